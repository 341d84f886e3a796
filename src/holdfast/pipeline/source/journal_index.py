"""A map of a data directory's journal, for the driver: what it holds, and where.

Only reads, takes no lock. What counts of a live directory is every whole, valid batch. The journal
has no mark of what the node has *committed* (fsynced and promised): that is known over the network
only (reader_http.py). In its place the driver makes new records durable itself before it hands out
their offsets, so nothing that Spark has read is lost in a power cut. What stays possible is that
Spark reads a record a moment before its publisher is answered, or one whose publisher never is.

Of a cluster's replica only what its checkpoint of the watermarks says counts: the rest of the
journal may still be cut off, and what was cut off lies between what counts.
"""

import os
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from holdfast.pipeline.source.indexed_read import chosen_pieces
from holdfast.pipeline.source.offsets import OffsetRange, Offsets, PartitionBounds
from holdfast.pipeline.source.reader_path import Piece, find_batch
from holdfast.pipeline.source.segment_index import NO_OFFSET, SegmentMap
from holdfast.storage.files.data_directory import open_to_read
from holdfast.storage.files.filesystem import OsFileSystem
from holdfast.storage.files.layout import segment_name
from holdfast.storage.journal.epoch_folders import newest_claimed
from holdfast.storage.reading.index import IndexHead
from holdfast.storage.reading.index_file import CorruptIndex
from holdfast.storage.reading.topic_postings import TopicChoice
from holdfast.storage.record import HEAD_FIELDS, HEADER_BYTES, Batch, CorruptBatch

CLAIM_LOOKS: Final = 100
CLAIM_PAUSE_S: Final = 0.02
"""A takeover goes on between a claim and the moment when the epoch counts."""
BATCH_SPAN_US: Final = 0x1_0000_0000
"""No record is later than this after the first of its batch (a head keeps 32 bits)."""


