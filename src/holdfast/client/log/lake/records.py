"""Reads the table `records` of a lake as the older part of the log.

`LakeRecords` pins one version of the table: a list of files with the offsets that each has. A read
is a list of `LakePiece`, which a task in another process can read.

Invariant: for each wanted offset of a range the pieces yield the row of that offset once, in order
within its partition. A compaction or a backfill may replace a file before or while it is read. Then
the rows that are left are read in the files that replaced it: of the same day, with the same
offsets.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.client.log.lake.commits import RECORDS, Commit, CommitLog, File
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.objects import LakePath, at_once, location
from holdfast.client.log.lake.parquet import offsets_of_rows, parquet_file
from holdfast.client.log.messages import LogMessage
from holdfast.client.log.reading.offsets import (
    LogGeneration,
    OffsetRange,
    Offsets,
    PartitionBounds,
    generation_in,
    is_other_log,
)
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.seam import Seam
from holdfast.log.columns.decode import ROWS_MAX, topic_mask
from holdfast.log.reading.topic_filter import TopicFilter
from holdfast.protocol.topics.names import covers

logger = logging.getLogger("holdfast")

Integers = npt.NDArray[np.int64]
TIME: Final = "timestamp"
KEYS: Final = ["partition", "offset"]
REPLACED_MAX: Final = 20
"""The most replacements of a file during its read, after which the read fails."""
OFFSET_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True)
class LakePiece:
    """Rows of one file: those of some offsets."""

    file: File
    ranges: dict[int, tuple[int, int]]
    """The wanted offsets per partition."""
    apart: int = 0
    """The number of a group of pieces whose offsets interleave, because a clock was set back. 0:
    none. Their rows are sorted in memory."""


class _Settings(msgspec.Struct):
    """The part of lake.json that a reader needs."""

    source: dict[str, str] = {}


class LakeRecords:
    """The records of a lake as of one version, which `refresh` pins."""

    def __init__(self, place: str) -> None:
        """`place`: a directory, or a URL like s3://BUCKET/NAME. Raises LakeError."""
        self.path = location(place).absolute()
        self._log = CommitLog(self.path, RECORDS)
        self._commit: Commit | None = None
        self._files: list[File] = []
        self._offsets: dict[str, dict[int, tuple[int, int]]] = {}
        # Per file and partition the offsets of its rows that count. Equal ones: it has none.
        self._low = self._high = np.zeros((0, 0), np.int64)
        self.bounds: dict[int, PartitionBounds] = {}
        """The offsets of the table. Some of them may be among `skipped`."""
        self.skipped: list[OffsetRange] = []
        """The offsets inside its bounds that the table lacks, because the log had lost them."""

    def refresh(self) -> None:
        """Pins the newest version. Raises LakeError if there is none."""
        commit = self._log.last()
        if commit is None:
            raise LakeError(
                f"{self.path} is no lake with records: give the directory or the URL of one that"
                " `holdfast pipeline run` has made"
            )
        if self._commit is not None and self._commit.lineage != commit.lineage:
            raise LakeError(f"the lake {self.path} was made again during the read: begin again")
        if self._commit is not None and self._commit.version == commit.version:
            return
        files = self._log.live(commit.version)
        self._learn_offsets(files)
        begins = {int(p): at for p, at in commit.begins.items()}
        for restored in commit.restored:
            for p, at in restored.offsets.items():
                begins[int(p)] = min(begins.get(int(p), 0), at)
        self.bounds = {
            int(p): PartitionBounds(min(begins.get(int(p), 0), end), end)
            for p, end in commit.offsets.items()
        }
        self.skipped = [
            OffsetRange(each.partition, each.first, each.end) for each in commit.skipped
        ]
        count = max(self.bounds, default=-1) + 1
        self._low, self._high = np.zeros((2, len(files), count), np.int64)
        for number, file in enumerate(files):
            for own, (low, high) in self._offsets[file.path].items():
                self._low[number, own] = low
                self._high[number, own] = max(low, min(high, _cut(commit, file, own)))
        self._files, self._commit = files, commit

    @property
    def commit(self) -> Commit:
        """The version that `refresh` has pinned."""
        assert self._commit is not None
        return self._commit

    def identity(self) -> str:
        """Returns the identity of the log that the table has (`offsets.log_identity`), or an empty
        text."""
        return self._commit.log if self._commit is not None else ""

    @property
    def partitions(self) -> int:
        """The number of partitions of the log."""
        return len(self.bounds)

    @property
    def generation(self) -> LogGeneration:
        """The generation of the log that the table has."""
        return LogGeneration(generation_in(self.identity())[1] if self.identity() else None)

    def check_log(self, identity: str) -> None:
        """Raises LakeError if the records are of another log than that with this identity."""
        if is_other_log(self.identity(), identity):
            raise LakeError(
                f"the lake {self.path} has the records of another log ({self.identity()}) than that"
                f" of the servers or the directory ({identity}): give those of the same log"
            )

    def own_topics(self) -> list[str]:
        """Returns the filters of the topics that the lake was made of. Empty: all. Raises
        LakeError."""
        try:
            text = (self.path / "lake.json").read_bytes()
            source = msgspec.json.decode(text, type=_Settings).source
        except FileNotFoundError:
            raise LakeError(f"{self.path} is no lake: it has no lake.json") from None
        except msgspec.DecodeError as error:
            raise LakeError(f"{self.path / 'lake.json'} is damaged: {error}") from None
        kept = next((text for name, text in source.items() if name.lower() == "topics"), "")
        return [each.strip() for each in kept.split(",") if each.strip()]

    def check_topics(self, topics: TopicFilter, own: Sequence[str] | None = None) -> None:
        """Raises LakeError if the lake was made of some topics only, and others are wanted. `own`:
        what `own_topics` has returned, if it was called."""
        own = self.own_topics() if own is None else own
        is_among = any(
            not clause.prefixes
            and all(any(covers(wide, each) for wide in own) for each in clause.filters)
            for clause in topics.clauses
        )
        if own and not is_among:
            raise LakeError(
                f"the lake {self.path} has only messages of the topics {','.join(own)}: give"
                " topics among these"
            )

    def seam(
        self,
        log: Mapping[int, PartitionBounds],
        identity: str,
        generation: LogGeneration,
        *,
        fail_on_data_loss: bool,
    ) -> Seam:
        """Returns the seam to a log.

        A lake of an earlier generation of the log has other messages behind the restore, and is
        read up to there only when `fail_on_data_loss` is false. Else, and for a lake of another
        log, this raises LakeError.
        """
        self.check_log(identity)
        ends = {p: bound.end for p, bound in self.bounds.items()}
        before = self.generation.number
        moved, lost = generation.carry(ends, before, log)
        told = ""
        if lost:
            told = (
                f"the lake {self.path} is of generation {before} of the log, which was restored and"
                f" is at generation {generation.number}: from offset {lost[0].start} of partition"
                f" {lost[0].partition} on it has other messages than the log"
            )
        for p, end in moved.items():
            if p in log and end > log[p].end:
                told = told or (
                    f"the lake {self.path} has partition {p} up to offset {end}, but the log ends"
                    f" at {log[p].end}: it lost its tail, or is another log"
                )
                moved[p] = log[p].end
        if told and fail_on_data_loss:
            raise LakeError(f"{told}. Set failOnDataLoss=false to read the lake up to there only")
        if told:
            logger.warning("%s: the lake is read up to there only", told)
        lake = {
            p: PartitionBounds(min(b.first, moved[p]), moved[p]) for p, b in self.bounds.items()
        }
        return Seam(lake, log, self.skipped)

    def rest_of(self, coverage: Coverage) -> list[LakePiece] | None:
        """Returns what is left of a read in the newest version of the lake, because retention has
        removed it from the log meanwhile. None: the lake does not have all of it."""
        self.refresh()
        left = [
            OffsetRange(p, at, coverage.end[p])
            for p, at in coverage.next.items()
            if at < coverage.end[p]
        ]
        parts = Seam(self.bounds, {}, self.skipped).divide(left)
        return None if parts.log or parts.missing else self.pieces(parts.lake)

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Returns per partition the first offset whose row is not older than the time. A partition
        without such a row is left out."""
        found: Offsets = {}
        ascending = sorted(range(len(self._files)), key=lambda each: self._first_time(each))
        for number in ascending:
            file, low, high = self._files[number], self._low[number], self._high[number]
            first, last = file.times.get(TIME, (None, None))
            mine = [int(p) for p in np.flatnonzero(low < high)]
            better = [p for p in mine if low[p] < found.get(p, OFFSET_MAX)]
            if not better or (last is not None and last < timestamp_us):
                continue
            if first is not None and first >= timestamp_us:
                found |= {p: int(low[p]) for p in better}
                continue
            with parquet_file(self.path / file.path) as opened:
                rows = opened.read([*KEYS, TIME], use_threads=False)
            part, offset, time = (
                np.asarray(rows.column(name).cast(pa.int64())) for name in (*KEYS, TIME)
            )
            for p in better:
                some = offset[(part == p) & (time >= timestamp_us) & (offset < high[p])]
                if len(some):
                    found[p] = min(int(some.min()), found.get(p, OFFSET_MAX))
        return {p: at for p, at in found.items() if at < self.bounds[p].end}

    def pieces(self, ranges: Sequence[OffsetRange]) -> list[LakePiece]:
        """Returns what to read for ranges inside `bounds`, in an order in which the offsets of each
        partition ascend."""
        by_partition: dict[int, list[OffsetRange]] = {}
        for item in sorted(ranges, key=lambda each: each.start):
            by_partition.setdefault(item.partition, []).append(item)
        found: list[LakePiece] = []
        # A partition has several ranges if the lake lacks something between them.
        for turn in range(max(map(len, by_partition.values()), default=0)):
            start, end = np.zeros((2, self._low.shape[1]), np.int64)
            for partition, items in by_partition.items():
                if turn < len(items):
                    start[partition], end[partition] = items[turn].start, items[turn].end
            low, high = np.maximum(self._low, start), np.minimum(self._high, end)
            for number in np.flatnonzero((low < high).any(axis=1)):
                wanted = np.flatnonzero(low[number] < high[number])
                own = {int(p): (int(low[number, p]), int(high[number, p])) for p in wanted}
                found.append(LakePiece(self._files[number], own))
        return _in_order(found)

    def is_whole(self, piece: LakePiece) -> bool:
        """Returns whether a piece has all rows of its file."""
        return piece.ranges == {
            p: (low, high)
            for p, (low, high) in self._offsets[piece.file.path].items()
            if low < high
        }

    def _first_time(self, number: int) -> int:
        return self._files[number].times.get(TIME, (0, 0))[0]

    def _learn_offsets(self, files: Sequence[File]) -> None:
        """Reads the offsets of files that do not note them, those of an older version."""
        before = self._offsets
        self._offsets = {file.path: file.offsets or before.get(file.path, {}) for file in files}
        unknown = [file for file in files if file.rows and not self._offsets[file.path]]
        calls = [partial(offsets_of_rows, self.path / file.path) for file in unknown]
        read = at_once(self.path, calls)
        self._offsets |= {file.path: found for file, found in zip(unknown, read, strict=True)}


def _cut(commit: Commit, file: File, partition: int) -> int:
    """Returns the offset from which the rows of a file are of an earlier generation of the log."""
    later = (each.offsets for each in commit.restored if file.version < each.version)
    return min((each.get(str(partition), OFFSET_MAX) for each in later), default=OFFSET_MAX)


def _in_order(pieces: Sequence[LakePiece]) -> list[LakePiece]:
    """Orders pieces by time, and marks those whose offsets interleave."""
    ordered = sorted(pieces, key=lambda each: (each.file.times.get(TIME, (0, 0)), each.file.path))
    groups: list[list[LakePiece]] = []
    reached: Offsets = {}
    for piece in ordered:
        together = [piece]
        if any(start < reached.get(p, 0) for p, (start, _) in piece.ranges.items()):
            first = next(n for n, group in enumerate(groups) if _ends_behind(group, piece))
            together = [*(each for group in groups[first:] for each in group), piece]
            del groups[first:]
        groups.append(together)
        for p, (_, end) in piece.ranges.items():
            reached[p] = max(reached.get(p, 0), end)
    return [
        LakePiece(each.file, each.ranges, number if len(group) > 1 else 0)
        for number, group in enumerate(groups, 1)
        for each in group
    ]


def _ends_behind(group: Sequence[LakePiece], piece: LakePiece) -> bool:
    """Returns whether a partition of a group ends behind the begin of a piece."""
    return any(
        other.ranges.get(p, (0, 0))[1] > start
        for other in group
        for p, (start, _) in piece.ranges.items()
    )


@dataclass(frozen=True)
class LakeRows:
    """Some rows of a lake, with the columns that were asked for."""

    rows: pa.RecordBatch
    partition: Integers
    ends: Offsets
    """Per partition of the rows the offset after the last one."""

    def messages(self) -> Iterator[tuple[int, int, list[LogMessage]]]:
        """Yields the messages by partition, with the offset at which they end. Needs all
        columns."""
        for p, end in self.ends.items():
            mine = self.rows.filter(pa.array(self.partition == p))
            columns = {name: mine.column(name).to_pylist() for name in mine.schema.names}
            columns["timestamp_us"] = mine.column(TIME).cast(pa.int64()).to_pylist()
            columns["encoded_properties"] = columns["properties"]
            columns["producer"] = [
                None if each is None else (each["id"], each["epoch"], each["sequence"])
                for each in columns["producer"]
            ]
            fields = [columns[name] for name in LogMessage.__struct_fields__]
            yield p, end, list(map(LogMessage, *fields))


def groups_of(pieces: Iterable[LakePiece]) -> Iterator[list[LakePiece]]:
    """Yields the pieces that are read together: one, or several whose offsets interleave."""
    for _, group in groupby(enumerate(pieces), lambda each: each[1].apart or -1 - each[0]):
        yield [piece for _, piece in group]


class RowGroupCache:
    """The row groups and the footers of files that were used last, up to a number of bytes.

    The files of a lake never change. A lake that was removed and made again has the same names: the
    owner of a cache begins with another one when the lake has failed.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        # By path, number of the row group and columns, the one that was used last at the end.
        self._kept: dict[tuple[object, ...], tuple[Any, int]] = {}

    def get(self, key: tuple[object, ...], load: Callable[[], tuple[Any, int]]) -> Any:
        """Returns what has this key. `load`: reads it, and returns it with its bytes."""
        found = self._kept.pop(key, None)
        if found is None:
            found = load()
            self._bytes += found[1]
        self._kept[key] = found
        while self._bytes > self._bytes_max:
            self._bytes -= self._kept.pop(next(iter(self._kept)))[1]
        return found[0]


