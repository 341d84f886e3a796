"""Partitions of which this node may lack records that it had acknowledged.

With durability "memory" a power cut may take the newest records of a replica, and other nodes have
counted them. Smallest counter-example: A leads, B and C are in sync, and each has received record
7, so it is acknowledged. B loses its power, and starts again without record 7. A dies. The
controller makes B the leader, and C cuts off record 7.

So after such a start a replica follows as ever, but leads nothing, until one of these holds in
metadata that is current:

- It is not in the in-sync set. The controller takes it out, if another one of the set is complete
  (`placement.planning`). The leader takes it in once it has everything.
- It is the only one of the set.
- It is named as the leader, and each other one of the set is connected and may lack records, too.
  A follower that has more takes over (`FollowerSide._diverged`).

It waits for a node of the set that is not connected, because that one may have everything. A
time-out is no permission. Counter-example: A and B lose their power while C restarts. An operator
ends the wait by `unsafe-recover`.

If all of a set lose their power, they lose the records that none has synced. So a set of one may
lose some, which `min_insync` = 2 prevents. Counter-example: A and B are in sync, B is killed, and A
takes B out of the set. A loses its power, and only A counts when both return.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from holdfast.node.metadata.model import NodePhase, PartitionInfo
from holdfast.node.replicate.progress import IDLE, LedPartition
from holdfast.node.replicate.state import ReplicaState

FEATURE = "incomplete"
"""The feature in the handshake of a node that began with partitions that may lack records."""


class Incomplete:
    """The decision whether this node may lead a partition, as far as lost records go."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.reports: Mapping[str, frozenset[int]] = {}
        """Per connected node the partitions in which it may be incomplete."""
        # The partitions that this node leads although it may lack records, each with the in-sync
        # set of that decision. They are reported until the followers of the set have compared their
        # logs, because the controller takes no node out of a set of which each may lack records.
        # Counter-example: it takes out the follower that has more, and that one cannot take over.
        self._led: dict[int, tuple[str, ...]] = {}

    def own(self) -> frozenset[int]:
        """The partitions of this node to report to the others."""
        return frozenset(self._state.incomplete).union(self._led)

    def review(self, led: list[LedPartition | None]) -> bool:
        """Finds the partitions that this node may lead now; returns whether there are any. The
        metadata must be current."""
        state = self._state
        for partition in [each for each in self._led if self._is_compared(each, led[each])]:
            del self._led[partition]
        found = False
        for partition in sorted(state.incomplete):
            info = state.info(partition)
            if info is not None and self._is_resolved(partition, info):
                state.incomplete.discard(partition)
                found = True
        return found

    def _is_resolved(self, partition: int, info: PartitionInfo) -> bool:
        own = self._state.node_id
        others = [node for node in info.in_sync if node != own]
        if own not in info.in_sync or not others:
            return True
        if info.leader != own or not all(
            partition in self.reports.get(node, ()) for node in others
        ):
            return False
        self._led[partition] = info.in_sync
        return True

    def _is_compared(self, partition: int, led: LedPartition | None) -> bool:
        info = self._state.info(partition)
        if info is None or info.leader != self._state.node_id:
            return True
        if info.in_sync != self._led[partition]:
            return True
        return led is not None and all(
            each.state != IDLE and each.matched >= led.start for each in led.counted
        )

    def successor(self, partition: int, info: PartitionInfo) -> PartitionInfo | None:
        """The entry with a complete leader in place of this node, if one is connected."""
        metadata = self._state.metadata
        assert metadata is not None
        for node in info.in_sync:
            if (
                node in info.replicas
                and partition not in self.reports.get(node, (partition,))
                and metadata.nodes[node].state != NodePhase.DOWN
            ):
                in_sync = tuple(each for each in info.in_sync if each != self._state.node_id)
                return replace(info, leader=node, in_sync=in_sync)
        return None
