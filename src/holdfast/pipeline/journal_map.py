"""A map of a data directory's journal, for the driver: what it holds, and where.

Per segment, every MARK_BYTES, it keeps how far each partition has come there, so that any range of
offsets is found without reading the journal again. Only reads, takes no lock.

What counts of a live directory is every whole, valid batch. The journal has no mark of what the
node has *committed* (fsynced and promised): that is known over the network only (reader_http.py).
In its place the driver makes new records durable itself before it hands out their offsets, so
nothing that Spark has read is lost in a power cut. What stays possible is that Spark reads a record
a moment before its publisher is answered, or one whose publisher never is.
"""

import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np

from holdfast.log.record import HEAD_FIELDS, HEADER, HEADER_BYTES, Batch, CorruptBatch
from holdfast.pipeline.offsets import Bounds, OffsetRange, Offsets
from holdfast.pipeline.reader_path import CHUNK_BYTES, Piece, find_batch, is_batch
from holdfast.pipeline.scan import header_damage

WINDOW_BYTES: Final = 64 << 10
"""Read at a time where only batch headers matter."""
MARK_BYTES: Final = 1 << 20
PARTITIONS_MAX: Final = 65_536
BATCH_SPAN_US: Final = 0x1_0000_0000
"""No record is later than this after the first of its batch (a head keeps 32 bits)."""
NO_OFFSET: Final = -1
"""In place of an offset: no batch of the partition so far."""


class NotALogError(ValueError):
    """The path is no data directory, or one this program cannot read. The text says why."""


@dataclass
class Segment:
    """What is known of one segment file. An `ends` vector holds per partition the offset after its
    last batch, counted from the beginning of the journal."""

    path: Path
    position: int = 0
    """Everything before it is mapped: whole batches, and damage that was passed."""
    first: dict[int, int] = field(default_factory=dict)
    """The first offset of each partition that has records in here."""
    time_us_max: int = 0
    """The latest base timestamp in here."""
    mark_positions: list[int] = field(default_factory=list)
    mark_ends: "list[array[int]]" = field(default_factory=list)
    """`ends` before the batch at the mark."""
    mark_times_us: list[int] = field(default_factory=list)
    """`time_us_max` before the batch at the mark."""
    marked: int = 0
    """Position of the last mark."""

    def mark(self, position: int, ends: "array[int]") -> None:
        self.marked = position
        self.mark_positions.append(position)
        self.mark_ends.append(ends[:])
        self.mark_times_us.append(self.time_us_max)

    def forget(self) -> None:
        """Back to knowing nothing."""
        self.position = 0
        self.time_us_max = 0
        self.marked = 0
        self.first.clear()
        self.mark_positions.clear()
        self.mark_ends.clear()
        self.mark_times_us.clear()


