"""Reads a lake and the log behind it as one log."""

from collections.abc import Iterator, Mapping, Sequence

from holdfast.client.log.access import Bounds, ReadableLog
from holdfast.client.log.errors import LogClosed, LogOptionError
from holdfast.client.log.lake.records import LakePiece, LakeRecords, LakeRows, read_lake
from holdfast.client.log.reading.offsets import (
    DataLossError,
    LogGeneration,
    OffsetRange,
    Offsets,
)
from holdfast.client.log.reading.scan import Coverage
from holdfast.client.log.reading.seam import IN_NEITHER, Seam, joined_offsets
from holdfast.log.columns.chunk import Chunk
from holdfast.log.columns.decode import SCHEMA, select
from holdfast.log.reading.topic_filter import TopicFilter


class LakeLog:
    """A ReadableLog whose older part is in a lake, or all of it."""

    def __init__(
        self, place: str, log: ReadableLog | None, topics: TopicFilter, *, is_strict: bool
    ) -> None:
        """`is_strict`: a lake of an earlier generation of the log is refused. Raises LakeError."""
        self._place = place
        self.lake = LakeRecords(place)
        self._log = log
        self._topics = topics
        self._is_strict = is_strict
        self.seam = Seam({}, {})
        self._is_closed = False

    def bounds(self, at_least: Mapping[int, int] | None = None) -> Bounds:
        """See ReadableLog. It pins the newest version of the lake. Raises LakeError."""
        self.lake.refresh()
        self.lake.check_topics(self._topics)
        seen = {p: bound.end for p, bound in self.lake.bounds.items()}
        seen |= {p: max(end, seen.get(p, 0)) for p, end in (at_least or {}).items()}
        return self._joined(self._log.bounds(seen) if self._log is not None else {})

    def _joined(self, log: Bounds) -> Bounds:
        self.seam = self.lake.seam(
            log, self.identity(), self.generation(), fail_on_data_loss=self._is_strict
        )
        return self.seam.bounds()

    def identity(self) -> str:
        """See ReadableLog."""
        return (self._log or self.lake).identity()

    def generation(self) -> LogGeneration:
        """See ReadableLog."""
        return self._log.generation() if self._log is not None else self.lake.generation

    def partitions(self) -> int:
        """See ReadableLog."""
        return self._log.partitions() if self._log is not None else self.lake.partitions

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """See ReadableLog."""
        if self._log is not None:
            log = self._log.offsets_at(timestamp_us)
        else:
            log = {p: bound.end for p, bound in self.lake.bounds.items()}
        return joined_offsets(self.seam, self.lake.offsets_at(timestamp_us), log)

    def read(
        self,
        ranges: Sequence[OffsetRange],
        coverage: Coverage,
        topics: TopicFilter,
        columns: Sequence[str] | None = None,
    ) -> Iterator[Chunk | LakeRows]:
        """See ReadableLog. First come the rows of the lake, then the chunks of the log."""
        names = SCHEMA.names if columns is None else columns
        left = list(ranges)
        while left:
            parts = self.seam.divide(left)
            for item in parts.missing:
                coverage.note_missing(item, IN_NEITHER)
            yield from self._rows(self.lake.pieces(parts.lake), coverage, topics, names)
            for item in (*parts.lake, *parts.missing):
                coverage.next[item.partition] = max(coverage.next[item.partition], item.end)
            left = parts.log
            if not parts.lake:
                break
            # The lake may have grown meanwhile, and retention have removed what it has read.
            self.bounds()
        if not left or self._log is None:
            return
        try:
            yield from self._log.read(left, coverage, topics)
        except DataLossError:
            rest = self.lake.rest_of(coverage)
            if rest is None:
                raise
            yield from self._rows(rest, coverage, topics, names)
            coverage.next |= coverage.end

    def _rows(
        self,
        pieces: Sequence[LakePiece],
        coverage: Coverage,
        topics: TopicFilter,
        names: Sequence[str],
    ) -> Iterator[LakeRows]:
        for rows in read_lake(self._place, pieces, select(names), topics):
            if self._is_closed:
                raise LogClosed("the cursor was closed")
            coverage.next |= rows.ends
            yield rows

    def wait(self, ends: Mapping[int, int], timeout_s: float) -> Bounds | None:
        """See ReadableLog. Raises LogOptionError without a broker."""
        if self._log is None:
            raise LogOptionError("follow needs the admin port of a broker, not a lake alone")
        found = self._log.wait(ends, timeout_s)
        return None if found is None else self._joined(found)

    def pause(self, seconds: float) -> None:
        """See ReadableLog."""
        if self._log is not None:
            self._log.pause(seconds)

    def close(self) -> None:
        """See ReadableLog."""
        if self._log is not None:
            self._log.close()

    def interrupt(self) -> None:
        """See ReadableLog."""
        self._is_closed = True
        if self._log is not None:
            self._log.interrupt()
