"""The journal's bookkeeping: open batches, offsets, watermarks, and the list of segments.

It does no I/O. `append` puts a record into its partition's open batch; `take` closes all open
batches and hands them out as one WriteGroup, whose place in the file is decided there and then;
`wrote` and `commit` say how far the disk has come. The batches of a group lie in the order of
their first records, so across partitions the order inside a group is not that of `append`.

A segment begins with a group and is named by the number of records appended before it.

A group is atomic: readers and recovery take all of its batches or none. Smallest counter-example: a
shared group's position moves past a message in one batch, and the member that was given it has it
inflight in another. If a crash leaves only the first, nobody is ever given the message again. So
each batch says how many bytes of its group lie in front of it, and whether another one follows
(ATTRIBUTE_MORE). A group of one batch is atomic by the batch's checksum.

The bytes in front are counted from the journal's `tag`, a number that no publisher knows. So a
payload that looks like a batch is not taken for one where the batch around it is torn. The tag of a
journal never changes, because recovery compares it from group to group.

A replica does not mark its groups. Its partitions are committed one by one, so no record relies on
one of another partition, and its batches are the leader's, byte for byte.

In a replica (`replicated`) a partition has one leader among several journals. It gets batches by
`append` where it leads and by `append_batch` where it follows; `commit` says what is durable here,
and the high watermark moves by `advance` alone. What was never committed may be cut off again:
`truncate` and `reset` drop what is pending, but never bytes that are with the writer or in a file.
Those are void as soon as the partition goes on below them, see holdfast.storage.reading.index.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from holdfast.storage.journal import segment_list
from holdfast.storage.journal.active_index import ActiveIndex
from holdfast.storage.journal.epoch_table import PartitionEpochs
from holdfast.storage.journal.segment import Segment, WriteGroup
from holdfast.storage.journal.watermarks import Checkpoint
from holdfast.storage.record import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_RESET,
    GROUP_MASK,
    HEAD_BYTES,
    HEADER_BYTES,
    Batch,
    BatchBuilder,
    Record,
)

BATCH_RECORDS_MAX: Final = 1 << 20
"""A posting has INDEX_BITS for the index in a batch."""
BATCH_BODY_BYTES_MAX: Final = 16 << 20
"""A batch is closed at this size; a record as large makes one of its own. So a batch has at most
twice as much, or one record, and fits into a frame between nodes."""
_MARKS: Final = ATTRIBUTE_GROUPED | ATTRIBUTE_MORE
SEGMENT_BYTES_DEFAULT: Final = 64 << 20


class Journal:
    def __init__(
        self,
        partitions: int,
        segment_bytes: int = SEGMENT_BYTES_DEFAULT,
        segments: Sequence[Segment] = (),
        replicated: bool = False,
        start_epochs: Sequence[tuple[int, int, int]] = (),
        tag: int = 0,
    ) -> None:
        """`segments`: oldest first, without holes; the last one is appended to and so has an
        ActiveIndex. None: a journal that begins. `replicated`: only `advance` and `reset` move the
        high watermark. `start_epochs`: what the method of that name gave before older segments
        were removed. `tag`: below 2**32, see above; the one that the segments have, if they do."""
        self.partitions = partitions
        self.segment_bytes = segment_bytes
        self.replicated = replicated
        self.tag = tag
        # Whether the batch followed last ends its group.
        self._follows_group_end = True
        self.segments: list[Segment] = list(segments)
        self.epoch = 0
        # Per partition, what the next batch to be opened carries.
        self.epochs: list[int] = [0] * partitions
        self._history = PartitionEpochs(partitions, start_epochs)
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
            for segment in self.segments:
                self._history.take_notes(segment.head, cuts=replicated)
            self._history.apply_floors(self.start_offsets)
        # Per partition the first offset not yet committed, not yet in the file, and not yet on the
        # disk. Readers stop at the second.
        self.high_watermark: list[int] = list(self.next_offset)
        self.written: list[int] = list(self.next_offset)
        self.durable_offset: list[int] = list(self.next_offset)
        # In a replica: everything before it is durable.
        self.committed_sequence = self.sequence
        # Appended and not yet taken; without batch headers.
        self.pending_bytes = 0
        self._taken_sequence = self.sequence
        # The next group starts a segment however much room there is.
        self._starts_segment = False
        self._open: list[BatchBuilder | None] = [None] * partitions
        # Own ones and those of leaders, as they came.
        self._pending: list[BatchBuilder | Batch] = []
        # Of a replica: partitions that damage has touched, see OpenedJournal.unsure. Until each was
        # cut there or began anew, the next opening has to find the damage again.
        self.unsure: dict[int, int] = {}
        self._sure_sequence = 0
        # What the last checkpoint of a replica says: everything before this place is durable.
        self._durable_segment = 0
        self._durable_position = 0
        # In a replica: groups whose end may still have to be moved back.
        self._in_flight: deque[WriteGroup] = deque()

    def begin_at(self, next_offset: Sequence[int], sequence: int) -> None:
        """Let an empty journal go on where another one, or what was removed, ended."""
        assert not self.segments
        assert not self._pending
        self.start_offsets = list(next_offset)
        self.next_offset = list(next_offset)
        self.high_watermark = list(next_offset)
        self.written = list(next_offset)
        self.durable_offset = list(next_offset)
        self.sequence = sequence
        self.committed_sequence = sequence
        self._taken_sequence = sequence

    def begin_epoch(self, epoch: int) -> None:
        """What is appended from here on carries the epoch and begins a segment: the one before
        may still be open elsewhere. A last segment has records: the new one would get its name."""
        assert not self.segments or self.segments[-1].head.records
        self.epoch = epoch
        for partition in range(self.partitions):
            self.lead(partition, epoch)
        self._starts_segment = True

    def lead(self, partition: int, epoch: int) -> None:
        """What is appended to the partition from here on carries the epoch."""
        self.epochs[partition] = epoch
        builder = self._open[partition]
        if builder is not None and builder.epoch != epoch:
            self._open[partition] = None

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
        index.add_parsed(position, batch)
        segment.size_bytes = position + batch.length
        end = batch.end_offset
        self.next_offset[batch.partition] = end
        self.high_watermark[batch.partition] = end
        self.written[batch.partition] = end
        self.durable_offset[batch.partition] = end
        self._history.note(batch.partition, batch.epoch, batch.base_offset)
        if batch.attributes & ATTRIBUTE_GROUPED:
            if self._follows_group_end:
                self.tag = batch.group
            self._follows_group_end = not batch.attributes & ATTRIBUTE_MORE
        self.sequence += batch.count
        self.committed_sequence = self.sequence
        self._taken_sequence = self.sequence

    def append(self, record: Record) -> int:
        """Put a record at the end of its partition; returns the offset that it gets."""
        partition = record.partition
        builder = self._open[partition]
        if builder is None:
            builder = self._begin_batch(partition)
        before = builder.body_bytes
        offset = builder.add(record)
        self.next_offset[partition] = offset + 1
        self.sequence += 1
        self.pending_bytes += builder.body_bytes - before + HEAD_BYTES
        if builder.body_bytes >= BATCH_BODY_BYTES_MAX or builder.count >= BATCH_RECORDS_MAX:
            self._open[partition] = None
            if builder.body_bytes > 2 * BATCH_BODY_BYTES_MAX and builder.count > 1:
                self._pending.append(builder.move_last(record))
        return offset

    def extend(self, batch: Batch) -> int:
        """Put the records of a batch that another node has made at the end of its partition, as
        they are; returns the offset that the first one gets."""
        partition = batch.partition
        builder = self._open[partition]
        if (
            builder is None
            or builder.count + batch.count > BATCH_RECORDS_MAX
            or builder.body_bytes + batch.body_bytes > 2 * BATCH_BODY_BYTES_MAX
        ):
            builder = self._begin_batch(partition)
        offset = builder.extend(batch)
        self.next_offset[partition] = offset + batch.count
        self.sequence += batch.count
        self.pending_bytes += batch.body_bytes + batch.count * HEAD_BYTES
        if builder.body_bytes >= BATCH_BODY_BYTES_MAX:
            self._open[partition] = None
        return offset

    def _begin_batch(self, partition: int) -> BatchBuilder:
        builder = BatchBuilder(partition, self.next_offset[partition])
        builder.epoch = self.epochs[partition]
        if builder.epoch:
            self._history.note(partition, builder.epoch, builder.base_offset)
        self._open[partition] = builder
        self._pending.append(builder)
        return builder

    def take(self) -> WriteGroup | None:
        """Close all open batches and hand them out; None if nothing was appended since the last
        call. Groups must be written in the order they were taken."""
        pending = self._pending
        if not pending:
            return None
        self._pending = []
        data: list[bytes] = []
        built: list[Batch] = []
        size_bytes = 0
        following = len(pending)
        for item in pending:
            following -= 1
            if isinstance(item, BatchBuilder):
                self._open[item.partition] = None
                if self.replicated:
                    content = item.build(item.epoch)
                    if item.count:
                        built.append(item.parsed(content))
                else:
                    group_field = (self.tag + size_bytes) & GROUP_MASK
                    marks = _MARKS if following else ATTRIBUTE_GROUPED
                    content = item.build(item.epoch, group_field, marks)
            else:
                content = item.content()
            data.append(content)
            size_bytes += len(content)
        self.pending_bytes = 0
        before = self.segments[-1] if self.segments else None
        segment = before
        if (
            segment is None
            or self._starts_segment
            or (segment.size_bytes and segment.size_bytes + size_bytes > self.segment_bytes)
        ):
            segment = self._begin_segment(pending)
        position = segment.size_bytes
        segment_list.add_batches(self.segments, pending, data)
        self._taken_sequence = self.sequence
        is_new = segment is not before
        group = WriteGroup(
            segment.sequence,
            position,
            data,
            size_bytes,
            self.sequence,
            list(self.next_offset),
            is_new,
            before if is_new else None,
            built,
        )
        if self.replicated:
            self._in_flight.append(group)
        return group

    def _begin_segment(self, pending: list[BatchBuilder | Batch]) -> Segment:
        """In front of these batches."""
        self._starts_segment = False
        starts = self.segments[-1].end_offsets() if self.segments else self.start_offsets
        if self.replicated:
            starts = segment_list.cut_starts(self.segments, starts, self.next_offset, pending)
        index = ActiveIndex(self._taken_sequence, starts)
        segment = Segment(self._taken_sequence, index.head, index, 0)
        self.segments.append(segment)
        return segment

    def wrote(self, group: WriteGroup) -> None:
        """The group's bytes are in the file: readers may have them."""
        self.written[:] = group.end_offsets
        while self._in_flight and self._in_flight[0] is not group:
            self._in_flight.popleft()

    def commit(self, group: WriteGroup) -> None:
        """The group is durable, and therefore committed unless other replicas have a say."""
        self.durable_offset[:] = group.end_offsets
        if not self.replicated:
            self.high_watermark[:] = group.end_offsets
        elif self._in_flight and self._in_flight[0] is group:
            self._in_flight.popleft()
        if not self.unsure and group.end_sequence >= self._sure_sequence:
            self._durable_segment = group.segment
            self._durable_position = group.position + group.size_bytes
        self.committed_sequence = group.end_sequence

    def commit_appended(self) -> None:
        """Everything appended so far counts as durable (durability "memory")."""
        self.durable_offset[:] = self.next_offset
        if not self.replicated:
            self.high_watermark[:] = self.next_offset
        self.committed_sequence = self.sequence

    # In a replica

    def append_batch(self, batch: Batch) -> None:
        """Add a batch of the partition's leader as it is. Raises ValueError if it does not begin
        where the partition ends."""
        partition = batch.partition
        if partition >= self.partitions:
            raise ValueError(f"partition {partition}, the journal has {self.partitions}")
        if batch.base_offset != self.next_offset[partition] or not batch.count:
            raise ValueError(
                f"{batch.count} records from offset {batch.base_offset} of partition {partition},"
                f" which ends at {self.next_offset[partition]}"
            )
        self._open[partition] = None
        self._pending.append(batch)
        self._history.note(partition, batch.epoch, batch.base_offset)
        self.next_offset[partition] = batch.end_offset
        self.sequence += batch.count
        self.pending_bytes += batch.length

    def truncate(self, partition: int, offset: int) -> None:
        """Drop what the partition holds from `offset` on, where a batch begins. Raises ValueError
        if that is committed, or not there.

        What is in a file stays there, and a restart before the partition goes on brings it back.
        """
        committed = self.high_watermark[partition]
        end = self.next_offset[partition]
        if not committed <= offset <= end:
            raise ValueError(
                f"partition {partition} cannot be cut at {offset}: it is committed to {committed}"
                f" and ends at {end}"
            )
        if offset == end:
            return
        for item in self._pending:
            inside = item.base_offset < offset < item.base_offset + item.count
            if item.partition == partition and inside:
                raise ValueError(f"partition {partition}: no batch begins at {offset}")
        self._history.cut(partition, offset)
        self._cut(partition, offset)
        if offset <= self.unsure.get(partition, -1):
            self._make_sure(partition)

    def begin_checkpoints(self, checkpoint: Checkpoint, unsure: dict[int, int]) -> None:
        """Of a replica that was opened: what its last checkpoint said, and OpenedJournal.unsure."""
        self.unsure = unsure
        for partition, end in enumerate(self.next_offset):
            # Retention removes nothing that is not committed. The file's end may lack what was.
            committed = max(checkpoint.offsets[partition], self.start_offsets[partition])
            self.high_watermark[partition] = min(committed, end)
        self._durable_segment = checkpoint.segment
        self._durable_position = checkpoint.position
        if self.segments and not unsure:
            self._durable_segment = self.segments[-1].sequence
            self._durable_position = self.segments[-1].size_bytes

    def reset(self, partition: int, offset: int) -> None:
        """Let the partition begin anew at `offset`, where its leader's log begins: what it holds
        is void, and it is committed up to there. Nothing of it is durable before the next group
        is, with the mark that tells a restart. If that is below the high watermark, the checkpoint
        of the watermarks must be replaced before."""
        self._history.begin_anew(partition, offset)
        self._cut(partition, 0)
        mark = BatchBuilder(partition, offset)
        mark.attributes = ATTRIBUTE_RESET
        self._pending.append(mark)
        self.pending_bytes += HEADER_BYTES
        self.sequence += 1
        self._make_sure(partition)
        self.start_offsets[partition] = offset
        self.next_offset[partition] = offset
        self.high_watermark[partition] = offset

    def advance(self, partition: int, offset: int) -> None:
        """What lies before the offset is committed. Never moves back, nor beyond what is here."""
        offset = min(offset, self.next_offset[partition])
        if offset > self.high_watermark[partition]:
            self.high_watermark[partition] = offset

    def checkpoint(self) -> Checkpoint:
        """What is committed and durable here, for the file of watermarks. What is committed but
        not durable here may lie where the file still holds what was cut off."""
        offsets = [min(pair) for pair in zip(self.high_watermark, self.durable_offset, strict=True)]
        return Checkpoint(offsets, self._durable_segment, self._durable_position)

    def last_epoch(self, partition: int) -> int:
        """Of the newest batch, pending ones included; 0 for an empty log."""
        return self._history.last_epoch(partition)

    def epoch_end(self, partition: int, epoch: int) -> tuple[int, int]:
        """The largest epoch here that is not above `epoch`, and the offset where it ends; epoch 0,
        and where the log begins, if there is none."""
        found, end = self._history.end_of(partition, epoch, self.next_offset[partition])
        return found, max(end, self.start_offsets[partition])

    def epoch_starts(self, partition: int) -> list[tuple[int, int]]:
        """(epoch, first offset), oldest first."""
        return self._history.entries(partition)

    def start_epochs(self) -> list[tuple[int, int, int]]:
        """Partition, epoch, and where that began: under which epochs the partitions begin. To be
        kept when older segments are removed, or a restart would not know where nothing is left."""
        return self._history.starts(self.start_offsets) if self.replicated else []

    def settled_sequence(self, offsets: Sequence[int]) -> int:
        """A sequence before which no record that counts is at or behind these offsets: what a
        snapshot of everything before them is called."""
        segment = segment_list.last_within(self.segments, offsets)
        if segment is None:
            return self.segments[0].sequence if self.segments else self._taken_sequence
        all_of_it = segment is self.segments[-1] and list(offsets) == self.next_offset
        return self.sequence if all_of_it else segment.sequence

    def _make_sure(self, partition: int) -> None:
        if self.unsure.pop(partition, None) is not None:
            self._sure_sequence = self.sequence

    def _cut(self, partition: int, offset: int) -> None:
        """Forget what the partition holds from `offset` on, as far as it is not in a file."""
        self._open[partition] = None
        kept: list[BatchBuilder | Batch] = []
        self.pending_bytes = 0
        for item in self._pending:
            if item.partition == partition and item.base_offset >= offset and item.count:
                self.sequence -= item.count
            else:
                kept.append(item)
                self.pending_bytes += item.size_bytes
        self._pending = kept
        self.next_offset[partition] = offset
        self.written[partition] = min(self.written[partition], offset)
        self.durable_offset[partition] = min(self.durable_offset[partition], offset)
        for group in self._in_flight:
            group.end_offsets[partition] = min(group.end_offsets[partition], offset)

    def active_sequence(self) -> int:
        """The sequence that names the active segment, or the first one to come."""
        return self.segments[-1].sequence if self.segments else self.sequence

    def size_bytes(self) -> int:
        """Of all segments."""
        return segment_list.size_bytes(self.segments)

    def remove_oldest(self, count: int) -> list[Segment]:
        """Forget the oldest segments (never the active one) and return them; their files may be
        removed after the new `start_offsets` are durable. In a replica fewer may go: not what a
        restart would have to know of to tell what is void."""
        count = min(count, len(self.segments) - 1)
        if self.replicated:
            count = segment_list.removable(self.segments, count, self.high_watermark)
        if count <= 0:
            return []
        removed = self.segments[:count]
        self.segments = self.segments[count:]
        self.start_offsets = list(self.segments[0].start_offsets())
        self._history.apply_floors(self.start_offsets)
        return removed

    def replace_segment(self, segment: Segment) -> None:
        """Its file was rewritten: another size and index, the same sequence and offsets."""
        for at, other in enumerate(self.segments[:-1]):
            if other.sequence == segment.sequence:
                self.segments[at] = segment
                return