class JournalMap:
    """The map; `refresh` brings it up to date."""

    def __init__(self, directory: str) -> None:
        """Reads the manifest. Raises NotALogError."""
        self.journal = Path(directory) / "journal"
        self.partitions = _partition_count(Path(directory))
        self._segments: list[Segment] = []
        self._ends = array("q", [NO_OFFSET] * self.partitions)
        self._complete = True
        """The journal still has its very first segment: nothing was ever removed."""

    def refresh(self) -> None:
        """Map what was added and forget what was removed since the last call."""
        names = sorted(name for name in os.listdir(self.journal) if name.endswith(".log"))
        known = {segment.path.name: segment for segment in self._segments}
        newest_known = self._segments[-1].path.name if self._segments else ""
        mapped = []
        for name in names:
            segment = known.get(name) or Segment(self.journal / name)
            if name >= newest_known:
                try:
                    self._map(segment, last=name == names[-1])
                except FileNotFoundError:
                    continue  # retention was faster
            mapped.append(segment)
        self._segments = mapped
        self._complete = not names or int(names[0].removesuffix(".log")) == 0

    def bounds(self) -> dict[int, Bounds]:
        """What each partition has. A partition is left out while nothing is known of it: it has
        no record in the segments that retention has left."""
        result: dict[int, Bounds] = {}
        for segment in self._segments:
            for partition, first in segment.first.items():
                if partition not in result:
                    result[partition] = Bounds(first, self._ends[partition])
        if self._complete:
            for partition in range(self.partitions):
                result.setdefault(partition, Bounds(0, 0))
        return result

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Per partition the first offset whose record is not older than the time; the end of the
        partition if there is none."""
        found: Offsets = {}
        earliest_us = timestamp_us - BATCH_SPAN_US
        bounds = self.bounds()
        for segment in self._segments:
            if segment.time_us_max < earliest_us:
                continue
            mark = max(0, bisect_left(segment.mark_times_us, earliest_us) - 1)
            start = segment.mark_positions[mark]
            for batch in _batches(Piece(str(segment.path), start, segment.position)):
                if batch.partition not in found:
                    index = _first_index_at(batch, timestamp_us)
                    if index < batch.count:
                        found[batch.partition] = batch.base_offset + index
                        if len(found) == len(bounds):
                            return found
        return {p: found.get(p, bound.end) for p, bound in bounds.items()}

    def pieces(self, ranges: Sequence[OffsetRange]) -> list[Piece]:
        """The stretches of the journal, in order, that hold every record of the ranges."""
        result: list[Piece] = []
        after = self._ends
        for segment in reversed(self._segments):
            if not segment.mark_ends:
                continue
            before = segment.mark_ends[0]
            if any(
                after[item.partition] > item.start and before[item.partition] < item.end
                for item in ranges
            ):
                start = segment.mark_positions[_last_mark_before(segment.mark_ends, ranges)]
                mark = _first_mark_after(segment.mark_ends, ranges)
                end = segment.position if mark is None else segment.mark_positions[mark]
                if start < end:
                    result.append(Piece(str(segment.path), start, end))
            after = before
        result.reverse()
        return result

    def _map(self, segment: Segment, *, last: bool) -> None:
        """Map the batches from `segment.position` on.

        In the last segment every batch is verified, because an unfinished write may end it. In
        the others headers are enough: a task verifies what it reads.
        """
        descriptor = os.open(segment.path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size < segment.position:
                # The file was cut below what was mapped of it: start over with it.
                if segment.mark_ends:
                    self._ends = segment.mark_ends[0]
                segment.forget()
            start = segment.position
            while True:
                self._map_batches(descriptor, segment, size, checked=last)
                stop = segment.position
                if not any(os.pread(descriptor, HEADER_BYTES, stop)):
                    break  # the end, or space that was allocated in advance
                following = find_batch(descriptor, stop + 8, size)
                if following is None:
                    break
                # Bytes are written in order, so whatever is no batch here is damage, now that a
                # later batch is there; unless it was just being written at the first look.
                segment.position = stop if is_batch(descriptor, stop, size) else following
            if segment.position > start:
                _make_durable(descriptor)
        finally:
            os.close(descriptor)

    def _map_batches(self, descriptor: int, segment: Segment, size: int, *, checked: bool) -> None:
        """Map up to the first batch that is not valid or goes beyond `size`."""
        usual = CHUNK_BYTES if checked else WINDOW_BYTES
        needed = HEADER_BYTES
        while needed and segment.position + needed <= size:
            wanted = min(max(usual, needed), size - segment.position)
            data = os.pread(descriptor, wanted, segment.position)
            if len(data) < needed:
                return  # the file has become shorter
            needed = self._enter(descriptor, segment, data, size, checked=checked)

    def _enter(
        self, descriptor: int, segment: Segment, data: bytes, size: int, *, checked: bool
    ) -> int:
        """Take note of the batches at the beginning of `data`, read at `segment.position`, and
        pass them. If `checked` each must be in there whole, else its header is enough.

        Returns how many bytes of the next one are needed to go on; 0 if it is not valid.
        """
        start = segment.position
        inside = 0
        needed = HEADER_BYTES
        view = memoryview(data)
        ends = self._ends
        while inside + HEADER_BYTES <= len(data):
            magic, length, crc, layout, _, partition, base, _, count, time_us, body, _ = (
                HEADER.unpack_from(data, inside)
            )
            position = start + inside
            valid = not header_damage(magic, length, layout, count, body)
            if checked and valid and inside + length > len(data):
                needed = length
                break
            if checked:
                valid = valid and crc32(view[inside + 12 : inside + length]) == crc
            elif valid:
                # Offsets are dense; where they jump, a header alone is not to be believed.
                dense = partition < self.partitions and base == ends[partition]
                valid = position + length <= size if dense else is_batch(descriptor, position, size)
            if not valid:
                needed = 0
                break
            if partition < self.partitions:
                if position - segment.marked >= MARK_BYTES or not segment.mark_positions:
                    segment.mark(position, ends)
                if partition not in segment.first:
                    segment.first[partition] = base
                if time_us > segment.time_us_max:
                    segment.time_us_max = time_us
                ends[partition] = base + count
            inside += length
        segment.position = start + inside
        return needed


def _batches(piece: Piece) -> Iterator[Batch]:
    """All valid batches of a piece."""
    descriptor = os.open(piece.path, os.O_RDONLY)
    try:
        position: int | None = piece.start
        while position is not None and position + HEADER_BYTES <= piece.end:
            length = int.from_bytes(os.pread(descriptor, 4, position + 4), "little")
            data = os.pread(descriptor, min(length, piece.end - position), position)
            try:
                batch = Batch(data)
            except CorruptBatch:
                position = find_batch(descriptor, position + 8, piece.end)
                continue
            yield batch
            position += batch.length
    finally:
        os.close(descriptor)


def _first_index_at(batch: Batch, timestamp_us: int) -> int:
    """Index of the first record that is not older; the batch's count if all are."""
    heads = np.frombuffer(batch.data, HEAD_FIELDS, batch.count, batch.start + HEADER_BYTES)
    late = heads["timestamp_delta_us"] >= timestamp_us - batch.base_timestamp_us
    return int(late.argmax()) if late.any() else batch.count


