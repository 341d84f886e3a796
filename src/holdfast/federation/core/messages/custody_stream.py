"""Queues messages from this origin to one destination."""

from collections import deque
from dataclasses import dataclass, field

from holdfast.federation.core.messages.custody_entry import (
    CustodyEntry,
)
from holdfast.federation.core.messages.retransmit_timer import RetransmitTimer


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
