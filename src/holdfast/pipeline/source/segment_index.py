"""What the driver knows of one segment: how far each partition has come, at marks in the file.

A segment that is finished is known by its index' head alone until a part of it is wanted. The one
that is being written, or has no valid index, is walked batch by batch.

Of the segment that is being written, only complete write groups are mapped: an incomplete one never
counts, unless the rest of it is being written.

In a replica's journal a batch may override what earlier ones of its partition hold from its first
offset on. That is kept as *cuts*: batches before a place count below an offset only.
"""

import os
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

from holdfast.pipeline.source.offsets import OffsetRange
from holdfast.pipeline.source.reader_path import CHUNK_BYTES, Piece, find_batch, is_batch
from holdfast.pipeline.source.scan import header_damage
from holdfast.storage.reading.index import IndexHead
from holdfast.storage.reading.segment_reader import is_later_group
from holdfast.storage.record import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_RESET,
    HEADER,
    HEADER_BYTES,
)

WINDOW_BYTES: Final = 64 << 10
"""Read at a time where only batch headers matter."""
MARK_BYTES: Final = 1 << 20
NO_OFFSET: Final = -1
"""In place of an offset: nothing is known of the partition so far."""
WHOLE: Final = sys.maxsize
"""As the place of a cut: a later segment made it."""


