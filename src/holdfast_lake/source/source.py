"""The Spark data source `holdfast`, for `spark.read` and `spark.readStream`.

The options are in options.py, the columns are SCHEMA in decode.py. One row is one message. Records
of other kinds (sessions, cursors) have offsets too, so the offsets of rows may have gaps.

A stream is as exactly-once as its sink. Its position is one offset per partition, and a range of
offsets always gives the same rows. The source hands out only offsets whose records cannot change.

The last guarantee needs a broker with `log.durability = "fsync"`. With `"memory"` the broker shows
an offset before its record is synced. Counter-example: a query reads offset 7, the power fails, and
the broker gives offset 7 to another record. The query never reads that record.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from holdfast.client.admin_connection import Server
from holdfast.client.log.access import ReadableLog, ServedLog
from holdfast.client.log.client import open_log
from holdfast.client.log.groups import GroupOffsets
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import (
    EARLIEST,
    LATEST,
    DataLossError,
    OffsetRange,
    Offsets,
    PartitionBounds,
    RestoredError,
)
from holdfast.client.log.reading.reader_http import read_ranges
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.seam import IN_NEITHER, SeamParts
from holdfast.client.log.reading.servers import Servers
from holdfast.log.columns.decode import SCHEMA, decode_rows
from holdfast.log.reading.topic_filter import TopicFilter
from holdfast_lake.source.options import (
    DDL_TYPES,
    OptionError,
    SourceOptions,
    default_tasks,
    for_stream,
    parse,
)
from holdfast_lake.source.pushdown import PushedFilters, PushFilters
from holdfast_lake.workers import exclude_modules_from_collection

if TYPE_CHECKING:
    from holdfast.client.log.lake.records import LakePiece, LakeRecords
    from holdfast.client.log.lake_log import LakeLog

logger = logging.getLogger("holdfast")

LOST_SHOWN: Final = 20
"""The most lost ranges that one warning lists."""
RESTORED_ADVICE: Final = (
    "Start again from a new checkpoint, or set failOnDataLoss=false to go on from there: what was"
    " read behind it stays in what this query has written"
)
STATE_PATH: Final = "/api/v1/log/state"
STATE_BYTES_MAX: Final = 16 << 30
"""The most bytes of a snapshot that a server sends."""
TASK_RECORDS: Final = 20_000
"""The offsets of a micro-batch for one more task. For fewer, its start costs more than it saves."""


@dataclass
class ReadWork(InputPartition):
    """The input of one task: ranges, and the servers to read them from."""

    ranges: list[OffsetRange]
    servers: Sequence[Server] = ()
    """The servers in order of preference. If it is empty, the task uses those of the options."""
    topics: TopicFilter = TopicFilter()  # noqa: RUF009
    generation: int | None = None
    """The generation of the log in which the ranges were found, if the servers know it."""
    lake: "list[LakePiece]" = field(default_factory=list)
    """The pieces of the lake that the task reads before the ranges."""


class LogAccess:
    """The driver's access to the log, through servers, and to a lake that has its older part. It
    opens them on first use."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._group: GroupOffsets | None = None

    @cached_property
    def _opened(self) -> "tuple[ServedLog | None, LakeLog | None]":
        options = self.options
        return open_log(
            options.servers, options.access, options.wait_s, options.lake, options.topics,
            is_strict=options.fail_on_data_loss,
        )  # fmt: skip

    @property
    def log(self) -> ReadableLog:
        """The log, with its older part if that is in a lake."""
        own, lake = self._opened
        found = lake or own
        assert found is not None
        return found

    def qos0_hint(self) -> str:
        """Returns how many messages are not in the log, because they are of QoS 0, and what stores
        them. Empty: none, or the source is a lake alone."""
        servers = self._servers
        unlogged = servers.qos0_unlogged() if servers is not None else 0
        if not unlogged:
            return ""
        return (
            f"{unlogged:,} messages of QoS 0 were not stored since the servers have started, so no "
            'table has them. log.qos0 = ["zigbee2mqtt/#"] in the configuration stores those of '
            "these topics, or `holdfast serve --log-qos0 FILTER`"
        )

    def register(self, lake: str, position: Offsets, *, is_grown: bool) -> None:
        """Commits the position of a lake as that of a group, if the servers keep the log until
        lakes have it. `is_grown`: whether it has new messages. Raises AdminError."""
        servers = self._servers
        if servers is None or not servers.keep_until_lake():
            return
        if self._group is None:
            self._group = GroupOffsets(lake, servers)
            self._group.load()
        self._group.commit(position, position if is_grown else (), self.log.generation().number)

    def write_state(self, file: IO[bytes]) -> None:
        """Writes a snapshot of what the log defines beside its messages. Raises AdminError."""
        servers = self._servers
        if servers is not None:
            servers.ask_one(lambda each: each.download(STATE_PATH, file, STATE_BYTES_MAX))

    def carried(
        self, position: Offsets, before: int | None, bounds: Mapping[int, PartitionBounds]
    ) -> Offsets:
        """Returns a position of generation `before` of the log as one of its present generation.

        If the position has passed messages that the log has lost, this raises RestoredError. With
        `failOnDataLoss=false` it logs a warning instead.
        """
        now = self.log.generation()
        moved, lost = now.carry(position, before, bounds)
        if lost:
            error = RestoredError(before or 0, now.number or 0, lost, RESTORED_ADVICE)
            if self.options.fail_on_data_loss:
                raise error
            logger.warning("%s", error)
        return moved

    def ranges(
        self,
        start: Offsets,
        end: Offsets,
        bounds: Mapping[int, PartitionBounds],
        narrowing: PushedFilters | None = None,
        skipped: list[OffsetRange] | None = None,
    ) -> list[OffsetRange]:
        """Returns the ranges to read between two positions.

        If the log lacks some of them, this raises DataLossError. With `failOnDataLoss=false` it
        logs a warning instead and appends the missing ranges to `skipped`.
        """
        options = self.options
        narrowing = narrowing or PushedFilters()
        topics = options.topics.plus(narrowing.topics)
        wanted = offsets.ranges_to_read(start, end, bounds)
        wanted = narrowing.ranges(wanted, self.log.partitions(), topics)
        found, lost = offsets.divide(wanted, bounds, fail_on_data_loss=options.fail_on_data_loss)
        coverage = Coverage((), fail_on_data_loss=options.fail_on_data_loss)
        for missing in self.divide(found).missing:
            coverage.note_missing(missing, IN_NEITHER)
        lost += coverage.lost
        if lost:
            count = sum(item.records for item in lost)
            places = [f"{i.start} to {i.end} of partition {i.partition}" for i in lost[:LOST_SHOWN]]
            text = "%d offsets are not in the log and were skipped: %s"
            logger.warning(text, count, ", ".join(places))
        if skipped is not None:
            skipped += lost
        return found

    def plan_tasks(
        self,
        ranges: Sequence[OffsetRange],
        topics: TopicFilter | None = None,
        *,
        whole: bool = True,
        tasks: int | None = None,
    ) -> list[ReadWork]:
        """Divides ranges among at most `tasks` tasks.

        With `whole`, one task reads all records of a partition, so the records of a topic stay in
        order. Otherwise each task reads the part of every partition that was written at about the
        same time.
        """
        tasks = tasks or self.options.tasks or default_tasks(sum(each.records for each in ranges))
        topics = topics or self.options.topics
        if self._servers is not None:
            number = self._servers.generation.number
            return [
                self._work(each.ranges, topics, each.servers, number)
                for each in self._servers.assign(ranges, tasks, whole=whole)
            ]
        divide = offsets.group if whole else offsets.split
        return [self._work(each, topics) for each in divide(ranges, tasks)]

    def _work(
        self,
        ranges: Sequence[OffsetRange],
        topics: TopicFilter,
        servers: Sequence[Server] = (),
        generation: int | None = None,
    ) -> ReadWork:
        """Returns the input of the task that reads some ranges."""
        parts = self.divide(ranges)
        of_lake = self.lake.pieces(parts.lake) if self.lake is not None else []
        return ReadWork(parts.log, servers, topics, generation, of_lake)

    def close(self) -> None:
        """Closes the connections to the servers."""
        if "_opened" in self.__dict__:
            self.log.close()

    def divide(self, ranges: Sequence[OffsetRange]) -> SeamParts:
        """Returns the parts of some ranges that are in the lake and in the log."""
        lake = self._opened[1]
        return SeamParts([], list(ranges), []) if lake is None else lake.seam.divide(ranges)

    @property
    def lake(self) -> "LakeRecords | None":
        """The lake that has the older part of the log, if the options name one."""
        lake = self._opened[1]
        return None if lake is None else lake.lake

    @property
    def _servers(self) -> Servers | None:
        own = self._opened[0]
        return None if own is None else own.servers


