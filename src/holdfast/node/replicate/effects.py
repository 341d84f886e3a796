"""Effects that replication returns. The driver carries them out in order."""

from holdfast.node.metadata.model import PartitionInfo


class ReplicationEffect:
    """The base of all effects; the driver dispatches on the class."""


class Send(ReplicationEffect):
    """A frame for a node. It is dropped if the node is not connected. A list is one payload in
    pieces, which other frames may share."""

    def __init__(self, node: str, kind: int, payload: bytes | list[bytes]) -> None:
        self.node = node
        self.kind = kind
        self.payload = payload


class ReadBatches(ReplicationEffect):
    """A request to read whole batches of a partition from the disk: from `start` on, about
    `bytes_max` bytes. The driver passes them to Replication.handle_batches; after a failed read it
    passes none."""

    def __init__(self, request: int, node: str, partition: int, start: int, bytes_max: int) -> None:
        self.request = request
        # The follower that needs the batches.
        self.node = node
        self.partition = partition
        self.start = start
        self.bytes_max = bytes_max


class ProposeInSync(ReplicationEffect):
    """A change of the metadata to propose: another in-sync set, or the same leader under a new
    epoch. The metadata shows the outcome. If it shows none, the change is proposed again."""

    def __init__(self, partition: int, expected_version: int, info: PartitionInfo) -> None:
        self.partition = partition
        self.expected_version = expected_version
        self.info = info


class Committed(ReplicationEffect):
    """The high watermark has moved: every record below `offset` is committed."""

    def __init__(self, partition: int, offset: int) -> None:
        self.partition = partition
        self.offset = offset


class Restarted(ReplicationEffect):
    """The partition now begins at `offset`, because the leader no longer has the records below it.
    The replicated state from those records must come from another node; see
    ReplicationConfig.suspends_restarted."""

    def __init__(self, partition: int, offset: int) -> None:
        self.partition = partition
        self.offset = offset


class GivenUp(ReplicationEffect):
    """This node leads a suspended partition with the state it has, because no other node is in
    sync."""

    def __init__(self, partition: int) -> None:
        self.partition = partition


class Broken(ReplicationEffect):
    """An invariant of the partition does not hold here, so this node has stopped it."""

    def __init__(self, partition: int, text: str) -> None:
        self.partition = partition
        self.text = text


class BecameLeader(ReplicationEffect):
    """This node leads the partition from now on, under a new epoch."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch


class LeadershipEnded(ReplicationEffect):
    """This node no longer leads. Its uncommitted records of this epoch may never be committed."""

    def __init__(self, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch


class Diverged(ReplicationEffect):
    """The leader lacks committed records that this node has. A disk lied about a sync, or was
    restored from a copy. With `takes_over` this node is in sync and asks to lead; a ProposeInSync
    follows. Without it the others have continued, and this node's log is no longer the
    partition's."""

    def __init__(self, partition: int, leader: str, text: str, takes_over: bool) -> None:
        self.partition = partition
        self.leader = leader
        self.text = text
        self.takes_over = takes_over
