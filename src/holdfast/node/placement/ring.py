"""The hash ring: the places of each partition's replicas.

Every node has POINTS points on a circle of 2**64, every partition has one. A point is the first
eight bytes, big-endian, of the BLAKE2b hash of "<node>#<number>" or "partition <number>". Clockwise
from its point a partition meets the nodes in an order of its own, which is the same on every
machine and for ever.

A pure ring gives some nodes twice the load of others. So the ring only orders the candidates: no
node stores more than its share, rounded up, and none leads more (consistent hashing with bounded
loads). Replicas that exist already count first. So `placement` of a changed set of nodes moves only
what the change demands. For a node that joins, that is about partitions * replication factor /
nodes.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from holdfast.node.placement.leaders import Leadership

POINTS: Final = 64
"""The number of points of each node."""
CIRCLE: Final = 1 << 64

Assignment = tuple[tuple[str, ...], ...]
"""The replicas of each partition: the preferred leader first, then clockwise."""


def ring_point(text: str) -> int:
    """The position of a text on the circle."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class Ring:
    """The points of the nodes and partitions."""

    def __init__(self, nodes: Collection[str], partitions: int) -> None:
        self._starts = [ring_point(f"partition {number}") for number in range(partitions)]
        self._points = {
            node: sorted(ring_point(f"{node}#{number}") for number in range(POINTS))
            for node in nodes
        }
        self._circle = sorted(
            (point, node) for node, points in self._points.items() for point in points
        )

    def walk(self, partition: int) -> Iterator[str]:
        """All nodes in the order met clockwise from the partition's point."""
        circle = self._circle
        first = bisect_left(circle, (self._starts[partition], ""))
        met: set[str] = set()
        for index in range(first, first + len(circle)):
            node = circle[index % len(circle)][1]
            if node not in met:
                met.add(node)
                yield node
                if len(met) == len(self._points):
                    return

    def distance(self, partition: int, node: str) -> int:
        """The distance clockwise from the partition's point to the nearest point of the node."""
        points = self._points[node]
        start = self._starts[partition]
        index = bisect_left(points, start)
        return points[index] - start if index < len(points) else points[0] + CIRCLE - start


def placement(
    nodes: Collection[str],
    partitions: int,
    replication_factor: int,
    current: Sequence[Sequence[str]] = (),
) -> Assignment:
    """The wanted replicas and preferred leaders. `current` has the present replicas by partition;
    it is empty for a new cluster. The order of `nodes` does not matter.

    Loads differ by at most one; leaderships do too where the replicas allow it. If there are fewer
    nodes than the replication factor, each stores one replica of every partition.
    """
    if not nodes:
        return ((),) * partitions
    placing = _Placing(sorted(nodes), partitions, replication_factor, current)
    placing.drop()
    placing.fill()
    placing.even_out()
    return placing.ordered(current)


class _Placing:
    """A placement under construction."""

    def __init__(
        self,
        nodes: Sequence[str],
        partitions: int,
        replication_factor: int,
        current: Sequence[Sequence[str]],
    ) -> None:
        self._ring = Ring(nodes, partitions)
        self._copies = min(replication_factor, len(nodes))
        self._share = -(-partitions * self._copies // len(nodes))
        self._assigned: dict[str, set[int]] = {node: set() for node in nodes}
        self._replicas: list[list[str]] = [[] for _ in range(partitions)]
        for partition, replicas in enumerate(current):
            for node in replicas:
                if node in self._assigned:
                    self._add(partition, node)

    def _add(self, partition: int, node: str) -> None:
        self._replicas[partition].append(node)
        self._assigned[node].add(partition)

    def _remove(self, partition: int, node: str) -> None:
        self._replicas[partition].remove(node)
        self._assigned[node].remove(partition)

    def _most_loaded(self, partition: int) -> str:
        """The most loaded replica; the last of equals, so that the preferred leader stays in
        place."""
        replicas = reversed(self._replicas[partition])
        return max(replicas, key=lambda node: len(self._assigned[node]))

    def drop(self) -> None:
        """Drops the most loaded replicas where there are too many, because one is being moved."""
        for partition, replicas in enumerate(self._replicas):
            while len(replicas) > self._copies:
                self._remove(partition, self._most_loaded(partition))

    def fill(self) -> None:
        """Adds missing replicas in ring order, on nodes with room."""
        for partition, replicas in enumerate(self._replicas):
            if len(replicas) == self._copies:
                continue
            for node in self._ring.walk(partition):
                if len(self._assigned[node]) < self._share and node not in replicas:
                    self._add(partition, node)
                    if len(replicas) == self._copies:
                        break
            while len(replicas) < self._copies:
                # All nodes with room are replicas of this partition already.
                others = [node for node in self._assigned if node not in replicas]
                self._add(partition, min(others, key=lambda node: len(self._assigned[node])))

    def even_out(self) -> None:
        """Moves replicas to nodes with too few, first from nodes with too many."""
        held = self._assigned
        enough = sum(map(len, held.values())) // len(held)
        for keep in (self._share, enough):
            for node in held:
                # For a small deficit it is cheaper to search for each partition in its present
                # node.
                if (enough - len(held[node])) * enough > len(self._replicas):
                    self._raise(node, enough, keep)
        while True:
            high = max(held, key=lambda node: (len(held[node]), node))
            low = min(held, key=lambda node: (len(held[node]), node))
            if len(held[high]) - len(held[low]) <= 1:
                return
            # The difference is not empty: `high` stores more partitions than `low` stores in total.
            self._move(self._nearest(held[high] - held[low], low)[0], high, low)

    def _raise(self, low: str, enough: int, keep: int) -> None:
        """Gives `low` the nearest partitions until it has enough; other nodes keep at least
        `keep`."""
        held = self._assigned
        others = set(range(len(self._replicas))) - held[low]
        for partition in self._nearest(others, low):
            high = self._most_loaded(partition)
            if len(held[high]) > keep:
                self._move(partition, high, low)
                if len(held[low]) == enough:
                    return

    def _nearest(self, partitions: Collection[int], node: str) -> list[int]:
        return sorted(
            partitions, key=lambda partition: (self._ring.distance(partition, node), partition)
        )

    def _move(self, partition: int, high: str, low: str) -> None:
        self._remove(partition, high)
        self._add(partition, low)

    def ordered(self, current: Sequence[Sequence[str]]) -> Assignment:
        """The replicas with the preferred leader first, then the others as they follow on the
        ring."""
        clockwise = [
            sorted(replicas, key=lambda node: (self._ring.distance(partition, node), node))
            for partition, replicas in enumerate(self._replicas)
        ]
        leadership = Leadership(list(self._assigned), clockwise)
        for partition, before in enumerate(current):
            if before and before[0] in clockwise[partition]:
                leadership.assign(partition, before[0])
        leaders = leadership.balanced()
        placed = []
        for replicas, leader in zip(clockwise, leaders, strict=True):
            first = replicas.index(leader)
            placed.append((*replicas[first:], *replicas[:first]))
        return tuple(placed)
