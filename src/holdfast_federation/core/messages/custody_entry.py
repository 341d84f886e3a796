"""A message in custody, and the frame of which its store and its links get the bytes."""

from collections import deque
from dataclasses import dataclass, field

from holdfast_federation.core.effects import Message
from holdfast_federation.core.frames import Data
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.retransmit_timer import RetransmitTimer

Place = tuple[bytes, int, int]
"""A destination, the message's place in its stream, and the stream's lowest unconfirmed place."""
Grants = dict[bytes, tuple[bool, tuple[str, ...]]]
"""The audience per destination: whether plain subscribers receive it, and the shared groups."""


@dataclass(slots=True, eq=False)
class CustodyEntry:
    """A message in custody. It is deleted when `places` is empty."""

    id: MessageId
    message: Message
    accepted_at: float
    places: dict[bytes, int]
    """The places at the destinations that have not confirmed it."""
    grants: Grants = field(default_factory=dict)
    """The grants of those destinations that have one. The others serve plain subscribers only."""
    waits_for: frozenset[MessageId] = frozenset()
    """The entries to be stored before it is sent: itself, unless it is stored or may be sent
    before, and those that have its reclaimed grants. A copy of before the reclaim may be in flight.
    """
    is_regranted: bool = False
    """True: its grants were reclaimed from an earlier entry."""

    @property
    def may_send(self) -> bool:
        return not self.waits_for

    @property
    def size(self) -> int:
        message = self.message
        return len(message.topic) + len(message.payload) + len(message.properties)

    def remaining_s(self, now: float) -> float | None:
        expiry_s = self.message.expiry_s
        return None if expiry_s is None else max(0.0, expiry_s - (now - self.accepted_at))


def frame_of(entry: CustodyEntry, destinations: list[Place], hops_max: int, now: float) -> Data:
    id, message = entry.id, entry.message
    return Data(
        id.node,
        id.epoch,
        id.sequence,
        0,
        hops_max,
        message.qos,
        message.is_retained,
        message.topic,
        message.payload,
        message.properties,
        entry.remaining_s(now),
        destinations,
        0,
        message.stamp,
        [
            (node, entry.grants[node][0], list(entry.grants[node][1]))
            for node, _, _ in destinations
            if node in entry.grants
        ],
        entry.is_regranted,
    )


def message_of(frame: Data) -> Message:
    return Message(
        frame.topic,
        frame.payload,
        frame.qos,
        frame.is_retained,
        frame.properties,
        frame.expiry_s,
        None,
        frame.stamp,
    )


@dataclass(slots=True)
class Stream:
    """The queue of messages to one destination. The first `sent` entries are in flight."""

    patience: RetransmitTimer
    entries: deque[CustodyEntry] = field(default_factory=deque)
    sent: int = 0
    """The number of entries in flight."""
    sent_bytes: int = 0
    bytes: int = 0
    next_place: int = 1
    """Above the places of all entries of this epoch. It never falls."""
    retry_at: float | None = None
    launched: tuple[int, int] = (0, 0)
    """The last epoch and place that were put into flight since the start."""
    probing: int = 0
    """The most messages in flight after a loss; 0: the window."""

    def check(self, places: list[int]) -> None:
        """Raises `AssertionError` for an invariant that does not hold. `places`: of the entries."""
        entries = list(self.entries)
        assert 0 <= self.sent <= len(entries), "more is in flight than is queued"
        assert self.bytes == sum(entry.size for entry in entries), "the bytes of the queue"
        assert self.sent_bytes == sum(entry.size for entry in entries[: self.sent])
        order = [(entry.id.epoch, place) for entry, place in zip(entries, places, strict=True)]
        assert order == sorted(set(order)), "the places are out of order"
        assert not any(entry.id in entry.waits_for for entry in entries[: self.sent]), (
            "sent before it is stored"
        )
        assert self.sent == 0 or self.launched >= order[self.sent - 1], "sent and not launched"

    def next(self, messages_max: int, bytes_max: int) -> CustodyEntry | None:
        """Returns the next message to send if it fits into the window."""
        if self.sent >= min(len(self.entries), messages_max):
            return None
        entry = self.entries[self.sent]
        # Messages from before the restart are confirmed before those of this epoch are sent. A
        # destination that has received the new epoch refuses the old one.
        if not entry.may_send or entry.id.epoch != self.entries[0].id.epoch:
            return None
        return None if self.sent and self.sent_bytes + entry.size > bytes_max else entry
