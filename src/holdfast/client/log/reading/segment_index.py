"""Maps one segment: which offset each partition has reached at marks in the file.

A finished segment is known by the head of its index alone, until a query needs positions in it. A
segment that is still written, or has no valid index, is walked batch by batch.

Of the segment that is still written, only complete write groups are mapped. Recovery drops an
incomplete group, so its offsets may belong to other records after a restart.

In the journal of a replica a batch may override earlier records of its partition, from its first
offset on. The map keeps that as *cuts*: a batch before a byte position counts only below an offset.
Counter-example without cuts: a deposed leader's batch 5 to 9 stays in the file, and the new
leader's batch 7 to 9 follows it. Offset 7 would be read from the old batch.
"""

import os
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.reader_path import CHUNK_BYTES, Piece, find_batch, is_batch
from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_RESET,
    HEADER,
    HEADER_BYTES,
    header_damage,
)
from holdfast.log.reading.index import IndexHead
from holdfast.log.reading.segment_reader import is_later_group

WINDOW_BYTES: Final = 64 << 10
"""The bytes per read when only batch headers matter."""
MARK_BYTES: Final = 1 << 20
"""The least distance in bytes between two marks. More marks read less beside the wanted range, and
take more memory."""
NO_OFFSET: Final = -1
"""A stand-in for an offset: nothing is known of the partition so far."""
WHOLE: Final = sys.maxsize
"""The byte position of a cut that a later segment made: it covers the whole file."""


