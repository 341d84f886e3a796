"""The hash ring: the places of each partition's replicas.

Every node has POINTS points on a circle of 2**64, every partition has one. A point is the first
eight bytes, big-endian, of the BLAKE2b hash of "<node>#<number>" or "partition <number>". Clockwise
from its point a partition meets the nodes in an order of its own, which is the same on every
machine and for ever.

A pure ring gives some nodes twice the load of others. So the ring only orders the candidates: no
node stores more than its share (`shares`), rounded up, and none leads more (consistent hashing with
bounded loads). Replicas that exist already count first. So `placement` of a changed set of nodes
moves only what the change demands. For a node that joins, that is about partitions * replication
factor / nodes.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from holdfast.node.metadata.model import NodeTraits
from holdfast.node.placement.shares import NodeShares

HandOver = tuple[int, str, str]
"""A partition, the node that gives it away, and the node that takes it."""


def find_chain(
    nodes: Iterable[str],
    excess: Callable[[str], int],
    unit: int,
    takers: Callable[[str, Container[str]], Iterable[tuple[int, str]]],
) -> list[HandOver]:
    """The shortest chain of hand-overs from the most loaded node that has one, to a node whose
    excess is lower by more than `unit`. Each node of the chain passes one partition to the next, so
    only the loads of its ends change. Empty: no chain improves anything. `takers`: the possible
    (partition, taker) of a giver, besides the nodes that are reached already."""
    ranked = sorted(nodes, key=lambda node: (-excess(node), node))
    for start in ranked:
        if excess(start) - excess(ranked[-1]) <= unit:
            return []
        reached: dict[str, tuple[int, str]] = {start: (-1, "")}
        queue = deque([start])
        while queue:
            giver = queue.popleft()
            for partition, taker in takers(giver, reached):
                reached[taker] = (partition, giver)
                if excess(start) - excess(taker) > unit:
                    return _traced(taker, reached)
                queue.append(taker)
    return []


def _traced(last: str, reached: dict[str, tuple[int, str]]) -> list[HandOver]:
    chain: list[HandOver] = []
    while True:
        partition, giver = reached[last]
        if not giver:
            return chain
        chain.append((partition, giver, last))
        last = giver


class Leadership:
    """The leader of each partition. The caller assigns fixed leaders, then takes `balanced`."""

    def __init__(self, shares: NodeShares, replicas: Sequence[Sequence[str]]) -> None:
        """Starts without leaders. `replicas` is by partition, none of them empty."""
        self._shares = shares
        self._replicas = replicas
        self._leaders = [""] * len(replicas)
        self._led: dict[str, set[int]] = {node: set() for node in shares.zones}

    def assign(self, partition: int, node: str) -> None:
        """Makes the node lead the partition."""
        old = self._leaders[partition]
        if old:
            self._led[old].remove(partition)
        self._leaders[partition] = node
        self._led[node].add(partition)

    def balanced(self) -> list[str]:
        """The leader of each partition. An assigned leader is moved only if loads would otherwise
        differ from the shares by more than one."""
        for partition, replicas in enumerate(self._replicas):
            if not self._leaders[partition]:
                # The first of equals is the nearest on the ring.
                self.assign(partition, min(replicas, key=self._excess))
        while chain := find_chain(self._led, self._excess, self._shares.unit, self._takers):
            for partition, _, taker in chain:
                self.assign(partition, taker)
        return self._leaders

    def _excess(self, node: str) -> int:
        return self._shares.excess(node, len(self._led[node]))

    def _takers(self, giver: str, reached: Container[str]) -> Iterable[tuple[int, str]]:
        for partition in sorted(self._led[giver]):
            for taker in self._replicas[partition]:
                if taker not in reached:
                    yield partition, taker


POINTS: Final = 64
"""The number of points of each node."""
CIRCLE: Final = 1 << 64

NO_TRAITS: Final[Mapping[str, NodeTraits]] = MappingProxyType({})
"""Nodes without zones, all of one capacity."""

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
    traits: Mapping[str, NodeTraits] = NO_TRAITS,
) -> Assignment:
    """The wanted replicas and preferred leaders. `current` has the present replicas by partition;
    it is empty for a new cluster. The order of `nodes` does not matter. `traits`: the zones and
    capacities of nodes; see `shares`.

    Loads differ from the shares by at most one; leaderships do too where the replicas allow it. If
    there are fewer nodes than the replication factor, each stores one replica of every partition.
    No zone has more replicas of a partition than it must.
    """
    if not nodes:
        return ((),) * partitions
    placing = _Placing(sorted(nodes), partitions, replication_factor, current, traits)
    placing.drop()
    placing.fill()
    placing.even_out()
    return placing.ordered(current, traits)


class _Placing:
    """A placement under construction."""

    def __init__(
        self,
        nodes: Sequence[str],
        partitions: int,
        replication_factor: int,
        current: Sequence[Sequence[str]],
        traits: Mapping[str, NodeTraits],
    ) -> None:
        self._ring = Ring(nodes, partitions)
        self._copies = min(replication_factor, len(nodes))
        self._shares = NodeShares(nodes, partitions, self._copies, traits)
        self._zones = self._shares.zones
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

    def _excess(self, node: str) -> int:
        return self._shares.excess(node, len(self._assigned[node]))

    def _most_loaded(self, replicas: Sequence[str]) -> str:
        """The most loaded replica; the last of equals, so that the preferred leader stays in
        place."""
        return max(reversed(replicas), key=self._excess)

    def _may_take(self, partition: int, node: str, giver: str = "") -> bool:
        """Whether the node may become a replica, in place of `giver`."""
        replicas = self._replicas[partition]
        if node in replicas:
            return False
        zone = self._zones[node]
        others = sum(self._zones[each] == zone for each in replicas if each != giver)
        return others < self._shares.zone_limit

    def drop(self) -> None:
        """Drops the most loaded replicas where there are too many, because one is being moved, or
        too many in one zone."""
        for partition, replicas in enumerate(self._replicas):
            while True:
                counts = Counter(self._zones[node] for node in replicas)
                crowded = [
                    node for node in replicas if counts[self._zones[node]] > self._shares.zone_limit
                ]
                if not crowded and len(replicas) <= self._copies:
                    break
                self._remove(partition, self._most_loaded(crowded or replicas))

    def fill(self) -> None:
        """Adds missing replicas in ring order, on nodes with room."""
        for partition, replicas in enumerate(self._replicas):
            if len(replicas) == self._copies:
                continue
            for node in self._ring.walk(partition):
                has_room = len(self._assigned[node]) < self._shares.most[node]
                if has_room and self._may_take(partition, node):
                    self._add(partition, node)
                    if len(replicas) == self._copies:
                        break
            while len(replicas) < self._copies:
                # All nodes with room are replicas of this partition already, or in their zones.
                others = [node for node in self._assigned if self._may_take(partition, node)]
                self._add(partition, min(others, key=self._excess))

    def even_out(self) -> None:
        """Moves replicas to nodes with too few, first from nodes with too many."""
        held, shares = self._assigned, self._shares
        for keep in (shares.most, shares.least):
            for node in held:
                enough = shares.least[node]
                # For a small deficit it is cheaper to search for each partition in its present
                # node.
                if (enough - len(held[node])) * enough > len(self._replicas):
                    self._raise(node, enough, keep)
        while self._relieve_one():
            pass

    def _relieve_one(self) -> bool:
        """Moves a replica from the node with the greatest excess to that with the lowest, or one of
        each node of a chain. Returns False if nothing improves the evenness."""
        held = self._assigned
        high = max(held, key=lambda node: (self._excess(node), node))
        low = min(held, key=lambda node: (self._excess(node), node))
        if self._excess(high) - self._excess(low) <= self._shares.unit:
            return False
        movable = [each for each in held[high] - held[low] if self._may_take(each, low, high)]
        if movable:
            self._move(self._nearest(movable, low)[0], high, low)
            return True
        # The zones stand between the two. The shortest chain uses a partition once, so its moves do
        # not contradict each other.
        chain = find_chain(held, self._excess, self._shares.unit, self._takers)
        for partition, giver, taker in chain:
            self._move(partition, giver, taker)
        return bool(chain)

    def _takers(self, giver: str, reached: Container[str]) -> Iterable[tuple[int, str]]:
        unreached = [node for node in self._assigned if node not in reached]
        for partition in sorted(self._assigned[giver]):
            for taker in [node for node in unreached if self._may_take(partition, node, giver)]:
                unreached.remove(taker)
                yield partition, taker

    def _raise(self, low: str, enough: int, keep: Mapping[str, int]) -> None:
        """Gives `low` the nearest partitions until it has enough; other nodes keep at least
        `keep`."""
        held = self._assigned
        others = set(range(len(self._replicas))) - held[low]
        for partition in self._nearest(others, low):
            givers = [
                node for node in self._replicas[partition] if self._may_take(partition, low, node)
            ]
            high = self._most_loaded(givers) if givers else low
            if len(held[high]) > keep[high]:
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

    def ordered(
        self, current: Sequence[Sequence[str]], traits: Mapping[str, NodeTraits]
    ) -> Assignment:
        """The replicas with the preferred leader first, then the others as they follow on the
        ring."""
        clockwise = [
            sorted(replicas, key=lambda node: (self._ring.distance(partition, node), node))
            for partition, replicas in enumerate(self._replicas)
        ]
        leadership = Leadership(NodeShares(self._assigned, len(clockwise), 1, traits), clockwise)
        for partition, before in enumerate(current):
            if before and before[0] in clockwise[partition]:
                leadership.assign(partition, before[0])
        leaders = leadership.balanced()
        placed = []
        for replicas, leader in zip(clockwise, leaders, strict=True):
            assert not self._shares.is_crowded(replicas), "a zone has more replicas than it must"
            first = replicas.index(leader)
            placed.append((*replicas[first:], *replicas[:first]))
        return tuple(placed)
