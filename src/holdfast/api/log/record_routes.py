"""Serves the log's records as JSON, page by page, newest or oldest first; and its messages as
Arrow, for programs such as DuckDB and Polars.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from starlette import types
from starlette.responses import StreamingResponse

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import WholeLog
from holdfast.api.views.pages import CURSOR_CHARACTERS_MAX, PAGE_MAX, BadCursor
from holdfast.api.views.records import (
    READ_BYTES,
    LogPage,
    RecordQuery,
    RecordScan,
    decode_positions,
    encode_positions,
    log_record,
)
from holdfast.log.batch import Batch
from holdfast.log.kinds import KIND_NAMES
from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE, Record
from holdfast.protocol.topics.names import InvalidFilter, check_filter, has_wildcard
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

if TYPE_CHECKING:
    from holdfast.api.views.arrow import ArrowStream


SEGMENTS_MAX: Final = 200
"""The most segments of the log whose lists one request reads."""
FETCH_RECORDS: Final = 100
"""The most messages that one step reads."""
READ_BYTES_MAX: Final = 32 << 20
"""The most bytes of payloads that one request reads."""


def is_topic(filter: str) -> bool:
    """Whether a filter is one topic."""
    return bool(filter) and not has_wildcard(filter)


class TopicScan:
    """The scan for one page, like `RecordScan`. `step` runs in a thread."""

    def __init__(self, reader: WholeLog, query: RecordQuery) -> None:
        self._reader = reader
        self._query = query
        topic = query.filter.encode()
        self._partition = partition_of(topic, len(query.start))
        # The lists of topics are those of the log. What is older is scanned for the next pages.
        begin = reader.begin_of_log(self._partition)
        self._first = max(begin, query.bounds[self._partition])
        start = query.start[self._partition]
        self._history = reader.topic_history(topic, self._partition, start)
        self._at = 0
        self._segments = 0
        self._size_bytes = 0
        # Messages of the topic at this offset and later are in the page, or not chosen.
        self._position = start
        self._found: list[Record] = []

    def is_done(self) -> bool:
        """Whether the page is full, the log at its end, or the budget spent."""
        if len(self._found) >= self._query.limit or self._size_bytes >= READ_BYTES_MAX:
            return True
        if self._at < len(self._history.offsets):
            return self._history.offsets[self._at] < self._first
        return self._is_searched() or self._segments >= SEGMENTS_MAX

    def _is_searched(self) -> bool:
        return self._history.is_done() or self._history.searched <= self._first

    def step(self) -> None:
        """Reads some messages that are found, or searches one more segment."""
        offsets = self._history.offsets
        if self._at >= len(offsets):
            self._segments += 1
            self._history.step()
            if self._at >= len(offsets):
                self._position = max(self._first, self._history.searched)
            return
        query = self._query
        for offset in offsets[self._at : self._at + FETCH_RECORDS]:
            if offset < self._first or len(self._found) >= query.limit:
                return
            self._at += 1
            self._position = offset
            record = self._reader.fetch(self._partition, offset)
            if record is None:
                continue
            self._size_bytes += len(record.payload) + len(record.properties)
            if query.clients and record.client_id not in query.clients:
                continue
            if query.part in record.payload:
                self._found.append(record)

    def page(self) -> LogPage:
        """The page, the newest message first."""
        offsets = self._history.offsets
        has_more = self._at < len(offsets) and offsets[self._at] >= self._first
        following = ""
        if has_more or (self._at >= len(offsets) and not self._is_searched()):
            positions = list(self._query.bounds)
            positions[self._partition] = self._position
            following = encode_positions(positions, self._query.generation)
        elif self._first > self._query.bounds[self._partition]:
            positions = list(self._query.bounds)
            positions[self._partition] = self._first
            following = encode_positions(positions, self._query.generation)
        rows = [log_record(each, self._query.bytes_max) for each in self._found]
        return LogPage(rows, following, self._at)


ARROW: Final = "application/vnd.apache.arrow.stream"
NEXT: Final = "Holdfast-Next"
"""The header of an Arrow response with the cursor of the next one; empty at the end of the log."""
COLUMNS_ALL: Final = (
    "topic,payload,partition,offset,timestamp,qos,retain,properties,client_id,producer"
)
STREAMS_MAX: Final = 4
"""The most Arrow responses at the same time. Each has one slice of the log in memory."""
KINDS: Final = {name: kind for kind, name in KIND_NAMES.items()}
SCANS_MAX: Final = 4
"""The most requests that scan the log at the same time."""

NOT_AGREED: Final = (
    "this node was restored, and the cluster has not agreed on the generation of its log yet"
)
REMOVED: Final = (
    "records behind this cursor were removed by retention: begin again, for example with from_us"
)

RESTORED: Final = (
    "the log was restored since this cursor, and its offsets belong to other records: begin again,"
    " for example with from_us"
)

PARTITION: Final = Whole("partition", "records of this partition only", most=65_535)
START: Final = Whole("start", "with `partition`: the first offset; with `newest`, the end")
FROM_US: Final = Whole("from_us", "records from this time on, in microseconds since 1970")
TO_US: Final = Whole("to_us", "records before this time")
FILTER: Final = Text("filter", "messages and retained updates of these topics", most=65_535)
KIND: Final = Text("kind", "records of this kind", choices=tuple(KINDS))
CLIENT: Final = Text("client", "records of this publisher or session", most=65_535)
PART: Final = Text("text", "records whose payload contains this text", most=256)
ORDER: Final = Text("order", "the order of the page", choices=("newest", "oldest"),
                    default="newest")  # fmt: skip
LIMIT: Final = Whole("limit", "the most records", least=1, most=PAGE_MAX, default=50)
AFTER: Final = Text("after", "`next` of the page before", most=CURSOR_CHARACTERS_MAX)
BYTES: Final = Whole("bytes", "the most bytes of each payload", default=200, most=65_536)
ROWS: Final = Whole("rows", "Arrow: about the most offsets, and so the most messages",
                    least=1, most=10_000_000, default=100_000)  # fmt: skip
COLUMNS: Final = Text("columns", "Arrow: the columns, separated by commas", default=COLUMNS_ALL)
FOR_JSON: Final = (KIND, CLIENT, PART, ORDER, LIMIT, BYTES)
FOR_ARROW: Final = (ROWS, COLUMNS)


class RecordRoutes:
    """The route of the log's records."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._scans = 0
        self._streams = 0

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/log/records", Scope.READER,
                     "the records of the log as JSON, or its messages as Arrow", self._records,
                     LogPage,
                     (PARTITION, START, FROM_US, TO_US, FILTER, KIND, CLIENT, PART, ORDER, LIMIT,
                      AFTER, BYTES, ROWS, COLUMNS), refusals=(406, 410, 421, 503),
                     other_media_types=(ARROW,)),
        ]  # fmt: skip

    async def _records(self, call: Call) -> object:
        is_arrow = ARROW in call.request.headers.get("accept", "")
        for each in FOR_JSON if is_arrow else FOR_ARROW:
            if each.name in call.request.query_params:
                kind = "JSON" if is_arrow else f"Arrow (send Accept: {ARROW})"
                raise bad_request(f"{each.name}: it is for {kind}")
        return await (self._stream(call) if is_arrow else self._list(call))

    async def _stream(self, call: Call) -> StreamingResponse:
        log = await self._node.log_and_lake()
        query = await self._query(call, log, newest=False)
        names = [each.strip() for each in call[COLUMNS].split(",")]
        wrong = [each for each in names if each not in COLUMNS_ALL.split(",")]
        if wrong or len(set(names)) < len(names):
            raise bad_request(f"columns={shown(call[COLUMNS])}: some of {COLUMNS_ALL}, each once")
        if self._streams >= STREAMS_MAX:
            raise ApiRefusal(503, f"{STREAMS_MAX} Arrow responses are sent already: try again",
                             {"Retry-After": "1"})  # fmt: skip
        self._streams += 1
        try:
            # In a thread, because the import takes some 100 ms.
            module = await asyncio.to_thread(import_module, "holdfast.api.views.arrow")
            stream = module.ArrowStream(names, query.filter)
            page = _page(query.start, query.bounds, call[ROWS])
            following = ""
            if page.ends != query.bounds:
                following = encode_positions(page.ends, query.generation)
            return _Counted(_slices(log, page, stream), self._stream_ended, following)
        except ImportError:
            self._stream_ended()
            text = "this node has no pyarrow: install holdfast[arrow] there, or read JSON"
            raise ApiRefusal(406, text) from None
        except BaseException:
            self._stream_ended()
            raise

    def _stream_ended(self) -> None:
        self._streams -= 1

    async def _list(self, call: Call) -> LogPage:
        log = await self._node.log_and_lake()
        query = await self._query(call, log, newest=call[ORDER] == "newest")
        if self._scans >= SCANS_MAX:
            raise ApiRefusal(503, f"{SCANS_MAX} requests scan the log already: try again",
                             {"Retry-After": "1"})  # fmt: skip
        self._scans += 1
        try:
            # The log lists the messages of each topic, so those of one topic need no scan.
            scan: RecordScan | TopicScan = RecordScan(log, query)
            if query.newest and query.kind == MESSAGE and is_topic(query.filter):
                home = partition_of(query.filter.encode(), len(query.start))
                if query.start[home] > log.begin_of_log(home):
                    scan = TopicScan(log, query)
            while not scan.is_done():
                await log.in_thread(scan.step)
            starts = zip(query.start, query.bounds, strict=True)
            first = log.first_offset
            if not query.newest and any(s < min(first(p), e) for p, (s, e) in enumerate(starts)):
                # During the scan, so what is missing in the page is not known.
                raise ApiRefusal(410, REMOVED)
            return scan.page()
        finally:
            self._scans -= 1

    async def _query(self, call: Call, log: WholeLog, *, newest: bool) -> RecordQuery:
        generation = self._node.broker.generation()
        if generation is None:
            raise ApiRefusal(503, NOT_AGREED, {"Retry-After": "1"})
        ends = list(log.ends)
        count = len(ends)
        first = [log.first_offset(partition) for partition in range(count)]
        for parameter, bound in ((FROM_US, first), (TO_US, ends)):
            time_us = call.get(parameter)
            for partition in range(count) if time_us is not None else ():
                work = partial(log.offset_for_time, partition, time_us or 0)
                offset = await log.in_thread(work)
                bound[partition] = min(max(offset, first[partition]), ends[partition])
        chosen, start = call.get(PARTITION), call.get(START)
        if chosen is not None:
            if chosen >= count:
                raise bad_request(f"partition={chosen}: this log has 0 to {count - 1}")
            for partition in range(count):
                if partition != chosen:
                    ends[partition] = first[partition]
            if start is not None:
                side = ends if newest else first
                side[chosen] = min(max(start, first[chosen]), ends[chosen])
        elif start is not None:
            raise bad_request("start: it needs a partition")
        begin, bounds = (ends, first) if newest else (first, ends)
        after = call.get(AFTER)
        if after is not None:
            given = _positions(after, count, generation)
            begin = list(map(min, given, ends) if newest else map(max, given, first))
            if not newest:
                # Read again: retention may have removed records during the search for the times.
                kept = [log.first_offset(partition) for partition in range(count)]
                _check_kept(given, first, kept, chosen)
        filter = call.get(FILTER) or ""
        if filter:
            try:
                check_filter(filter)
            except InvalidFilter as error:
                raise bad_request(f"filter={shown(filter)}: {error}") from None
        kind = KINDS.get(call.get(KIND) or "", 0)
        client = call.get(CLIENT)
        clients = frozenset(() if client is None else (client.encode(),))
        part = (call.get(PART) or "").encode("utf-8", "surrogatepass")
        return RecordQuery(
            begin,
            bounds,
            call[LIMIT],
            newest,
            kind,
            filter,
            clients,
            call[BYTES],
            part,
            generation,
        )