def _make_durable(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError:
        # A read-only file system loses nothing; a disk that fails stops the node itself, and
        # recovery decides where its journal ends.
        return


def _last_mark_before(marks: "Sequence[array[int]]", ranges: Sequence[OffsetRange]) -> int:
    """The last mark that no record of the ranges lies before (an end never goes back)."""
    low = len(marks)
    for item in ranges:
        partition = item.partition
        low = min(low, bisect_right(marks, item.start, key=lambda ends: ends[partition]))
    return max(0, low - 1)


def _first_mark_after(marks: "Sequence[array[int]]", ranges: Sequence[OffsetRange]) -> int | None:
    """The first mark that no record of the ranges lies after; None if there is none."""
    high = 0
    for item in ranges:
        partition = item.partition
        high = max(high, bisect_left(marks, item.end, key=lambda ends: ends[partition]))
    return high if high < len(marks) else None


def _partition_count(directory: Path) -> int:
    manifest = directory / "manifest.json"
    try:
        content: Mapping[str, object] = json.loads(manifest.read_bytes())
        partitions = content["partitions"]
    except (FileNotFoundError, NotADirectoryError):
        raise NotALogError(
            f"{directory} is no Holdfast data directory: it has no manifest.json"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise NotALogError(f"{manifest} is damaged: no number of partitions in it") from None
    if not isinstance(partitions, int) or not 0 < partitions <= PARTITIONS_MAX:
        raise NotALogError(f"{manifest}: {partitions!r} partitions, allowed 1 to {PARTITIONS_MAX}")
    return partitions
