"""Leaders for partitions whose replicas are given, as evenly as those allow."""

from collections import deque
from collections.abc import Sequence


class Leadership:
    """Who leads what. Assign what is decided, then take `balanced`."""

    def __init__(self, nodes: Sequence[str], replicas: Sequence[Sequence[str]]) -> None:
        """`replicas` by partition, none of them empty."""
        self._replicas = replicas
        self._leaders = [""] * len(replicas)
        self._led: dict[str, set[int]] = {node: set() for node in nodes}

    def assign(self, partition: int, node: str) -> None:
        old = self._leaders[partition]
        if old:
            self._led[old].remove(partition)
        self._leaders[partition] = node
        self._led[node].add(partition)

    def balanced(self) -> list[str]:
        """The leader of each partition. Who was assigned is moved only where loads would differ
        by more than one otherwise."""
        for partition, replicas in enumerate(self._replicas):
            if not self._leaders[partition]:
                # The first of equals: the nearest on the ring.
                self.assign(partition, min(replicas, key=lambda node: len(self._led[node])))
        while self._relieve_one():
            pass
        return self._leaders

    def _relieve_one(self) -> bool:
        """Takes one partition from a node that leads most, or gives one to a node that leads
        least. False: no chain of hand-overs improves anything."""
        most = max(map(len, self._led.values()))
        least = min(map(len, self._led.values()))
        if most - least <= 1:
            return False
        for node in sorted(node for node, led in self._led.items() if len(led) == most):
            if self._hand_over(node, most):
                return True
        return False

    def _hand_over(self, start: str, most: int) -> bool:
        """The shortest chain of hand-overs from `start` to a node that leads two less than it or
        fewer: each node of the chain gives one partition to the next, so only its ends change."""
        reached: dict[str, tuple[str, int]] = {start: ("", -1)}
        queue = deque([start])
        while queue:
            giver = queue.popleft()
            for partition in sorted(self._led[giver]):
                for taker in self._replicas[partition]:
                    if taker in reached:
                        continue
                    reached[taker] = (giver, partition)
                    if len(self._led[taker]) <= most - 2:
                        self._carry_out(taker, reached)
                        return True
                    queue.append(taker)
        return False

    def _carry_out(self, last: str, reached: dict[str, tuple[str, int]]) -> None:
        node = last
        while True:
            giver, partition = reached[node]
            if not giver:
                return
            self.assign(partition, node)
            node = giver