class JournalMap:
    """The map; `refresh` brings it up to date."""

    def __init__(self, path: str) -> None:
        """Reads the manifest. Raises DataDirectoryError."""
        self.path = Path(path)
        self._root = OsFileSystem(self.path)
        self.directory = open_to_read(self.path)
        self.partitions = self.directory.manifest.partitions
        self._segments: list[SegmentMap] = []
        self._floor = array("q", [0] * self.partitions)
        """Where the journal begins; NO_OFFSET where that is not known."""
        self._committed: list[int] | None = None
        """Of a replica."""

    def refresh(self) -> None:
        """Map what was added and forget what was removed since the last call. Raises
        DataDirectoryError.

        Of a shared directory a deposed holder may still add to the newest epoch we know, and what
        it adds will not count. So we do as a holder does: what was mapped, and made durable, before
        a look that finds no newer claim, counts for good."""
        for _ in range(CLAIM_LOOKS):
            directory = open_to_read(self.path)
            if directory.epoch != self.directory.epoch:
                self.directory = directory
                self._segments = []
            if directory.manifest.is_replica:
                # Looked at first: all of it is in the files.
                self._committed = directory.read_watermarks()
            self._map_segments()
            if self._committed is not None and any(each.has_shrunk for each in self._segments):
                # The end that was cut off had perhaps overridden what is there again.
                self._segments = []
                self._map_segments()
            if self._newest_claimed() <= self.directory.epoch.number:
                return
            time.sleep(CLAIM_PAUSE_S)
        # Whoever claimed it has died, and so has the holder before: nobody adds anything now.

    def _newest_claimed(self) -> int:
        try:
            return newest_claimed(self._root)
        except FileNotFoundError:
            return 0  # one node's own

    def _map_segments(self) -> None:
        sequences = self.directory.segments()
        first, self._floor = self._start(sequences)
        known = {segment.sequence: segment for segment in self._segments}
        newest_known = self._segments[-1].sequence if self._segments else -1
        segments: list[SegmentMap] = []
        ends = self._floor
        for sequence in sequences:
            if sequence < first:
                continue  # about to be removed
            last = sequence == sequences[-1]
            segment = known.get(sequence)
            try:
                if segment is None:
                    segment = SegmentMap(
                        self.path / self.directory.epoch.folder / segment_name(sequence),
                        sequence,
                        ends[:],
                        self.directory.sealed.get(sequence),
                        replica=self._committed is not None,
                    )
                    head = None if last else self._index_head(sequence)
                    if head is None or not segment.use_index(head):
                        segment.walk(last=last)
                elif sequence >= newest_known:
                    segment.walk(last=last)
            except FileNotFoundError:
                continue  # retention was faster
            for partition, offset in segment.overrides.items():
                for earlier in segments:
                    earlier.cut(partition, offset)
            segment.overrides.clear()
            ends = segment.ends
            segments.append(segment)
        self._segments = segments

    def bounds(self) -> dict[int, PartitionBounds]:
        """What each partition has. A partition is left out while nothing is known of it, which
        takes a damaged journal/start.json and no index."""
        result: dict[int, PartitionBounds] = {}
        starts = [self._floor, *(segment.start_ends for segment in self._segments)]
        ends = self._segments[-1].ends if self._segments else self._floor
        for partition in range(self.partitions):
            for start in starts:
                if start[partition] != NO_OFFSET:
                    first, end = start[partition], ends[partition]
                    if self._committed is not None:
                        first = self._start_of(partition, first)
                        end = min(end, self._committed[partition])
                    result[partition] = PartitionBounds(first, max(first, end))
                    break
        return result

    def _start_of(self, partition: int, start: int) -> int:
        """Of a replica: where the partition began anew, or went on below where the journal begins,
        which was void then."""
        for segment in reversed(self._segments):
            if partition in segment.resets:
                return segment.resets[partition]
        own = self._segments[0].start_ends[partition] if self._segments else NO_OFFSET
        return start if own == NO_OFFSET else min(start, own)

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Per partition the first offset whose record is not older than the time; the end of the
        partition if there is none."""
        found: Offsets = {}
        bounds = self.bounds()
        for segment in self._segments:
            if segment.time_us_max < timestamp_us - BATCH_SPAN_US:
                continue
            piece = segment.piece_from(timestamp_us - BATCH_SPAN_US)
            for position, batch in _batches(piece):
                partition = batch.partition
                if partition in bounds and partition not in found:
                    offset = batch.base_offset + _first_index_at(batch, timestamp_us)
                    end = min(batch.end_offset, segment.end_at(partition, position))
                    if offset < end and batch.end_offset > bounds[partition].first:
                        found[partition] = offset
                        if len(found) == len(bounds):
                            return found
        return {p: found.get(p, bound.end) for p, bound in bounds.items()}

    def pieces(
        self, ranges: Sequence[OffsetRange], choice: TopicChoice | None = None
    ) -> list[Piece]:
        """The stretches of the journal, in order, that hold every record of the ranges; with a
        choice those of its topics."""
        result = []
        for segment in self._segments:
            try:
                if choice is not None and segment.is_finished and self._committed is None:
                    chosen = chosen_pieces(self.directory, segment, ranges, choice)
                    if chosen is not None:
                        result += chosen
                        continue
                piece = segment.piece(ranges)
            except FileNotFoundError:
                continue  # the task that misses its records says so
            if piece is not None:
                result.append(piece)
        return result

    def _start(self, sequences: Sequence[int]) -> tuple[int, "array[int]"]:
        """Sequence and offsets at which the journal begins."""
        start = self.directory.read_start()
        if start is not None:
            return start[0], array("q", start[1])
        # Never was anything removed, or start.json is damaged; then an index may tell.
        known = not sequences or sequences[0] == 0
        return 0, array("q", [0 if known else NO_OFFSET] * self.partitions)

    def _index_head(self, sequence: int) -> IndexHead | None:
        try:
            return self.directory.read_index_head(sequence)
        except CorruptIndex:
            return None  # the node makes it anew; until then the segment is walked


def _batches(piece: Piece) -> Iterator[tuple[int, Batch]]:
    """All valid batches of a piece, and where they are."""
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
            yield position, batch
            position += batch.length
    finally:
        os.close(descriptor)


def _first_index_at(batch: Batch, timestamp_us: int) -> int:
    """Index of the first record that is not older; the batch's count if all are."""
    heads = np.frombuffer(batch.data, HEAD_FIELDS, batch.count, batch.start + HEADER_BYTES)
    late = heads["timestamp_delta_us"] >= timestamp_us - batch.base_timestamp_us
    return int(late.argmax()) if late.any() else batch.count
