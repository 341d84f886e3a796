"""Waiting until this node has applied everything that was committed anywhere before."""

from typing import Final

from holdfast.cluster.fabric import Fabric
from holdfast.cluster.opening import barrier_request
from holdfast.node.state import NodeState
from holdfast.replication.kinds import BARRIER

ASK_AGAIN_S: Final = 0.1
WAIT_S: Final = 5.0
"""Then a barrier counts as passed: a partition that nobody leads must not stop the others."""
NUMBER_MIN: Final = 1 << 63
"""Requests from here on are of this module, those below of opening.Opener."""


class Barrier:
    def __init__(self, number: int, partitions: int, deadline: float) -> None:
        self.number = number
        self.deadline = deadline
        self.asked_at = -1.0
        # Per partition the offset that must be applied; -1: its leader has not said.
        self.ends = [-1] * partitions


class Barriers:
    def __init__(self, state: NodeState, fabric: Fabric) -> None:
        self._state = state
        self._fabric = fabric
        self._number = NUMBER_MIN
        self._waiting: dict[int, Barrier] = {}

    def begin(self) -> int:
        """What is begun in one turn is one barrier."""
        newest = self._waiting.get(self._number)
        if newest is not None and newest.asked_at < 0:
            return newest.number
        self._number += 1
        deadline = self._state.now + WAIT_S
        barrier = Barrier(self._number, len(self._fabric.leading), deadline)
        self._waiting[barrier.number] = barrier
        return barrier.number

    def has_passed(self, number: int) -> bool:
        return number not in self._waiting

    def answered(self, number: int, entries: list[tuple[int, int, int]]) -> None:
        barrier = self._waiting.get(number)
        if barrier is None:
            return
        for partition, _, end in entries:
            if partition < len(barrier.ends) and barrier.ends[partition] < 0:
                barrier.ends[partition] = end

    def advance(self) -> bool:
        """Ask whom there is to ask; True if a barrier was passed."""
        now = self._state.now
        passed = False
        for barrier in list(self._waiting.values()):
            if barrier.asked_at <= now - ASK_AGAIN_S:
                self._ask(barrier)
            delivered = self._state.delivered
            applied = self._fabric.is_whole and all(
                0 <= end <= delivered[partition] for partition, end in enumerate(barrier.ends)
            )
            if applied or barrier.deadline <= now:
                del self._waiting[barrier.number]
                passed = True
        return passed

    def _ask(self, barrier: Barrier) -> None:
        barrier.asked_at = self._state.now
        leaders: dict[str, None] = {}
        for partition, end in enumerate(barrier.ends):
            if end >= 0:
                continue
            if self._fabric.leads(partition):
                barrier.ends[partition] = self._fabric.journal.next_offset[partition]
            else:
                leaders[self._fabric.leader(partition)] = None
        for leader in leaders:
            self._fabric.send(leader, BARRIER, barrier_request(barrier.number))

    def timer(self) -> float | None:
        if not self._waiting:
            return None
        return min(barrier.asked_at for barrier in self._waiting.values()) + ASK_AGAIN_S
