"""What the client core tells its driver, in the order it happened."""

from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.client.errors import ClientError
from holdfast.protocol.mqtt.packets import Packet, Properties


@dataclass
class Message:
    """A received PUBLISH. `properties` has what the publisher and the server sent, topic alias
    and subscription identifiers included; `packet_id` is 0 for QoS 0. `connection` counts the
    client's connections: an id says nothing on the next one."""

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
    session_present: bool
    properties: Properties


@dataclass
class Received:
    message: Message


@dataclass
class Acknowledged:
    """A message published with QoS 1 or 2 is done. `reason` below 0x80: the server has it."""

    handle: int
    reason: int
    properties: Properties


@dataclass
class Subscribed:
    """Answer to a SUBSCRIBE or UNSUBSCRIBE; one reason per filter (none for an MQTT 3 UNSUBACK)."""

    packet_id: int
    reasons: list[int]
    properties: Properties


@dataclass
class Reauthenticated:
    pass


@dataclass
class Traced:
    """With `Options.trace`: a packet left (`sent`) or arrived."""

    sent: bool
    packet: Packet


@dataclass
class Closed:
    """The connection is over: send what is left, close the socket. `error` None: as we wished."""

    error: ClientError | None


Effect: TypeAlias = (
    Connected | Received | Acknowledged | Subscribed | Reauthenticated | Traced | Closed
)