def read_lake(
    place: str,
    pieces: Sequence[LakePiece],
    schema: pa.Schema,
    topics: TopicFilter,
    cache: RowGroupCache | None = None,
) -> Iterator[LakeRows]:
    """Reads pieces in their order. Raises LakeError for a file that is damaged or missing."""
    reader = _PieceReader(location(place), schema, topics, cache or RowGroupCache(0))
    for group in groups_of(pieces):
        for rows, partitions, offsets in reader.read_group(group):
            yield from _sliced(rows, np.asarray(partitions), np.asarray(offsets))


def _sliced(rows: pa.Table, partitions: Integers, offsets: Integers) -> Iterator[LakeRows]:
    start = 0
    for batch in rows.combine_chunks().to_batches(max_chunksize=ROWS_MAX):
        part = partitions[start : start + batch.num_rows]
        ends = np.zeros(int(part.max()) + 1, np.int64)
        np.maximum.at(ends, part, offsets[start : start + batch.num_rows] + 1)
        start += batch.num_rows
        yield LakeRows(batch, part, {int(p): int(ends[p]) for p in np.flatnonzero(ends)})


_Rows = tuple[pa.Table, pa.ChunkedArray, pa.ChunkedArray]
"""Rows, and the partition and the offset of each."""


@dataclass(frozen=True)
class _PieceReader:
    """Reads some columns of some topics in the pieces of a lake."""

    lake: LakePath
    schema: pa.Schema
    topics: TopicFilter
    cache: RowGroupCache

    def read_group(self, group: Sequence[LakePiece]) -> Iterator[_Rows]:
        """Yields the rows of a piece, or sorts those of several whose offsets interleave."""
        tables = (each for piece in group for each in self._read_piece(piece))
        if len(group) == 1:
            yield from tables
            return
        keyed = [rows.append_column("_p", p).append_column("_o", o) for rows, p, o in tables]
        if keyed:
            joined = pa.concat_tables(keyed).sort_by([("_p", "ascending"), ("_o", "ascending")])
            yield joined.select(self.schema.names), joined["_p"], joined["_o"]

    def _read_piece(self, piece: LakePiece, turns: int = 0) -> Iterator[_Rows]:
        """Yields the rows of a piece by row groups, also if its file is replaced meanwhile."""
        left = dict(piece.ranges)
        try:
            yield from self._read_file(piece.file, left)
            return
        except FileNotFoundError:
            if turns == REPLACED_MAX:
                raise LakeError(
                    f"{self.lake / piece.file.path} is missing, and each file that replaced it: do"
                    " runs of the lake replace them without a pause? Begin the read again"
                ) from None
        for each in _replacements(self.lake, piece.file, left):
            yield from self._read_piece(each, turns + 1)

    def _read_file(self, file: File, left: dict[int, tuple[int, int]]) -> Iterator[_Rows]:
        """Yields the rows of a file in the ranges `left`, by row groups, and moves these behind
        them.

        With topics, the columns of the keys are read first, and the others only where a row is
        wanted.
        """
        count = max(left, default=0) + 1
        start, end, reached = np.zeros((3, count), np.int64)
        for p, (first, stop) in left.items():
            start[p], end[p] = first, stop
        keys = [*KEYS, "topic"] if self.topics else KEYS
        with ExitStack() as stack:
            opened = _OpenedFile(self.lake, file, stack, self.cache)
            footer = opened.footer()
            there = set(footer.schema.to_arrow_schema().names)
            more = [name for name in self.schema.names if name not in keys and name in there]
            if not self.topics:
                # Nearly all rows of a row group are wanted, and one read of all columns costs less.
                keys, more = [*keys, *more], []
            for number in range(footer.num_row_groups):
                if not _may_have(footer.row_group(number), start, end):
                    continue
                rows = opened.read(number, keys)
                part = np.asarray(rows.column("partition"))
                offset = np.asarray(rows.column("offset"))
                known = part < count
                own = np.where(known, part, 0)
                mask = known & (offset >= start[own]) & (offset < end[own])
                if not mask.any():
                    continue
                own, at = own[mask], offset[mask]
                if not (at >= reached[own]).all():
                    raise LakeError(
                        f"{self.lake / file.path} has the offsets of a partition out of order, or"
                        " twice: restore it, or backfill its day"
                    )
                np.maximum.at(reached, own, at + 1)
                if self.topics:
                    hits = topic_mask(self.topics, rows.column("topic").combine_chunks())
                    mask &= np.asarray(hits)
                if mask.any():
                    if more:
                        rest = opened.read(number, more)
                        for name in rest.column_names:
                            rows = rows.append_column(name, rest.column(name))
                    if not mask.all():
                        rows = rows.filter(pa.array(mask))
                    yield _typed(rows, self.schema), rows.column("partition"), rows.column("offset")
                for p in map(int, np.flatnonzero(reached)):
                    left[p] = (int(reached[p]), left[p][1])


