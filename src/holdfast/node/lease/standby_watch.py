"""A standby's judgement: does the holder live?

A standby claims the lease when the holder's counter has not changed for `timeout_s` by the
standby's own monotonic clock. It claims at once when the holder's lock is free or the lease is
released. Clocks of two machines are never compared. A wrong judgement costs only a takeover,
because the fence protects promises (see `claim`).
"""

from typing import Final

from msgspec import Struct

WAIT: Final = ""
EXPIRED: Final = "expired"
UNLOCKED: Final = "died"
RELEASED: Final = "released"
NOBODY: Final = "nobody"


class LeaseTimes(Struct, frozen=True):
    """The times of a lease, in seconds."""

    timeout_s: float = 0.5
    """The silence after which a standby takes over. A holder stops promising after half of it
    without a renewal of its own, and gives up after all of it."""
    heartbeat_s: float = 0.1
    """The interval between two renewals."""
    poll_s: float = 0.02
    """The interval between two checks by a standby."""


class Sight(Struct, frozen=True):
    """One observation of the lease by a standby."""

    epoch: int
    """The newest claimed epoch; 0: the lease was never held."""
    counts: bool
    """True if its claimant has taken over. Before that its lock means nothing."""
    counter: int
    is_locked: bool
    is_released: bool


class HolderWatch:
    """The memory of a standby: when the holder's counter last changed."""

    def __init__(self, times: LeaseTimes) -> None:
        self._timeout_s = times.timeout_s
        self._epoch = -1
        self._counter = -1
        self._changed_at = 0.0

    def judge(self, sight: Sight, began_at: float, ended_at: float) -> str:
        """The reason to claim the lease, or WAIT. The observation took from `began_at` to
        `ended_at`. Silence counts from the end of the observation that saw a change to the
        beginning of this one. Otherwise a standby that is stalled while it reads would take its own
        pause for the holder's."""
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
