"""Reports one client's history: connects, disconnects, takeovers, subscriptions, refusals.

Two sources know parts of it. The log has a record of each open, subscribe, unsubscribe, close and
end of a session that outlives its connection, as long as retention keeps it. The memory of each
node has its last log lines, with addresses and reasons, until the node stops. An event that both
know is listed once, as the log line.
"""

from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from holdfast.api.endpoints import Call, Endpoint, Text, Whole
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import LogSource
from holdfast.api.views.events import note_row
from holdfast.api.views.history import pieces_before
from holdfast.api.views.pages import AbsentNode
from holdfast.io.event_loop.note_ring import TEXT_MAX
from holdfast.log.batch import Batch
from holdfast.log.partition import partition_of
from holdfast.log.record import SESSION, Record
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    OpenRecord,
    SubscribeRecord,
    UnsubscribeRecord,
    decode_record,
)
from holdfast.security.access.scopes import Scope

EVENTS_MAX: Final = 200
SEARCH_BYTES_MAX: Final = 8 << 20
"""The most bytes of the log that one request searches."""
FILTERS_MAX: Final = 10
"""The most filters that one event names."""
SAME_US: Final = 1_000_000
"""A record and a log line of one kind that are no further apart are the same event."""
AGES_MAX: Final = 50
"""The most inflight messages of a session whose times are read."""
CLIENT: Final = Text("client", "the client id", required=True, most=65_535)
LIMIT: Final = Whole("limit", "the most events", least=1, most=EVENTS_MAX, default=50)
BEFORE: Final = Whole("before", "`next` of the page before")
OPENED: Final = "session_opened"
CLOSED: Final = "session_closed"
SAME: Final = {
    "connected": OPENED,
    "disconnected": CLOSED,
    "session_taken_over": CLOSED,
    "protocol_error": CLOSED,
    "keep_alive_timeout": CLOSED,
}
"""The events of the log that log lines describe better."""


class SessionEvent(Struct):
    """One event of a client."""

    at_us: int
    event: str
    node: str
    """The node of the client's connection; empty: the record does not name it."""
    fields: dict[str, Any]
    source: str
    """`log` or `memory`."""


class SessionEvents(Struct):
    """The events of a client, the newest first."""

    events: list[SessionEvent]
    next: int = 0
    """The value of `before` for older events of the log; 0: the log has none."""
    missing: list[AbsentNode] = []


class NodeEvents(Struct):
    """The events of a client in the memory of one node."""

    events: list[SessionEvent]


class EventsQuestion(Struct):
    """The question for the events of a client in the memory of another node."""

    client: str
    limit: int


class SessionHistoryRoutes:
    """The route of the history of a client."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        everywhere.offer("client_events", EventsQuestion, self._noted_here)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/session/history", Scope.VIEWER,
                     "what happened to a client, from the log and the memory of the nodes",
                     self._history, SessionEvents, (CLIENT, LIMIT, BEFORE), refusals=(421, 503)),
        ]  # fmt: skip

    async def _history(self, call: Call) -> SessionEvents:
        client, limit, before = call[CLIENT], call[LIMIT], call.get(BEFORE)
        found, following = await self._recorded(client, limit, before)
        if before is not None:
            return SessionEvents(found, following)
        question = EventsQuestion(client, limit)
        own = await self._noted_here(question)
        others, missing = await self._everywhere.ask_others("client_events", question, NodeEvents)
        noted = [event for each in (own, *others) for event in each.events]
        events = [*noted, *without_noted(found, noted)]
        events.sort(key=lambda each: each.at_us, reverse=True)
        return SessionEvents(events[:limit], following, missing)

    async def _noted_here(self, question: EventsQuestion) -> NodeEvents:
        client, node = question.client[:TEXT_MAX], self._node.node_id
        found: list[SessionEvent] = []
        for recent in reversed(self._node.broker.notes.after(0)):
            if recent.note.fields.get("client") == client:
                row = note_row(recent)
                del row.fields["client"]
                found.append(SessionEvent(row.at_us, row.event, node, row.fields, "memory"))
                if len(found) >= min(question.limit, EVENTS_MAX):
                    break
        return NodeEvents(found)

    async def _recorded(
        self, client: str, limit: int, before: int | None
    ) -> tuple[list[SessionEvent], int]:
        """The events of the log before an offset of the session's partition, the newest first, and
        the offset before which older ones are, or 0."""
        key = client.encode("utf-8", "surrogatepass")
        home = partition_of(key, self._node.broker.node.state.config.partitions)
        log = await self._node.log((home,))
        first, at = log.first_offset(home), log.ends[home]
        at = at if before is None else min(at, before)
        found: list[SessionEvent] = []
        # One piece at least, or `next` would never move on.
        async for piece in pieces_before(log.in_thread, log, key, home, at, SEARCH_BYTES_MAX):
            found += (event_of(each) for each in reversed(piece.records) if each.kind == SESSION)
            at = piece.start
            if len(found) >= limit:
                break
        return found, at if at > first else 0


def event_of(record: Record) -> SessionEvent:
    """The event of a SESSION record. A record that cannot be read has the name `unreadable`."""
    found = SessionEvent(record.timestamp_us, "unreadable", "", {}, "log")
    try:
        change = decode_record(record.payload)
    except ValueError:
        return found
    if isinstance(change, OpenRecord):
        found.event, found.node = OPENED, change.owner
        found.fields = {"clean": change.clean, "session_expiry_s": change.expiry_s}
    elif isinstance(change, CloseRecord):
        found.event, found.fields = CLOSED, {"session_expiry_s": change.expiry_s}
    elif isinstance(change, EndRecord):
        found.event = "session_ended"
    elif isinstance(change, SubscribeRecord):
        found.event = "subscribed"
        found.fields = _filters([row[0] for row in change.subscriptions])
    elif isinstance(change, UnsubscribeRecord):
        found.event, found.fields = "unsubscribed", _filters(change.filters)
    return found


def _filters(filters: list[str]) -> dict[str, Any]:
    named = [each[:TEXT_MAX] for each in filters[:FILTERS_MAX]]
    return {"filters": named, "count": len(filters)}


def without_noted(
    recorded: Iterable[SessionEvent], noted: Iterable[SessionEvent]
) -> list[SessionEvent]:
    """The events of the log that no log line describes."""
    known: dict[str, list[int]] = {}
    for each in noted:
        known.setdefault(SAME.get(each.event, ""), []).append(each.at_us)
    return [
        each
        for each in recorded
        if not any(abs(each.at_us - at_us) < SAME_US for at_us in known.get(each.event, ()))
    ]


def times_of(reader: LogSource, places: list[tuple[int, int]]) -> list[int]:
    """The times of the records at these places (partition, offset), in microseconds since 1970. 0:
    this node does not have the record. Runs in a thread."""
    found: list[int] = []
    batch: tuple[int, Batch] | None = None
    for partition, offset in places:
        is_near = batch is not None and batch[0] == partition
        if not (is_near and batch and batch[1].base_offset <= offset < batch[1].end_offset):
            batch = None
            if reader.first_offset(partition) <= offset:
                for data in reader.read_batches(partition, offset, offset + 1, 1):
                    read = Batch(data, check=False)
                    if read.base_offset <= offset < read.end_offset:
                        batch = partition, read
        at = 0 if batch is None else batch[1].record(offset - batch[1].base_offset).timestamp_us
        found.append(at)
    return found