class _OpenedFile:
    """A file of a lake, which is opened when its cache lacks something."""

    def __init__(self, lake: LakePath, file: File, stack: ExitStack, cache: RowGroupCache) -> None:
        """`stack`: closes it."""
        self._lake = lake
        self._file = file
        self._stack = stack
        self._cache = cache
        self._opened: pq.ParquetFile | None = None

    def footer(self) -> pq.FileMetaData:
        """Returns what the end of the file says of its row groups."""

        def load() -> tuple[pq.FileMetaData, int]:
            found = self._open().metadata
            return found, found.serialized_size

        return self._cache.get((self._file.path,), load)

    def read(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Returns some columns of a row group."""

        def load() -> tuple[pa.Table, int]:
            found = self._open().read_row_group(number, columns, use_threads=False)
            return found, found.nbytes

        return self._cache.get((self._file.path, number, *columns), load)

    def _open(self) -> pq.ParquetFile:
        """Opens it at its place. A commit that was just recorded has it where it was staged."""
        if self._opened is None:
            try:
                # Without its size the store would be asked for it first.
                place, size = self._lake / self._file.path, self._file.bytes
                found = parquet_file(place, size, pre_buffer=True)
                self._opened = self._stack.enter_context(found)
            except FileNotFoundError:
                if not self._file.staged:
                    raise
                found = parquet_file(self._lake / self._file.staged, pre_buffer=True)
                self._opened = self._stack.enter_context(found)
        return self._opened


def _replacements(
    lake: LakePath, lost: File, left: Mapping[int, tuple[int, int]]
) -> list[LakePiece]:
    """Returns what is left of a file that was removed, in the files that replaced it.

    A compaction and a backfill keep the day of each row and its offset. Of a day, no two files have
    the same offsets, and those of a later commit are behind. Raises LakeError if no file has
    replaced it.
    """
    log = CommitLog(lake, RECORDS)
    last = log.last()
    live = log.live(last.version) if last is not None else []
    if last is None or any(each.path == lost.path for each in live):
        if (lake / lost.path).exists():
            return [LakePiece(lost, dict(left))]  # It was just moved to its place.
        days = ", ".join(f"{name}={value}" for name, value in lost.partition.items())
        raise LakeError(f"{lake / lost.path} is missing: restore it, or backfill {days}")
    found = []
    for file in live:
        if file.partition != lost.partition or not file.rows:
            continue
        own = {}
        for p, (low, high) in (file.offsets or offsets_of_rows(lake / file.path)).items():
            start, end = left.get(p, (0, 0))
            low, high = max(low, start), min(high, end, _cut(last, file, p))
            if low < high:
                own[p] = (low, high)
        if own:
            found.append(LakePiece(file, own))
    return found


def _may_have(group: Any, start: Integers, end: Integers) -> bool:
    """Returns whether the least and greatest offset of a row group leave room for wanted rows."""
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == "offset" and column.is_stats_set:
            least, greatest = column.statistics.min, column.statistics.max
            return bool(np.any((start < end) & (end > least) & (start <= greatest)))
    return True


def _typed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns the columns of a schema. One that the file lacks is null."""
    return pa.table(
        [
            rows.column(field.name).cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ],
        schema=schema,
    )
