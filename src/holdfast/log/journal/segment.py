"""A file of the journal, and the group of batches that one write adds to it."""

from collections.abc import Mapping

from holdfast.log.batch import Batch
from holdfast.log.reading.index import DamagedOffsets, IndexHead, SegmentIndex


class Segment:
    """One file of the journal. Its offsets count from the beginning of the log."""

    def __init__(
        self, sequence: int, head: IndexHead, index: SegmentIndex | None, size_bytes: int
    ) -> None:
        self.sequence = sequence
        self.head = head
        # Kept in memory while the segment is active, and until its .idx file is written.
        self.index = index
        # The size of the file; fewer bytes may be on the disk.
        self.size_bytes = size_bytes
        # They replace the head's offsets where a later segment has overridden the end of this one.
        self._starts: list[int] | None = None
        self._ends: list[int] | None = None
        # The bytes of forgotten partitions by `marks` (see `segment_list.forgotten`).
        self.dead_bytes = 0
        self.marks: Mapping[int, int] = {}

    def start_offsets(self) -> list[int]:
        """Per partition, the offset below which the segment has no valid record."""
        return self.head.start_offsets if self._starts is None else self._starts

    def end_offsets(self) -> list[int]:
        """Per partition, the offset after the last valid record."""
        return self.head.end_offsets if self._ends is None else self._ends

    def end_sequence(self) -> int:
        """The sequence after the segment. Records lost to damage count too, so sequences are the
        same with and without it."""
        return self.sequence + self.head.records + self.head.missing

    def override(self, partition: int, offset: int) -> None:
        """Notes that a later segment has the partition's records from `offset` on.

        The lists are replaced and not changed, because readers in other threads use the old ones.
        """
        starts = list(self.start_offsets())
        starts[partition] = min(starts[partition], offset)
        ends = list(self.end_offsets())
        ends[partition] = min(ends[partition], offset)
        self._starts = starts
        self._ends = ends

    def rewritten(self, head: IndexHead, size_bytes: int) -> "Segment":
        """The segment with a new file, in which nothing is dead."""
        segment = Segment(self.sequence, head, None, size_bytes)
        segment._starts, segment._ends = self._starts, self._ends
        segment.marks = self.marks
        return segment

    def note_forgotten(self, marks: Mapping[int, int]) -> None:
        """Estimates the dead bytes, unless it was done for these marks; see
        `segment_list.forgotten`. The records show the share of a partition, so no index is read."""
        if marks == self.marks and self.index is None:
            return
        self.marks = dict(marks)
        head = self.head
        dead = head.void if any(marks.get(each) == self.sequence for each in head.resets) else 0
        for partition, at in marks.items():
            if self.sequence < at:
                dead += head.end_offsets[partition] - head.start_offsets[partition]
        self.dead_bytes = self.size_bytes * min(dead, head.records) // max(1, head.records)

    def is_mostly_dead(self) -> bool:
        """True if rewriting it is worth more than it costs."""
        return 2 * self.dead_bytes > self.size_bytes

    def has_void(self) -> bool:
        """True if some records in this segment no longer count."""
        return self.head.void > 0 or self._ends is not None

    def last_timestamp_us(self) -> int:
        """The newest timestamp of its records."""
        return self.head.last_timestamp_us

    def gaps(self) -> list[DamagedOffsets]:
        """The offsets in it whose records are damaged or missing."""
        return self.head.gaps


class WriteGroup:
    """Batches to be written at one position with one call. They count completely or not at all."""

    def __init__(
        self,
        segment: int,
        position: int,
        data: list[bytes],
        size_bytes: int,
        end_sequence: int,
        end_offsets: list[int],
        starts_segment: bool,
        sealed: Segment | None,
        built: list[Batch],
    ) -> None:
        # The sequence that names the segment file.
        self.segment = segment
        self.position = position
        self.data = data
        self.size_bytes = size_bytes
        self.end_sequence = end_sequence
        # Per partition the offset after the last record appended when the group was taken.
        self.end_offsets = end_offsets
        # The file must be created first.
        self.starts_segment = starts_segment
        # The segment that ended where this group's begins. Its .idx file must be written.
        self.sealed = sealed
        # In a replica, the batches that were built here, unless it is alone.
        self.built = built
