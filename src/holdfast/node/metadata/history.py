"""Recent history of the cluster as one node has seen it: leaders, in-sync sets, and the states of
nodes.

A change of the metadata is the same at every node and has its version, so the histories of several
nodes can be merged by it. Nothing here takes part in a decision.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.node.metadata.model import ClusterMetadata

CHANGES_MAX: Final = 2000
"""The most changes of the metadata that are kept."""
PARTITION_CHANGES_MAX: Final = 20_000
"""The most changes of partitions in all of them: a node that fails changes many at once."""
REMOVED: Final = "removed"
"""The state of a node after its removal; before it joined, its state is ""."""


class NodeChange(NamedTuple):
    """A node with another state than before."""

    node: str
    before: str
    after: str


class PartitionChange(NamedTuple):
    """A partition with another leader, epoch or in-sync set than before."""

    partition: int
    leader_before: str
    leader_after: str
    epoch: int
    in_sync_before: tuple[str, ...]
    in_sync_after: tuple[str, ...]


class MetadataChange(NamedTuple):
    """A change of the metadata, at the time at which this node applied it."""

    version: int
    at_us: int
    nodes: tuple[NodeChange, ...]
    partitions: tuple[PartitionChange, ...]


class ClusterHistory:
    """The newest changes of the metadata at one node. A restart begins with none."""

    def __init__(self) -> None:
        self.is_current = False
        """Whether the node has applied everything that was committed before its start. The changes
        until then are not kept, because they are older than they seem here."""
        self._changes: deque[MetadataChange] = deque()
        self._partition_changes = 0

    def add_change(
        self,
        before: ClusterMetadata,
        after: ClusterMetadata,
        changed: Iterable[int],
        at_us: int,
    ) -> None:
        """Keeps a change of the metadata. `changed` has every partition that may differ."""
        if not self.is_current:
            return
        nodes = () if before.nodes is after.nodes else _node_changes(before, after)
        partitions = _partition_changes(before, after, changed)
        if not nodes and not partitions:
            return
        self._changes.append(MetadataChange(after.version, at_us, nodes, partitions))
        self._partition_changes += len(partitions)
        # The newest change stays, however large it is.
        while len(self._changes) > 1 and (
            len(self._changes) > CHANGES_MAX or self._partition_changes > PARTITION_CHANGES_MAX
        ):
            self._partition_changes -= len(self._changes.popleft().partitions)

    def changes(self, since_us: int) -> list[MetadataChange]:
        """The changes since a time, oldest first."""
        return [each for each in self._changes if each.at_us >= since_us]


def _node_changes(before: ClusterMetadata, after: ClusterMetadata) -> tuple[NodeChange, ...]:
    found = []
    for node in sorted({*before.nodes, *after.nodes}):
        old, new = before.nodes.get(node), after.nodes.get(node)
        states = ("" if old is None else old.state, REMOVED if new is None else new.state)
        if states[0] != states[1]:
            found.append(NodeChange(node, *states))
    return tuple(found)


def _partition_changes(
    before: ClusterMetadata, after: ClusterMetadata, changed: Iterable[int]
) -> tuple[PartitionChange, ...]:
    found = []
    for number in changed:
        old, new = before.partitions[number], after.partitions[number]
        if (old.leader, old.epoch, old.in_sync) != (new.leader, new.epoch, new.in_sync):
            found.append(
                PartitionChange(number, old.leader, new.leader, new.epoch, old.in_sync, new.in_sync)
            )
    return tuple(found)