class _Page(Struct, frozen=True):
    """The offsets of one Arrow response, per partition."""

    starts: list[int]
    ends: list[int]


def _page(starts: list[int], bounds: list[int], rows: int) -> _Page:
    """About `rows` of the offsets, of each partition the same share."""
    total = sum(max(0, bound - start) for start, bound in zip(starts, bounds, strict=True))
    if total <= rows:
        return _Page(starts, bounds)
    ends = [
        start + -(-(bound - start) * rows // total) if start < bound else bound
        for start, bound in zip(starts, bounds, strict=True)
    ]
    return _Page(starts, ends)


async def _slices(log: WholeLog, page: _Page, stream: "ArrowStream") -> AsyncIterator[bytes]:
    """The response in pieces. One is read when the reader has taken those before. If a record
    cannot be read here, it raises, so that the response ends without its last chunk."""
    for partition, start in enumerate(page.starts):
        end = page.ends[partition]
        while start < end:
            read = partial(log.read_batches, partition, start, end, READ_BYTES)
            batches = await log.in_thread(read)
            data = await asyncio.to_thread(stream.write, batches, start, end)
            start = Batch(batches[-1], check=False).end_offset
            if data:
                yield data
    yield await asyncio.to_thread(stream.end)


class _Counted(StreamingResponse):
    """An Arrow response, with what is done at its end."""

    def __init__(
        self, pieces: AsyncIterator[bytes], on_ended: Callable[[], None], following: str
    ) -> None:
        headers = {"Cache-Control": "no-store", NEXT: following}
        super().__init__(pieces, media_type=ARROW, headers=headers)
        self._on_ended = on_ended

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_ended()


def _positions(after: str, partitions: int, generation: int) -> list[int]:
    """The positions of a cursor. Raises `ApiRefusal`."""
    try:
        given = decode_positions(after, partitions, generation)
    except BadCursor as error:
        raise bad_request(f"after={shown(after)}: {error}") from None
    if given is None:
        raise ApiRefusal(410, RESTORED)
    return given


def _check_kept(given: list[int], first: list[int], kept: list[int], chosen: int | None) -> None:
    """Raises `ApiRefusal` (410) if retention has removed records that a cursor continues with.

    `first` is where each partition begins for this request, `kept` where the log begins. Records
    that the request does not choose are no loss: those of other partitions, or before `from_us`,
    whose first offset is then behind that of the log.
    """
    for partition, at in enumerate(given):
        is_chosen = chosen in (None, partition)
        if is_chosen and at < kept[partition] and first[partition] <= kept[partition]:
            raise ApiRefusal(410, REMOVED)
