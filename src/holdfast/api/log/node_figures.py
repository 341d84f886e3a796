"""Reports each node's disk with the time until it is full, and the last notes of all nodes."""

from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import Call, Endpoint, Whole
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import obstacles
from holdfast.api.views.events import NoteRow, note_row
from holdfast.api.views.pages import AbsentNode
from holdfast.io.event_loop.broker import Broker
from holdfast.security.access.scopes import Scope

GROWTH_S: Final = 3600.0
"""The time in seconds before now from which the growth of the log is measured."""
NOTES_MAX: Final = 500
LIMIT: Final = Whole("limit", "the most notes", least=1, most=NOTES_MAX, default=50)


class NodeNoteRows(Struct):
    """The newest notes of the nodes, the newest first."""

    notes: list["NodeNote"]
    missing: list[AbsentNode] = []


class NodeNote(NoteRow):
    """A note with its node."""

    node: str = ""


class NotesQuestion(Struct):
    """The number of notes that another node should send."""

    limit: int


class NodeStorage(Struct, kw_only=True):
    """The log on the disk of one node."""

    node: str
    obstacles: dict[str, str]
    """The reasons why the node does not serve clients now, by name."""
    log_bytes: int
    free_bytes: int
    reserve_bytes: int
    """The free bytes below which publishes of QoS 1 and 2 are refused."""
    oldest_us: int
    """The time of the oldest record; 0: the log is empty."""
    growth_bytes_per_s: float
    """The bytes that the log gained per second in the last `covers_s`."""
    covers_s: float
    full_in_s: float | None
    """The time in seconds until the free bytes reach the reserve at this growth. None: retention
    removes old segments before, or the log does not grow."""
    retention_age_s: int
    """The age in seconds at which segments are removed; 0: never."""
    retention_bytes: int
    """The size of the log above which segments are removed; 0: none."""


class StorageReply(Struct):
    """The logs of all nodes."""

    nodes: list[NodeStorage]
    missing: list[AbsentNode] = []


class StorageQuestion(Struct):
    """The question for the storage of another node."""


class NodeFigureRoutes:
    """The routes of the nodes' disks and notes."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        everywhere.offer("storage", StorageQuestion, self._storage_here)
        everywhere.offer("last_notes", NotesQuestion, self._notes_here)

    def endpoints(self) -> list[Endpoint]:
        v1, viewer = "/api/v1", Scope.VIEWER
        return [
            Endpoint("GET", f"{v1}/storage", viewer,
                     "the log on the disk of each node, and when the disk is full", self._storage,
                     StorageReply, refusals=(503,)),
            Endpoint("GET", f"{v1}/notes", viewer, "the last lines of the logs of all nodes",
                     self._notes, NodeNoteRows, (LIMIT,), refusals=(503,)),
        ]  # fmt: skip

    async def _storage(self, call: Call) -> StorageReply:
        question = StorageQuestion()
        own = await self._storage_here(question)
        others, missing = await self._everywhere.ask_others("storage", question, NodeStorage)
        return StorageReply(sorted([own, *others], key=lambda each: each.node), missing)

    async def _storage_here(self, question: StorageQuestion) -> NodeStorage:
        return storage_of(self._node.server, self._node.broker)

    async def _notes(self, call: Call) -> NodeNoteRows:
        question = NotesQuestion(call[LIMIT])
        own = await self._notes_here(question)
        others, missing = await self._everywhere.ask_others("last_notes", question, NodeNoteRows)
        notes = [note for each in (own, *others) for note in each.notes]
        notes.sort(key=lambda each: each.at_us, reverse=True)
        return NodeNoteRows(notes[: call[LIMIT]], missing)

    async def _notes_here(self, question: NotesQuestion) -> NodeNoteRows:
        ring = self._node.broker.notes
        found: list[NodeNote] = []
        for recent in reversed(ring.after(max(0, ring.last - min(question.limit, NOTES_MAX)))):
            row = note_row(recent)
            found.append(NodeNote(row.at_us, row.level, row.event, row.fields, self._node.node_id))
        return NodeNoteRows(found)


def storage_of(server: ServedProcess, broker: Broker) -> NodeStorage:
    """Returns the log on the disk of this node, and when the disk is full."""
    config, state = server.config, broker.node.state
    segments = [each for each in state.journal.segments if each.head.records]
    oldest_us = min((each.head.first_timestamp_us for each in segments), default=0)
    begin_us = max(oldest_us, state.wall_us - int(GROWTH_S * 1e6))
    # A segment counts by the part of its time that is in the span.
    grown = sum(
        each.size_bytes * _share(each.head.first_timestamp_us, each.last_timestamp_us(), begin_us)
        for each in segments
    )
    covers_s = max(1.0, (state.wall_us - begin_us) / 1e6) if oldest_us else 0.0
    log_bytes = sum(each.size_bytes for each in state.journal.segments)
    retention = config.log.retention
    found = NodeStorage(
        node=config.node.id,
        obstacles={each.name: each.text for each in obstacles(server)},
        log_bytes=log_bytes,
        free_bytes=broker.writer.space(),
        reserve_bytes=broker.runtime.reserve_bytes,
        oldest_us=oldest_us,
        growth_bytes_per_s=round(grown / covers_s, 1) if covers_s else 0.0,
        covers_s=round(covers_s, 1),
        full_in_s=None,
        retention_age_s=retention.age_s,
        retention_bytes=retention.bytes,
    )
    found.full_in_s = full_in_s(found)
    return found


def _share(first_us: int, last_us: int, begin_us: int) -> float:
    """The share of a time that is behind its `begin_us`."""
    if first_us >= begin_us or last_us <= first_us:
        return 1.0 if last_us >= begin_us else 0.0
    return max(0.0, (last_us - begin_us) / (last_us - first_us))


def full_in_s(storage: NodeStorage) -> float | None:
    """The time in seconds until a disk is full, or None if retention keeps the log smaller.

    Retention by age bounds the log at the growth of that time, and retention by size at its size.
    """
    growth = storage.growth_bytes_per_s
    if growth <= 0:
        return None
    left = max(0, storage.free_bytes - storage.reserve_bytes)
    bounds: list[float] = []
    if storage.retention_age_s:
        bounds.append(growth * storage.retention_age_s)
    if storage.retention_bytes:
        bounds.append(storage.retention_bytes)
    if bounds and min(bounds) <= storage.log_bytes + left:
        return None
    return round(left / growth, 0)
