"""The packets: one class each, the same for every protocol version and both directions.

Fields that a version does not have keep their defaults when decoded and are left out when encoded.
`reason` is an MQTT 5 reason code in every version; decode and encode translate the return codes of
MQTT 3. Packets are plain data: decode checks those of a peer, encode trusts its caller.
"""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

TYPE_NAMES: Final[dict[int, str]] = {
    CONNECT: "CONNECT",
    CONNACK: "CONNACK",
    PUBLISH: "PUBLISH",
    PUBACK: "PUBACK",
    PUBREC: "PUBREC",
    PUBREL: "PUBREL",
    PUBCOMP: "PUBCOMP",
    SUBSCRIBE: "SUBSCRIBE",
    SUBACK: "SUBACK",
    UNSUBSCRIBE: "UNSUBSCRIBE",
    UNSUBACK: "UNSUBACK",
    PINGREQ: "PINGREQ",
    PINGRESP: "PINGRESP",
    DISCONNECT: "DISCONNECT",
    AUTH: "AUTH",
}

PropertyValue: TypeAlias = int | str | bytes | list[int] | list[tuple[str, str]]
Properties: TypeAlias = dict[int, PropertyValue]
"""Property values by property id. The user property is a list of pairs in the order sent, the
subscription identifier a list (of one in SUBSCRIBE); each other property is a single value."""


@dataclass
class Will:
    """The will in a CONNECT. `properties` include the will delay interval."""

    topic: str
    """The topic name. The decoder has checked its UTF-8 and not its form."""
    payload: bytes
    qos: int
    retain: bool
    properties: Properties = field(default_factory=dict)


@dataclass
class Connect:
    """A CONNECT. `protocol_level` is 3, 4 or 5; `clean_start` is Clean Session in MQTT 3.
    `is_bridge`: another broker's bridge, which in MQTT 3 sets the highest bit of the level."""

    protocol_level: int
    clean_start: bool
    keep_alive_s: int
    """The seconds of the keep alive; 0 turns it off."""
    client_id: str
    """The client id, which may be empty: the caller decides what that means."""
    will: Will | None = None
    """The will, or None without one."""
    username: str | None = None
    password: bytes | None = None
    """The password as bytes. In MQTT 3 a user name precedes it, in MQTT 5 not always."""
    properties: Properties = field(default_factory=dict)
    is_bridge: bool = False


@dataclass
class Connack:
    """A CONNACK. A server never sends `session_present` with an error (section 3.2.2.1.1)."""

    session_present: bool
    reason: int
    properties: Properties = field(default_factory=dict)


@dataclass(init=False)
class Publish:
    """A PUBLISH with as little overhead as possible, because one is made for each message."""

    topic: bytes
    """The topic in UTF-8, not checked by the decoder (brokers remember checked topics by their
    bytes). It is empty when a topic alias replaces it."""
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    """The packet id, or 0 at QoS 0."""
    properties: bytes
    """The encoded MQTT 5 properties in the order sent, message expiry included. Their length
    prefix, the topic alias and the subscription identifiers are left out."""
    topic_alias: int
    """The topic alias, or 0."""
    expiry_s: int
    """The message expiry interval in seconds, or -1."""
    subscription_ids: list[int] | None
    """The subscription identifiers that a client has decoded, or None."""

    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        qos: int,
        retain: bool,
        dup: bool,
        packet_id: int,
        properties: bytes,
        topic_alias: int,
        expiry_s: int,
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.dup = dup
        self.packet_id = packet_id
        self.properties = properties
        self.topic_alias = topic_alias
        self.expiry_s = expiry_s
        self.subscription_ids = None


@dataclass(init=False)
class Ack:
    """PUBACK, PUBREC, PUBREL or PUBCOMP, according to `kind`."""

    kind: int
    packet_id: int
    reason: int
    properties: Properties

    def __init__(
        self, kind: int, packet_id: int, reason: int = 0, properties: Properties | None = None
    ) -> None:
        self.kind = kind
        self.packet_id = packet_id
        self.reason = reason
        self.properties = {} if properties is None else properties


@dataclass
class SubscriptionRequest:
    """One filter of a SUBSCRIBE with its options. MQTT 3 has only the filter and the QoS."""

    filter: str
    qos: int
    no_local: bool = False
    """The client does not get its own messages by this filter."""
    retain_as_published: bool = False
    """Forwarded messages keep RETAIN. Otherwise it is set only on those that a new subscription
    gets from the retained store."""
    retain_handling: int = 0
    """0: retained messages with each SUBSCRIBE; 1: only for a new subscription; 2: never."""


@dataclass
class Subscribe:
    """A SUBSCRIBE with at least one filter."""

    packet_id: int
    subscriptions: list[SubscriptionRequest]
    properties: Properties = field(default_factory=dict)


@dataclass
class Suback:
    """A SUBACK: one reason per subscription of the SUBSCRIBE, in its order."""

    packet_id: int
    reasons: list[int]
    properties: Properties = field(default_factory=dict)


@dataclass
class Unsubscribe:
    """An UNSUBSCRIBE with at least one filter."""

    packet_id: int
    filters: list[str]
    properties: Properties = field(default_factory=dict)


@dataclass
class Unsuback:
    """An UNSUBACK: one reason per filter of the UNSUBSCRIBE, in its order; none in MQTT 3."""

    packet_id: int
    reasons: list[int] = field(default_factory=list)
    properties: Properties = field(default_factory=dict)


@dataclass
class Pingreq:
    """A PINGREQ, which has no fields."""


@dataclass
class Pingresp:
    """A PINGRESP, which has no fields."""


@dataclass
class Disconnect:
    """A DISCONNECT; in MQTT 3 only a client sends one."""

    reason: int = 0
    properties: Properties = field(default_factory=dict)


@dataclass
class Auth:
    """A step of enhanced authentication, MQTT 5 only."""

    reason: int = 0
    properties: Properties = field(default_factory=dict)


Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Ack
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
"""Every packet."""

Answer: TypeAlias = Connack | Ack | Suback | Unsuback | Disconnect | Auth
"""The packets in which a broker sends properties of its own."""
