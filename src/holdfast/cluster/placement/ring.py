"""The hash ring: where the replicas of each partition belong.

Every node has POINTS points on a circle of 2**64, every partition one: the first eight bytes,
big-endian, of the BLAKE2b hash of "<node>#<number>" or "partition <number>". Clockwise from its
point a partition meets the nodes in an order of its own, the same on every machine and for ever.

A pure ring leaves some nodes with twice the load of others. So it only says who is asked first:
no node holds more than its share, rounded up, and none leads more (consistent hashing with bounded
loads). And since what is stored already counts first, `placement` of a changed set of nodes moves
only what the change demands: about partitions * replication factor / nodes for a node that joins.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from holdfast.cluster.placement.leaders import Leadership

POINTS: Final = 64
"""Of each node."""
CIRCLE: Final = 1 << 64

Assignment = tuple[tuple[str, ...], ...]
"""By partition: its replicas, the preferred leader first, then clockwise."""


def ring_point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class Ring:
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
        """All nodes, as met clockwise from the partition's point."""
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
        """Clockwise from the partition's point to the nearest point of the node."""
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
    """Where replicas and preferred leaders belong, given where they are (`current`, by partition;
    empty for a new cluster). Any order of `nodes` gives the same result.

    Loads differ by at most one, those of leaders by at most one where the replicas allow it. Fewer
    nodes than the replication factor hold a replica each.
    """
    if not nodes:
        return ((),) * partitions
    placing = _Placing(sorted(nodes), partitions, replication_factor, current)
    placing.drop()
    placing.fill()
    placing.even_out()
    return placing.ordered(current)


class _Placing:
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
        self._held: dict[str, set[int]] = {node: set() for node in nodes}
        self._replicas: list[list[str]] = [[] for _ in range(partitions)]
        for partition, replicas in enumerate(current):
            for node in replicas:
                if node in self._held:
                    self._add(partition, node)

    def _add(self, partition: int, node: str) -> None:
        self._replicas[partition].append(node)
        self._held[node].add(partition)

    def _remove(self, partition: int, node: str) -> None:
        self._replicas[partition].remove(node)
        self._held[node].remove(partition)

    def _most_loaded(self, partition: int) -> str:
        """The last of equals, so that the preferred leader stays where it is."""
        replicas = reversed(self._replicas[partition])
        return max(replicas, key=lambda node: len(self._held[node]))

    def drop(self) -> None:
        """Where there are more than wanted (a replica is being moved), the most loaded goes."""
        for partition, replicas in enumerate(self._replicas):
            while len(replicas) > self._copies:
                self._remove(partition, self._most_loaded(partition))

    def fill(self) -> None:
        for partition, replicas in enumerate(self._replicas):
            if len(replicas) == self._copies:
                continue
            for node in self._ring.walk(partition):
                if len(self._held[node]) < self._share and node not in replicas:
                    self._add(partition, node)
                    if len(replicas) == self._copies:
                        break
            while len(replicas) < self._copies:
                # All who still have room are here already.
                others = [node for node in self._held if node not in replicas]
                self._add(partition, min(others, key=lambda node: len(self._held[node])))

    def even_out(self) -> None:
        """Moves replicas to those with too few, from those with too many while there are any."""
        held = self._held
        enough = sum(map(len, held.values())) // len(held)
        for keep in (self._share, enough):
            for node in held:
                # For fewer it is cheaper to look for each of them in the one that it comes from.
                if (enough - len(held[node])) * enough > len(self._replicas):
                    self._raise(node, enough, keep)
        while True:
            high = max(held, key=lambda node: (len(held[node]), node))
            low = min(held, key=lambda node: (len(held[node]), node))
            if len(held[high]) - len(held[low]) <= 1:
                return
            # There is one: `high` holds more partitions than `low` holds at all.
            self._move(self._nearest(held[high] - held[low], low)[0], high, low)

    def _raise(self, low: str, enough: int, keep: int) -> None:
        """Gives `low` partitions near it until it has enough; others keep as many as said."""
        held = self._held
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
        """The preferred leader first, and the others as they follow it on the ring."""
        clockwise = [
            sorted(replicas, key=lambda node: (self._ring.distance(partition, node), node))
            for partition, replicas in enumerate(self._replicas)
        ]
        leadership = Leadership(list(self._held), clockwise)
        for partition, before in enumerate(current):
            if before and before[0] in clockwise[partition]:
                leadership.assign(partition, before[0])
        leaders = leadership.balanced()
        placed = []
        for replicas, leader in zip(clockwise, leaders, strict=True):
            first = replicas.index(leader)
            placed.append((*replicas[first:], *replicas[:first]))
        return tuple(placed)