def read_work(
    options: SourceOptions,
    work: InputPartition,
    schema: pa.Schema,
    skipped: list[OffsetRange] | None = None,
) -> Iterator[Any]:
    """Reads the ranges of one task and yields their rows as Arrow batches.

    At the end it appends the damaged and missing ranges to `skipped`.
    """
    if not isinstance(work, ReadWork):
        return  # Spark plans one empty task where a batch read has nothing to read
    yield from _lake_rows(options, work.lake, schema, work.topics)
    coverage = Coverage(work.ranges, fail_on_data_loss=options.fail_on_data_loss)
    chunks = read_ranges(
        work.servers or options.servers,
        work.ranges,
        coverage,
        work.topics,
        options.access,
        options.wait_s,
        work.generation,
    )
    try:
        for chunk in chunks:
            yield from decode_rows(chunk, schema, work.topics)
    except DataLossError:
        lake = open_lake(options)
        rest = lake.rest_of(coverage) if lake is not None else None
        if rest is None:
            raise
        yield from _lake_rows(options, rest, schema, work.topics)
    if skipped is not None:
        skipped += coverage.lost


def open_lake(options: SourceOptions) -> "LakeRecords | None":
    """Returns the lake of the options, if they name one. Raises LakeError."""
    if not options.lake:
        return None
    # Imported here, because a task that reads the log alone needs no Parquet.
    from holdfast.client.log.lake.records import LakeRecords

    return LakeRecords(options.lake)


