"""Which of two retained messages of a topic is newer, anywhere in the federation.

A hybrid logical clock: as long as wall clocks agree, stamps are wall time; where they do not, what
is published by one who has seen a version is still newer than that version.
"""

from typing import Final

from holdfast.federation.identity import MessageId

Version = tuple[int, bytes, int, int]
"""Stamp, and of the publication: origin, epoch, sequence. The greatest is the newest."""

AHEAD_MAX_S: Final = 86_400.0
"""A stamp further ahead of our own clock is not believed: it would stay the newest for long."""
UNKNOWN_AGE: Final = 1
"""The stamp of what a broker had retained before anybody stamped it: older than anything that a
member has seen published."""


def version_of(stamp: int, id: MessageId) -> Version:
    return (stamp, *id)


class HybridClock:
    """Stamps are microseconds."""

    def __init__(self, wall_s: float, now: float) -> None:
        self._newest = UNKNOWN_AGE
        self._offset_s = wall_s - now

    def set_wall(self, wall_s: float, now: float) -> None:
        """It was set, or has drifted."""
        self._offset_s = wall_s - now

    def wall_us(self, now: float) -> int:
        return max(UNKNOWN_AGE + 1, int((now + self._offset_s) * 1e6))

    def stamp(self, now: float) -> int:
        """Of a publication made now: above all that were heard or given."""
        self._newest = max(self.wall_us(now), self._newest + 1)
        return self._newest

    def hear(self, stamp: int, now: float) -> bool:
        """False: it is not to be believed."""
        if stamp > self.wall_us(now) + AHEAD_MAX_S * 1e6:
            return False
        self._newest = max(self._newest, stamp)
        return True
