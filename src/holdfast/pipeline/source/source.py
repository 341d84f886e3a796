"""`spark.read.format("holdfast")` and `spark.readStream.format("holdfast")`.

See options.py for the options and SCHEMA in decode.py for the columns. One row is one message;
records of other kinds (sessions, cursors) have offsets too, so offsets of rows may have gaps.
A stream is exactly once as far as its sink is: its position is an offset per partition, only
offsets whose records cannot change are handed out, and a range always gives the same rows.

That needs a broker with `log.durability = "fsync"`. With `"memory"` an offset is shown when its
record is written and not yet synced: after a power cut the broker may give the offset to another
record, which a query that was further has passed.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

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

from holdfast.pipeline.admin_connection import Server
from holdfast.pipeline.source import offsets
from holdfast.pipeline.source.decode import SCHEMA, decode_rows
from holdfast.pipeline.source.journal_index import JournalMap
from holdfast.pipeline.source.offsets import EARLIEST, LATEST, OffsetRange, Offsets, PartitionBounds
from holdfast.pipeline.source.options import OptionError, SourceOptions, parse
from holdfast.pipeline.source.pushdown import PushedFilters, PushFilters
from holdfast.pipeline.source.reader_http import read_ranges
from holdfast.pipeline.source.reader_path import Piece, read_pieces
from holdfast.pipeline.source.scan import Coverage
from holdfast.pipeline.source.servers import Servers
from holdfast.pipeline.source.topic_filter import TopicFilter
from holdfast.storage.reading.topic_postings import TopicChoice

logger = logging.getLogger("holdfast")

LOST_SHOWN: Final = 20
TASK_RECORDS: Final = 20_000
"""Of a stream's batch: fewer do not pay for a further task."""
_DDL_TYPES: Final = {
    "topic": "string",
    "payload": "binary",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "qos": "tinyint",
    "retain": "boolean",
    "properties": "binary",
    "client_id": "string",
    "producer": "struct<id: string, epoch: bigint, sequence: bigint>",
}


@dataclass
class ReadWork(InputPartition):
    """What one task reads: ranges of some log partitions, and where."""

    ranges: list[OffsetRange]
    pieces: list[Piece]
    servers: Sequence[Server] = ()
    """The preferred one first; those of the options if there are none."""
    topics: TopicFilter = TopicFilter()  # noqa: RUF009


class LogAccess:
    """The driver's view of the log, whichever way it is reached; opened when first used."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._map: JournalMap | None = None
        self._http: Servers | None = None

    def bounds(self, at_least: Mapping[int, int] | None = None) -> dict[int, PartitionBounds]:
        """`at_least`: ends that were seen before; servers that have not come as far again are
        waited for."""
        if self.options.path is None:
            return self._servers().bounds(at_least)
        journal = self._journal()
        journal.refresh()
        return journal.bounds()

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Within the bounds that were read last."""
        if self.options.path is None:
            return self._servers().offsets_at(timestamp_us)
        return self._journal().offsets_at(timestamp_us)

    def partitions(self) -> int:
        """How many the log has; after `bounds`."""
        if self.options.path is None:
            return self._servers().partitions
        return self._journal().partitions

    def ranges(
        self,
        start: Offsets,
        end: Offsets,
        bounds: Mapping[int, PartitionBounds],
        narrowing: PushedFilters | None = None,
        skipped: list[OffsetRange] | None = None,
    ) -> list[OffsetRange]:
        """What is to be read between two positions. Raises DataLossError when some of it is not in
        the log, or says what was skipped: in the process's log, and in `skipped`."""
        options = self.options
        narrowing = narrowing or PushedFilters()
        topics = options.topics.plus(narrowing.topics)
        wanted = offsets.wanted(start, end, bounds)
        wanted = narrowing.ranges(wanted, self.partitions(), topics)
        found, lost = offsets.held(wanted, bounds, fail_on_data_loss=options.fail_on_data_loss)
        if lost:
            logger.warning(
                "%d offsets are not in the log and were skipped: %s",
                sum(item.records for item in lost),
                ", ".join(
                    f"{item.start} to {item.end} of partition {item.partition}"
                    for item in lost[:LOST_SHOWN]
                ),
            )
        if skipped is not None:
            skipped += lost
        return found

    def work(
        self,
        ranges: Sequence[OffsetRange],
        topics: TopicFilter | None = None,
        *,
        whole: bool = True,
        tasks: int | None = None,
    ) -> list[ReadWork]:
        """For that many tasks at most. `whole`: the records of a partition, and so of a topic, stay
        in one of them; otherwise each gets what was written in a part of the time."""
        tasks = tasks or self.options.tasks
        topics = topics or self.options.topics
        if self.options.path is None:
            found = self._servers().assign(ranges, tasks, whole=whole)
            return [ReadWork(each.ranges, [], each.servers, topics) for each in found]
        divide = offsets.group if whole else offsets.split
        journal = self._journal()
        choice = None
        if topics:
            clause = topics.narrowest()
            choice = TopicChoice(clause.filters, clause.prefixes, lambda: None)
        return [
            ReadWork(each, journal.pieces(each, choice), (), topics)
            for each in divide(ranges, tasks)
        ]

    def close(self) -> None:
        if self._http is not None:
            self._http.close()

    def _journal(self) -> JournalMap:
        if self._map is None:
            self._map = JournalMap(self.options.path or "")
        return self._map

    def _servers(self) -> Servers:
        if self._http is None:
            self._http = Servers(self.options.servers)
        return self._http


