"""Reads the log of the whole cluster for the admin port.

A node stores the partitions of which it is a replica. The others are read at one of their replicas
in sync, over the link between the nodes. A route reads through a `WholeLog`, which has the methods
of the node's own reader. It is of one moment: its ends are those that the replicas had.

With `open_lake`, it begins where the lake of this node begins. A lake has messages alone. The
batches that are made of them have a record of the kind ABSENT at each other offset, so that readers
see no gap.

Invariant: what is read here is of logs that did not begin again since the `WholeLog` was made.
Counter-example: the node forgets the log of a partition, and a route that has its ends finds no
record before them. The read is refused then, because other nodes have the records.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, LogMoved
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.lake_port import LakeAwayError, LakePort
from holdfast.log.batch import DELTA_US_MAX, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.topic_history import TopicHistory
from holdfast.log.record import MESSAGE, Record
from holdfast.node.reads.fetch_frames import FetchFrame, ReadRange
from holdfast.protocol.topics.names import matches

T = TypeVar("T")

ANSWER_S: Final = 10.0
"""The time in seconds that a replica may take for an answer."""
REMOTE_BYTES: Final = 1 << 20
"""The most bytes of batches of an answer, and at least one batch."""
REMOTE_READS: Final = 16
"""The answers with batches of a partition that one call of `read` waits for."""
HISTORY_OFFSETS: Final = 1000
"""The offsets of a topic's messages after which an answer ends."""
HISTORY_SEGMENTS: Final = 16
"""The segments that are searched for an answer."""
LAKE_OFFSETS: Final = 20_000
"""The most offsets of one read of a lake."""
ABSENT: Final = 0
"""The kind of a record that a lake does not have, because it was no message, or was lost."""


class BoundsQuestion(Struct):
    """Asks a node for the first offsets and ends of partitions that it stores."""

    partitions: list[int]


class Bounds(Struct):
    """The answer, in the order of the question."""

    first: list[int]
    ends: list[int]
    oldest_us: int = 0
    """The time of the node's oldest record; 0: it has none."""


class BatchesQuestion(Struct):
    """Asks for batches; see `LogReader.read_batches`."""

    partition: int
    start: int
    end: int
    size: int


class Batches(Struct):
    """The answer."""

    batches: list[bytes]


class TimeQuestion(Struct):
    """Asks for the first offset whose record is not older than a time."""

    partition: int
    time_us: int


class OffsetAnswer(Struct):
    """The answer."""

    offset: int


class HistoryQuestion(Struct):
    """Asks for the messages of a topic below an offset, the newest first."""

    topic: bytes
    partition: int
    before: int


class HistoryAnswer(Struct):
    """Their offsets. Above `searched` there are no others."""

    offsets: list[int]
    searched: int
    done: bool


Ask = Callable[[str, str, Struct, type[Any], float], Awaitable[Any]]
"""Asks a node: its name, the question, its parameters, the type of the answer, and the longest
wait in seconds. Raises `ApiRefusal` (503)."""


async def ask_nobody(
    node: str, name: str, parameters: Struct, kind: type[Any], wait_s: float
) -> Any:
    """Asks no node."""
    raise ApiRefusal(503, f"{node} is not asked")


class LogSource(Protocol):
    """The methods of a reader of the log that views use."""

    def first_offset(self, partition: int) -> int: ...

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]: ...


class TopicSearch(Protocol):
    """The search for a topic's messages; see `TopicHistory`."""

    offsets: list[int]

    def is_done(self) -> bool: ...

    @property
    def searched(self) -> int: ...

    def step(self) -> None: ...


