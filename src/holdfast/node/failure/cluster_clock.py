"""The cluster clock: the wall clock that the nodes of a cluster agree on.

Times in the log use the wall clock, and so do the lifetimes of sessions, wills and messages. One
node writes a time and another judges it later, so one wrong clock must not count. Smallest
counter-example: A closes a session that lasts ten minutes, B is two days ahead and leads its home.
B ends the session at once, with the messages that were acknowledged for it.

Each node sends its clock once a second (`position_reports`). A node uses its own clock while that
is within TOLERANCE_S of the median of all clocks that it knows. Otherwise it uses the median.
Between two samples the median advances with the monotonic clock, so a jump of the node's own clock
moves nothing. Of two middle clocks, the one nearer to the previous value counts. A node that has
just started has no previous value, and takes the others'. It decides nothing before it has one.
Counter-example: B, two days ahead, restarts and leads the home again before A has reported its
clock. B has no other clock than its own, and ends the session.

A node whose last other node is removed goes on with the agreed clock, until its own one is within
TOLERANCE_S of it. Counter-example: B, two days ahead, is to go on alone. The removal of A would end
all sessions that last less than two days. After a restart B has no clock but its own.

The module is pure: times are arguments, in microseconds.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

TOLERANCE_S: Final = 1.0
"""The distance from the median, in seconds, up to which a clock is accurate enough."""
SKEW_S: Final = 5.0
"""The error in seconds above which a clock is reported as wrong. Below half of it, the report
ends."""
SAMPLE_S: Final = 5.0
"""The seconds for which the newest sample counts. A sample that was long under way looks too old,
and a smaller delay shows a later clock."""
NEVER_SET_US: Final = 1_735_689_600_000_000
"""2025-01-01 in microseconds. A machine with an earlier time has no set clock."""
_STEP_US: Final = int(SKEW_S * 1e6)
_TOLERANCE_US: Final = int(TOLERANCE_S * 1e6)


@dataclass(slots=True)
class _Sample:
    """One reading of another node's clock."""

    offset_us: int
    """The node's wall clock minus our monotonic clock."""
    taken_at: float


class ClusterClock:
    """The clocks of the nodes, and the agreed clock as an offset from our monotonic clock."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._samples: dict[str, _Sample] = {}
        self._own_us = 0
        # The agreed clock as an offset from our monotonic clock; None without samples.
        self._base_us: int | None = None
        self.has_agreed = False
        """This node has taken part in the cluster, so its clock need not give way at the start."""
        self.stepped_s = 0.0
        """The seconds by which somebody has set this node's clock since that was told, or by which
        its machine was suspended."""
        self._skewed: set[str] = set()

    def tick(self, now: float, wall_us: int) -> int:
        """The wall clock to use while this node's shows `wall_us`."""
        now_us = int(now * 1e6)
        own_us = wall_us - now_us
        step_us = own_us - self._own_us
        if not -_STEP_US <= step_us <= _STEP_US and self._own_us:
            self.stepped_s += step_us / 1e6
        self._own_us = own_us
        base_us = self._base_us
        if base_us is None or -_TOLERANCE_US <= self._own_us - base_us <= _TOLERANCE_US:
            if base_us is not None and not self._samples:
                self._base_us = own_us
            return wall_us
        return now_us + base_us

    def own_us(self, now: float) -> int:
        """This node's own wall clock, right or wrong."""
        return int(now * 1e6) + self._own_us

    def offsets_us(self) -> tuple[int, int]:
        """This node's own clock and the one that it uses, as offsets from our monotonic clock; 0
        for the latter if it has just started. Both change only when a clock is set or is wrong."""
        if not self.has_agreed:
            return self._own_us, 0
        return self._own_us, self._own_us if self._base_us is None else self._base_us

    def agreed_us(self, now: float) -> int:
        """The clock that this node uses, for the others; 0 if it has just started."""
        return int(now * 1e6) + self.offsets_us()[1] if self.has_agreed else 0

    def add_sample(self, node: str, wall_us: int, agreed_us: int, now: float) -> None:
        """Takes a sample of another node's clock."""
        now_us = int(now * 1e6)
        offset_us = wall_us - now_us
        sample = self._samples.get(node)
        if sample is None or offset_us >= sample.offset_us or now - sample.taken_at > SAMPLE_S:
            self._samples[node] = _Sample(offset_us, now)
        self._agree(agreed_us - now_us if agreed_us else None, now_us)

    def has_samples(self) -> bool:
        return bool(self._samples)

    def forget(self, nodes: Collection[str], now: float) -> None:
        """Drops the samples of all nodes except these."""
        gone = self._samples.keys() - nodes
        for node in gone:
            del self._samples[node]
            self._skewed.discard(node)
        if gone:
            self._agree(None, int(now * 1e6))

    def _agree(self, told_us: int | None, now_us: int) -> None:
        if not self._samples:
            return
        clocks = sorted([*(each.offset_us for each in self._samples.values()), self._own_us])
        low, high = clocks[(len(clocks) - 1) // 2], clocks[len(clocks) // 2]
        base_us = self._base_us
        if base_us is None:
            if self.has_agreed:
                base_us = self._own_us
            elif told_us is not None:
                base_us = told_us
            else:
                # No node knows the previous value. By the earlier clock nothing expires too soon.
                # It is chosen unless it was never set.
                base_us = low if low + now_us >= NEVER_SET_US else high
        median_us = low if abs(low - base_us) <= abs(high - base_us) else high
        if abs(self._own_us - median_us) <= _TOLERANCE_US:
            base_us = self._own_us
        elif abs(base_us - median_us) > _TOLERANCE_US:
            base_us = median_us
        self._base_us = base_us

    def skews_s(self) -> dict[str, float]:
        """The seconds by which each node's clock, this one included, is ahead of the agreed one."""
        base_us = self._own_us if self._base_us is None else self._base_us
        skews = {node: (each.offset_us - base_us) / 1e6 for node, each in self._samples.items()}
        skews[self._node_id] = (self._own_us - base_us) / 1e6
        return skews

    def pop_changes(self) -> list[tuple[str, float, bool]]:
        """(node, skew, True) of each clock that became wrong since the last call, and (node, skew,
        False) of each that is right again."""
        changes = []
        for node, skew_s in self.skews_s().items():
            if node not in self._skewed and abs(skew_s) > SKEW_S:
                self._skewed.add(node)
                changes.append((node, skew_s, True))
            elif node in self._skewed and abs(skew_s) < SKEW_S / 2:
                self._skewed.discard(node)
                changes.append((node, skew_s, False))
        return changes
