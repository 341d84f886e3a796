"""Chooses leaders for partitions with given replicas, as evenly as those allow."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

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
