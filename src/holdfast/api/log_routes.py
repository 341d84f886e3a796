"""Serves small reads of the log on the admin port. Large ones: `holdfast.api.log_sender`.

- `GET /api/v1/log` -> {"node", "log", "partitions", "ranges": [[first offset, high watermark],
  ...], "leads": [partition, ...], "created": "", "generation",
  "former": [[generation, [offset, ...]], ...], "qos0_unlogged", "keeps_until_lake"}. `log`
  names the log and is equal on all nodes of a cluster. `generation` changes when the log is
  restored. `former` lists generations before it, with the offsets up to which their records are
  those of this one.
  `leads` are the partitions whose records this node receives first. Readers should prefer another
  node for them.
- `POST /api/v1/log/wait` {"ends": [...], "wait_ms": M} -> the same, once some partition ends behind
  the offset in `ends`, or after M milliseconds.
- `GET /api/v1/log/offsets?timestamp_us=T` -> {"offsets": [...]}: per partition the first offset
  whose record is not older, or the end if all are older.
- `GET /api/v1/log/state` -> a snapshot of what the log defines beside its messages: sessions,
  groups, retained messages (`holdfast.log.snapshot`). 421 from a node that stores no log.
- `GET /api/v1/log/P?start=A&end=B&bytes=M` -> whole raw batches with the offsets from A to at most
  B, about M bytes. The reader trims the first and the last one. 410 below the retention floor, 503
  while four other responses are in progress.
- `GET /api/v1/log/P/offset?timestamp_us=T` -> {"offset"}.

A node reads the partitions that it does not store at others. `stored` names those that it stores,
and `servers` the admin ports of the other nodes. `POST /api/v1/log/read` has only the stored ones:
without any it replies with 421, whose text and header `Holdfast-Log-Servers` name the nodes to ask.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field
from starlette import types
from starlette.responses import JSONResponse, Response

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole, bad_request
from holdfast.api.log.record_routes import NOT_AGREED
from holdfast.api.log_plan import (
    PATH,
    REQUEST_BYTES_MAX,
    BadRead,
    NotStored,
    OtherGeneration,
    Pace,
    ReadPlanner,
    ReadRequest,
    RemovedRecords,
    header_of,
)
from holdfast.api.nodes.own_node import (
    STANDS_BY,
    OwnNode,
    check_log,
    cluster_of,
    elsewhere,
    log_servers,
    not_stored,
)
from holdfast.api.nodes.whole_log import WholeLog
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.io.event_loop.log_reads import LogReads
from holdfast.log.batch import Batch
from holdfast.log.reading.byte_ranges import Extent
from holdfast.numbers import whole_number
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

LOOK_S: Final = 0.01
"""The seconds between two looks at the log."""
WAITS_MAX: Final = 256
"""The most requests that wait at one node. Further ones receive 503."""


class TooManyWaits(Exception):
    """The greatest number of requests waits already."""


class CommitWatch:
    """The requests that wait, each with the ends of the log that its reader knows.

    One task looks at the log for all of them, and only while there are any. So neither a message
    nor a node without such readers pays for it.
    """

    def __init__(self, find_ends: Callable[[], list[int] | None]) -> None:
        """`find_ends` returns the committed end of each partition, or None if the log cannot be
        read any more. That ends all waits."""
        self._find_ends = find_ends
        self._waits: dict[asyncio.Future[None], Sequence[int]] = {}
        self._looks: asyncio.Task[None] | None = None

    async def wait(self, known: Sequence[int], timeout_s: float) -> None:
        """Returns when some partition ends behind its known end, or after the timeout. Raises
        `TooManyWaits`."""
        ends = self._find_ends()
        if ends is None or any(map(int.__gt__, ends, known)):
            return
        if len(self._waits) >= WAITS_MAX:
            raise TooManyWaits(f"{WAITS_MAX} requests wait for the log already: try again")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[future] = known
        if self._looks is None:
            self._looks = watched(self._look(ends))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return
        finally:
            self._waits.pop(future, None)

    async def _look(self, before: list[int]) -> None:
        """Looks until no request waits. `before` are ends that no waiting reader is behind."""
        try:
            while self._waits:
                await asyncio.sleep(LOOK_S)
                ends = self._find_ends()
                if ends is None:
                    return
                # Only partitions that have grown since the last look can be news to a reader. With
                # all 4,096 of them compared for each of 256 readers, a look would take 50 ms.
                grown = [p for p, end in enumerate(ends) if end > before[p]]
                before = ends
                for future, known in self._waits.items():
                    if not future.done() and any(ends[p] > known[p] for p in grown):
                        future.set_result(None)
        finally:
            self._looks = None
            for future in self._waits:
                if not future.done():
                    future.set_result(None)


READ_BYTES_DEFAULT: Final = 4 << 20
READ_BYTES_MAX: Final = 64 << 20
BATCHES_TYPE: Final = "application/octet-stream"

SLICE_BYTES: Final = 1 << 20
"""The bytes read from the disk at a time, plus the rest of the last batch.

