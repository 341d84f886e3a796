"""`GET /api/v1/trace/live`: a stream (SSE) of what a client, a topic or an address does.

It follows the committed log and the notes of the broker, so no client and no message pays for it.
Messages of QoS 0 that are neither logged nor retained are not in it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Final

from msgspec import Struct
from starlette.responses import StreamingResponse

from holdfast.api.endpoints import (
    EVENT_STREAM,
    ApiRefusal,
    Call,
    Endpoint,
    Text,
    Whole,
    bad_request,
)
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.routes.event_feed import IDLE_S, NOTHING, sse_event, sse_response
from holdfast.api.views.events import NoteRow, note_row
from holdfast.api.views.records import LogRecord, log_record, read_window
from holdfast.api.views.slices import ITEMS
from holdfast.log.record import MESSAGE, RETAINED, Record
from holdfast.node.session.session import Session
from holdfast.protocol.topics.names import InvalidFilter, check_filter, matches
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

TICK_S: Final = 0.5
STREAMS_MAX: Final = 4
"""The most live traces of one node."""
SECONDS_MAX: Final = 600
ROWS_MAX: Final = 200
"""The most records and notes of one event. Further ones are counted in `left_out`."""
WINDOW: Final = 2000
"""The most records of a partition in one tick. A trace that cannot keep up skips the rest."""

CLIENT: Final = Text("client", "a client id", most=65_535)
FILTER: Final = Text("topic", "a topic filter", most=65_535)
ADDRESS: Final = Text("address", "an IP address, or the beginning of one with its port", most=64)
SECONDS: Final = Whole("seconds", "how long", least=1, most=SECONDS_MAX, default=60)
BYTES: Final = Whole("bytes", "the most bytes of each payload", default=200, most=4096)


class LiveBatch(Struct):
    """The changes since the last event."""

    records: list[LogRecord]
    notes: list[NoteRow]
    """Lines of the log: connects, refusals, disconnects, denials."""
    left_out: int = 0


class NoteQuestion(Struct):
    """The notes of another node behind a number. -1: only the number of the newest."""

    after: int


class NoteAnswer(Struct):
    """The newest notes of a node."""

    last: int
    notes: list[NoteRow]


class LiveRoutes:
    """The route of live traces."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        self._streams = 0
        everywhere.offer("notes", NoteQuestion, self._notes_here)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/trace/live", Scope.READER,
                     "a stream (SSE) of what a client, a topic or an address does", self._stream,
                     LiveBatch, (CLIENT, FILTER, ADDRESS, SECONDS, BYTES), refusals=(421, 503),
                     media_type=EVENT_STREAM),
        ]  # fmt: skip

    async def _stream(self, call: Call) -> StreamingResponse:
        given = [call.get(CLIENT), call.get(FILTER), call.get(ADDRESS)]
        if sum(each is not None for each in given) != 1:
            raise bad_request("give one of client, topic and address")
        filter = given[1]
        if filter is not None:
            try:
                check_filter(filter)
            except InvalidFilter as error:
                raise bad_request(f"topic={shown(filter)}: {error}") from None
        _ = self._node.readable_broker
        if self._streams >= STREAMS_MAX:
            raise ApiRefusal(503, f"{STREAMS_MAX} live traces run already", {"Retry-After": "5"})
        chosen = LiveChoice(given[0], filter, given[2])
        if given[2] is not None:
            sessions = list(self._node.state.sessions.values())
            await self._node.slices.run(chosen.connected(sessions))
        return sse_response(self._events(chosen, call[SECONDS], call[BYTES]))

    async def _events(
        self, chosen: "LiveChoice", seconds: int, bytes_max: int
    ) -> AsyncIterator[bytes]:
        broker = self._node.broker
        positions = list((await self._node.log()).ends)
        numbers: dict[str, int] = {}
        self._streams += 1
        try:
            spoke_at = broker.loop.time()
            deadline = spoke_at + seconds
            await self._new_notes(numbers)
            yield b": begins\n\n"
            while broker.loop.time() < deadline:
                await asyncio.sleep(TICK_S)
                batch = LiveBatch([], [])
                notes = [each for each in await self._new_notes(numbers) if chosen.has_note(each)]
                records = await self._new_records(positions, batch)
                records = [each for each in records if chosen.has_record(each)]
                batch.notes = notes[:ROWS_MAX]
                batch.records = [log_record(each, bytes_max) for each in records[:ROWS_MAX]]
                batch.left_out += max(0, len(notes) - ROWS_MAX) + max(0, len(records) - ROWS_MAX)
                if batch.records or batch.notes or batch.left_out:
                    spoke_at = broker.loop.time()
                    yield sse_event(batch)
                elif broker.loop.time() >= spoke_at + IDLE_S:
                    spoke_at = broker.loop.time()
                    yield NOTHING
            yield b"event: end\ndata: {}\n\n"
        finally:
            self._streams -= 1

    async def _new_records(self, positions: list[int], batch: LiveBatch) -> list[Record]:
        log = await self._node.log()
        found: list[Record] = []
        for partition, end in enumerate(log.ends):
            start = positions[partition]
            if start >= end:
                continue
            if end - start > WINDOW:
                batch.left_out += end - start - WINDOW
                start = end - WINDOW
            work = partial(read_window, log, partition, start, end, WINDOW)
            window = await log.in_thread(work)
            positions[partition] = window.position
            found += window.records
        return sorted(found, key=lambda each: each.timestamp_us)

    async def _new_notes(self, numbers: dict[str, int]) -> list[NoteRow]:
        """The notes of all nodes behind those numbers. The first time: none."""
        found: list[NoteRow] = []
        own = self._node.node_id
        for node in (own, *self._everywhere.others()):
            question = NoteQuestion(numbers.get(node, -1))
            try:
                if node == own:
                    answer = await self._notes_here(question)
                else:
                    answer = await self._everywhere.ask(node, "notes", question, NoteAnswer, 1.0)
            except ApiRefusal:
                # It is asked again in the next tick, from the same number.
                continue
            numbers[node] = answer.last
            found += answer.notes
        return found

    async def _notes_here(self, question: NoteQuestion) -> NoteAnswer:
        notes = self._node.broker.notes
        if question.after < 0 or question.after > notes.last:
            return NoteAnswer(notes.last, [])
        return NoteAnswer(notes.last, [note_row(each) for each in notes.after(question.after)])


