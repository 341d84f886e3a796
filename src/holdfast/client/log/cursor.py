"""Reads the log once, as messages, lists or Arrow batches, and tracks the position behind them.

Invariant: each matching message below `position` was handed out, once and in order within its
partition, or its loss was reported; none at or above it was. So a program that stores its results
and `position` in one transaction has each message exactly once, wherever it dies.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.client.log.access import Bounds, ReadableLog
from holdfast.client.log.errors import (
    LogClosed,
    LogGap,
    LogGapError,
    LogOptionError,
    LogRestored,
    LogRestoredError,
    LogTruncatedError,
)
from holdfast.client.log.groups import GroupOffsets
from holdfast.client.log.messages import LogMessage, MessageDecoder
from holdfast.client.log.position import EARLIEST, LATEST, Position, ResolvedPlace
from holdfast.client.log.reading.offsets import (
    DataLossError,
    LogGeneration,
    OffsetRange,
    Offsets,
    RestoredError,
    ranges_to_read,
)
from holdfast.client.log.reading.scan import Coverage
from holdfast.log.columns.chunk import Chunk
from holdfast.log.reading.topic_filter import TopicFilter

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.client.log.lake.records import LakeRows

MESSAGES_MAX: Final = 10_000
"""The most messages of one list, unless the program asks for fewer."""
WAIT_S: Final = 5.0
"""The longest wait at one server for new records. Then all servers are asked, because that one may
have lost the others."""
PACE_S: Final = 0.01
"""The least seconds between two reads at the end of the log. Records that arrive meanwhile are read
together."""
NEVER: Final = 1 << 62
"""An end that no partition reaches."""

S = TypeVar("S")
OnGap = Callable[[LogGap], object]
_Part = tuple[int, int, list[LogMessage]]
"""A partition, the offset at which a batch of it ends, and the messages of the batch."""
_CHUNK_END: Final[_Part] = (-1, 0, [])
_IDLE: Final[_Part] = (-2, 0, [])
_NOTHING: Final = Chunk(b"")
"""The chunk of a wait in which nothing came."""


@dataclass(frozen=True)
class LogSelection:
    """The checked options of a cursor."""

    topics: TopicFilter
    start: ResolvedPlace
    end: ResolvedPlace | None
    """None: the end of the log when the read begins, or no end with `follow`."""
    follow: bool
    partitions: frozenset[int] | None
    """None: all of them."""
    idle_s: float | None


class LogCursor:
    """One read of the log, made by `LogClient.read`. One thread at a time uses it, and any thread
    may close it, which ends the iteration.

    Iterate over it for messages, over `batches` for lists of messages, or over `arrow` for Arrow
    batches.
    """

    def __init__(
        self,
        access: ReadableLog,
        selection: LogSelection,
        group: GroupOffsets | None = None,
        on_gap: OnGap | None = None,
    ) -> None:
        self._access = access
        self._selection = selection
        self._group = group
        self._on_gap = on_gap
        self._bounds: Bounds = access.bounds()
        self._generation = access.generation()
        chosen = selection.topics.partitions(max(self._bounds, default=-1) + 1)
        if selection.partitions is not None:
            unknown = sorted(selection.partitions - set(self._bounds))
            if unknown:
                raise LogOptionError(f"partitions has {unknown}; the log has {len(self._bounds)}")
            chosen &= selection.partitions
        self._partitions = sorted(chosen & set(self._bounds))
        self._next = self._resolve(selection.start)
        if group is not None:
            self._next |= {p: at for p, at in group.load().items() if p in self._next}
        self._end = self._resolve(LATEST if selection.end is None else selection.end)
        self._check_end(self._end)
        self._decoder = MessageDecoder(selection.topics)
        self._chunks = self._read_chunks()
        self._parts = self._read_parts()
        # The present batch of the log, and the number of its messages that were handed out.
        self._part: _Part = _CHUNK_END
        self._taken = 0
        self._reached: Offsets = {}
        # The partitions of which messages were handed out since the last commit.
        self._processed: set[int] = set()
        self._form = ""
        self._columns: list[str] | None = None
        self._failure: Exception | None = None
        self._is_busy = False
        self._is_closed = False

    def __enter__(self) -> "LogCursor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the read, from any thread, and closes its connections."""
        self._is_closed = True
        self._access.interrupt()
        if not self._is_busy:
            self._access.close()

    @property
    def position(self) -> Position:
        """The position behind what was handed out so far."""
        found = dict(self._next)
        partition, end, messages = self._part
        if partition >= 0 and self._taken == len(messages):
            found[partition] = end
        elif partition >= 0 and self._taken:
            found[partition] = messages[self._taken - 1].offset + 1
        return Position(found, self._generation.number)

    def commit(self, position: Position | None = None) -> None:
        """Commits a position, by default `position`, for the group of this read. When it returns,
        the broker has it as durably as messages. Everything below it must be processed. Raises
        AdminError if no server confirms it."""
        if self._group is None:
            raise LogOptionError("commit needs a read with a group")
        self._processed.add(self._part[0])
        position = position or self.position
        self._group.commit(position.offsets, self._processed, position.generation)
        self._processed.clear()

    # Messages

    def __iter__(self) -> "LogCursor":
        return self

    def __next__(self) -> LogMessage:
        self._use("messages")
        while self._taken >= len(self._part[2]):
            if not self._advance():
                raise StopIteration
        self._taken += 1
        return self._part[2][self._taken - 1]

    def batches(self, messages_max: int = MESSAGES_MAX) -> Iterator[list[LogMessage]]:
        """Yields lists of at most `messages_max` messages, as soon as there are any. With `idle_s`,
        a list is empty when nothing came for that time."""
        if messages_max < 1:
            raise LogOptionError(f"messages_max is {messages_max}; allowed: 1 or more")
        self._use("messages")
        while True:
            found: list[LogMessage] = []
            while len(found) < messages_max:
                _, _, messages = self._part
                if self._taken < len(messages):
                    until = self._taken + messages_max - len(found)
                    found += messages[self._taken : until]
                    self._taken = min(until, len(messages))
                elif not self._advance():
                    if found:
                        yield found
                    return
                elif self._part is _IDLE or (found and self._part is _CHUNK_END):
                    break
            yield found

    def _advance(self) -> bool:
        """Goes on to the next batch of the log, when the present one is handed out. False: the read
        has ended."""
        self._next = dict(self.position.offsets)
        if self._part[2]:
            self._processed.add(self._part[0])
        self._part, self._taken = _CHUNK_END, 0
        part = self._step(self._parts)
        if part is None:
            return False
        self._part = part
        return True

    def _read_parts(self) -> Iterator[_Part]:
        for chunk in self._chunks:
            if chunk is _NOTHING:
                yield _IDLE
                continue
            if isinstance(chunk, Chunk):
                yield from self._decoder.messages(chunk)
            else:
                yield from chunk.messages()
            yield _CHUNK_END

    # Arrow

    def arrow(self, columns: str | None = None) -> "Iterator[pa.RecordBatch]":
        """Yields Arrow batches of the columns, by default all: some names separated by commas, in
        that order. The columns are those of the Spark source (docs/source.md). Needs pyarrow."""
        from holdfast.log.columns.decode import decode

        schema = _schema(columns)
        self._use("Arrow batches")
        self._columns = schema.names
        while (chunk := self._step(self._chunks)) is not None:
            if isinstance(chunk, Chunk):
                batch = decode(chunk, schema, self._selection.topics)
            else:
                batch = chunk.rows
            if chunk is not _NOTHING:
                self._next |= self._reached
            if batch.num_rows or chunk is _NOTHING:
                self._processed |= self._reached.keys()
                yield batch

    def arrow_reader(self, columns: str | None = None) -> "pa.RecordBatchReader":
        """The read as a stream that DuckDB, Polars and pyarrow take, with bounded memory."""
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(_schema(columns), self.arrow(columns))

    def to_arrow(self, columns: str | None = None) -> "pa.Table":
        """The rest of the read as one table in memory."""
        if self._selection.follow:
            raise LogOptionError("to_arrow needs a read with an end, not follow")
        return self.arrow_reader(columns).read_all()

    # The read

    def _use(self, form: str) -> None:
        if self._form not in ("", form):
            raise LogOptionError(f"this cursor gives {self._form}: make another one for {form}")
        self._form = form

    def _step(self, source: Iterator[S]) -> S | None:
        """The next item, or None at the end. An error ends the read: later calls raise it again."""
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            return None
        self._is_busy = True
        try:
            return next(source, None)
        except LogClosed:
            return None
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._is_busy = False
            if self._is_closed:
                self._access.close()

    def _read_chunks(self) -> "Iterator[Chunk | LakeRows]":
        """Yields the wanted chunks. `_reached` is the position behind each; when the next one is
        requested, `_next` is there."""
        selection, access = self._selection, self._access
        idle_since = time.monotonic()
        while True:
            ranges = self._ranges()
            coverage = Coverage(ranges, fail_on_data_loss=self._on_gap is None)
            try:
                for chunk in access.read(ranges, coverage, selection.topics, self._columns):
                    self._report_lost(coverage)
                    self._reached = dict(coverage.next)
                    yield chunk
                    idle_since = time.monotonic()
            except DataLossError as error:
                if error.lost is None:
                    raise
                raise LogGapError(_gap(error.lost)) from None
            self._report_lost(coverage)
            # Of topics that nothing is left of, there is no chunk.
            self._next |= coverage.next
            if not selection.follow:
                return
            if not self._wait(idle_since) and selection.idle_s is not None:
                yield _NOTHING
                idle_since = time.monotonic()

    def _ranges(self) -> list[OffsetRange]:
        """The ranges to read now. Reports what retention has removed before them."""
        ends = self._end
        if self._selection.follow:
            ends = {p: self._bounds[p].end for p in self._partitions}
        for partition in self._partitions:
            bound, start = self._bounds[partition], self._next[partition]
            if start > bound.end:
                raise LogTruncatedError(partition, start, bound.end)
            if start < min(bound.first, ends[partition]):
                removed = LogGap(partition, start, min(bound.first, ends[partition]))
                if self._on_gap is None:
                    raise LogGapError(removed)
                self._on_gap(removed)
                self._next[partition] = removed.end
        return ranges_to_read(self._next, ends, self._bounds)

    def _wait(self, idle_since: float) -> bool:
        """Waits until the log goes on. False: nothing came within `idle_s`."""
        idle_s = self._selection.idle_s
        began = time.monotonic()
        while True:
            self._access.pause(max(0.0, began + PACE_S - time.monotonic()))
            left_s = WAIT_S
            if idle_s is not None:
                left_s = min(left_s, idle_since + idle_s - time.monotonic())
                if left_s <= 0:
                    return False
            # Other partitions may grow as they like.
            ends = {p: self._next.get(p, NEVER) for p in range(len(self._bounds))}
            found = self._access.wait(ends, left_s)
            if found is None:
                # The server had nothing for a long time, or is away. Others may know more.
                found = self._access.bounds({p: bound.end for p, bound in self._bounds.items()})
            self._bounds = found
            self._note_generation()
            if any(self._bounds[p].end > self._next[p] for p in self._partitions):
                return True

    def _note_generation(self) -> None:
        """Carries the position over to the present generation of the log, if it was restored."""
        before, self._generation = self._generation, self._access.generation()
        self._next = self._carried(self._next, before.number)

    def _carried(self, position: Offsets, before: int | None) -> Offsets:
        """A position of generation `before` in the log as it is. Raises LogRestoredError, or
        reports what the log has lost of it to `on_gap`."""
        now: LogGeneration = self._generation
        moved, lost = now.carry(position, before, self._bounds)
        for item in lost:
            gap = LogRestored(item.partition, item.start, item.end)
            if self._on_gap is None:
                advice = "Pass on_gap to read() to go on there, or begin at another start"
                text = str(RestoredError(before or 0, now.number or 0, lost, advice))
                raise LogRestoredError(text, gap)
            self._on_gap(gap)
        return moved

    def _report_lost(self, coverage: Coverage) -> None:
        """Reports the gaps that a read has found, before the messages behind them."""
        lost, coverage.lost = coverage.lost, []
        if self._on_gap is not None:
            for item in lost:
                self._on_gap(_gap(item))

    def _resolve(self, place: ResolvedPlace) -> Offsets:
        """The offset of a place in each partition."""
        bounds = {p: self._bounds[p] for p in self._partitions}
        if isinstance(place, Position):
            unknown = sorted(set(place.offsets) - set(self._bounds))
            if unknown:
                raise LogOptionError(
                    f"the position has partition {unknown[0]}, the log has 0 to "
                    f"{len(self._bounds) - 1}"
                )
            given = {p: at for p, at in place.offsets.items() if p in bounds}
            given = self._carried(given, place.generation)
            return {p: given.get(p, bound.first) for p, bound in bounds.items()}
        if isinstance(place, int):
            found = self._access.offsets_at(place)
            return {p: min(max(found.get(p, b.first), b.first), b.end) for p, b in bounds.items()}
        return {p: b.first if place == EARLIEST else b.end for p, b in bounds.items()}

    def _check_end(self, end: Offsets) -> None:
        for partition, offset in end.items():
            if offset > self._bounds[partition].end:
                raise LogTruncatedError(partition, offset, self._bounds[partition].end)


def _gap(item: OffsetRange) -> LogGap:
    return LogGap(item.partition, item.start, item.end)


def _schema(columns: str | None) -> "pa.Schema":
    """The Arrow schema of some columns. Raises LogOptionError."""
    from holdfast.log.columns.decode import SCHEMA, select

    names = SCHEMA.names if columns is None else [each.strip() for each in columns.split(",")]
    if set(names) - set(SCHEMA.names) or len(set(names)) < len(names):
        raise LogOptionError(
            f"columns is {columns!r}; allowed: some of {', '.join(SCHEMA.names)}, each once"
        )
    return select(names)