The next slice is read only when the reader has taken the one before.
"""
PIECE_BYTES: Final = 256 << 10
"""The bytes handed to the connection at a time."""
WAIT_MS_MAX: Final = 10_000
"""The longest wait for the log to grow. It is shorter than the timeouts of clients."""
READS_MAX: Final = 4
"""The most simultaneous responses with batches. Each has one slice in memory."""


PARTITION: Final = Text("partition", "the number of the partition", in_path=True)
START: Final = Whole("start", "the first offset", required=True)
END: Final = Whole("end", "the first offset that is not read; default: the high watermark")
BYTES: Final = Whole(
    "bytes", "about how many bytes are read", default=READ_BYTES_DEFAULT, most=READ_BYTES_MAX
)
TIMESTAMP_US: Final = Whole("timestamp_us", "microseconds since 1970", required=True)


class LogRanges(Struct, frozen=True):
    """The committed log of a node."""

    node: str
    log: str
    """The name of the log, equal on all nodes of a cluster."""
    partitions: int
    ranges: list[tuple[int, int]]
    """The first offset and the high watermark of each partition."""
    leads: list[int]
    """The partitions whose records this node receives first."""
    created: str = ""
    """Always empty. A broker of version 0.1 sends the name of its data directory."""
    generation: int = 0
    """The generation of the log. It changes when the log is restored."""
    former: list[tuple[int, list[int]]] = field(default_factory=list)
    """Former generations, with the offsets up to which their records are those of this one."""
    qos0_unlogged: int = 0
    """The QoS 0 messages that this node has received since its start and that the log does not
    store."""
    keeps_until_lake: bool = False
    """Whether retention waits for registered lakes (`log.retention.keep_until_lake`)."""
    stored: list[int] = field(default_factory=list)
    """The partitions that this node stores."""
    servers: list[str] = field(default_factory=list)
    """The admin ports of the other nodes with the log, unless all of it is stored here."""


class WaitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The ends that a reader knows, and how long it waits for more."""

    ends: list[Annotated[int, Meta(ge=0)]]
    """The end of each partition of the log, in order."""
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = WAIT_MS_MAX


class Offset(Struct, frozen=True):
    """A position in one partition."""

    offset: int


class Offsets(Struct, frozen=True):
    """A position in each partition."""

    offsets: list[int]


