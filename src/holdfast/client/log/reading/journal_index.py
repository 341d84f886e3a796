"""Maps the offsets of a data directory's journal to positions in its files.

The driver only reads, and takes no lock. In the directory of a running node every complete, valid
batch counts. The journal has no mark of the records that the node has *committed*: only the network
source (reader_http.py) knows those. So the driver makes new records durable before it hands out
their offsets. No power failure can then remove a record that Spark has read.

Two cases remain. Spark may read a record shortly before its publisher is acknowledged. It may also
read a record whose publisher is never acknowledged.

In the journal of a cluster's replica only the records below its checkpoint of the high watermarks
count. The node may still truncate the rest, and truncated records stay in the file between valid
ones.

Selective reads of a finished segment: only the batches with messages of some topics.

The postings in the segment's index name those batches. The read pays off if it needs few of many
topics.
"""

import os
import time
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

from holdfast.client.log.reading.offsets import (
    LogGeneration,
    OffsetRange,
    Offsets,
    PartitionBounds,
    log_identity,
)
from holdfast.client.log.reading.reader_path import Piece, find_batch
from holdfast.client.log.reading.segment_index import NO_OFFSET, SegmentMap
from holdfast.log.batch import HEAD, HEADER_BYTES, Batch, CorruptBatch
from holdfast.log.files.data_directory import DataDirectoryError, open_to_read
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import DataDirectory, segment_name
from holdfast.log.journal.epoch_folders import newest_claimed
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.index import IndexHead
from holdfast.log.reading.index_file import CorruptIndex, SealedIndex, decode
from holdfast.log.reading.topic_postings import TopicChoice

GAP_BYTES: Final = 64 << 10
"""The most unwanted bytes between two wanted batches that are cheaper to read than to skip."""


def chosen_pieces(
    directory: DataDirectory,
    segment: SegmentMap,
    ranges: Sequence[OffsetRange],
    choice: TopicChoice,
) -> list[Piece] | None:
    """Returns pieces with every wanted batch of the ranges.

    It returns None if the postings are missing or do not pay off; the caller then reads the whole
    stretch. A missing file raises FileNotFoundError.
    """
    if not segment.intersect(ranges):
        return []
    path, inode = str(segment.path), os.stat(segment.path).st_ino
    index = _index(directory, segment)
    if index is None:
        return None
    batches = choice.find(index)
    if batches is None:
        return None
    of = {item.partition: item for item in ranges}
    covered = {
        p: max(item.start, index.head.start_offsets[p])
        for p, item in of.items()
        if index.head.end_offsets[p] > item.start
    }
    stretches: list[list[int]] = []
    passed = []
    for number in batches:
        partition = index.partitions[number]
        base = index.base_offsets[number]
        end = base + index.counts[number]
        item = of.get(partition)
        if item is None or end <= item.start or base >= item.end:
            continue
        if covered[partition] < base:
            passed.append((partition, covered[partition], base))
        covered[partition] = end
        start, stop = index.positions[number], index.batch_end(number)
        if stretches and start - stretches[-1][1] <= GAP_BYTES:
            stretches[-1][1] = stop
        else:
            stretches.append([start, stop])
    for partition, offset in covered.items():
        if offset < index.head.end_offsets[partition]:
            passed.append((partition, offset, index.head.end_offsets[partition]))
    # The first piece carries the skipped ranges of all pieces. If no batch is wanted, an empty
    # piece carries them.
    first, *rest = stretches or [[0, 0]]
    return [
        Piece(path, inode, first[0], first[1], passed=tuple(sorted(passed))),
        *(Piece(path, inode, start, stop) for start, stop in rest),
    ]


def _index(directory: DataDirectory, segment: SegmentMap) -> SealedIndex | None:
    """Returns the index of the segment as it was mapped.

    It returns None if there is none, or if the index notes damage or batches that do not count.
    """
    try:
        data = directory.read_index(segment.sequence)
        index = decode(data) if data is not None else None
    except CorruptIndex:
        return None
    if index is None or index.head.log_bytes != segment.position:
        return None
    head = index.head
    if head.void or head.resets or head.gaps or segment.cuts:
        return None
    return index


STATE_PIECE_BYTES: Final = 1 << 20
CLAIM_LOOKS: Final = 100
"""The most looks for the end of a takeover, CLAIM_PAUSE_S apart."""
CLAIM_PAUSE_S: Final = 0.02
"""The pause in seconds between two looks. A takeover needs some time from its claim until its epoch
counts."""
BATCH_SPAN_US: Final = 0x1_0000_0000
"""The most microseconds between the first record of a batch and a later one: a head keeps 32
bits."""


CREATED_CHARACTERS: Final = 16
"""The digits of the hash by which a server names its data directory (`created` of /api/v1/log)."""


