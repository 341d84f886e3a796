"""Which of two retained messages of a topic is newer, anywhere in the federation.

A hybrid logical clock: as long as wall clocks agree, stamps are wall time; where they do not, what
is published by one who has seen a version is still newer than that version.
"""

from statistics import median_low
from typing import Final

from holdfast.federation.core.identity import MessageId

Version = tuple[int, bytes, int, int]
"""Stamp, and of the publication: origin, epoch, sequence. The greatest is the newest."""

AHEAD_MAX_S: Final = 86_400.0
"""A stamp further ahead of our own clock is not believed: it would stay the newest for long."""
UNKNOWN_AGE: Final = 1
"""The stamp of what a broker had retained before anybody stamped it: older than anything that a
member has seen published."""


def version_of(stamp: int, id: MessageId) -> Version:
    return (stamp, *id)


PLAUSIBLE_S: Final = 1_735_689_600.0
"""2025 began: a clock that is before this was never set."""
TOLD_S: Final = 60.0
"""Clocks that differ by more are told."""


class HybridClock:
    """Stamps are microseconds.

    A clock that is wrong by more than AHEAD_MAX_S would split what is retained for good: who is in
    1970 believes nobody's stamps, and who is ten years ahead is believed by nobody. So a clock that
    was never set follows the linked members', and any other one where two of these or more agree
    against it. With a single linked member it cannot be known who is wrong; both say so.
    """

    def __init__(self, wall_s: float, now: float) -> None:
        self._newest = UNKNOWN_AGE
        self._own_offset_s = wall_s - now
        self._offset_s = self._own_offset_s
        # Of linked members.
        self._peers: dict[bytes, float] = {}
        self.is_wrong = False
        """By what is known, it is this member's that is wrong."""
        self.is_disputed = False
        """It and a linked member's differ by more than AHEAD_MAX_S."""

    @property
    def ahead_s(self) -> float | None:
        """Of the linked members' clocks, the middle one; None: they have not said."""
        if not self._peers:
            return None
        return self._own_offset_s - median_low(sorted(self._peers.values()))

    def set_wall(self, wall_s: float, now: float) -> float:
        """It was set, or has drifted; by how much stamps jump."""
        self._own_offset_s = wall_s - now
        return self._judge(now)

    def set_peer(self, peer: bytes, wall_s: float, now: float) -> float:
        self._peers[peer] = wall_s - now
        return self._judge(now)

    def forget_peer(self, peer: bytes) -> None:
        """What it has said goes with the next one's word."""
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
            # Of the time when it was wrong: all that follows would be ahead, too.
            self._newest = self.wall_us(now)
        return self._offset_s - before

    def wall_us(self, now: float) -> int:
        return max(UNKNOWN_AGE + 1, int((now + self._offset_s) * 1e6))

    def stamp(self, now: float) -> int:
        """Of a publication made now: above all that were heard or given."""
        self._newest = max(self.wall_us(now), self._newest + 1)
        return self._newest

    def observe(self, stamp: int, now: float) -> bool:
        """False: it is not to be believed."""
        if self.is_ahead(stamp, now):
            return False
        self._newest = max(self._newest, stamp)
        return True

    def is_ahead(self, stamp: int, now: float) -> bool:
        return stamp > self.wall_us(now) + AHEAD_MAX_S * 1e6

    def is_of_no_time(self, stamp: int, now: float) -> bool:
        """Was it given by a clock that was wrong?"""
        return UNKNOWN_AGE < stamp < PLAUSIBLE_S * 1e6 or self.is_ahead(stamp, now)
