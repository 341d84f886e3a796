"""What a member of the published protocol wants done. Its driver carries effects out in order."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishToNeighbour:
    """On the neighbour's broker. Lost without harm to anything but the message."""

    neighbour: int
    topic: str
    payload: bytes
    qos: int
    retain: bool = False


@dataclass(frozen=True, slots=True)
class DeliverLocally:
    """On the own broker, which must not send it back (No Local)."""

    topic: str
    payload: bytes
    qos: int


@dataclass(frozen=True, slots=True)
class ConnectNeighbour:
    """Keep a connection to its broker; in place of the one there is, if there is one."""

    neighbour: int
    address: str


@dataclass(frozen=True, slots=True)
class DisconnectNeighbour:
    neighbour: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A message could not be read, or is more than a bound allows; counted by its reason already.
    For a line in the log, few of which a second are enough."""

    topic: str
    reason: str
    text: str


Effect = PublishToNeighbour | DeliverLocally | ConnectNeighbour | DisconnectNeighbour | Refused