class JournalMap:
    """The map of one journal. `refresh` brings it up to date, and the other methods use its last
    state."""

    def __init__(self, path: str) -> None:
        """Reads the manifest of the directory. Raises DataDirectoryError."""
        self.path = Path(path)
        self._root = OsFileSystem(self.path)
        self.directory = open_to_read(self.path)
        self.partitions = self.directory.manifest.partitions
        self._segments: list[SegmentMap] = []
        self._floor = array("q", [0] * self.partitions)
        """The offsets at which the journal begins. NO_OFFSET where that is not known."""
        self._committed: list[int] | None = None
        """The high watermarks of a replica. None in any other directory."""

    def identity(self) -> str:
        """Returns what distinguishes the log from all others, as the servers of the log say it."""
        manifest = self.directory.manifest
        created = sha256(manifest.created.encode()).hexdigest()[:CREATED_CHARACTERS]
        name = "" if manifest.cluster_id else created
        return log_identity(manifest.cluster_id, name, manifest.log_generation)

    @property
    def generation(self) -> LogGeneration:
        """The generation of the log."""
        manifest = self.directory.manifest
        return LogGeneration(manifest.log_generation, dict(manifest.former))

    def write_state(self, file: IO[bytes]) -> None:
        """Writes the newest snapshot of what the log defines beside its messages. Raises
        DataDirectoryError if there is none."""
        directory = open_to_read(self.path)
        if not directory.manifest.is_replica or not directory.snapshots():
            raise DataDirectoryError(f"{self.path} has no snapshot of its state yet")
        found = directory.open_snapshot(directory.snapshots()[-1])
        for at in range(0, found.size(), STATE_PIECE_BYTES):
            file.write(found.read(at, min(STATE_PIECE_BYTES, found.size() - at)))

    def refresh(self) -> None:
        """Maps segments that were added and forgets those that were removed since the last call.

        In a shared directory a deposed holder may still append to the newest known epoch, and those
        records will not count. So the driver does what a holder does: it maps the records, makes
        them durable, and then looks for a newer claim. If there is none, the records count
        permanently. Looking first is wrong: a claim between the look and the sync would drop
        records that Spark has read.

        Raises DataDirectoryError.
        """
        for _ in range(CLAIM_LOOKS):
            directory = open_to_read(self.path)
            if directory.epoch != self.directory.epoch:
                self._segments = []
            self.directory = directory
            # Read before the segments, so that they contain every record below the watermarks.
            checkpoint = directory.read_checkpoint()
            self._committed = checkpoint.offsets if directory.manifest.is_replica else None
            self._map_segments()
            if self._committed is not None and any(each.has_shrunk for each in self._segments):
                # The node truncated the end of a segment. The truncated batches may have overridden
                # records that count again, so everything is mapped again.
                self._segments = []
                self._map_segments()
            self._take_resets(checkpoint)
            if self._newest_claimed() <= self.directory.epoch.number:
                return
            time.sleep(CLAIM_PAUSE_S)
        # The node that claimed the epoch is down, and so is the holder before it. No process
        # appends now.

    def _take_resets(self, checkpoint: Checkpoint) -> None:
        """Lowers the watermark of a partition that began again after the checkpoint, as
        `segment_list.claims` does: a record of its new log may still be cut off."""
        if self._committed is None or not self._segments:
            return
        if checkpoint.segment < self._segments[0].sequence:
            self._committed = [0] * self.partitions
        for segment in self._segments:
            for partition, (offset, position) in segment.resets.items():
                if (segment.sequence, position) >= (checkpoint.segment, checkpoint.position):
                    self._committed[partition] = offset

    def _newest_claimed(self) -> int:
        try:
            return newest_claimed(self._root)
        except FileNotFoundError:
            return 0  # not a shared directory

    def _map_segments(self) -> None:
        """Maps all segments in order. Each begins with the ends of the one before it.

        A batch that overrides records of earlier segments cuts those segments' maps, too.
        """
        sequences = self.directory.segments()
        first, self._floor = self._start(sequences)
        known = {segment.sequence: segment for segment in self._segments}
        newest_known = self._segments[-1].sequence if self._segments else -1
        segments: list[SegmentMap] = []
        ends = self._floor
        for sequence in sequences:
            if sequence < first:
                continue  # retention is about to remove it
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
                continue  # retention has removed it
            for partition, offset in segment.overrides.items():
                for earlier in segments:
                    earlier.cut(partition, offset)
            segment.overrides.clear()
            ends = segment.ends
            segments.append(segment)
        self._segments = segments

    def bounds(self) -> dict[int, PartitionBounds]:
        """Returns the offsets that each partition has.

        A partition of which nothing is known is left out. That needs both a damaged
        journal/start.json and a missing index.
        """
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
        """Returns the first offset of a partition of a replica.

        A replica may have been reset, so that the partition begins again at a higher offset. It may
        also go on below the start of the journal, if its old records were void.
        """
        for segment in reversed(self._segments):
            if partition in segment.resets:
                return segment.resets[partition][0]
        own = self._segments[0].start_ends[partition] if self._segments else NO_OFFSET
        return start if own == NO_OFFSET else min(start, own)

    def offsets_at(self, timestamp_us: int) -> Offsets:
        """Returns per partition the first offset whose record is not older than the time.

        A partition without such a record gets its end.
        """
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
        """Returns the stretches of the journal, in order, that have every record of the ranges.

        With `choice`, they need to have only the records of its topics.
        """
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
                continue  # the task reports the missing records
            if piece is not None:
                result.append(piece)
        return result

    def _start(self, sequences: Sequence[int]) -> tuple[int, "array[int]"]:
        """Returns the journal sequence and the offsets at which the journal begins."""
        start = self.directory.read_start()
        if start is not None:
            return start[0], array("q", start[1])
        # Either retention has not removed any segment, or start.json is damaged. Then an index may
        # have the offsets.
        known = not sequences or sequences[0] == 0
        return 0, array("q", [0 if known else NO_OFFSET] * self.partitions)

    def _index_head(self, sequence: int) -> IndexHead | None:
        try:
            return self.directory.read_index_head(sequence)
        except CorruptIndex:
            return None  # the node rebuilds it; until then the driver walks the segment


def _batches(piece: Piece) -> Iterator[tuple[int, Batch]]:
    """Yields all valid batches of a piece with their byte positions."""
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
    """Returns the index of the first record that is not older, or the batch's count if all are
    older."""
    elapsed_us = timestamp_us - batch.base_timestamp_us
    for index, fields in enumerate(HEAD.iter_unpack(batch.raw_heads())):
        if fields[8] >= elapsed_us:
            return index
    return batch.count
