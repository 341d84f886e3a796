"""The journal's bookkeeping: open batches, offsets, watermarks, and the list of segments.

It does no I/O. `append` puts a record into its partition's open batch; `take` closes all open
batches and hands them out as one WriteGroup, whose place in the file is decided there and then;
`wrote` and `commit` say how far the disk has come. The batches of a group lie in the order of
their first records, so across partitions the order inside a group is not that of `append`.

A segment begins with a group and is named by the number of records appended before it.
"""

from collections.abc import Sequence
from typing import Final

from holdfast.log.index import ActiveIndex, Gap, IndexHead, SegmentIndex
from holdfast.log.record import HEAD_BYTES, Batch, BatchBuilder

BATCH_RECORDS_MAX: Final = 1 << 20
"""A posting has INDEX_BITS for the index in a batch."""
BATCH_BODY_BYTES_MAX: Final = 16 << 20
"""A batch is closed at this size; a single larger record makes one of its own."""
SEGMENT_BYTES_DEFAULT: Final = 64 << 20


class Segment:
    """One file of the journal. Offsets are cumulative: counted from the beginning of the log."""

    def __init__(
        self, sequence: int, head: IndexHead, index: SegmentIndex | None, size_bytes: int
    ) -> None:
        self.sequence = sequence
        self.head = head
        # In memory while the segment is active, and until its .idx file is written.
        self.index = index
        # Of the file; what the disk has may be less.
        self.size_bytes = size_bytes

    def start_offsets(self) -> list[int]:
        return self.head.start_offsets

    def end_offsets(self) -> list[int]:
        return self.head.end_offsets

    def end_sequence(self) -> int:
        """Counts what damage has taken, so sequences are the same with or without it."""
        records = self.head.records
        for gap in self.head.gaps:
            records += gap.end - gap.start
        return self.sequence + records

    def last_timestamp_us(self) -> int:
        return self.head.last_timestamp_us

    def gaps(self) -> list[Gap]:
        return self.head.gaps


class WriteGroup:
    """Batches to be written at one place with one call."""

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
    ) -> None:
        # Sequence that names the segment file.
        self.segment = segment
        self.position = position
        self.data = data
        self.size_bytes = size_bytes
        self.end_sequence = end_sequence
        # Per partition the offset after the last record appended when the group was taken.
        self.end_offsets = end_offsets
        # The file must be created first.
        self.starts_segment = starts_segment
        # The segment that ended where this group's begins; its .idx file is to be written.
        self.sealed = sealed