def _lake_rows(
    options: SourceOptions, pieces: "Sequence[LakePiece]", schema: pa.Schema, topics: TopicFilter
) -> Iterator[Any]:
    if pieces:
        from holdfast.client.log.lake.records import read_lake

        for rows in read_lake(options.lake, pieces, schema, topics):
            yield rows.rows


class HoldfastSource(DataSource):
    """The entry point of Spark: it makes the readers and writers of the format `holdfast`."""

    @classmethod
    def name(cls) -> str:
        """The name that users pass to `format`."""
        return "holdfast"

    @cached_property
    def parsed(self) -> SourceOptions:
        """The options of a read, checked. A writer has options of its own."""
        return parse(self.options)

    def schema(self) -> str:
        """The selected columns as DDL."""
        return ", ".join(f"{name} {DDL_TYPES[name]}" for name in self.parsed.columns)

    def reader(self, schema: StructType) -> "HoldfastReader":
        """Makes the reader of a batch query."""
        return HoldfastReader(self.parsed, arrow_schema(schema))

    def streamReader(self, schema: StructType) -> "HoldfastStreamReader":
        """Makes the reader of a streaming query."""
        return HoldfastStreamReader(self.parsed, arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Makes the writer of a batch query."""
        # Imported here, because a process that only reads needs no MQTT client.
        from holdfast_lake.sink.sink import HoldfastWriter

        return HoldfastWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Makes the writer of a streaming query."""
        from holdfast_lake.sink.sink import HoldfastStreamWriter

        return HoldfastStreamWriter(self.options, schema, overwrite)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema of the columns that Spark wants.

    With `.schema(...)` a user may select some of the source's columns. Any other column raises
    OptionError.
    """
    for name in schema.names:
        if name not in DDL_TYPES:
            raise OptionError(f"the schema has a column {name!r}; there are {', '.join(DDL_TYPES)}")
    return pa.schema([SCHEMA.field(name) for name in schema.names])


class HoldfastReader(DataSourceReader):
    """The reader of a batch query. Its range is fixed when the query is planned."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        if options.records_per_trigger_max is not None:
            raise OptionError("maxRecordsPerTrigger is for streams; a batch read takes all")
        self.options = options
        self.schema = schema
        self.narrowing = PushedFilters()
        if options.push_filters:
            self.pushFilters = PushFilters(self.narrowing)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        """Plans the tasks of the query."""
        options = self.options
        access = LogAccess(options)
        try:
            ranges = batch_ranges(access, self.narrowing)
            topics = options.topics.plus(self.narrowing.topics)
            return [*access.plan_tasks(ranges, topics, whole=False)]
        finally:
            access.close()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Reads the rows of one task."""
        exclude_modules_from_collection()
        return read_work(self.options, partition, self.schema)


class HoldfastStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query.

    Spark keeps one on the driver while the query runs. It sends another copy to the tasks, which
    open no LogAccess of their own.
    """

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self.options = for_stream(options)
        self.schema = schema
        self._access: LogAccess | None = None
        self._target: Offsets | None = None
        """The end of a run with Trigger.AvailableNow. None for other triggers."""

    def initialOffset(self) -> dict[str, int]:
        """Returns the position at which a query without a checkpoint begins."""
        bounds = self._log().log.bounds()
        options = self.options
        start = _position(
            self._log(), bounds, options.starting_timestamp_us, options.starting_offsets, LATEST
        )
        start = self._log().carried(start, options.starting_generation, bounds)
        return self._to_json(start)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Returns the limit of one micro-batch, from `maxRecordsPerTrigger`."""
        records_max = self.options.records_per_trigger_max
        return ReadAllAvailable() if records_max is None else ReadMaxRows(records_max)

    def latestOffset(self, start: Mapping[str, int], limit: ReadLimit) -> dict[str, int]:
        """Returns the end of the next micro-batch: committed, within the limit, and never below
        `start`."""
        begin, bounds = self._from_json(start)
        end = offsets.available(begin, bounds, fail_on_data_loss=self.options.fail_on_data_loss)
        if self._target is not None:
            end = {
                partition: max(begin.get(partition, 0), min(offset, self._target[partition]))
                for partition, offset in end.items()
                if partition in self._target
            } | {p: offset for p, offset in begin.items() if p not in self._target}
        if isinstance(limit, ReadMaxRows):
            floor = {partition: bound.first for partition, bound in bounds.items()}
            end = offsets.admit(begin, end, floor, limit.max_rows)
        return self._to_json(end)

    def reportLatestOffset(self) -> dict[str, int]:
        """Returns the end of the log, from which Spark computes how far the query is behind."""
        bounds = self._log().log.bounds()
        return self._to_json({partition: bound.end for partition, bound in bounds.items()})

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of the run at the current end of the log."""
        self._target = {p: bound.end for p, bound in self._log().log.bounds().items()}

    def partitions(
        self, start: Mapping[str, int], end: Mapping[str, int]
    ) -> Sequence[InputPartition]:
        """Plans the tasks of one micro-batch."""
        access = self._log()
        stop, bounds = self._from_json(end)
        begin = access.carried(offsets.from_json(start), offsets.generation_of(start), bounds)
        ranges = access.ranges(begin, stop, bounds)
        records = sum(each.records for each in ranges)
        # The number of tasks depends on the range only. So a micro-batch that Spark repeats has the
        # same tasks.
        tasks = min(self.options.tasks or default_tasks(records), max(1, records // TASK_RECORDS))
        # Only a user can know that the query does not need the order of a topic.
        whole = not self.options.tasks or tasks <= len(ranges)
        return [*access.plan_tasks(ranges, whole=whole, tasks=tasks)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Reads the rows of one task."""
        exclude_modules_from_collection()
        return read_work(self.options, partition, self.schema)

    def commit(self, end: Mapping[str, int]) -> None:
        """Does nothing. Spark calls this one micro-batch late or never, so the broker must not
        delete segments because of it."""

    def stop(self) -> None:
        """Closes the connections when the query ends."""
        if self._access is not None:
            self._access.close()

    def _from_json(
        self, position: Mapping[str, int]
    ) -> tuple[Offsets, Mapping[int, PartitionBounds]]:
        """Returns a position of a checkpoint in the log as it is now, and the bounds of the log.

        The position has the generation of the log at its time, because a log that was restored
        gives its offsets to other messages.
        """
        found = offsets.from_json(position)
        bounds = self._log().log.bounds(found)
        return self._log().carried(found, offsets.generation_of(position), bounds), bounds

    def _to_json(self, position: Offsets) -> dict[str, int]:
        return offsets.to_json(position, self._log().log.generation().number)

    def _log(self) -> LogAccess:
        if self._access is None:
            self._access = LogAccess(self.options)
        return self._access


def batch_ranges(access: LogAccess, narrowing: PushedFilters) -> list[OffsetRange]:
    """Returns the ranges that a batch query reads, as the log and the lake are now."""
    options = access.options
    bounds = access.log.bounds()
    start = _position(
        access, bounds, options.starting_timestamp_us, options.starting_offsets, EARLIEST
    )
    start = access.carried(start, options.starting_generation, bounds)
    end = _position(access, bounds, options.ending_timestamp_us, options.ending_offsets, LATEST)
    since_us = narrowing.starting_timestamp_us
    if since_us is not None:
        first = _position(access, bounds, since_us, None, EARLIEST)
        start = {p: max(offset, first.get(p, offset)) for p, offset in start.items()}
    return access.ranges(start, end, bounds, narrowing)


def _position(
    access: LogAccess,
    bounds: Mapping[int, PartitionBounds],
    timestamp_us: int | None,
    given: str | Offsets | None,
    default: str,
) -> Offsets:
    """Resolves a time, or a position that the user gave, to one offset per partition."""
    if timestamp_us is None:
        return offsets.resolve(default if given is None else given, bounds)
    at = access.log.offsets_at(timestamp_us)
    # Between the two requests retention may have deleted records, and new ones may have arrived. So
    # the offsets are cut to the bounds.
    return {p: min(max(at.get(p, b.first), b.first), b.end) for p, b in bounds.items()}


def newest_messages(options: SourceOptions, count: int) -> tuple[list[tuple[str, bytes, int]], str]:
    """Returns topic, payload and time of the last messages, about `count`, an equal share per
    partition, and a hint if messages are not stored. The time is that of storing, in microseconds
    since 1970.

    Raises the errors of the source.
    """
    schema = pa.schema([SCHEMA.field(name) for name in ("topic", "payload", "timestamp")])
    access = LogAccess(options)
    try:
        bounds = access.log.bounds()
        share = -(-count // max(1, len(bounds)))
        ranges = [
            OffsetRange(partition, max(bound.first, bound.end - share), bound.end)
            for partition, bound in bounds.items()
            if bound.end > bound.first
        ]
        found: list[tuple[str, bytes, int]] = []
        for work in access.plan_tasks(ranges, options.topics, tasks=1):
            for batch in read_work(options, work, schema):
                times = batch.column("timestamp").cast(pa.int64()).to_pylist()
                topics, payloads = (batch.column(name).to_pylist() for name in schema.names[:2])
                found += zip(topics, payloads, times, strict=True)
        return found, access.qos0_hint()
    finally:
        access.close()
