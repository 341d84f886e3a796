"""Versions retained messages: which of two of a topic is newer, anywhere in the federation.

Stamps come from a hybrid logical clock. While the wall clocks agree, stamps are wall time. Where
they differ, a message that is published by a member that has seen a version is still newer than
that version.
"""

from statistics import median_low
from typing import Final

from holdfast_federation.core.identity import MessageId

Version = tuple[int, bytes, int, int]
"""The stamp, and the origin, epoch and sequence of the publication. The greatest is the newest."""

AHEAD_MAX_S: Final = 86_400.0
"""The most seconds by which a stamp may be ahead of this member's clock. A greater one is rejected,
because it would remain the newest for long."""
UNKNOWN_AGE: Final = 1
"""The stamp of a message that a broker had retained before any member stamped it. It is older than
every message that a member has seen published."""


def version_of(stamp: int, id: MessageId) -> Version:
    return (stamp, *id)


PLAUSIBLE_S: Final = 1_735_689_600.0
"""The begin of 2025. A clock that is before it was never set."""
TOLD_S: Final = 60.0
"""The difference in seconds from which clocks are reported."""


class HybridClock:
    """The source of stamps, in microseconds.

    A clock that is wrong by more than AHEAD_MAX_S would split the retained messages for good: a
    member in 1970 rejects all stamps, and those of a member ten years ahead are rejected by all. So
    a clock that was never set follows the clocks of the linked members. Any other clock follows
    them when two or more agree against it. With a single linked member it is unknown which clock is
    wrong, and both members report it.
    """

    def __init__(self, wall_s: float, now: float) -> None:
        self._newest = UNKNOWN_AGE
        self._own_offset_s = wall_s - now
        self._offset_s = self._own_offset_s
        # By linked member: its wall clock minus the monotonic clock here, in seconds.
        self._peers: dict[bytes, float] = {}
        self.is_wrong = False
        """True if, by what is known, the clock of this member is wrong."""
        self.is_disputed = False
        """True if it differs from a linked member's by more than AHEAD_MAX_S."""

    @property
    def ahead_s(self) -> float | None:
        """The seconds by which it is ahead of the median of the linked members' clocks; None
        without one."""
        if not self._peers:
            return None
        return self._own_offset_s - median_low(sorted(self._peers.values()))

    def set_wall(self, wall_s: float, now: float) -> float:
        """Sets the wall clock of this member. Returns the seconds by which stamps jump."""
        self._own_offset_s = wall_s - now
        return self._judge(now)

    def set_peer(self, peer: bytes, wall_s: float, now: float) -> float:
        """Sets the wall clock of a linked member. Returns the seconds by which stamps jump."""
        self._peers[peer] = wall_s - now
        return self._judge(now)

    def forget_peer(self, peer: bytes) -> None:
        """Removes a member's clock. It counts no more from the next clock that arrives."""
        self._peers.pop(peer, None)

    def _judge(self, now: float) -> float:
        own = self._own_offset_s
        is_set = now + own >= PLAUSIBLE_S
        peers = sorted(at for at in self._peers.values() if now + at >= PLAUSIBLE_S)
        middle = median_low(peers) if peers else own
        agreeing = sum(abs(at - middle) <= AHEAD_MAX_S for at in peers)
        is_outvoted = agreeing >= 2 and 2 * agreeing > len(peers)
        is_far = abs(own - middle) > AHEAD_MAX_S
        self.is_wrong = not is_set or (is_far and is_outvoted)
        self.is_disputed = any(abs(own - at) > AHEAD_MAX_S for at in self._peers.values())
        before, self._offset_s = self._offset_s, middle if self.is_wrong else own
        if self._newest > self.wall_us(now) + AHEAD_MAX_S * 1e6:
            # The stamp is from the time when this clock was wrong. Without this, all later stamps
            # would be ahead, too, and be rejected by the others.
            self._newest = self.wall_us(now)
        return self._offset_s - before

    def wall_us(self, now: float) -> int:
        """Returns the wall time that this member uses, in microseconds."""
        return max(UNKNOWN_AGE + 1, int((now + self._offset_s) * 1e6))

    def stamp(self, now: float) -> int:
        """Returns the stamp of a publication made now. It is above all stamps seen or given."""
        self._newest = max(self.wall_us(now), self._newest + 1)
        return self._newest

    def observe(self, stamp: int, now: float) -> bool:
        """Notes a stamp. Returns False if it is too far ahead."""
        if self.is_ahead(stamp, now):
            return False
        self._newest = max(self._newest, stamp)
        return True

    def is_ahead(self, stamp: int, now: float) -> bool:
        return stamp > self.wall_us(now) + AHEAD_MAX_S * 1e6

    def is_of_no_time(self, stamp: int, now: float) -> bool:
        """True if a wrong clock gave the stamp."""
        return UNKNOWN_AGE < stamp < PLAUSIBLE_S * 1e6 or self.is_ahead(stamp, now)
