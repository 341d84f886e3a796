"""Effects: the requests of a `PaperMember` to its driver, which carries them out in order."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishToNeighbour:
    """A publication on a neighbour's broker. Losing it affects only that message."""

    neighbour: int
    topic: str
    payload: bytes
    qos: int
    retain: bool = False


@dataclass(frozen=True, slots=True)
class DeliverLocally:
    """A publication on this member's broker, which must not send it back (No Local)."""

    topic: str
    payload: bytes
    qos: int


@dataclass(frozen=True, slots=True)
class ConnectNeighbour:
    """A request to keep a connection to a neighbour's broker, in place of an earlier one."""

    neighbour: int
    address: str


@dataclass(frozen=True, slots=True)
class DisconnectNeighbour:
    neighbour: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A report of a message that is malformed or exceeds a bound.

    The member has already counted it by its reason. The driver may log it, a few lines a second.
    """

    topic: str
    reason: str
    text: str


Effect = PublishToNeighbour | DeliverLocally | ConnectNeighbour | DisconnectNeighbour | Refused