class WholeLog:
    """The log with all partitions. Its methods run in `in_thread`, except for `first_offset`."""

    def __init__(self, broker: Broker, ask: Ask) -> None:
        self._broker = broker
        self._ask = ask
        self._reader = broker.reader
        journal = broker.node.state.journal
        self._restarts = journal.restarts
        self.ends = list(map(min, journal.high_watermark, journal.written))
        """The first offset of each partition that is not both committed and readable."""
        self._first: dict[int, int] = {}
        self.oldest_us = oldest_us(broker)
        """The time of the oldest record; 0: there is none."""
        # The partitions that are read elsewhere, and where.
        self.nodes: dict[int, str] = {}
        self._lake: LakePort | None = None
        # Of the partitions that have older records in the lake, where the log begins.
        self._begins: dict[int, int] = {}
        # The offsets in the lake by the time that was searched.
        self._times: dict[int, dict[int, int]] = {}
        self.lake_error = ""
        """Why the lake is not read, or ""."""

    async def open(self, partitions: Iterable[int] | None = None) -> None:
        """Finds the partitions that are not stored here, of all or of these. Raises `ApiRefusal`
        (503) if no replica of one answers."""
        remote = self._broker.runtime.cluster_node.remote_reads
        chosen = range(len(self.ends)) if partitions is None else partitions
        left = {each for each in chosen if not remote.is_stored(each)}
        tried: set[str] = set()
        failure = "no node has it"
        while left:
            by_node: dict[str, list[int]] = {}
            for partition in sorted(left):
                for node in self._replicas(partition):
                    if node not in tried:
                        by_node.setdefault(node, []).append(partition)
            if not by_node:
                raise ApiRefusal(503, f"partition {min(left)} cannot be read: {failure}")
            node = max(by_node, key=lambda name: len(by_node[name]))
            tried.add(node)
            wanted = by_node[node]
            try:
                found = await self._ask(
                    node, "log_bounds", BoundsQuestion(wanted), Bounds, ANSWER_S
                )
            except ApiRefusal as error:
                failure = str(error)
                continue
            for partition, first, end in zip(wanted, found.first, found.ends, strict=True):
                if found.oldest_us:
                    self.oldest_us = min(self.oldest_us or found.oldest_us, found.oldest_us)
                if end >= 0:
                    self._first[partition] = first
                    self.ends[partition] = end
                    self.nodes[partition] = node
                    left.discard(partition)

    async def open_lake(self) -> None:
        """Adds what the lake has below the start of the log. Without it the log begins as it is,
        and `lake_error` has the reason."""
        self._lake = self._broker.lake
        begins = [self.first_offset(partition) for partition in range(len(self.ends))]
        if self._lake is None or not any(begins):
            return
        self._begins = {partition: begin for partition, begin in enumerate(begins) if begin}
        try:
            found = await self._search_lake(0)
        except LakeAwayError as error:
            self.lake_error = str(error)
            found = {}
        self._begins = {partition: self._begins[partition] for partition in found}
        self._first |= found

    async def _search_lake(self, time_us: int) -> dict[int, int]:
        """Returns per partition the first offset in the lake that is not older than a time, and is
        below the log. Raises LakeAwayError."""
        assert self._lake is not None
        ranges = [ReadRange(partition, 0, begin) for partition, begin in self._begins.items()]
        query = FetchFrame(number=0, ranges=ranges, queries=[("#", time_us, 0, [])])
        head, _ = await self._lake.request(query)
        pairs = zip(self._begins.items(), head.starts[0].offsets, strict=True)
        return {partition: at for (partition, begin), at in pairs if at < begin}

    def begin_of_log(self, partition: int) -> int:
        """The offset below which records of a partition are in the lake alone."""
        begin = self._begins.get(partition)
        return self.first_offset(partition) if begin is None else begin

    def is_in_lake(self, partition: int, offset: int) -> bool:
        """Whether only the lake may have an offset."""
        return offset < self._begins.get(partition, 0)

    def _lake_batches(self, partition: int, start: int, end: int, size: int) -> list[bytes]:
        """Reads batches in the lake. They have every offset from `start` on, at most up to `end`.
        Raises ApiRefusal."""
        assert self._lake is not None
        end = min(end, self._begins[partition], start + LAKE_OFFSETS)
        frame = FetchFrame(
            number=0,
            ranges=[ReadRange(partition, start, end)],
            filters=[("#", -1), ("$delayed/#", -1)],
            records_max=LAKE_OFFSETS,
            bytes_max=max(1, min(size, REMOTE_BYTES)),
        )
        try:
            head, records = self._await(self._lake.request(frame))
        except LakeAwayError as error:
            raise ApiRefusal(503, str(error), {"Retry-After": "1"}) from None
        return batches_of(partition, start, head.positions[0], records)

    def _replicas(self, partition: int) -> list[str]:
        """The connected replicas in sync, the leader last."""
        context = self._broker.runtime.cluster_node.context
        info = None if context.metadata is None else context.metadata.partitions[partition]
        found = [] if info is None else [each for each in info.in_sync if each in context.connected]
        return sorted(found, key=lambda name: info is not None and name == info.leader)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Does work with the log: in the reading thread, or in one that may wait for others. Raises
        `LogMoved` if a log has left this node meanwhile."""
        if not self.nodes and not self._begins:
            found = await self._broker.reads.in_thread(work)
        else:
            found = await asyncio.to_thread(work)
        check_restarts(self._broker, self._restarts)
        return found

    def _await(self, answer: Awaitable[T]) -> T:
        async def get() -> T:
            return await answer

        return asyncio.run_coroutine_threadsafe(get(), self._broker.loop).result()

    def _there(self, partition: int, name: str, question: Struct, kind: type[T]) -> T:
        try:
            found: T = self._await(self._ask(self.nodes[partition], name, question, kind, ANSWER_S))
        except ApiRefusal as error:
            # It had the partition when the request began.
            raise LogMoved(str(error)) from None
        return found

    # The methods of `LogReader`

    def first_offset(self, partition: int) -> int:
        first = self._first.get(partition)
        if first is None:
            first = self._reader.first_offset(partition)
            check_restarts(self._broker, self._restarts)
        return first

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]:
        if self.is_in_lake(partition, start):
            return self._lake_batches(partition, start, end, bytes_max)
        if partition not in self.nodes:
            return self._reader.read_batches(partition, start, end, bytes_max)
        question = BatchesQuestion(partition, start, end, min(bytes_max, REMOTE_BYTES))
        return self._there(partition, "log_batches", question, Batches).batches

    def fetch(self, partition: int, offset: int) -> Record | None:
        if partition not in self.nodes and not self.is_in_lake(partition, offset):
            return self._reader.fetch(partition, offset)
        for data in self.read_batches(partition, offset, offset + 1, 1):
            batch = Batch(data, check=False)
            if batch.base_offset <= offset < batch.end_offset:
                record = batch.record(offset - batch.base_offset)
                return record if record.kind == MESSAGE else None
        return None

    def offset_for_time(self, partition: int, time_us: int) -> int:
        offset = self._log_offset(partition, time_us)
        # The lake has what was before the log.
        if offset > self._begins.get(partition, -1):
            return offset
        if time_us not in self._times:
            try:
                self._times[time_us] = self._await(self._search_lake(time_us))
            except LakeAwayError as error:
                raise ApiRefusal(503, str(error), {"Retry-After": "1"}) from None
        return self._times[time_us].get(partition, offset)

    def _log_offset(self, partition: int, time_us: int) -> int:
        if partition not in self.nodes:
            return self._reader.offset_for_time(partition, time_us)
        question = TimeQuestion(partition, time_us)
        return self._there(partition, "log_time", question, OffsetAnswer).offset

    def topic_history(self, topic: bytes, partition: int, before: int) -> TopicSearch:
        if partition not in self.nodes:
            return self._reader.topic_history(topic, partition, before)
        return RemoteHistory(partial(self._history, topic, partition), before)

    def _history(self, topic: bytes, partition: int, before: int) -> HistoryAnswer:
        question = HistoryQuestion(topic, partition, before)
        return self._there(partition, "log_history", question, HistoryAnswer)

    def read(
        self,
        positions: list[int],
        limits: list[int],
        interests: list[ReadInterest],
        records_max: int,
        bytes_max: int,
    ) -> ReadResult:
        elsewhere = [
            partition
            for partition, (position, limit) in enumerate(zip(positions, limits, strict=True))
            if partition in self.nodes
            or (position < limit and self.is_in_lake(partition, position))
        ]
        if not elsewhere:
            return self._reader.read(positions, limits, interests, records_max, bytes_max)
        own = list(limits)
        for partition in elsewhere:
            own[partition] = positions[partition]
        result = self._reader.read(positions, own, interests, records_max, bytes_max)
        places = list(result.positions)
        lost = result.lost
        for partition in elsewhere:
            end = min(limits[partition], self.ends[partition])
            first = self.first_offset(partition)
            lost += max(0, min(first, end) - places[partition])
            at = max(places[partition], min(first, end))
            for _ in range(REMOTE_READS):
                if at >= end or len(result.records) >= records_max:
                    break
                batches = self.read_batches(partition, at, end, REMOTE_BYTES)
                for data in batches:
                    batch = Batch(data, check=False)
                    found = batch.records()
                    result.records += [
                        each
                        for each in found
                        if at <= each.offset < end and _is_wanted(each, interests)
                    ]
                    at = min(end, batch.end_offset)
                if not batches:
                    at = end
            places[partition] = at
        done = all(at >= limit for at, limit in zip(places, limits, strict=True))
        return ReadResult(result.records, places, done, lost)


def removed(log: WholeLog) -> ApiRefusal:
    """The refusal of a record below the start of the log."""
    text = "the record was removed by retention"
    return ApiRefusal(410, f"{text}, and {log.lake_error}" if log.lake_error else text)


def check_restarts(broker: Broker, restarts: int) -> None:
    """Raises `LogMoved` if a log of a node has begun again, or was forgotten, since its journal had
    this number of restarts."""
    if broker.node.state.journal.restarts != restarts:
        raise LogMoved("a partition has left this node during the request: send it again")


def oldest_us(broker: Broker) -> int:
    """The time of the oldest record in the log of this node; 0: it has none."""
    times = [each.head.first_timestamp_us for each in broker.node.state.journal.segments]
    return min(filter(None, times), default=0)


def batches_of(partition: int, start: int, end: int, records: list[Record]) -> list[bytes]:
    """Makes batches with the records of a lake, and with ABSENT at each other offset of a range."""
    found: list[bytes] = []
    builder = BatchBuilder(partition, start)
    for record in [*records, None]:
        stop = end if record is None else record.offset
        time_us = builder.base_timestamp_us if record is None else record.timestamp_us
        for _ in range(stop - builder.base_offset - builder.count):
            builder.add(Record(partition, ABSENT, timestamp_us=time_us))
        # The times of a batch are within an hour of its first record.
        elapsed_us = time_us - builder.base_timestamp_us
        is_full = builder.body_bytes >= REMOTE_BYTES or not 0 <= elapsed_us < DELTA_US_MAX
        if builder.count and (record is None or is_full):
            found.append(builder.build(0))
            builder = BatchBuilder(partition, stop)
        if record is not None:
            builder.add(record)
    return found


def _is_wanted(record: Record, interests: list[ReadInterest]) -> bool:
    if record.kind != MESSAGE:
        return False
    topic = record.topic.decode("utf-8", "replace")
    return any(
        matches(each.filter, topic)
        and (each.start is None or record.offset >= each.start[record.partition])
        for each in interests
    )


class RemoteHistory:
    """The search for a topic's messages at another node."""

    def __init__(self, ask: Callable[[int], HistoryAnswer], before: int) -> None:
        self._ask = ask
        self._is_done = False
        self.searched = before
        self.offsets: list[int] = []

    def is_done(self) -> bool:
        return self._is_done

    def step(self) -> None:
        """Asks for more offsets."""
        found = self._ask(self.searched)
        self.offsets += found.offsets
        self.searched, self._is_done = found.searched, found.done


def search(history: TopicHistory, before: int) -> HistoryAnswer:
    """The answer to a HistoryQuestion. Runs in a thread."""
    for _ in range(HISTORY_SEGMENTS):
        if history.is_done() or len(history.offsets) >= HISTORY_OFFSETS:
            break
        history.step()
    offsets = history.offsets
    if len(offsets) > HISTORY_OFFSETS:
        # The next question is for those below.
        return HistoryAnswer(offsets[:HISTORY_OFFSETS], offsets[HISTORY_OFFSETS - 1], False)
    return HistoryAnswer(offsets, min(before, history.searched), history.is_done())
