"""Which partitions' leaders this node may send records to.

A record sent before may be in a leader's log, or lost with the leader or the link. So after each
change of either, records wait until this node's own log has what the leader's had when it was
asked: the question goes the same way as the records, behind them.
"""

from typing import Final

from holdfast.cluster.context import ClusterContext
from holdfast.cluster.frame_kinds import BARRIER
from holdfast.cluster.partitions.replication import Replication
from holdfast.cluster.publish.forwarding import RecordForwarder
from holdfast.cluster.reads.read_barrier import ALIGNMENT, barrier_request

ASK_AGAIN_S: Final = 0.03
"""The next leader may know later than we that it is one."""


class LeaderSync:
    def __init__(
        self, fabric: ClusterContext, forwarding: RecordForwarder, replication: Replication
    ) -> None:
        self._fabric = fabric
        self._forwarding = forwarding
        self._replication = replication
        self._waiting: set[int] = set(range(fabric.journal.partitions))
        # Per partition what its leader has answered: leader, epoch, end of its log.
        self._ends: dict[int, tuple[str, int, int]] = {}
        self._asked_at = -1.0

    def lose(self, partition: int) -> None:
        """Its leader, the leader's epoch or the link to it is another one."""
        self._forwarding.stop(partition)
        self._ends.pop(partition, None)
        self._waiting.add(partition)
        self._asked_at = -1.0

    def lose_node(self, node: str) -> None:
        for partition in range(len(self._fabric.leading)):
            if self._fabric.leader(partition) == node:
                self.lose(partition)

    def lead(self, partition: int, epoch: int, known: set[int]) -> None:
        """This node leads the partition itself."""
        self._waiting.discard(partition)
        self._ends.pop(partition, None)
        self._forwarding.aligned(partition, self._fabric.node_id, epoch, known)

    def answered(self, node: str, entries: list[tuple[int, int, int]]) -> None:
        for partition, epoch, end in entries:
            if partition in self._waiting:
                self._ends[partition] = (node, epoch, end)

    def take_aligned(self) -> list[tuple[int, str, int]]:
        """(partition, leader, epoch) of those that records may be sent for from now on."""
        if not self._waiting:
            return []
        found: list[tuple[int, str, int]] = []
        journal = self._fabric.journal
        for partition in list(self._waiting):
            answer = self._ends.get(partition)
            if answer is None:
                continue
            leader, epoch, end = answer
            if (
                leader == self._fabric.leader(partition)
                and epoch == self._fabric.epoch(partition)
                and self._replication.followed_epoch(partition) == epoch
                and journal.next_offset[partition] >= end
            ):
                self._waiting.discard(partition)
                del self._ends[partition]
                found.append((partition, leader, epoch))
        return found

    def ask(self, now: float) -> None:
        """Whoever has not answered yet, or not for the epoch that is known here."""
        if not self._waiting or now < self._asked_at + ASK_AGAIN_S:
            return
        leaders: set[str] = set()
        for partition in self._waiting:
            leader = self._fabric.leader(partition)
            answer = self._ends.get(partition)
            if answer is not None and answer[:2] == (leader, self._fabric.epoch(partition)):
                continue
            if leader in self._fabric.connected and self._replication.followed_epoch(partition):
                leaders.add(leader)
        # With nobody to ask there is nothing to wait for but an event.
        self._asked_at = now if leaders else -1.0
        for leader in leaders:
            self._fabric.send(leader, BARRIER, barrier_request(ALIGNMENT))

    def timer(self) -> float | None:
        return self._asked_at + ASK_AGAIN_S if self._waiting and self._asked_at >= 0 else None
