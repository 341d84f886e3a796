"""Ports that the turns of a cluster node need of their driver."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.log.journal.watermarks import Checkpoint
from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.requests import Outcome
from holdfast.node.raft.node import Write
from holdfast.node.replicate.effects import ReadBatches
from holdfast.node.runtime.runtime import ClientPort, JournalPort, ReadPort


class LoopPort(ClientPort, Protocol):
    """The event loop of a cluster node."""

    def write_watermarks(self, watermarks: Checkpoint) -> None:
        """Syncs the records below the high watermarks, unless they are; writes the watermarks, and
        calls `ClusterRuntime.watermarks_written`. Older ones only make a start slower."""

    def write_remembered(self, content: bytes) -> None:
        """Stores what this node remembers of the other nodes' disks. An older one only notices an
        older copy less often."""


class RaftPort(Protocol):
    """The writer of Raft's files, in the order of submission."""

    @property
    def is_full(self) -> bool:
        """Whether a write waits for space."""

    def submit(self, write: Write) -> None:
        """Writes, then calls `ClusterRuntime.raft_written`."""


class LinkPort(Protocol):
    """The links to the other nodes."""

    def send(self, node_id: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        """Queues a frame; returns False if there is no link."""

    def flush(self) -> None:
        """Sends what is queued."""

    def review(self) -> None:
        """Closes the links that the metadata does not allow any more."""

    def isolate(self, text: str) -> None:
        """Closes all links and allows no new ones."""


class ReplicaReadPort(ReadPort, Protocol):
    """The reader of the log, which also reads for other nodes."""

    def read_batches(
        self, effect: ReadBatches, end: int, done: Callable[[ReadBatches, list[bytes]], None]
    ) -> None:
        """Reads whole batches below the offset `end`."""


class ProcessPort(Protocol):
    """The process of the node, with its directory."""

    def take_nodes(self, metadata: ClusterMetadata) -> None:
        """Adjusts the links, because the cluster's nodes have changed."""

    def take_users(self) -> None:
        """Puts the users of the metadata in force."""

    def proposals_done(self, outcomes: list[tuple[int, Outcome]]) -> None:
        """Passes on the outcomes of proposals that were made for an operator."""

    def save_snapshot(self) -> None:
        """Writes a snapshot of state received from other nodes, unless one is being written."""

    def became_ready(self) -> None:
        """Begins to serve clients."""

    def became_complete(self) -> None:
        """Removes the mark that this disk may lack acknowledged records."""

    def relieved(self) -> None:
        """Continues with the shutdown: this node leads nothing, or no other node is connected."""

    def set_aside(self, *, keep: bool) -> None:
        """Starts again with an empty directory. `keep`: the content is undamaged."""

    def stand_apart(self, text: str) -> None:
        """Stores that this node stands apart for the reason `text`, until it begins anew or is
        stopped in order."""

    def recovered(self) -> None:
        """Stores that the disk has the log of the others again."""

    def begin_anew(self) -> None:
        """Starts again as another Raft peer, because the disk is an older copy."""


@dataclass(frozen=True)
class ClusterPorts:
    """The part of the driver that the turns of a cluster node use."""

    journal: JournalPort
    reader: ReplicaReadPort
    clients: LoopPort
    raft: RaftPort
    links: LinkPort
    process: ProcessPort