class Journal:
    def __init__(
        self,
        partitions: int,
        segment_bytes: int = SEGMENT_BYTES_DEFAULT,
        segments: Sequence[Segment] = (),
    ) -> None:
        """`segments`: oldest first, without holes; the last one is appended to and so has an
        ActiveIndex. None: a journal that begins."""
        self.partitions = partitions
        self.segment_bytes = segment_bytes
        self.segments: list[Segment] = list(segments)
        self.epoch = 0
        # Per partition the first offset that is still there, or would be without damage.
        self.start_offsets: list[int] = [0] * partitions
        # Per partition the offset the next record gets.
        self.next_offset: list[int] = [0] * partitions
        # Records appended so far.
        self.sequence = 0
        if self.segments:
            self.start_offsets = list(self.segments[0].start_offsets())
            self.next_offset = list(self.segments[-1].end_offsets())
            self.sequence = self.segments[-1].end_sequence()
        # Per partition the first offset not yet committed, and not yet in the file. Readers stop
        # at the latter.
        self.high_watermark: list[int] = list(self.next_offset)
        self.written: list[int] = list(self.next_offset)
        self.committed_sequence = self.sequence
        # Appended and not yet taken; without batch headers.
        self.pending_bytes = 0
        self._taken_sequence = self.sequence
        # The next group starts a segment however much room there is.
        self._starts_segment = False
        self._open: list[BatchBuilder | None] = [None] * partitions
        self._pending: list[BatchBuilder] = []

    def begin_at(self, next_offset: Sequence[int], sequence: int) -> None:
        """Let an empty journal go on where another one, or what was removed, ended."""
        assert not self.segments
        assert not self._pending
        self.start_offsets = list(next_offset)
        self.next_offset = list(next_offset)
        self.high_watermark = list(next_offset)
        self.written = list(next_offset)
        self.sequence = sequence
        self.committed_sequence = sequence
        self._taken_sequence = sequence

    def begin_epoch(self, epoch: int) -> None:
        """What is appended from here on carries the epoch and begins a segment: the one before
        may still be open elsewhere. A last segment has records: the new one would get its name."""
        assert not self.segments or self.segments[-1].head.records
        self.epoch = epoch
        self._starts_segment = True

    def follow_segment(self) -> Segment:
        """The segment that another process has begun, named by what was followed so far."""
        ends = self.segments[-1].end_offsets() if self.segments else self.start_offsets
        index = ActiveIndex(self.sequence, ends)
        segment = Segment(self.sequence, index.head, index, 0)
        self.segments.append(segment)
        return segment

    def follow(self, batch: Batch, position: int) -> None:
        """Take over a batch that another process has written at `position` of the last segment.
        It counts as committed: whoever promises on it makes it durable first."""
        segment = self.segments[-1]
        index = segment.index
        assert isinstance(index, ActiveIndex)
        topics, last_delta_us = batch.topics()
        index.add_batch(
            position,
            batch.length,
            batch.partition,
            batch.base_offset,
            batch.attributes,
            batch.base_timestamp_us,
            last_delta_us,
            topics,
        )
        segment.size_bytes = position + batch.length
        end = batch.end_offset
        self.next_offset[batch.partition] = end
        self.high_watermark[batch.partition] = end
        self.written[batch.partition] = end
        self.sequence += batch.count
        self.committed_sequence = self.sequence
        self._taken_sequence = self.sequence

    def append(
        self,
        partition: int,
        kind: int,
        flags: int,
        timestamp_us: int,
        topic: bytes,
        client_id: bytes,
        producer: bytes,
        producer_epoch: int,
        sequence: int,
        properties: bytes,
        payload: bytes,
        state: bool,
    ) -> int:
        """Add a record, return its offset. `sequence` is the record's own (producer sequence or
        packet id); `state`: recovery must apply it."""
        builder = self._open[partition]
        if builder is None:
            builder = BatchBuilder(partition, self.next_offset[partition])
            self._open[partition] = builder
            self._pending.append(builder)
        before = builder.body_bytes
        offset = builder.add(
            kind,
            flags,
            timestamp_us,
            topic,
            client_id,
            producer,
            producer_epoch,
            sequence,
            properties,
            payload,
            state,
        )
        self.next_offset[partition] = offset + 1
        self.sequence += 1
        self.pending_bytes += builder.body_bytes - before + HEAD_BYTES
        if builder.body_bytes >= BATCH_BODY_BYTES_MAX or builder.count >= BATCH_RECORDS_MAX:
            self._open[partition] = None
        return offset

    def take(self) -> WriteGroup | None:
        """Close all open batches and hand them out; None if nothing was appended since the last
        call. Groups must be written in the order they were taken."""
        pending = self._pending
        if not pending:
            return None
        self._pending = []
        data: list[bytes] = []
        size_bytes = 0
        for builder in pending:
            self._open[builder.partition] = None
            batch = builder.build(self.epoch)
            data.append(batch)
            size_bytes += len(batch)
        self.pending_bytes = 0
        segments = self.segments
        segment = segments[-1] if segments else None
        sealed: Segment | None = None
        starts_segment = False
        if (
            segment is None
            or self._starts_segment
            or (segment.size_bytes and segment.size_bytes + size_bytes > self.segment_bytes)
        ):
            self._starts_segment = False
            sealed = segment
            starts_segment = True
            index = ActiveIndex(
                self._taken_sequence,
                segment.end_offsets() if segment is not None else self.start_offsets,
            )
            segment = Segment(self._taken_sequence, index.head, index, 0)
            segments.append(segment)
        position = segment.size_bytes
        active = segment.index
        assert isinstance(active, ActiveIndex)
        at = position
        for number, builder in enumerate(pending):
            length = len(data[number])
            active.add_built(at, length, builder)
            at += length
        segment.size_bytes = at
        self._taken_sequence = self.sequence
        return WriteGroup(
            segment.sequence,
            position,
            data,
            size_bytes,
            self.sequence,
            list(self.next_offset),
            starts_segment,
            sealed,
        )

    def wrote(self, group: WriteGroup) -> None:
        """The group's bytes are in the file: readers may have them."""
        self.written[:] = group.end_offsets

    def commit(self, group: WriteGroup) -> None:
        """The group is durable."""
        self.high_watermark[:] = group.end_offsets
        self.committed_sequence = group.end_sequence

    def commit_appended(self) -> None:
        """Everything appended so far counts as committed (durability "memory")."""
        self.high_watermark[:] = self.next_offset
        self.committed_sequence = self.sequence

    def active_sequence(self) -> int:
        """The sequence that names the active segment, or the first one to come."""
        return self.segments[-1].sequence if self.segments else self.sequence

    def size_bytes(self) -> int:
        """Of all segments."""
        total = 0
        for segment in self.segments:
            total += segment.size_bytes
        return total

    def remove_oldest(self, count: int) -> list[Segment]:
        """Forget the oldest segments (never the active one) and return them; their files may be
        removed after the new `start_offsets` are durable."""
        count = min(count, len(self.segments) - 1)
        if count <= 0:
            return []
        removed = self.segments[:count]
        self.segments = self.segments[count:]
        self.start_offsets = list(self.segments[0].start_offsets())
        return removed

    def replace_segment(self, segment: Segment) -> None:
        """Its file was rewritten: another size and index, the same sequence and offsets."""
        for at, other in enumerate(self.segments[:-1]):
            if other.sequence == segment.sequence:
                self.segments[at] = segment
                return
