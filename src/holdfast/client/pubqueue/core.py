"""Decides what a publish queue sends next: window, refusals, back-off. Pure.

Order: messages leave by ascending sequence. After a temporary refusal no message is sent until
everything inflight is settled. Then sending begins again at the lowest unconfirmed one, alone until
one is confirmed. So order holds with any window at a broker that, like Holdfast, refuses the
messages after a refused one. With window 1 it holds at every broker.

Epochs: a broker refuses a message with an epoch below the newest it has stored. So the first
message of a newer epoch leaves only after all of the older one are settled and durably removed
(`needs_checkpoint`): none of them can be sent again afterwards.

Renewal: `needs_renewal` asks for a new epoch for all waiting messages, in two cases. A later
message was stored although an earlier one was refused: the broker would take the earlier one for a
repetition and drop it. Or the message that was refused for now has left the queue, and the broker
would wait for it for ever.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.client.pubqueue.messages import QueueEntry

RETRY_FIRST_S: Final = 0.05
"""The seconds of the first back-off range."""
RETRY_MAX_S: Final = 5.0
"""The seconds of the largest back-off range."""


class QueueBackoff:
    """Doubling delays, each drawn from the upper half of its range."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._range_s = RETRY_FIRST_S

    def reset(self) -> None:
        """Begins with the first range again."""
        self._range_s = RETRY_FIRST_S

    def next_s(self) -> float:
        """The seconds of the next delay."""
        delay_s = self._range_s * (0.5 + 0.5 * self._random())
        self._range_s = min(self._range_s * 2, RETRY_MAX_S)
        return delay_s


class QueueCore:
    """The messages of a queue that are in memory, waiting or inflight. `random` returns numbers in
    [0, 1); `now` is monotonic seconds.

    Invariant: within an epoch, no message is sent while an earlier one waits to be sent again.
    """

    def __init__(self, window: int, random: Callable[[], float]) -> None:
        if window < 1:
            raise ValueError(f"window {window}: 1 or more messages")
        self.window = window
        self.pending: deque[QueueEntry] = deque()
        """The messages loaded and not inflight, ascending."""
        self.pending_size = 0
        """The sum of their sizes in bytes."""
        self.inflight: dict[int, QueueEntry] = {}
        """The messages inflight by sequence, in sending order."""
        self.resent = 0
        self.overtaken = 0
        """Messages that a later one has overtaken at the server."""
        self.stopped = False
        self._backoff = QueueBackoff(random)
        self._to_resend: list[QueueEntry] = []
        # After a refusal no message is sent before this time, and before all inflight are settled.
        self._is_resending = False
        self._resume_at = 0.0
        self._probing = False
        self._epoch = -1
        self._delivered_last = 0
        # The lowest message that was refused for now and not stored since; 0: none.
        self._refused_first = 0
        self._refused_has_left = False

    def add(self, entry: QueueEntry) -> None:
        """Adds a message. Sequences must ascend."""
        self.pending.append(entry)
        self.pending_size += entry.size

    def next(self, now: float) -> QueueEntry | None:
        """The message to pass to the client now, or None."""
        if not self.pending or self.stopped:
            return None
        if self._is_resending:
            if self.inflight or now < self._resume_at:
                return None
            self._is_resending = False
            self._probing = True
        if len(self.inflight) >= (1 if self._probing else self.window):
            return None
        entry = self.pending[0]
        if entry.epoch != self._epoch or self.needs_renewal():
            return None
        self.pending.popleft()
        self.pending_size -= entry.size
        self.inflight[entry.sequence] = entry
        if entry.attempts:
            self.resent += 1
        entry.attempts += 1
        return entry

    def needs_checkpoint(self) -> bool:
        """Whether the removals so far must become durable before the next message is sent. Then
        call `checkpoint`."""
        return (
            bool(self.pending)
            and not self.inflight
            and not self._to_resend
            and self.pending[0].epoch != self._epoch
        )

    def checkpoint(self) -> None:
        """Begins the next message's epoch, because the removals are durable."""
        if self.needs_checkpoint():
            self._begin_epoch(self.pending[0].epoch)

    def needs_renewal(self) -> bool:
        """Whether all waiting messages need a new epoch. Make it durable, then call `renew`."""
        return (
            bool(self.pending)
            and not self.inflight
            and self.pending[0].epoch == self._epoch
            and (self.pending[0].sequence < self._delivered_last or self._refused_has_left)
        )

    def renew(self, epoch: int) -> None:
        """Gives all waiting messages the new epoch."""
        for entry in self.pending:
            entry.epoch = epoch
        self._begin_epoch(epoch)

    def timer(self) -> float | None:
        """The time at which `next` may return a message without another event, or None."""
        if self._is_resending and not self.inflight and self.pending and not self.stopped:
            return self._resume_at
        return None

    def delivered(self, sequence: int) -> QueueEntry | None:
        """Records that the server has a message. None: it was not inflight."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return None
        self._delivered_last = max(self._delivered_last, sequence)
        if sequence == self._refused_first:
            self._refused_first = 0
        if self._is_resending:
            self._requeue_resends()
        else:
            self._probing = False
            self._backoff.reset()
        return entry

    def failed(self, sequence: int) -> QueueEntry | None:
        """Records that the server refused a message permanently; it leaves the queue."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return None
        if sequence == self._refused_first:
            self._refused_first = 0
            self._refused_has_left = True
        if self._is_resending:
            self._requeue_resends()
        return entry

    def retry(self, sequence: int, now: float, refused: bool) -> None:
        """Sends a message again, because it was refused for now, or (not `refused`) its connection
        ended."""
        entry = self.inflight.pop(sequence, None)
        if entry is None:
            return
        if not refused:
            # The next connection has no refused message to wait for.
            self._refused_first = 0
        elif not self._refused_first or sequence < self._refused_first:
            self._refused_first = sequence
        self._to_resend.append(entry)
        if not self._is_resending:
            self.back_off(now)
        self._requeue_resends()

    def back_off(self, now: float) -> None:
        """Sends nothing for the next back-off delay."""
        self._is_resending = True
        self._resume_at = now + self._backoff.next_s()

    def oldest_put_at(self) -> float | None:
        """The time of the oldest message in seconds since 1970, or None."""
        times = [entry.put_at for entry in (*self.inflight.values(), *self._to_resend)]
        if self.pending:
            times.append(self.pending[0].put_at)
        return min(times, default=None)

    def stop(self) -> None:
        """Sends no more. Messages inflight may still be settled."""
        self.stopped = True

    def take_expired(self, clock: float) -> list[QueueEntry]:
        """Removes and returns the expired messages at the head that were never sent. `clock` is
        seconds since 1970."""
        expired: list[QueueEntry] = []
        while (when := self.next_expiry()) and when <= clock:
            entry = self.pending.popleft()
            self.pending_size -= entry.size
            expired.append(entry)
        return expired

    def next_expiry(self) -> float:
        """The time at which the next message expires, in seconds since 1970, or 0."""
        if not self.pending or self.pending[0].attempts:
            return 0.0
        return self.pending[0].expires_at

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._delivered_last = 0
        self._refused_first = 0
        self._refused_has_left = False

    def _requeue_resends(self) -> None:
        """Moves the messages to be sent again to the front, in order, once none is inflight."""
        if self.inflight or not self._to_resend:
            return
        self._to_resend.sort(key=lambda entry: entry.sequence)
        self.overtaken += sum(entry.sequence < self._delivered_last for entry in self._to_resend)
        self.pending.extendleft(reversed(self._to_resend))
        self.pending_size += sum(entry.size for entry in self._to_resend)
        self._to_resend.clear()
