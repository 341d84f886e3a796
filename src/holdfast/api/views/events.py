"""Gathers the changes at a node, tick by tick, for readers who watch."""

from typing import Any, Final

from msgspec import Struct

from holdfast.api.metrics.catalog import DROPPED, REFUSED
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import obstacles
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.note_ring import RecentNote

NAMES_MAX: Final = 50
"""The most clients, and the most log lines, that one batch of events names."""
RATES_S: Final = 1.0
"""The interval in seconds of rates and drops."""
RATES: Final = (
    "publish_received", "publish_sent", "bytes_received", "bytes_sent", "connections_opened",
    "connections_refused",
)  # fmt: skip
CONNECTED: Final = "connected"
GONE: Final = ("disconnected", "session_taken_over", "protocol_error", "keep_alive_timeout")


class NoteRow(Struct):
    """A line of the broker's log."""

    at_us: int
    level: str
    event: str
    fields: dict[str, Any]


class ClientChanges(Struct):
    """The clients that came and went. `notes` names at most 50 of them."""

    connected: int
    disconnected: int
    notes: list[NoteRow]


class EventBatch(Struct, omit_defaults=True, kw_only=True):
    """Changes at one node since its last batch. Unchanged parts are left out."""

    number: int
    node: str
    at_us: int
    clients: ClientChanges | None = None
    log: list[NoteRow] = []
    """Other lines of the log, at most 50."""
    ready: bool | None = None
    obstacles: list[str] | None = None
    """All obstacles to readiness, when that list has changed."""
    leaders: dict[int, str] = {}
    """Partitions with another leader than before."""
    in_sync: dict[int, list[str]] = {}
    nodes: dict[str, str] = {}
    """Nodes of the cluster with another state than before."""
    rates: dict[str, float] = {}
    """Per second, and `connections` and `sessions` as they are now."""
    drops: dict[str, int] = {}
    """Deliveries dropped and publishes refused since the last rates, by reason."""


def note_row(recent: RecentNote) -> NoteRow:
    """A note as JSON; values that are no JSON become text."""
    fields = {
        name: value if isinstance(value, str | int | float | bool | list) else str(value)
        for name, value in recent.note.fields.items()
    }
    return NoteRow(recent.at_us, recent.note.level, recent.note.event, fields)


class ChangeWatch:
    """Compares a node with how it was at the last batch."""

    def __init__(self, server: ServedProcess, broker: Broker) -> None:
        self._server = server
        self._broker = broker
        self._note = broker.notes.last
        self._obstacles: list[str] | None = None
        self._version = -1
        self._leaders: dict[int, str] = {}
        self._in_sync: dict[int, list[str]] = {}
        self._nodes: dict[str, str] = {}
        self._rated_at = broker.loop.time()
        self._counters = self._counted()
        self._number = 0

    def batch(self) -> EventBatch | None:
        """Returns the changes, or None."""
        now = self._broker.loop.time()
        state = self._broker.node.state
        found = EventBatch(number=0, node=state.config.node_id, at_us=0)
        self._add_notes(found)
        self._add_health(found)
        self._add_cluster(found)
        if now - self._rated_at >= RATES_S:
            self._add_rates(found, now - self._rated_at)
            self._rated_at = now
        empty = EventBatch(number=0, node=found.node, at_us=0)
        if found == empty:
            return None
        self._number += 1
        found.number = self._number
        self._broker.touch()
        found.at_us = state.wall_us
        return found

    def _add_notes(self, found: EventBatch) -> None:
        notes = self._broker.notes.after(self._note)
        self._note = self._broker.notes.last
        clients: list[NoteRow] = []
        connected = disconnected = 0
        for recent in notes:
            event = recent.note.event
            is_client = event == CONNECTED or event in GONE
            connected += event == CONNECTED
            disconnected += event in GONE
            rows = clients if is_client else found.log
            if len(rows) < NAMES_MAX:
                rows.append(note_row(recent))
        if connected or disconnected:
            found.clients = ClientChanges(connected, disconnected, clients)

    def _add_health(self, found: EventBatch) -> None:
        names = [each.name for each in obstacles(self._server)]
        if names != self._obstacles:
            self._obstacles = names
            found.obstacles = names
            found.ready = not names

    def _add_cluster(self, found: EventBatch) -> None:
        cluster = self._server.cluster
        assert cluster is not None
        version = cluster.figures().metadata_version
        if version == self._version:
            return
        self._version = version
        status: dict[str, Any] = cluster.status()
        for number, each in enumerate(status["partitions"]):
            if self._leaders.get(number) != each["leader"]:
                self._leaders[number] = found.leaders[number] = each["leader"]
            if self._in_sync.get(number) != each["in_sync"]:
                self._in_sync[number] = found.in_sync[number] = list(each["in_sync"])
        states = {each["node"]: str(each["state"]) for each in status["nodes"]}
        for node, phase in states.items():
            if self._nodes.get(node) != phase:
                found.nodes[node] = phase
        for node in self._nodes.keys() - states.keys():
            found.nodes[node] = "removed"
        self._nodes = states

    def _counted(self) -> dict[str, int]:
        stats = self._broker.node.state.stats
        names = (*RATES, *DROPPED.values(), *REFUSED.values())
        return {name: getattr(stats, name) for name in names}

    def _add_rates(self, found: EventBatch, elapsed_s: float) -> None:
        before, after = self._counters, self._counted()
        self._counters = after
        for reason, name in (*DROPPED.items(), *REFUSED.items()):
            if after[name] > before[name]:
                found.drops[reason] = after[name] - before[name]
        state = self._broker.node.state
        found.rates = {name: round((after[name] - before[name]) / elapsed_s, 1) for name in RATES}
        found.rates["connections"] = state.connections
        found.rates["sessions"] = state.client_sessions() + state.cluster.away()[0]