class LogRoutes:
    """The routes of the log."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._reads = 0
        self._watch = CommitWatch(self._ends)
        # A port with TLS sends the log here, any other port in LogSender.
        self._pace = Pace(lambda: node.server.config.log.read_bytes_per_s)

    def endpoints(self) -> list[Endpoint]:
        v1, scope = "/api/v1/log", Scope.READER
        return [
            Endpoint("GET", v1, scope, "the committed offsets", self._ranges, LogRanges,
                     refusals=(503,)),
            Endpoint("POST", f"{v1}/wait", scope, "the committed offsets, once there are more",
                     self._wait, LogRanges, body=WaitRequest, refusals=(503,), reads_only=True),
            Endpoint("GET", f"{v1}/offsets", scope, "the offsets of a time in all partitions",
                     self._offsets, Offsets, (TIMESTAMP_US,), refusals=(503,)),
            Endpoint("GET", f"{v1}/state", scope, "a snapshot of sessions and retained messages",
                     self._state, bytes, refusals=(409, 421, 503), media_type=BATCHES_TYPE),
            Endpoint("GET", f"{v1}/{{partition}}", scope, "committed records as raw batches",
                     self._read, bytes, (PARTITION, START, END, BYTES), refusals=(410, 503),
                     media_type=BATCHES_TYPE),
            Endpoint("GET", f"{v1}/{{partition}}/offset", scope, "the offset of a time",
                     self._offset, Offset, (PARTITION, TIMESTAMP_US), refusals=(503,)),
            Endpoint("POST", PATH, scope, "much of the log, as it is on disk", self._read_plan,
                     bytes, body=ReadRequest, body_bytes_max=REQUEST_BYTES_MAX,
                     refusals=(409, 410, 421, 503),
                     media_type=BATCHES_TYPE, reads_only=True),
        ]  # fmt: skip

    @property
    def _broker(self) -> Broker:
        """The broker. Raises `ApiRefusal` (503) on a standby, or if the log is damaged."""
        broker = self._node.server.broker
        if broker is None:
            raise ApiRefusal(503, STANDS_BY)
        check_log(broker)
        return broker

    async def _ranges(self, call: Call) -> LogRanges:
        config = self._broker.node.state.config
        whole = await self._node.log()
        ranges = [(whole.first_offset(partition), end) for partition, end in enumerate(whole.ends)]
        servers = [address for _, address in log_servers(self._broker)] if whole.nodes else []
        log, leads = self._place()
        generation = self._broker.generation()
        if generation is None:
            raise ApiRefusal(503, NOT_AGREED, {"Retry-After": "1"})
        return LogRanges(
            config.node_id,
            log,
            config.partitions,
            ranges,
            leads,
            "",
            generation,
            self._broker.former_generations(),
            self._broker.node.state.stats.publish_qos0_unlogged,
            self._node.server.config.log.retention.keep_until_lake > 0,
            [each for each in range(config.partitions) if each not in whole.nodes],
            servers,
        )

    async def _wait(self, call: Call) -> LogRanges:
        request = call.body(WaitRequest)
        partitions = self._broker.node.state.config.partitions
        if len(request.ends) != partitions:
            raise bad_request(f"ends has {len(request.ends)} offsets, this log {partitions}")
        try:
            await self._watch.wait(request.ends, request.wait_ms / 1000)
        except TooManyWaits as error:
            raise ApiRefusal(503, str(error), {"Retry-After": "1"}) from None
        return await self._ranges(call)

    def _ends(self) -> list[int] | None:
        """Returns the end of each partition, or None if this node's log cannot be read."""
        broker = self._node.server.broker
        if broker is None or not broker.runtime.believes_disk:
            return None
        journal = broker.node.state.journal
        return list(map(min, journal.high_watermark, journal.written))

    def _place(self) -> tuple[str, list[int]]:
        """Returns the name of the log, and the partitions that this node leads."""
        config = self._broker.node.state.config
        status = cluster_of(self._node.server).status()
        partitions = status["partitions"]
        assert isinstance(partitions, list)
        leads = [each["partition"] for each in partitions if each["leader"] == config.node_id]
        return str(status["cluster_id"]), leads

    def _partition(self, call: Call) -> int:
        text = call[PARTITION]
        last = self._broker.node.state.config.partitions - 1
        partition = whole_number(text, last)
        if partition is None:
            raise bad_request(f"partition {shown(text)}: this node has 0 to {last}")
        return partition

    async def _read(self, call: Call) -> Response:
        partition = self._partition(call)
        log = await self._node.log((partition,))
        watermark = log.ends[partition]
        start, size = call[START], call[BYTES]
        end = call.get(END)
        end = watermark if end is None else min(end, watermark)
        first = log.first_offset(partition)
        if start < first:
            return JSONResponse(
                {"error": "older records were removed by retention", "first_offset": first}, 410
            )
        if start >= end:
            return Response(b"", media_type=BATCHES_TYPE)
        self._begin()
        try:
            first_slice = await self._read_slice(log, partition, start, end, size)
        except BaseException:
            self._reads -= 1
            raise
        return _Slices(
            first_slice, partial(self._read_slice, log, partition), end, size, self._ended
        )

    async def _read_plan(self, call: Call) -> Response:
        """Serves what `holdfast.api.log_sender` serves, on connections that it cannot take: those
        with TLS, and those with an earlier request."""
        broker, request = self._broker, call.body(ReadRequest)
        self._begin()
        try:
            planner = ReadPlanner()
            plan = await broker.reads.in_thread(lambda: planner.plan(broker, request))
        except BadRead as error:
            self._reads -= 1
            raise bad_request(str(error)) from None
        except OtherGeneration as error:
            self._reads -= 1
            raise ApiRefusal(409, str(error)) from None
        except NotStored as error:
            self._reads -= 1
            raise not_stored(broker, error.partition) from None
        except RemovedRecords as error:
            self._reads -= 1
            return JSONResponse({"error": str(error), "first_offsets": error.first}, 410)
        except BaseException:
            self._reads -= 1
            raise
        return _Extents(plan.extents, broker.reads, self._pace, self._ended,
                        {"Holdfast-Log": header_of(plan)})  # fmt: skip

    async def _state(self, call: Call) -> Response:
        broker, maintenance = self._broker, self._node.server.maintenance
        if maintenance is None or not broker.runtime.cluster_node.context.has_data:
            raise elsewhere("the state", log_servers(broker))
        self._begin()
        try:
            try:
                file = await maintenance.open_state()
            except OSError as error:
                raise ApiRefusal(409, f"the state cannot be written: {error}") from None
            if file is None:
                text = "the state of this node is not complete: ask another node, or come again"
                raise ApiRefusal(409, text)
        except BaseException:
            self._ended()
            raise
        whole = [Extent(file, 0, file.size())]
        return _Extents(whole, broker.reads, self._pace, self._ended, {})

    def _begin(self) -> None:
        """Counts a response with batches. Raises `ApiRefusal` (503) if there are too many."""
        if self._reads >= READS_MAX:
            text = f"{READS_MAX} others read already: come again, or POST {PATH}"
            raise ApiRefusal(503, text, {"Retry-After": "1"})
        self._reads += 1

    def _ended(self) -> None:
        self._reads -= 1

    async def _read_slice(
        self, log: WholeLog, partition: int, start: int, end: int, size: int
    ) -> list[bytes]:
        """Reads batches from `start`. Damaged ones are left out; another node has them."""
        found = await log.in_thread(
            lambda: log.read_batches(partition, start, end, min(size, SLICE_BYTES))
        )
        # Raises ApiRefusal if damage found meanwhile makes the whole node unfit.
        _ = self._broker
        return found

    async def _offset(self, call: Call) -> Offset:
        partition = self._partition(call)
        timestamp_us = call[TIMESTAMP_US]
        log = await self._node.log((partition,))
        offset = await log.in_thread(lambda: log.offset_for_time(partition, timestamp_us))
        return Offset(offset)

    async def _offsets(self, call: Call) -> Offsets:
        timestamp_us = call[TIMESTAMP_US]
        log = await self._node.log()
        offsets: list[int] = []
        for partition in range(self._broker.node.state.config.partitions):
            # One partition at a time, so that reads of clients come in between.
            work = partial(log.offset_for_time, partition, timestamp_us)
            offsets.append(await log.in_thread(work))
        return Offsets(offsets)