class LiveChoice:
    """The choice of a live trace."""

    def __init__(self, client: str | None, filter: str | None, address: str | None) -> None:
        self._filter = filter
        self._address = address
        # With an address: the clients that have connected from there.
        self._clients = set() if client is None else {client}

    def note_client(self, client: str, remote: str) -> None:
        """Notes the client of a connection, with its address."""
        if self._address is not None and remote.startswith(self._address):
            self._clients.add(client)

    def connected(self, sessions: list[Session]) -> Iterator[None]:
        """Notes the clients that are connected, some at a time. It empties the list."""
        while sessions:
            for _ in range(min(ITEMS, len(sessions))):
                session = sessions.pop()
                if session.connection is not None:
                    self.note_client(session.client_id, session.connection.remote)
            yield

    def has_note(self, note: NoteRow) -> bool:
        """Whether a note is chosen."""
        client, remote = str(note.fields.get("client", "")), str(note.fields.get("remote", ""))
        if client:
            self.note_client(client, remote)
        if self._address is not None:
            return remote.startswith(self._address)
        topic = note.fields.get("topic")
        if self._filter is not None:
            return isinstance(topic, str) and matches(self._filter, topic)
        return client in self._clients

    def has_record(self, record: Record) -> bool:
        """Whether a record is chosen."""
        if self._filter is not None:
            topic = record.topic.decode("utf-8", "replace")
            return record.kind in (MESSAGE, RETAINED) and matches(self._filter, topic)
        return record.client_id.decode("utf-8", "replace") in self._clients
