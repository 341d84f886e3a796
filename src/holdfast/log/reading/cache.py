"""Shares memory between readers of the journal: open files, indexes, verified batches.

Each kind is bounded, and the least recently used goes first. Accesses take `lock`; reads of the
disk do not, so a slow disk delays only the reader that needs it. Two readers may therefore load the
same index at once. The first one stays.

The newest entry stays even if it alone exceeds the bound. Counter-example without that: an index
above the bound would be loaded again for every record that is read through it.
"""

from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Final

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.files.filesystem import ReadFile
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.reading.segment_store import SegmentStore

OPEN_FILES_MAX: Final = 32
"""The most open segment files."""
INDEX_CACHE_BYTES: Final = 64 << 20
"""The most bytes of loaded indexes."""
BATCH_CACHE_BYTES: Final = 16 << 20
"""The most bytes of verified batches."""
DAMAGE_KNOWN_MAX: Final = 10_000
"""The number of unreadable batches that are remembered, so that each is reported once."""


class SegmentCache:
    """Open files, indexes and batches of segments. Errors of the disk are passed on:
    `FileNotFoundError` if retention has removed the segment."""

    def __init__(self, store: SegmentStore, lock: AbstractContextManager[object]) -> None:
        self._store = store
        self._lock = lock
        self._files: OrderedDict[int, ReadFile] = OrderedDict()
        self._indexes: OrderedDict[int, SegmentIndex] = OrderedDict()
        self._index_bytes = 0
        # The batches by segment and number.
        self._batches: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._batch_bytes = 0
        # (segment, position) of unreadable batches.
        self._damaged: set[tuple[int, int]] = set()

    def index(self, segment: Segment) -> SegmentIndex:
        """The index of a segment: its own while it is written, else the loaded one."""
        index = segment.index
        if index is not None:
            return index
        with self._lock:
            index = self._indexes.get(segment.sequence)
            if index is not None:
                self._indexes.move_to_end(segment.sequence)
                return index
        index = self._store.load_index(segment)
        with self._lock:
            if segment.sequence not in self._indexes:
                self._indexes[segment.sequence] = index
                self._index_bytes += index.size_bytes()
                while self._index_bytes > INDEX_CACHE_BYTES and len(self._indexes) > 1:
                    oldest = self._indexes.popitem(last=False)[1]
                    self._index_bytes -= oldest.size_bytes()
                assert self._index_bytes >= 0, "fewer bytes of indexes than none"
        return index

    def file(self, sequence: int) -> ReadFile:
        """The open file of a segment."""
        with self._lock:
            file = self._files.get(sequence)
            if file is not None:
                self._files.move_to_end(sequence)
                return file
        file = self._store.open_segment(sequence)
        with self._lock:
            self._files[sequence] = file
            if len(self._files) > OPEN_FILES_MAX:
                self._files.popitem(last=False)
        return file

    def cached(self, segment: Segment, number: int) -> Batch | None:
        """A verified batch, if it is in memory."""
        key = (segment.sequence, number)
        with self._lock:
            batch = self._batches.get(key)
            if batch is not None:
                self._batches.move_to_end(key)
        return batch

    def batch(self, segment: Segment, index: SegmentIndex, number: int) -> Batch | None:
        """A verified batch; None if it is damaged, which is reported."""
        batch = self.cached(segment, number)
        if batch is not None:
            return batch
        position = index.positions[number]
        length = index.batch_end(number) - position
        try:
            batch = Batch(self.file(segment.sequence).read(position, length))
        except CorruptBatch as error:
            self.note_damage(segment, position, length, str(error))
            return None
        key = (segment.sequence, number)
        with self._lock:
            if key not in self._batches:
                self._batches[key] = batch
                self._batch_bytes += batch.length
                while self._batch_bytes > BATCH_CACHE_BYTES and len(self._batches) > 1:
                    self._batch_bytes -= self._batches.popitem(last=False)[1].length
                assert self._batch_bytes >= 0, "fewer bytes of batches than none"
        return batch

    def note_damage(self, segment: Segment, position: int, length: int, reason: str) -> None:
        """Reports an unreadable batch, once."""
        with self._lock:
            place = (segment.sequence, position)
            if place in self._damaged or len(self._damaged) >= DAMAGE_KNOWN_MAX:
                return
            self._damaged.add(place)
        self._store.note_damage(segment, position, length, reason)

    def check(self) -> None:
        """Raises `AssertionError` unless the counted bytes are the sums over the tables."""
        with self._lock:
            assert self._index_bytes == sum(each.size_bytes() for each in self._indexes.values())
            assert self._batch_bytes == sum(each.length for each in self._batches.values())
            assert len(self._files) <= OPEN_FILES_MAX, "too many open files"

    def forget_segment(self, sequence: int) -> None:
        """Forgets a segment whose file was removed or rewritten. The positions of its old index
        would point into the middle of batches of the new file."""
        with self._lock:
            self._files.pop(sequence, None)
            index = self._indexes.pop(sequence, None)
            if index is not None:
                self._index_bytes -= index.size_bytes()
            for key in list(self._batches):
                if key[0] == sequence:
                    self._batch_bytes -= self._batches.pop(key).length
