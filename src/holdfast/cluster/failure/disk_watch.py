"""Whether the disk of this node answers.

A write that is never finished looks like a healthy node from outside: heartbeats come, and nothing
is ever acknowledged. So the node itself says when one has taken too long, and is served by no more
than the others' memory of it: it gives up what it leads until its disk goes on. Who waits for free
space is not meant; that disk answers.
"""

from typing import Final

LATE_S: Final = 0.2
"""If a timer of ours comes later than this, we were held up ourselves, and so may be the report
that a write is done."""


class WriteClock:
    """One thread that writes, one thing after the other: how long it has been at this one."""

    def __init__(self) -> None:
        self.under_way = 0
        self.since = 0.0

    def began(self, now: float) -> None:
        """Something more was given to it."""
        if not self.under_way:
            self.since = now
        self.under_way += 1

    def ended(self, now: float) -> None:
        """It is done with the oldest."""
        self.under_way -= 1
        self.since = now

    def waits_for_space(self, now: float) -> None:
        """The disk answers: it is full."""
        self.since = now


class DiskWatch:
    """Call `handle_timers` when `timer` says."""

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: how long one write may take; and how long all must have been well afterwards
        before the disk counts as well again."""
        self.is_stalled = False
        self.journal = WriteClock()
        self.metadata = WriteClock()
        self.stall_s = stall_s
        # When the disk may count as well again.
        self._well_at = 0.0

    def timer(self) -> float | None:
        due = self._overdue_at()
        if not self.is_stalled:
            return due
        # While a write is overdue its end is awaited, however long that takes.
        return self._well_at if due is None or due > self._well_at else None

    def ended(self, clock: WriteClock, now: float) -> bool:
        """See WriteClock.ended and `handle_timers`."""
        has_changed = self.handle_timers(now)
        clock.ended(now)
        return has_changed

    def handle_timers(self, now: float) -> bool:
        """True: it is stalled, or is not any more, since this call."""
        due = self._overdue_at()
        was_stalled = self.is_stalled
        if due is not None and not was_stalled and now > due + LATE_S:
            self._forgive(now - due + LATE_S)
            due = self._overdue_at()
        if due is not None and now >= due:
            self.is_stalled = True
            self._well_at = now + self.stall_s
        elif was_stalled and now >= self._well_at:
            self.is_stalled = False
        return self.is_stalled != was_stalled

    def _overdue_at(self) -> float | None:
        """When the older of the writes under way has taken too long."""
        since = [clock.since for clock in (self.journal, self.metadata) if clock.under_way]
        return min(since) + self.stall_s if since else None

    def _forgive(self, late_s: float) -> None:
        """Long enough for what waits behind the timer to be told."""
        for clock in (self.journal, self.metadata):
            clock.since += late_s
