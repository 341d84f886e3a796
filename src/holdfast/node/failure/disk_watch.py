"""A watch over this node's disk: does it respond?

A write that never ends looks like a healthy node from outside: heartbeats arrive, and no record is
ever acknowledged. So the node reports a write that takes too long, by
`PartEffects.check_own_health`, and is given no leadership until the disk responds, by `useless` in
`node/placement/planning.py`. Waiting for free space is not a stall: that disk responds.
"""

from typing import Final

LATE_S: Final = 0.2
"""The lateness of our own timer, in seconds, above which this node itself was stalled. The report
that a write is done may then be late too."""
NEVER: Final = float("inf")


class WriteClock:
    """The duration of the current write of one thread. The thread writes one thing after
    another."""

    def __init__(self) -> None:
        self.under_way = 0
        self.since = 0.0

    def began(self, now: float) -> None:
        """Counts one more write for the thread."""
        if not self.under_way:
            self.since = now
        self.under_way += 1

    def ended(self, now: float) -> None:
        """Counts the oldest write as done."""
        self.under_way -= 1
        self.since = now

    def waits_for_space(self, now: float) -> None:
        """Restarts the duration, because a full disk responds."""
        self.since = now


class DiskWatch:
    """The stall detection for the journal's and the metadata's writes. The driver calls
    `handle_timers` when `timer` is due."""

    def __init__(self, stall_s: float) -> None:
        """Sets the limits: a write may take `stall_s` seconds. After a stall, the disk counts as
        well when no write was overdue for `stall_s`."""
        self.is_stalled = False
        self.journal = WriteClock()
        self.metadata = WriteClock()
        self.stall_s = stall_s
        # The time from which the disk may count as well again.
        self._well_at = 0.0

    def timer(self) -> float:
        due = self._overdue_at()
        if not self.is_stalled:
            return due
        # An overdue write needs no timer: its end is reported, however long that takes.
        return self._well_at if due > self._well_at else NEVER

    def ended(self, clock: WriteClock, now: float) -> bool:
        """Counts the oldest write as done. Returns True if `is_stalled` has changed. The timers
        come first, or a write that was overdue and ends now would leave no trace."""
        has_changed = self.handle_timers(now)
        clock.ended(now)
        return has_changed

    def handle_timers(self, now: float) -> bool:
        """Checks the writes under way. Returns True if `is_stalled` has changed."""
        due = self._overdue_at()
        was_stalled = self.is_stalled
        if not was_stalled and now > due + LATE_S:
            self._extend_deadlines(now - due + LATE_S)
            due = self._overdue_at()
        if now >= due:
            self.is_stalled = True
            self._well_at = now + self.stall_s
        elif was_stalled and now >= self._well_at:
            self.is_stalled = False
        return self.is_stalled != was_stalled

    def _overdue_at(self) -> float:
        """The time at which the older write under way has taken too long."""
        journal = self.journal
        metadata = self.metadata
        if journal.under_way and (not metadata.under_way or journal.since <= metadata.since):
            return journal.since + self.stall_s
        return metadata.since + self.stall_s if metadata.under_way else NEVER

    def _extend_deadlines(self, late_s: float) -> None:
        """Extends the writes under way, so that reports waiting behind the late timer arrive
        first."""
        for clock in (self.journal, self.metadata):
            clock.since += late_s
