"""Effects: the requests of a `PaperMember` to its driver, which carries them out in order."""

from dataclasses import dataclass

from bench.paper.config import PaperConfig
from bench.paper.messages import (
    CORE_ANN,
    MEMB_ANN,
    CoreAnnouncement,
    MembershipAnnouncement,
    encode,
)


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


class Outbox:
    def __init__(self, id: int, epoch: int, config: PaperConfig, effects: list[Effect]) -> None:
        self.id = id
        self.epoch = epoch
        self.config = config
        self.neighbours: dict[int, str] = {}
        """The broker URL of each neighbour."""
        self._effects = effects
        self._announced = 0

    def announce_own(self, topic: str) -> None:
        """Announces this member as the root of a topic.

        Numbers count over all topics. With a number per topic, a topic that was forgotten and
        returns would begin at 1, and neighbours would ignore it as older.
        """
        self._announced += 1
        own = CoreAnnouncement(self.id, self.id, self._announced, 0, self.epoch)
        self.announce(topic, own, None)

    def announce(self, topic: str, message: CoreAnnouncement, besides: int | None) -> None:
        """Passes an announcement to every neighbour except the one that sent it."""
        payload = encode(message)
        for neighbour in self.neighbours:
            if neighbour != besides:
                self.send(neighbour, CORE_ANN + topic, payload)

    def reply(self, topic: str, parent: int, root: int, epoch: int, number: int) -> None:
        message = MembershipAnnouncement(root, self.id, number, epoch)
        self.send(parent, MEMB_ANN + topic, encode(message))

    def send(self, neighbour: int, topic: str, payload: bytes) -> None:
        self._effects.append(PublishToNeighbour(neighbour, topic, payload, self.config.qos))
