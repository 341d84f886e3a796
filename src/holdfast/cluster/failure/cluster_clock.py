"""The wall clock that the nodes of a cluster agree on.

Times in the log, and how long a session, a will or a message still lasts, go by the wall clock. One
node writes a time, another one judges it later, so one wrong clock must not count. Smallest
counter-example: A closes a session that lasts ten minutes, B is two days ahead and leads its home:
B ends it at once, with the messages that were acknowledged for it.

Each node sends its clock with its heartbeats. A node goes by the median of all clocks that it
knows, its own included, as long as its own is farther than TOLERANCE_S from it; else by its own.
Between
two samples the median goes on with the monotonic clock, so a jump of the node's own clock moves
nothing. Where two clocks are in the middle the one counts that is nearer to what counted before; a
node that has just started, and has nothing before, believes the others.

Pure: times are arguments. All in microseconds.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

TOLERANCE_S: Final = 1.0
"""So far from the median a clock is right enough."""
SKEW_S: Final = 5.0
"""A clock that is off by more is told in the log; half of it ends that."""
SAMPLE_S: Final = 5.0
"""A sample that was under way for long seems too old: for so long the newest clock counts."""
NEVER_SET_US: Final = 1_735_689_600_000_000
"""2025-01-01: a machine that says an earlier time has none."""
_TOLERANCE_US: Final = int(TOLERANCE_S * 1e6)


@dataclass(slots=True)
class _Sample:
    offset_us: int
    """Of the node's wall clock from our monotonic clock."""
    taken_at: float


class ClusterClock:
    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._samples: dict[str, _Sample] = {}
        self._own_us = 0
        # What the cluster goes by, as an offset from our monotonic clock; valid with samples.
        self._base_us: int | None = None
        self.is_settled = False
        """This node has taken part: its clock is not the one that must give way."""
        self._skewed: set[str] = set()

    def tick(self, now: float, wall_us: int) -> int:
        """What counts as the wall clock, where this node's says `wall_us`."""
        now_us = int(now * 1e6)
        self._own_us = wall_us - now_us
        base_us = self._base_us
        if base_us is None or -_TOLERANCE_US <= self._own_us - base_us <= _TOLERANCE_US:
            return wall_us
        return now_us + base_us

    def own_us(self, now: float) -> int:
        """This node's own wall clock, right or wrong."""
        return int(now * 1e6) + self._own_us

    def agreed_us(self, now: float) -> int:
        """For the others: what this node goes by; 0: it has just started."""
        if not self.is_settled:
            return 0
        base_us = self._base_us
        return int(now * 1e6) + (self._own_us if base_us is None else base_us)

    def heard(self, node: str, wall_us: int, agreed_us: int, now: float) -> None:
        """The clock of another node."""
        now_us = int(now * 1e6)
        offset_us = wall_us - now_us
        sample = self._samples.get(node)
        if sample is None or offset_us >= sample.offset_us or now - sample.taken_at > SAMPLE_S:
            self._samples[node] = _Sample(offset_us, now)
        self._agree(agreed_us - now_us if agreed_us else None, now_us)

    def forget(self, nodes: Collection[str], now: float) -> None:
        """All but these."""
        gone = self._samples.keys() - nodes
        for node in gone:
            del self._samples[node]
            self._skewed.discard(node)
        if gone:
            self._agree(None, int(now * 1e6))

    def _agree(self, told_us: int | None, now_us: int) -> None:
        if not self._samples:
            self._base_us = None
            return
        clocks = sorted([*(each.offset_us for each in self._samples.values()), self._own_us])
        low, high = clocks[(len(clocks) - 1) // 2], clocks[len(clocks) // 2]
        base_us = self._base_us
        if base_us is None:
            if self.is_settled:
                base_us = self._own_us
            elif told_us is not None:
                base_us = told_us
            else:
                # Nobody knows what counted before. By the earlier clock nothing ends too soon, and
                # it is the earlier one unless it was never set.
                base_us = low if low + now_us >= NEVER_SET_US else high
        median_us = low if abs(low - base_us) <= abs(high - base_us) else high
        if abs(self._own_us - median_us) <= _TOLERANCE_US:
            base_us = self._own_us
        elif abs(base_us - median_us) > _TOLERANCE_US:
            base_us = median_us
        self._base_us = base_us

    def skews_s(self) -> dict[str, float]:
        """By node, of all whose clocks are known: how far it is ahead of what the cluster goes by;
        this node included."""
        base_us = self._own_us if self._base_us is None else self._base_us
        skews = {node: (each.offset_us - base_us) / 1e6 for node, each in self._samples.items()}
        skews[self._node_id] = (self._own_us - base_us) / 1e6
        return skews

    def take_changes(self) -> list[tuple[str, float, bool]]:
        """(node, skew, whether it begins) of each whose clock has begun to be wrong, or is right
        again, since the last call."""
        changes = []
        for node, skew_s in self.skews_s().items():
            if node not in self._skewed and abs(skew_s) > SKEW_S:
                self._skewed.add(node)
                changes.append((node, skew_s, True))
            elif node in self._skewed and abs(skew_s) < SKEW_S / 2:
                self._skewed.discard(node)
                changes.append((node, skew_s, False))
        return changes
