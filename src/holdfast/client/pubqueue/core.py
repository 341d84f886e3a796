"""Which message of a publish queue goes out next: window, order, refusals, back-off. Pure.

Order: messages leave by ascending sequence. When the server refuses one for now, nothing more is
sent until everything in flight is settled; then sending begins again at the lowest unconfirmed
one, alone until one is confirmed. So at a broker that, like Holdfast, refuses what follows a
refused message, order holds with any window; with window 1 it holds at every broker.

Epochs: a broker refuses what is older than the newest epoch it has stored. So the first message
of a newer epoch leaves only after all of the older one are settled and durably removed
(`wants_checkpoint`): none of them can be sent again afterwards.

Renewal: `wants_renewal` asks for a new epoch for everything that waits, in two cases. A later
message was stored although an earlier one was refused: sent again, the broker would take the
earlier one for a repetition and drop it. Or the message that was refused for now has left the
queue, and the broker would wait for it for ever.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.client.pubqueue.entry import QueueEntry

RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 5.0


class QueueBackoff:
    """Doubling delays, each drawn from the upper half of its range."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._range_s = RETRY_FIRST_S

    def reset(self) -> None:
        self._range_s = RETRY_FIRST_S

    def next_s(self) -> float:
        delay_s = self._range_s * (0.5 + 0.5 * self._random())
        self._range_s = min(self._range_s * 2, RETRY_MAX_S)
        return delay_s


class QueueCore:
    """`random` gives numbers in [0, 1); `now` is monotonic seconds."""

    def __init__(self, window: int, random: Callable[[], float]) -> None:
        if window < 1:
            raise ValueError(f"window {window}: 1 or more messages")
        self.window = window
        self.pending: deque[QueueEntry] = deque()
        """Loaded and not in flight, ascending."""
        self.pending_size = 0
        """Sum of their sizes."""
        self.inflight: dict[int, QueueEntry] = {}
        """By sequence, in sending order."""
        self.resent = 0
        self.overtaken = 0
        """Messages that a later one has overtaken at the server."""
        self.stopped = False
        self._backoff = QueueBackoff(random)
        self._again: list[QueueEntry] = []
        # After a refusal nothing is sent before this time and before all in flight is settled.
        self._held = False
        self._resume_at = 0.0
        self._probing = False
        self._epoch = -1
        self._delivered_last = 0
        # The lowest message that was refused for now and not stored since; 0: none.
        self._refused_first = 0
        self._refused_has_left = False

    def add(self, entry: QueueEntry) -> None:
        """Entries come in ascending order of their sequence."""
        self.pending.append(entry)
        self.pending_size += entry.size

    def next(self, now: float) -> QueueEntry | None:
        """The message to hand to the client now; None: later."""
        if not self.pending or self.stopped:
            return None
        if self._held:
            if self.inflight or now < self._resume_at:
                return None
            self._held = False
            self._probing = True
        if len(self.inflight) >= (1 if self._probing else self.window):
            return None
        entry = self.pending[0]
        if entry.epoch != self._epoch or self.wants_renewal():
            return None
        self.pending.popleft()
        self.pending_size -= entry.size
        self.inflight[entry.sequence] = entry
        if entry.attempts:
            self.resent += 1
        entry.attempts += 1
        return entry

    def wants_checkpoint(self) -> bool:
        """Nothing goes out before the removals so far are durable and `checkpoint` was called."""
        return (
            bool(self.pending)
            and not self.inflight
            and not self._again
            and self.pending[0].epoch != self._epoch
        )

    def checkpoint(self) -> None:
        if self.wants_checkpoint():
            self._begin_epoch(self.pending[0].epoch)

    def wants_renewal(self) -> bool:
        """Everything that waits needs a new epoch, made durable first; then call `renew`."""
        return (
            bool(self.pending)
            and not self.inflight
            and self.pending[0].epoch == self._epoch
            and (self.pending[0].sequence < self._delivered_last or self._refused_has_left)
        )

    def renew(self, epoch: int) -> None:
        for entry in self.pending:
            entry.epoch = epoch
        self._begin_epoch(epoch)

    def timer(self) -> float | None:
        """When `next` may give something without another event; None: not by time alone."""
        if self._held and not self.inflight and self.pending and not self.stopped:
            return self._resume_at
        return None

    def delivered(self, sequence: int) -> QueueEntry | None:
        """The server has it. None: it was not in flight."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return None
        self._delivered_last = max(self._delivered_last, sequence)
        if sequence == self._refused_first:
            self._refused_first = 0
        if self._held:
            self._settle_held()
        else:
            self._probing = False
            self._backoff.reset()
        return entry

    def failed(self, sequence: int) -> QueueEntry | None:
        """The server refused it for good; it leaves the queue."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return None
        if sequence == self._refused_first:
            self._refused_first = 0
            self._refused_has_left = True
        if self._held:
            self._settle_held()
        return entry

    def retry(self, sequence: int, now: float, refused: bool) -> None:
        """It was refused for now, or (not `refused`) its connection ended: it goes out again."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return
        if not refused:
            # The next connection waits for nothing.
            self._refused_first = 0
        elif not self._refused_first or sequence < self._refused_first:
            self._refused_first = sequence
        self._again.append(entry)
        if not self._held:
            self.hold(now)
        self._settle_held()

    def hold(self, now: float) -> None:
        """Send nothing for the next back-off delay."""
        self._held = True
        self._resume_at = now + self._backoff.next_s()

    def oldest_put_at(self) -> float | None:
        """Seconds since 1970; None if nothing is loaded."""
        times = [entry.put_at for entry in (*self.inflight.values(), *self._again)]
        if self.pending:
            times.append(self.pending[0].put_at)
        return min(times, default=None)

    def stop(self) -> None:
        """Send nothing any more; what is in flight may still be settled."""
        self.stopped = True

    def take_expired(self, clock: float) -> list[QueueEntry]:
        """Messages at the head that were never sent and whose time is over (seconds since 1970);
        they leave the queue."""
        expired: list[QueueEntry] = []
        while (when := self.next_expiry()) and when <= clock:
            entry = self.pending.popleft()
            self.pending_size -= entry.size
            expired.append(entry)
        return expired

    def next_expiry(self) -> float:
        """When the next message expires, seconds since 1970; 0: not as things are."""
        if not self.pending or self.pending[0].attempts:
            return 0.0
        return self.pending[0].expires_at

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._delivered_last = 0
        self._refused_first = 0
        self._refused_has_left = False

    def _settle_held(self) -> None:
        """Once nothing is in flight, what is to be sent again goes to the front, in order."""
        if self.inflight or not self._again:
            return
        self._again.sort(key=lambda entry: entry.sequence)
        self.overtaken += sum(entry.sequence < self._delivered_last for entry in self._again)
        self.pending.extendleft(reversed(self._again))
        self.pending_size += sum(entry.size for entry in self._again)
        self._again.clear()
