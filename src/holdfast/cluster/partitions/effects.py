"""What replication asks its driver to do, in this order."""

from holdfast.cluster.metadata.model import PartitionInfo


class ReplicationEffect:
    """Base of all effects; the driver dispatches on the class."""


class Send(ReplicationEffect):
    """A frame for a node; one that is not connected does not get it. A list is one payload in
    pieces, which other frames may share."""

    def __init__(self, node: str, kind: int, payload: bytes | list[bytes]) -> None:
        self.node = node
        self.kind = kind
        self.payload = payload


class ReadBatches(ReplicationEffect):
    """Read whole batches of a partition from the disk, the first one beginning at `start`, about
    `bytes_max` of them; answer with Replication.handle_batches, with none if that failed."""

    def __init__(self, request: int, node: str, partition: int, start: int, bytes_max: int) -> None:
        self.request = request
        # The follower they are for.
        self.node = node
        self.partition = partition
        self.start = start
        self.bytes_max = bytes_max


class ProposeInSync(ReplicationEffect):
    """Propose this change of the metadata: another in-sync set, or the same leader under a new
    epoch. What becomes of it shows in the metadata; it is proposed again if nothing does."""

    def __init__(self, partition: int, expected_version: int, info: PartitionInfo) -> None:
        self.partition = partition
        self.expected_version = expected_version
        self.info = info


class Committed(ReplicationEffect):
    """Every record below `offset` is committed: the log's high watermark has moved there."""

    def __init__(self, partition: int, offset: int) -> None:
        self.partition = partition
        self.offset = offset


class Truncated(ReplicationEffect):
    """Records from `offset` on were never committed, and are gone."""

    def __init__(self, partition: int, offset: int) -> None:
        self.partition = partition
        self.offset = offset


class Restarted(ReplicationEffect):
    """The partition begins at `offset` now: the leader no longer has what is missing below. What
    was derived from records below `offset` must come from elsewhere; see
    ReplicationConfig.holds_restarted."""

    def __init__(self, partition: int, offset: int) -> None:
        self.partition = partition
        self.offset = offset


class GivenUp(ReplicationEffect):
    """Nobody else is in sync in a partition that is held: this node leads it with what it has."""

    def __init__(self, partition: int) -> None:
        self.partition = partition


class BecameLeader(ReplicationEffect):
    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch


class LeadershipEnded(ReplicationEffect):
    """What was appended under this epoch and is not committed may never be."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch


class Diverged(ReplicationEffect):
    """The leader lacks committed records that this node has: a disk has lied, or was put back from
    a copy. `takes_over`: this node is in sync, and asks to lead (a ProposeInSync follows). Else the
    others have gone on without it, and what it has is not what the partition is any more."""

    def __init__(self, partition: int, leader: str, text: str, takes_over: bool) -> None:
        self.partition = partition
        self.leader = leader
        self.text = text
        self.takes_over = takes_over
