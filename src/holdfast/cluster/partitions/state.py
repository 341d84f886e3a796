"""What leading and following share on one node."""

from holdfast.cluster.metadata.model import ClusterMetadata, PartitionInfo
from holdfast.cluster.partitions.config import ReplicationConfig
from holdfast.cluster.partitions.effects import Committed, ReplicationEffect
from holdfast.cluster.partitions.log import ReplicaLog


class ReplicaState:
    def __init__(self, node_id: str, log: ReplicaLog, config: ReplicationConfig) -> None:
        self.node_id = node_id
        self.log = log
        self.config = config
        self.effects: list[ReplicationEffect] = []
        self.metadata: ClusterMetadata | None = None
        partitions = len(log.next_offset)
        # Per partition the highest epoch known from the metadata, from frames and from the log
        # itself. The log's keeps a node that has restarted with old metadata from following a
        # leader that was deposed.
        self.epochs = [log.last_epoch(partition) for partition in range(partitions)]
        # Partitions of which this node lacks what was derived from records that are gone: it
        # neither follows nor leads them.
        self.held: set[int] = set()
        # Nodes that are not heard here, or say that their disks are not to be trusted.
        self.ill: frozenset[str] = frozenset()

    def info(self, partition: int) -> PartitionInfo | None:
        metadata = self.metadata
        if metadata is None or partition >= len(metadata.partitions):
            return None
        return metadata.partitions[partition]

    def commit(self, partition: int, offset: int) -> bool:
        """Move the high watermark; False if it is there already."""
        if offset <= self.log.high_watermark[partition]:
            return False
        self.log.advance(partition, offset)
        self.effects.append(Committed(partition, offset))
        return True
