"""Ports that the turns of a node need of their driver."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.starts import FoundStart
from holdfast.node.effects import Effect, FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.requests import Outcome
from holdfast.node.raft.node import Write
from holdfast.node.replicate.effects import ReadBatches
from holdfast.node.session.connection import Connection


class JournalPort(Protocol):
    """The writer of the journal's groups, one at a time."""

    @property
    def is_full(self) -> bool:
        """Whether a group waits for space."""

    @property
    def free_bytes(self) -> int:
        """The free bytes after the last group."""

    def submit(self, group: WriteGroup) -> None:
        """Writes the group, then calls `Runtime.group_written`, unless `take_written` is first."""

    def set_awaited(self, *, is_awaited: bool) -> bool:
        """Whether the end of the present group wakes the event loop. It does from `submit` on.
        Returns True if the group is written and was not reported."""

    def take_written(self) -> WriteGroup | None:
        """Returns the group that is written and was not reported."""

    def space(self) -> int:
        """Returns the bytes that may still be written now."""


class ClientPort(Protocol):
    """The event loop with the clients' sockets."""

    def touch(self) -> None:
        """Calls `Runtime.begin` and schedules a turn, unless one is scheduled."""

    def flush(self, dirty: list[Connection]) -> None:
        """Writes the output of each of these connections to its socket."""

    def carry_out(self, effect: Effect) -> None:
        """Carries out an effect that is not a read."""

    def write_watermarks(self, watermarks: Checkpoint) -> None:
        """Syncs the records below the high watermarks, unless they are; writes the watermarks, and
        calls `Runtime.watermarks_written`. Older ones only make a start slower."""

    def write_remembered(self, content: bytes) -> None:
        """Stores what this node remembers of the other nodes' disks. An older one only notices an
        older copy less often."""


class ReadPort(Protocol):
    """The reader of the log, also for other nodes. It works in the order of the requests,
    and touches the node before it passes a result to `done`."""

    def read_log(self, effect: ReadLog, done: Callable[[ReadLog, ReadResult], None]) -> None:
        """Reads the records that `effect` asks for."""

    def fetch(self, effect: FetchInflight, done: Callable[[FetchInflight, Found], None]) -> None:
        """Reads the records of unfinished deliveries."""

    def find_starts(
        self, effect: FindStarts, done: Callable[[FindStarts, list[FoundStart]], None]
    ) -> None:
        """Finds the offsets at which subscriptions begin."""

    def read_batches(
        self, effect: ReadBatches, end: int, done: Callable[[ReadBatches, list[bytes]], None]
    ) -> None:
        """Reads whole batches below the offset `end`."""


class RaftPort(Protocol):
    """The writer of Raft's files, in the order of submission."""

    @property
    def is_full(self) -> bool:
        """Whether a write waits for space."""

    def submit(self, write: Write) -> None:
        """Writes, then calls `Runtime.raft_written`."""


class LinkPort(Protocol):
    """The links to the other nodes."""

    def send(self, node_id: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        """Queues a frame; returns False if there is no link."""

    def flush(self) -> None:
        """Sends what is queued."""

    def pending_bytes(self, node_id: str) -> int:
        """Returns the bytes queued for a node that the system has not accepted yet."""

    def close(self, node_id: str, text: str) -> None:
        """Closes the link to a node, and calls `Runtime.link_down` before it returns."""

    def review(self) -> None:
        """Closes the links that the metadata does not allow any more."""

    def isolate(self, text: str) -> None:
        """Closes all links and allows no new ones."""


class QuestionPort(Protocol):
    """The questions between admin ports, with the nodes that are connected."""

    def connected(self, node: str, features: str) -> None:
        """Notes a link, with the features of the node."""

    def disconnected(self, node: str) -> None:
        """Ends the questions to a node whose link is lost."""

    def handle_frame(self, node: str, kind: int, payload: bytes) -> None:
        """Handles a QUESTION or an ANSWER. Raises `BadFrame` for a malformed one."""


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


class RuntimePorts(Struct, frozen=True):
    """The part of the driver that the turns of a node use."""

    journal: JournalPort
    reader: ReadPort
    clients: ClientPort
    raft: RaftPort
    links: LinkPort
    process: ProcessPort
    questions: QuestionPort | None = None
    """None: frames of questions are bad ones."""