class _Slices(Response):
    """A response of whole batches that are read while it is sent.

    Its memory does not grow with its length, however slow the reader is. uvicorn's `send` waits for
    the reader, and `holdfast.security.http.connections` cuts one that stops reading.
    """

    def __init__(
        self,
        first: list[bytes],
        read: Callable[[int, int, int], Awaitable[list[bytes]]],
        end: int,
        size: int,
        on_ended: Callable[[], None],
    ) -> None:
        super().__init__(media_type=BATCHES_TYPE)
        # The length is not known yet, so the response is chunked.
        self.raw_headers = [each for each in self.raw_headers if each[0] != b"content-length"]
        self._batches = first
        self._read = read
        self._end = end
        self._left = size
        self._on_ended = on_ended

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        gone = watched(_disconnected(receive))
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            while self._batches and not gone.done():
                position = Batch(self._batches[-1], check=False).end_offset
                # Popped, because sent batches must not stay in memory.
                self._batches.reverse()
                while self._batches and not gone.done():
                    batch = self._batches.pop()
                    self._left -= len(batch)
                    for at in range(0, len(batch), PIECE_BYTES):
                        piece = batch[at : at + PIECE_BYTES]
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                if position >= self._end or self._left <= 0:
                    break
                self._batches = await self._read(position, self._end, self._left)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._on_ended()


class _Extents(Response):
    """A response of ranges of files, which are read while it is sent."""

    def __init__(
        self,
        extents: Sequence[Extent],
        reads: LogReads,
        pace: Pace,
        on_ended: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        size_bytes = sum(each.length for each in extents)
        headers = {"Content-Length": str(size_bytes), **headers}
        super().__init__(media_type=BATCHES_TYPE, headers=headers)
        self._extents = extents
        self._reads = reads
        self._pace = pace
        self._on_ended = on_ended

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        gone = watched(_disconnected(receive))
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            for file, position, length, _ in self._extents:
                end = position + length
                while position < end and not gone.done():
                    await asyncio.sleep(self._pace.take(min(PIECE_BYTES, end - position)))
                    read = partial(file.read, position, min(PIECE_BYTES, end - position))
                    piece = await self._reads.in_thread(read)
                    if not piece:
                        raise OSError("the file became shorter")
                    position += len(piece)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._on_ended()


async def _disconnected(receive: types.Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
