"""Effects of the client core, which its driver carries out in this order."""

from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.client.errors import ClientError
from holdfast.protocol.mqtt.packets import Packet, Properties


@dataclass
class Message:
    """A received PUBLISH. `properties` are those of the publisher and the server, topic alias and
    subscription identifiers included. `packet_id` is 0 at QoS 0. `connection` counts the client's
    connections, because a packet id means nothing on the next one."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    properties: Properties
    connection: int = field(default=0, compare=False, repr=False)


@dataclass
class Connected:
    """An accepted CONNECT, with the properties of CONNACK."""

    session_present: bool
    properties: Properties


@dataclass
class Received:
    """A message for the application."""

    message: Message


@dataclass
class Acknowledged:
    """The completion of a message published with QoS 1 or 2. `reason` below 0x80: the server has
    it."""

    handle: int
    reason: int
    properties: Properties


@dataclass
class Subscribed:
    """The reply to a SUBSCRIBE or UNSUBSCRIBE, with one reason per filter (none for an MQTT 3
    UNSUBACK)."""

    packet_id: int
    reasons: list[int]
    properties: Properties


@dataclass
class Reauthenticated:
    pass


@dataclass
class Traced:
    """A packet that left (`sent`) or arrived, with `Options.trace`."""

    sent: bool
    packet: Packet


@dataclass
class Closed:
    """The end of the connection: send the remaining bytes, then close the socket. `error` is None
    if the client asked for it."""

    error: ClientError | None


Effect: TypeAlias = (
    Connected | Received | Acknowledged | Subscribed | Reauthenticated | Traced | Closed
)
