"""Chooses leaders for partitions with given replicas, as evenly as those allow."""

from collections import deque
from collections.abc import Sequence


class Leadership:
    """The leader of each partition. The caller assigns fixed leaders, then takes `balanced`."""

    def __init__(self, nodes: Sequence[str], replicas: Sequence[Sequence[str]]) -> None:
        """Starts without leaders. `replicas` is by partition, none of them empty."""
        self._replicas = replicas
        self._leaders = [""] * len(replicas)
        self._led: dict[str, set[int]] = {node: set() for node in nodes}

    def assign(self, partition: int, node: str) -> None:
        """Makes the node lead the partition."""
        old = self._leaders[partition]
        if old:
            self._led[old].remove(partition)
        self._leaders[partition] = node
        self._led[node].add(partition)

    def balanced(self) -> list[str]:
        """The leader of each partition. An assigned leader is moved only if loads would otherwise
        differ by more than one."""
        for partition, replicas in enumerate(self._replicas):
            if not self._leaders[partition]:
                # The first of equals is the nearest on the ring.
                self.assign(partition, min(replicas, key=lambda node: len(self._led[node])))
        while self._relieve_one():
            pass
        return self._leaders

    def _relieve_one(self) -> bool:
        """Moves one leadership from a most loaded node towards a less loaded one. Returns False if
        no chain of moves improves anything."""
        most = max(map(len, self._led.values()))
        least = min(map(len, self._led.values()))
        if most - least <= 1:
            return False
        for node in sorted(node for node, led in self._led.items() if len(led) == most):
            if self._hand_over(node, most):
                return True
        return False

    def _hand_over(self, start: str, most: int) -> bool:
        """Finds and carries out the shortest chain of moves from `start` to a node with at least
        two leaderships fewer. Each node of the chain passes one partition to the next, so only the
        loads of its ends change."""
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
