"""A standby's judgement: does the holder live?

A holder is given up when its counter has not changed for `timeout_s` by *our* monotonic clock, or
at once when its lock is free or it says that it has released the lease. Clocks of two machines are
never compared. A wrong judgement costs a takeover and nothing else: what keeps promises is the
fence (see claim).
"""

from dataclasses import dataclass
from typing import Final

WAIT: Final = ""
EXPIRED: Final = "expired"
UNLOCKED: Final = "died"
RELEASED: Final = "released"
NOBODY: Final = "nobody"


@dataclass(frozen=True)
class LeaseTimes:
    timeout_s: float = 0.5
    """Silence after which a standby takes over. A holder stops promising after half of it without
    a renewal of its own, and gives up after all of it."""
    heartbeat_s: float = 0.1
    poll_s: float = 0.02
    """How often a standby looks."""


@dataclass(frozen=True)
class Sight:
    """What a standby saw of the lease."""

    epoch: int
    """The newest claimed; 0: nobody ever held it."""
    counts: bool
    """Whether its claimant has taken over; until then its lock means nothing."""
    counter: int
    is_locked: bool
    is_released: bool


class HolderWatch:
    def __init__(self, times: LeaseTimes) -> None:
        self._timeout_s = times.timeout_s
        self._epoch = -1
        self._counter = -1
        self._changed_at = 0.0

    def judge(self, sight: Sight, began_at: float, ended_at: float) -> str:
        """Why to claim the lease, or WAIT. The look took from `began_at` to `ended_at`; silence
        is counted from the end of the look that saw a change to the beginning of this one: a
        standby that is held up in a look must not take its own pause for the holder's."""
        if sight.epoch != self._epoch or sight.counter != self._counter:
            self._epoch = sight.epoch
            self._counter = sight.counter
            self._changed_at = ended_at
        if sight.epoch == 0:
            return NOBODY
        if sight.counts and sight.is_released:
            return RELEASED
        if sight.counts and not sight.is_locked:
            return UNLOCKED
        if began_at - self._changed_at > self._timeout_s:
            return EXPIRED
        return WAIT