class SegmentMap:
    """The map of one segment file.

    A vector of *ends* has, per partition, the offset after its last record before some byte
    position. Invariant: along the marks the ends never decrease, because `_lower` cuts earlier
    marks too. `piece` relies on it for its binary search.
    """

    def __init__(
        self,
        path: Path,
        sequence: int,
        start_ends: "array[int]",
        limit_bytes: int | None = None,
        *,
        replica: bool = False,
    ) -> None:
        """Makes an empty map.

        If `limit_bytes` is given, only that many bytes of the file count. With `replica`, batches
        may override earlier ones.
        """
        self.path = path
        self.sequence = sequence
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self.start_ends = start_ends
        self.ends = start_ends[:]
        # The latest base timestamp. If only the index was read, it is the latest timestamp of a
        # record.
        self.time_us_max = 0
        # The byte position up to which the file is mapped: complete batches, and damage between
        # them.
        self.position = 0
        self.is_indexed = False
        # The segment had a valid index when it was first mapped.
        self.is_finished = False
        self.has_shrunk = False
        # Per partition (byte position, offset), in the order in which the cuts were made.
        self.cuts: dict[int, list[tuple[int, int]]] = {}
        # Partitions that were reset in this segment: the offset at which they begin again, and the
        # byte position of the newest mark of that.
        self.resets: dict[int, tuple[int, int]] = {}
        # The lowest offset, per partition, from which batches here override earlier segments.
        self.overrides: dict[int, int] = {}
        self._replica = replica
        self._inode = 0
        # The write-group tag of the journal, see holdfast.log.journal.journal. None: not known
        # so far.
        self._tag: int | None = None
        # The state before an incomplete write group: byte position, `ends`, `time_us_max` and
        # number of marks. None if no group is incomplete.
        self._open_group: tuple[int, array[int], int, int] | None = None
        # Marks: the byte position of a batch, with `ends` and `time_us_max` before it.
        self._mark_positions: list[int] = []
        self._mark_ends: list[array[int]] = []
        self._mark_times_us: list[int] = []

    def use_index(self, head: IndexHead) -> bool:
        """Takes the map from the head of the index, without a walk.

        It returns False if the index belongs to another state of the file, or leaves out byte
        positions that matter. A missing file raises FileNotFoundError.
        """
        state = os.stat(self.path)
        if head.log_bytes != min(state.st_size, self._limit_bytes) or len(head.end_offsets) != len(
            self.ends
        ):
            return False
        if head.void or head.resets:
            return False  # the byte positions are in the batches only
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
        """Maps the batches that were added, and makes them durable.

        In the last segment every batch is verified, because an incomplete write group may end it.
        In the others headers are enough: a task verifies the batches that it reads. A missing file
        raises FileNotFoundError.
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
                # Bytes are written in order, and a later batch exists. So bytes here that are no
                # batch are damage, unless the node was still writing them at the first look.
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
        """Notes that a later segment overrides the partition from `offset` on."""
        if self.ends[partition] > offset:
            self.cuts.setdefault(partition, []).append((WHOLE, offset))
            self._lower(partition, offset)

    def end_at(self, partition: int, position: int) -> int:
        """Returns the offset below which a batch of the partition at `position` counts."""
        offsets = [offset for place, offset in self.cuts.get(partition, ()) if position < place]
        return min(offsets, default=sys.maxsize)

    def intersect(self, ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
        """Returns the ranges of which this segment has at least one record."""
        return [
            item
            for item in ranges
            if self.ends[item.partition] > item.start and self.start_ends[item.partition] < item.end
        ]

    def piece(self, ranges: Sequence[OffsetRange]) -> Piece | None:
        """Returns the stretch of the file that has every record of the ranges in this segment.

        It returns None if the segment has none. A missing file raises FileNotFoundError.
        """
        here = self.intersect(ranges)
        if not here:
            return None
        self._bring_up_to_date()
        low = len(self._mark_ends)
        high = 0
        for item in here:
            partition = item.partition
            # From the last mark before which the segment has no record of the range, to the first
            # mark after which it has none.
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
        """Returns the end of the segment, from the last mark before which every batch begins
        earlier.

        A missing file raises FileNotFoundError.
        """
        self._bring_up_to_date()
        mark = bisect_left(self._mark_times_us, base_time_us) - 1
        start = self._mark_positions[mark] if mark > 0 else 0
        return Piece(str(self.path), self._inode, start, self.position, self._cut_list())

    def _bring_up_to_date(self) -> None:
        """Walks the file if byte positions are not known.

        That is so if only the index was read, or if retention has replaced the file by one with
        emptied messages.
        """
        if self.is_indexed or os.stat(self.path).st_ino != self._inode:
            self.walk(last=False)

    def _map_batches(self, descriptor: int, size: int, *, checked: bool) -> None:
        """Maps batches up to the first one that is not valid or goes beyond `size`."""
        usual = CHUNK_BYTES if checked else WINDOW_BYTES
        needed = HEADER_BYTES
        while needed and self.position + needed <= size:
            wanted = min(max(usual, needed), size - self.position)
            data = os.pread(descriptor, wanted, self.position)
            if len(data) < needed:
                return  # the file has become shorter
            needed = self._enter(descriptor, data, size, checked=checked)

    def _enter(self, descriptor: int, data: bytes, size: int, *, checked: bool) -> int:
        """Maps the batches at the beginning of `data`, which was read at `position`, and advances
        past them.

        With `checked`, a batch must be in `data` completely. Otherwise its header is enough.
        Returns the number of bytes that the next batch needs, or 0 if it is not valid.
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
                # Offsets are dense. If they jump, a header alone is not proof: random bytes may
                # look like one. So the whole batch is verified.
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
                        self.resets[partition] = base, position
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
        """Restores the state before the incomplete group. The next walk looks at it again."""
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
        """Cuts all known ends of the partition to `offset`, so that the ends along the marks stay
        in order."""
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
        """Starts over. The file became shorter than the mapped part, was replaced, or was never
        walked.

        Cuts of later segments stay, because those segments are not walked again.
        """
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
    """An open file with the interface that is_later_group reads from."""

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
        # A read-only file system loses nothing. On a disk that fails, the node stops itself, and
        # recovery decides where its journal ends.
        return
