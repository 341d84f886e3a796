"""The queue of messages from this origin to one destination."""

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
    retry_at: float | None = None
    launched: tuple[int, int] = (0, 0)
    """The last epoch and place that were put into flight since the start."""
    probing: int = 0
    """The most messages in flight after a loss; 0: the window."""

    def next(self, messages_max: int, bytes_max: int) -> CustodyEntry | None:
        """Return the next message to send if it fits into the window."""
        if self.sent >= min(len(self.entries), messages_max):
            return None
        entry = self.entries[self.sent]
        # Messages from before the restart are confirmed before those of this epoch are sent. A
        # destination that has received the new epoch refuses the old one.
        if not entry.may_send or entry.id.epoch != self.entries[0].id.epoch:
            return None
        return None if self.sent and self.sent_bytes + entry.size > bytes_max else entry