def read_work(
    options: SourceOptions,
    work: InputPartition,
    schema: pa.Schema,
    skipped: list[OffsetRange] | None = None,
) -> Iterator[Any]:
    """Run in a task: the rows of its ranges as Arrow batches. `skipped` gets what was damaged or
    gone, at the end."""
    if not isinstance(work, ReadWork):
        return  # Spark plans one empty task where a batch read has nothing to read
    coverage = Coverage(work.ranges, fail_on_data_loss=options.fail_on_data_loss)
    if options.path is None:
        servers = work.servers or options.servers
        chunks = read_ranges(servers, work.ranges, coverage, work.topics)
    else:
        chunks = read_pieces(work.pieces, coverage)
    for chunk in chunks:
        yield from decode_rows(chunk, schema, work.topics)
    if skipped is not None:
        skipped += coverage.lost


class HoldfastSource(DataSource):
    """The data source `holdfast`."""

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    @cached_property
    def parsed(self) -> SourceOptions:
        """For reading; writing has options of its own."""
        return parse(self.options)

    def schema(self) -> str:
        return ", ".join(f"{name} {_DDL_TYPES[name]}" for name in self.parsed.columns)

    def reader(self, schema: StructType) -> "HoldfastReader":
        return HoldfastReader(self.parsed, arrow_schema(schema))

    def streamReader(self, schema: StructType) -> "HoldfastStreamReader":
        return HoldfastStreamReader(self.parsed, arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        # Imported here: who only reads needs no client.
        from holdfast.pipeline.sink.sink import HoldfastWriter

        return HoldfastWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from holdfast.pipeline.sink.sink import HoldfastStreamWriter

        return HoldfastStreamWriter(self.options, schema, overwrite)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Of the columns Spark wants: ours, or some of them that the user gave by `.schema(...)`."""
    for name in schema.names:
        if name not in _DDL_TYPES:
            raise OptionError(
                f"the schema has a column {name!r}; there are {', '.join(_DDL_TYPES)}"
            )
    return pa.schema([SCHEMA.field(name) for name in schema.names])


class HoldfastReader(DataSourceReader):
    """A batch read: the range is fixed when the query is planned."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        if options.records_per_trigger_max is not None:
            raise OptionError("maxRecordsPerTrigger is for streams; a batch read takes all")
        self.options = options
        self.schema = schema
        self.narrowing = PushedFilters()
        if options.push_filters:
            self.pushFilters = PushFilters(self.narrowing)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        access = LogAccess(options)
        try:
            bounds = access.bounds()
            start = _position(
                access, bounds, options.starting_timestamp_us, options.starting_offsets, EARLIEST
            )
            end = _position(
                access, bounds, options.ending_timestamp_us, options.ending_offsets, LATEST
            )
            since_us = self.narrowing.starting_timestamp_us
            if since_us is not None:
                first = _position(access, bounds, since_us, None, EARLIEST)
                start = {p: max(offset, first.get(p, offset)) for p, offset in start.items()}
            ranges = access.ranges(start, end, bounds, self.narrowing)
            topics = options.topics.plus(self.narrowing.topics)
            return [*access.work(ranges, topics, whole=False)]
        finally:
            access.close()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_work(self.options, partition, self.schema)


class HoldfastStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Spark keeps one of these on the driver as long as the query runs, and sends
    another, unused one to the tasks."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        for given, name in (
            (options.ending_offsets, "endingOffsets"),
            (options.ending_timestamp_us, "endingTimestamp"),
        ):
            if given is not None:
                raise OptionError(f"{name} is for batch reads; a stream has no end")
        self.options = options
        self.schema = schema
        self._access: LogAccess | None = None
        self._target: Offsets | None = None
        """Where a run with Trigger.AvailableNow ends."""

    def initialOffset(self) -> dict[str, int]:
        bounds = self._log().bounds()
        options = self.options
        return offsets.to_json(
            _position(
                self._log(),
                bounds,
                options.starting_timestamp_us,
                options.starting_offsets,
                LATEST,
            )
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        records_max = self.options.records_per_trigger_max
        return ReadAllAvailable() if records_max is None else ReadMaxRows(records_max)

    def latestOffset(self, start: Mapping[str, int], limit: ReadLimit) -> dict[str, int]:
        begin = offsets.from_json(start)
        bounds = self._log().bounds(begin)
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
        return offsets.to_json(end)

    def reportLatestOffset(self) -> dict[str, int]:
        bounds = self._log().bounds()
        return offsets.to_json({partition: bound.end for partition, bound in bounds.items()})

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {p: bound.end for p, bound in self._log().bounds().items()}

    def partitions(
        self, start: Mapping[str, int], end: Mapping[str, int]
    ) -> Sequence[InputPartition]:
        access = self._log()
        begin, stop = offsets.from_json(start), offsets.from_json(end)
        ranges = access.ranges(begin, stop, access.bounds(stop))
        records = sum(each.records for each in ranges)
        # The same for the same range: a batch that is run again has the same tasks.
        tasks = min(self.options.tasks, max(1, records // TASK_RECORDS))
        return [*access.work(ranges, tasks=tasks)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_work(self.options, partition, self.schema)

    def commit(self, end: Mapping[str, int]) -> None:
        """Nothing: Spark calls it a batch late, or never, so no retention may hang on it."""

    def stop(self) -> None:
        if self._access is not None:
            self._access.close()

    def _log(self) -> LogAccess:
        if self._access is None:
            self._access = LogAccess(self.options)
        return self._access


def _position(
    access: LogAccess,
    bounds: Mapping[int, PartitionBounds],
    timestamp_us: int | None,
    given: str | Offsets | None,
    default: str,
) -> Offsets:
    if timestamp_us is None:
        return offsets.resolve(default if given is None else given, bounds)
    at = access.offsets_at(timestamp_us)
    # Between the two questions retention may have removed records, or new ones may have come.
    return {p: min(max(at.get(p, b.first), b.first), b.end) for p, b in bounds.items()}
