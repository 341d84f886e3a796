"""State that the leader's and the follower's side share on one node."""

from collections.abc import Callable

from holdfast.node.metadata.model import ClusterMetadata, PartitionInfo
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import Broken, Committed, ReplicationEffect
from holdfast.node.replicate.log import ReplicaLog


class ReadTokens:
    """The bytes that may be read now for other nodes that no commit waits for: followers that catch
    up, and readers without a copy. Below zero it is a debt."""

    def __init__(self, config: ReplicationConfig) -> None:
        self._config = config
        self._tokens = float(config.read_bytes)
        self._at = 0.0

    def may_read(self, now: float) -> bool:
        """True if a read may begin. Its bytes are charged when it ends."""
        rate = self._config.catch_up_bytes_per_s
        self._tokens = min(self._tokens + (now - self._at) * rate, float(self._config.read_bytes))
        self._at = now
        return self._tokens > 0

    def charge(self, size_bytes: int) -> None:
        """Counts the bytes of a read."""
        self._tokens -= size_bytes

    def timer(self) -> float:
        """Returns the time at which a read may begin, if it may not now."""
        return self._at + max(0.001, (1 - self._tokens) / self._config.catch_up_bytes_per_s)


class ReplicaState:
    """The log, the metadata and the newest epochs as this node knows them. An epoch of a partition
    never falls here."""

    def __init__(self, node_id: str, log: ReplicaLog, config: ReplicationConfig) -> None:
        self.node_id = node_id
        self.log = log
        self.config = config
        self.effects: list[ReplicationEffect] = []
        self.read_tokens = ReadTokens(config)
        self.metadata: ClusterMetadata | None = None
        partitions = len(log.next_offset)
        # Per partition the highest epoch known from the metadata, from frames and from the log
        # itself. The log's epoch keeps a node that restarted with old metadata from following a
        # deposed leader.
        self.epochs = [log.last_epoch(partition) for partition in range(partitions)]
        # Partition -> the invariant that does not hold there. This node neither follows nor leads
        # it until a restart reads the log again.
        self.broken: dict[int, str] = {}
        # Partitions whose replicated state is incomplete here, because the records that define it
        # were deleted. This node neither follows nor leads them.
        self.suspended: set[int] = set()
        # Partitions of which this node may lack acknowledged records, so it does not lead them; see
        # `incomplete`.
        self.incomplete = set(range(partitions)) if config.is_incomplete else set()
        # Nodes that are silent here, or that report an untrustworthy disk.
        self.unhealthy: frozenset[str] = frozenset()
        self.unmet: frozenset[str] = frozenset()
        # The time of the present call, in seconds.
        self.now = 0.0
        # Whether this node follows the leader of a partition. StoredPartitions sets it.
        self.is_wanted: Callable[[int], bool] = lambda partition: True

    def info(self, partition: int) -> PartitionInfo | None:
        """The metadata of the partition, or None while this node has none."""
        metadata = self.metadata
        if metadata is None or partition >= len(metadata.partitions):
            return None
        return metadata.partitions[partition]

    def commit(self, partition: int, offset: int) -> bool:
        """Moves the high watermark. Returns False if it is there already."""
        log = self.log
        if offset <= log.high_watermark[partition]:
            return False
        assert offset <= log.durable_offset[partition], "the watermark passes what is durable"
        log.advance(partition, offset)
        self.effects.append(Committed(partition, offset))
        return True

    def break_off(self, partition: int, error: AssertionError) -> None:
        """Suspends a partition whose state is wrong; the others go on. Its log stays as it is."""
        if partition not in self.broken:
            self.broken[partition] = str(error)
            self.suspended.add(partition)
            self.effects.append(Broken(partition, str(error)))

    def check(self) -> None:
        """Raises `AssertionError` for an invariant over all partitions that does not hold."""
        log = self.log
        for partition, epoch in enumerate(self.epochs):
            assert log.start_offsets[partition] <= log.next_offset[partition]
            assert log.high_watermark[partition] <= log.next_offset[partition]
            assert log.durable_offset[partition] <= log.next_offset[partition]
            assert log.last_epoch(partition) <= epoch, "the log has a later epoch than is known"