class SegmentMap:
    """The map of one segment file. A vector of *ends* holds, per partition, the offset after its
    last record before a place in the journal."""

    def __init__(
        self,
        path: Path,
        sequence: int,
        start_ends: "array[int]",
        limit_bytes: int | None = None,
        *,
        replica: bool = False,
    ) -> None:
        """`limit_bytes`: only so much of the file counts; None: all of it. `replica`: batches may
        override others."""
        self.path = path
        self.sequence = sequence
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self.start_ends = start_ends
        self.ends = start_ends[:]
        # The latest base timestamp; of a segment known by its index the latest timestamp.
        self.time_us_max = 0
        # Everything before it is known: whole batches, and damage that was passed.
        self.position = 0
        self.is_indexed = False
        # It had an index when it was mapped first.
        self.is_finished = False
        self.has_shrunk = False
        # Per partition (place, offset), in the order they were made.
        self.cuts: dict[int, list[tuple[int, int]]] = {}
        # Partitions that begin anew in here, and at which offset.
        self.resets: dict[int, int] = {}
        # What batches in here override in earlier segments: from which offset on.
        self.overrides: dict[int, int] = {}
        self._replica = replica
        self._inode = 0
        # The journal's, see holdfast.storage.journal.journal; None: not known so far.
        self._tag: int | None = None
        # Of a write group that more batches must follow: position, `ends`, `time_us_max` and the
        # number of marks before it.
        self._open_group: tuple[int, array[int], int, int] | None = None
        # Positions of batches, and `ends` and `time_us_max` before them.
        self._mark_positions: list[int] = []
        self._mark_ends: list[array[int]] = []
        self._mark_times_us: list[int] = []

    def use_index(self, head: IndexHead) -> bool:
        """Take over what the index says, without a walk. False if it is of another state of the
        file. Raises FileNotFoundError."""
        state = os.stat(self.path)
        if head.log_bytes != min(state.st_size, self._limit_bytes) or len(head.end_offsets) != len(
            self.ends
        ):
            return False
        if head.void or head.resets:
            return False  # where, only the batches tell
        self._note_overrides(head.start_offsets)
        self.start_ends = array("q", head.start_offsets)
        self.ends = array("q", head.end_offsets)
        self.time_us_max = head.last_timestamp_us
        self.position = head.log_bytes
        self._inode = state.st_ino
        self.is_indexed = True
        self.is_finished = True
        return True

    def walk(self, *, last: bool) -> None:
        """Map the batches that were added, and make them durable. Raises FileNotFoundError.

        In the last segment every batch is verified, because an unfinished group may end it. In
        the others headers are enough: a task verifies what it reads.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            state = os.fstat(descriptor)
            size = min(state.st_size, self._limit_bytes)
            if size < self.position or state.st_ino != self._inode or self.is_indexed:
                self.has_shrunk |= size < self.position
                self._forget()
                self._inode = state.st_ino
            start = self.position
            while True:
                self._map_batches(descriptor, size, checked=last)
                stop = self.position
                at_end = stop >= size or not any(os.pread(descriptor, HEADER_BYTES, stop))
                if at_end and self._open_group is None:
                    break  # the end, or space that was allocated in advance
                if last and not is_later_group(_Descriptor(descriptor), self._tag, stop, size):
                    self._leave_open_group()
                    break
                following = find_batch(descriptor, stop + 8, size)
                if following is None:
                    break
                # Bytes are written in order, so whatever is no batch here is damage, now that a
                # later batch is there; unless it was just being written at the first look.
                if not is_batch(descriptor, stop, size):
                    self.position = following
                    self._open_group = None
            if self.position > start:
                _make_durable(descriptor)
        finally:
            os.close(descriptor)
        for partition, cuts in list(self.cuts.items()):
            for place, offset in cuts:
                if place == WHOLE:
                    self._lower(partition, offset)

    def cut(self, partition: int, offset: int) -> None:
        """A later segment has what the partition holds from `offset` on."""
        if self.ends[partition] > offset:
            self.cuts.setdefault(partition, []).append((WHOLE, offset))
            self._lower(partition, offset)

    def end_at(self, partition: int, position: int) -> int:
        """Below which offset a batch of the partition at `position` counts."""
        offsets = [offset for place, offset in self.cuts.get(partition, ()) if position < place]
        return min(offsets, default=sys.maxsize)

    def here(self, ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
        """Those of which it has something."""
        return [
            item
            for item in ranges
            if self.ends[item.partition] > item.start and self.start_ends[item.partition] < item.end
        ]

    def piece(self, ranges: Sequence[OffsetRange]) -> Piece | None:
        """The stretch that holds every record of the ranges that is in here; None if none is.
        Raises FileNotFoundError."""
        here = self.here(ranges)
        if not here:
            return None
        self._bring_up_to_date()
        low = len(self._mark_ends)
        high = 0
        for item in here:
            partition = item.partition
            # The last mark before which it has nothing, the first after which it has nothing.
            low = min(
                low, bisect_right(self._mark_ends, item.start, key=lambda ends: ends[partition])
            )
            high = max(
                high, bisect_left(self._mark_ends, item.end, key=lambda ends: ends[partition])
            )
        start = self._mark_positions[low - 1] if low > 0 else 0
        end = self._mark_positions[high] if high < len(self._mark_positions) else self.position
        return Piece(str(self.path), self._inode, start, end, self._cut_list())

    def piece_from(self, base_time_us: int) -> Piece:
        """The end of the segment, from the last place before which every batch begins earlier.
        Raises FileNotFoundError."""
        self._bring_up_to_date()
        mark = bisect_left(self._mark_times_us, base_time_us) - 1
        start = self._mark_positions[mark] if mark > 0 else 0
        return Piece(str(self.path), self._inode, start, self.position, self._cut_list())

    def _bring_up_to_date(self) -> None:
        """Positions are needed: walk if only the index was read, or if the file was replaced by
        one with emptied messages."""
        if self.is_indexed or os.stat(self.path).st_ino != self._inode:
            self.walk(last=False)

    def _map_batches(self, descriptor: int, size: int, *, checked: bool) -> None:
        """Map up to the first batch that is not valid or goes beyond `size`."""
        usual = CHUNK_BYTES if checked else WINDOW_BYTES
        needed = HEADER_BYTES
        while needed and self.position + needed <= size:
            wanted = min(max(usual, needed), size - self.position)
            data = os.pread(descriptor, wanted, self.position)
            if len(data) < needed:
                return  # the file has become shorter
            needed = self._enter(descriptor, data, size, checked=checked)

    def _enter(self, descriptor: int, data: bytes, size: int, *, checked: bool) -> int:
        """Take note of the batches at the beginning of `data`, read at `position`, and pass them.
        If `checked` each must be in there whole, else its header is enough.

        Returns how many bytes of the next one are needed to go on; 0 if it is not valid.
        """
        start = self.position
        inside = 0
        needed = HEADER_BYTES
        view = memoryview(data)
        ends = self.ends
        marked = self._mark_positions[-1] if self._mark_positions else -MARK_BYTES
        while inside + HEADER_BYTES <= len(data):
            (
                magic,
                length,
                crc,
                layout,
                attributes,
                partition,
                base,
                _,
                count,
                time_us,
                body,
                group,
            ) = HEADER.unpack_from(data, inside)
            position = start + inside
            valid = not header_damage(magic, length, layout, count, body)
            if checked and valid and inside + length > len(data):
                needed = length
                break
            if checked:
                valid = valid and crc32(view[inside + 12 : inside + length]) == crc
            elif valid:
                # Offsets are dense; where they jump, a header alone is not to be believed.
                dense = partition < len(ends) and base == ends[partition]
                valid = position + length <= size if dense else is_batch(descriptor, position, size)
            if not valid:
                needed = 0
                break
            if checked and attributes & ATTRIBUTE_GROUPED:
                self._enter_group(position, group, attributes)
            if partition < len(ends):
                if position - marked >= MARK_BYTES:
                    self._mark(position)
                    marked = position
                if ends[partition] == NO_OFFSET:
                    self.start_ends[partition] = base
                elif self._replica and (attributes & ATTRIBUTE_RESET or base < ends[partition]):
                    self._override(partition, base, position)
                    if attributes & ATTRIBUTE_RESET:
                        self.resets[partition] = base
                if time_us > self.time_us_max:
                    self.time_us_max = time_us
                ends[partition] = base + count
            inside += length
        self.position = start + inside
        return needed

    def _enter_group(self, position: int, group: int, attributes: int) -> None:
        if not attributes & ATTRIBUTE_MORE:
            self._open_group = None
        elif self._open_group is None:
            marks = len(self._mark_positions)
            self._open_group = (position, self.ends[:], self.time_us_max, marks)
        if self._tag is None:
            self._tag = group

    def _leave_open_group(self) -> None:
        """Nothing of it is mapped so far: look again when the file has grown."""
        if self._open_group is not None:
            self.position, self.ends, self.time_us_max, marks = self._open_group
            self._open_group = None
            del self._mark_positions[marks:]
            del self._mark_ends[marks:]
            del self._mark_times_us[marks:]

    def _override(self, partition: int, offset: int, position: int) -> None:
        self.cuts.setdefault(partition, []).append((position, offset))
        lowest = min(offset, self.overrides.get(partition, offset))
        self.overrides[partition] = lowest
        self._lower(partition, offset)

    def _note_overrides(self, starts: Sequence[int]) -> None:
        for partition, start in enumerate(starts):
            if start < self.start_ends[partition]:
                self.overrides[partition] = start

    def _lower(self, partition: int, offset: int) -> None:
        """Nothing so far counts from `offset` on. What is known of places stays in order."""
        for ends in (self.start_ends, *self._mark_ends, self.ends):
            ends[partition] = min(ends[partition], offset)

    def _cut_list(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(
            (partition, place, offset)
            for partition, cuts in self.cuts.items()
            for place, offset in cuts
        )

    def _mark(self, position: int) -> None:
        self._mark_positions.append(position)
        self._mark_ends.append(self.ends[:])
        self._mark_times_us.append(self.time_us_max)

    def _forget(self) -> None:
        """Start over: the file was cut below what was mapped of it, was replaced, or was never
        walked."""
        self.ends = self.start_ends[:]
        self.time_us_max = 0
        self.position = 0
        self.is_indexed = False
        self._open_group = None
        self.cuts = {
            partition: [cut for cut in cuts if cut[0] == WHOLE]
            for partition, cuts in self.cuts.items()
        }
        self._mark_positions.clear()
        self._mark_ends.clear()
        self._mark_times_us.clear()


class _Descriptor:
    """An open file, as is_later_group reads it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, position: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, position)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size


def _make_durable(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError:
        # A read-only file system loses nothing; a disk that fails stops the node itself, and
        # recovery decides where its journal ends.
        return
