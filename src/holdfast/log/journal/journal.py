"""The journal's bookkeeping: open batches, offsets, watermarks, and the list of segments.

The module does no I/O. `append` puts a record into its partition's open batch. `close_write_group`
closes all open batches and returns them as one WriteGroup, whose position in the file is final.
`wrote` and `commit` report the progress of the disk. The batches of a group lie in the order of
their first records. So the order inside a group, across partitions, is not that of `append`.

A segment begins with a group and is named by the number of records appended before it.

A group is atomic: readers and recovery take all of its batches or none. Smallest counter-example:
one batch moves a shared group's position past a message, and another records the message as
inflight at a group member. If a crash leaves only the first, the message is never delivered again.
So each batch has the number of bytes of its group in front of it, and whether another batch follows
(ATTRIBUTE_MORE). A group of one batch is atomic by the batch's checksum.

The bytes in front are counted from the journal's `tag`, a number that no publisher knows. So a
payload that looks like a batch is not taken for one when the batch around it is torn. The tag of a
journal never changes, because recovery compares it from group to group.

A replica does not mark its groups. Its partitions are committed one by one, so no record relies on
one of another partition. Its batches are the leader's, byte for byte.

In a replica (`replicated`) a partition has one leader among several journals. The journal gets
batches by `append` where it leads and by `append_batch` where it follows. `commit` reports what is
durable here, and `advance` alone moves the high watermark. Uncommitted records may be cut off
again: `truncate` and `reset` drop pending batches, but never bytes that are with the writer or in a
file. Those are void as soon as the partition continues below them; see `log.reading.index`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_RESET,
    GROUP_MASK,
    HEAD_BYTES,
    HEADER_BYTES,
    Batch,
)
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal import segment_list
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.epoch_table import PartitionEpochs
from holdfast.log.journal.segment import Segment, WriteGroup
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.record import Record

BATCH_RECORDS_MAX: Final = 1 << 20
"""The most records of a batch: a posting has INDEX_BITS for the index in a batch."""
BATCH_BODY_BYTES_MAX: Final = 16 << 20
"""The body size in bytes at which a batch is closed. A record as large makes a batch of its own. So
a batch has at most twice as much, or one record, and fits into a frame between nodes."""
_MARKS: Final = ATTRIBUTE_GROUPED | ATTRIBUTE_MORE
SEGMENT_BYTES_DEFAULT: Final = 64 << 20


class Journal:
    """The journal of one node: its segments, and per partition the offsets that are appended,
    written, durable and committed. No partition is committed or written beyond what is appended.
    None is durable beyond what is written, unless durability is "memory"."""

    def __init__(
        self,
        partitions: int,
        segment_bytes: int = SEGMENT_BYTES_DEFAULT,
        segments: Sequence[Segment] = (),
        replicated: bool = False,
        start_epochs: Sequence[tuple[int, int, int]] = (),
        tag: int = 0,
    ) -> None:
        """Starts a journal on `segments`, oldest first, without holes; the last one has an
        ActiveIndex. With `replicated`, only `advance` and `reset` move the high watermark.
        `start_epochs` is the result of that method before older segments were removed. `tag`, below
        2**32, is that of the segments if they have one."""
        self.partitions = partitions
        self.segment_bytes = segment_bytes
        self.replicated = replicated
        self.is_alone = False
        """In a replica: no other node counts, so what is durable here is committed."""
        self.tag = tag
        # True if the batch followed last ends its group.
        self._follows_group_end = True
        self.segments: list[Segment] = list(segments)
        # Per partition, the epoch of the next batch to be opened.
        self.epochs: list[int] = [0] * partitions
        self._history = PartitionEpochs(partitions, start_epochs)
        # Per partition the first offset that is still there, or would be without damage.
        self.start_offsets: list[int] = [0] * partitions
        # Per partition the offset the next record gets. Invariant, per partition:
        # start_offsets <= next_offset, and written, durable_offset, high_watermark <= next_offset.
        self.next_offset: list[int] = [0] * partitions
        self.restarts = 0
        """How often the log of a partition has begun again: see `reset`."""
        # Records appended so far.
        self.sequence = 0
        if self.segments:
            self.start_offsets = list(self.segments[0].start_offsets())
            self.next_offset = list(self.segments[-1].end_offsets())
            self.sequence = self.segments[-1].end_sequence()
            for segment in self.segments:
                self._history.add_notes(segment.head, cuts=replicated)
            self._history.apply_floors(self.start_offsets)
        # Per partition the first offset not yet committed, not yet in the file, and not yet on the
        # disk. Readers stop at the second.
        self.high_watermark: list[int] = list(self.next_offset)
        self.written: list[int] = list(self.next_offset)
        self.durable_offset: list[int] = list(self.next_offset)
        # In a replica, every record before this sequence is durable. It never falls, and is never
        # above `sequence`.
        self.committed_sequence = self.sequence
        # The bytes appended and not yet taken, without batch headers.
        self.pending_bytes = 0
        self._closed_sequence = self.sequence
        # The next group starts a segment, however much room there is.
        self._starts_segment = False
        self._open: list[BatchBuilder | None] = [None] * partitions
        # Batches built here, and batches of leaders as they came.
        self._pending: list[BatchBuilder | Batch] = []
        # In a replica, the partitions that damage has touched; see OpenedJournal.damaged. Until
        # each is cut there or reset, the next opening must find the damage again. So the checkpoint
        # does not move past it.
        self.damaged: dict[int, int] = {}
        self._replaced_sequence = 0
        # In a replica, the partitions whose records are not stored here, and where their log ended.
        # Invariant: such a partition has no pending batch, and all its positions are equal.
        self._unstored: dict[int, int] = {}
        # The position of a replica's last checkpoint: every byte before it is durable.
        self._durable_segment = 0
        self._durable_position = 0
        # In a replica, groups whose end may still have to be moved back.
        self._in_flight: deque[WriteGroup] = deque()

    def continue_at(self, next_offset: Sequence[int], sequence: int) -> None:
        """Lets an empty journal continue where another one, or removed segments, ended."""
        assert not self.segments
        assert not self._pending
        self.start_offsets = list(next_offset)
        self.next_offset = list(next_offset)
        self.high_watermark = list(next_offset)
        self.written = list(next_offset)
        self.durable_offset = list(next_offset)
        self.sequence = sequence
        self.committed_sequence = sequence
        self._closed_sequence = sequence

    def start_segment(self) -> None:
        """Appends from here on in a new segment, because the one before may still be open
        elsewhere. A last segment must have records, or the new one would get its name."""
        assert not self.segments or self.segments[-1].head.records
        self._starts_segment = True

    def lead(self, partition: int, epoch: int) -> None:
        """Appends to the partition under this epoch from here on."""
        self.epochs[partition] = epoch
        builder = self._open[partition]
        if builder is not None and builder.epoch != epoch:
            self._open[partition] = None

    def follow_segment(self) -> Segment:
        """Adds the segment that another process began, named by the sequence followed so far."""
        ends = self.segments[-1].end_offsets() if self.segments else self.start_offsets
        index = ActiveIndex(self.sequence, ends)
        segment = Segment(self.sequence, index.head, index, 0)
        self.segments.append(segment)
        return segment

    def follow(self, batch: Batch, position: int) -> None:
        """Takes over a batch that another process has written at `position` of the last segment. It
        counts as committed, because a node makes it durable before it promises anything on it."""
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
        if not self.damaged:
            self._durable_segment, self._durable_position = segment.sequence, segment.size_bytes
        self._history.note(batch.partition, batch.epoch, batch.base_offset)
        if batch.attributes & ATTRIBUTE_GROUPED:
            if self._follows_group_end:
                self.tag = batch.group
            self._follows_group_end = not batch.attributes & ATTRIBUTE_MORE
        self.sequence += batch.count
        self.committed_sequence = self.sequence
        self._closed_sequence = self.sequence

    def append(self, record: Record) -> int:
        """Appends a record to its partition, and returns its offset."""
        partition = record.partition
        builder = self._open[partition]
        if builder is None:
            builder = self._begin_batch(partition)
        before = builder.body_bytes
        offset = builder.add(record)
        assert offset == self.next_offset[partition], "a record leaves a hole"
        self.next_offset[partition] = offset + 1
        self.sequence += 1
        self.pending_bytes += builder.body_bytes - before + HEAD_BYTES
        if builder.body_bytes >= BATCH_BODY_BYTES_MAX or builder.count >= BATCH_RECORDS_MAX:
            self._open[partition] = None
            if builder.body_bytes > 2 * BATCH_BODY_BYTES_MAX and builder.count > 1:
                self._pending.append(builder.move_last(record))
        return offset

    def extend(self, batch: Batch) -> int:
        """Appends the records of another node's batch, and returns the first one's offset."""
        partition = batch.partition
        builder = self._open[partition]
        if (
            builder is None
            or builder.count + batch.count > BATCH_RECORDS_MAX
            or builder.body_bytes + batch.body_bytes > 2 * BATCH_BODY_BYTES_MAX
        ):
            builder = self._begin_batch(partition)
        offset = builder.extend(batch)
        assert offset == self.next_offset[partition], "a batch leaves a hole"
        self.next_offset[partition] = offset + batch.count
        self.sequence += batch.count
        self.pending_bytes += batch.body_bytes + batch.count * HEAD_BYTES
        if builder.body_bytes >= BATCH_BODY_BYTES_MAX:
            self._open[partition] = None
        return offset

    def _begin_batch(self, partition: int) -> BatchBuilder:
        assert partition not in self._unstored, "a record of a partition that is not stored"
        builder = BatchBuilder(partition, self.next_offset[partition])
        builder.epoch = self.epochs[partition]
        if builder.epoch:
            self._history.note(partition, builder.epoch, builder.base_offset)
        builder.corrects_times = self.replicated
        if self.replicated and not self.is_alone:
            builder.records = []
        self._open[partition] = builder
        self._pending.append(builder)
        return builder

    def close_write_group(self) -> WriteGroup | None:
        """Closes all open batches and returns them as one group; None if nothing was appended since
        the last call. Groups must be written in the order they were taken."""
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
                    if item.count and not self.is_alone:
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
        self._closed_sequence = self.sequence
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
        self._starts_segment = False
        starts = self.logged(self.start_offsets)
        if self.segments:
            starts = self.segments[-1].end_offsets()
        if self.replicated:
            ends = list(self.next_offset)
            for partition in self._unstored:
                ends[partition] = starts[partition]
            starts = segment_list.cut_starts(self.segments, starts, ends, pending)
        index = ActiveIndex(self._closed_sequence, starts)
        segment = Segment(self._closed_sequence, index.head, index, 0)
        self.segments.append(segment)
        return segment

    def wrote(self, group: WriteGroup) -> None:
        """Notes that the group is in the file, so readers may have it."""
        self.written[:] = group.end_offsets
        while self._in_flight and self._in_flight[0] is not group:
            self._in_flight.popleft()

    def commit(self, group: WriteGroup) -> None:
        """Notes that the group is durable. Without other replicas it is therefore committed."""
        assert group.end_sequence >= self.committed_sequence, "the committed sequence falls"
        self.durable_offset[:] = group.end_offsets
        if not self.replicated or self.is_alone:
            self.high_watermark[:] = group.end_offsets
        if self._in_flight and self._in_flight[0] is group:
            self._in_flight.popleft()
        if not self.damaged and group.end_sequence >= self._replaced_sequence:
            self._durable_segment = group.segment
            self._durable_position = group.position + group.size_bytes
        self.committed_sequence = group.end_sequence

    # In a replica

    def append_batch(self, batch: Batch) -> None:
        """Appends a leader's batch. Raises `ValueError` if it does not begin where the partition
        ends."""
        partition = batch.partition
        if partition >= self.partitions:
            raise ValueError(f"partition {partition}, the journal has {self.partitions}")
        if batch.base_offset != self.next_offset[partition] or not batch.count:
            raise ValueError(
                f"{batch.count} records from offset {batch.base_offset} of partition {partition},"
                f" which ends at {self.next_offset[partition]}"
            )
        assert partition not in self._unstored, "a batch of a partition that is not stored"
        self._open[partition] = None
        self._pending.append(batch)
        self._history.note(partition, batch.epoch, batch.base_offset)
        self.next_offset[partition] = batch.end_offset
        self.sequence += batch.count
        self.pending_bytes += batch.length

    def truncate(self, partition: int, offset: int) -> None:
        """Drops the partition's records from `offset` on, where a batch begins. Bytes in a file
        stay there, and a restart before the partition continues brings them back. Raises
        `ValueError` if the records are committed, or no batch begins there."""
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
        if offset <= self.damaged.get(partition, -1):
            self._mark_replaced(partition)

    def begin_checkpoints(self, checkpoint: Checkpoint, damaged: dict[int, int]) -> None:
        """Takes over the last checkpoint of an opened replica, and its OpenedJournal.damaged."""
        self.damaged = damaged
        claims = segment_list.claims(self.segments, checkpoint)
        for partition, end in enumerate(self.next_offset):
            # Retention removes only committed records, so the start is committed. The file's end
            # may lack committed records.
            committed = max(claims[partition], self.start_offsets[partition])
            self.high_watermark[partition] = min(committed, end)
        self._durable_segment = checkpoint.segment
        self._durable_position = checkpoint.position
        if self.segments and not damaged:
            self._durable_segment = self.segments[-1].sequence
            self._durable_position = self.segments[-1].size_bytes

    def reset(self, partition: int, offset: int) -> None:
        """Restarts the partition at `offset`, where its leader's log begins: its records are void,
        and it is committed up to there. The next group makes the reset durable, by a mark for a
        restart. The partition is stored from here on."""
        self._unstored.pop(partition, None)
        self.restarts += 1
        self._history.restart_at(partition, offset)
        self._cut(partition, 0)
        mark = BatchBuilder(partition, offset)
        mark.attributes = ATTRIBUTE_RESET
        self._pending.append(mark)
        self.pending_bytes += HEADER_BYTES
        self.sequence += 1
        self._mark_replaced(partition)
        self.start_offsets[partition] = offset
        self.next_offset[partition] = offset
        self.high_watermark[partition] = offset

    def forget(self, partition: int) -> None:
        """Ends the log of the partition here: its records are void, and the partition is not stored
        from here on. The next group makes that durable. After a crash before that, the partition
        has its log as before. Its positions are those of the high watermark until `place`. A
        restart finds an empty log at 0, behind the state that a snapshot has. Counter-example with
        a log that is empty at the high watermark: so is one that has begun again there, and that
        one lacks nothing."""
        if partition not in self._unstored:
            end = self.high_watermark[partition]
            self.reset(partition, 0)
            self._unstored[partition] = 0
            self.place(partition, end)

    def place(self, partition: int, offset: int) -> None:
        """Sets the positions of a partition that is not stored. They are in memory alone: a restart
        finds the end of the log that was forgotten, or 0. The log of the partition must be empty,
        so `forget` it before. `reset` begins to store it."""
        if partition not in self._unstored:
            end = self.next_offset[partition]
            assert self.start_offsets[partition] == end, "the log of the partition is not empty"
            self._unstored[partition] = end
            self._history.cut(partition, 0)
            self._mark_replaced(partition)
        self.start_offsets[partition] = offset
        self.next_offset[partition] = offset
        self.high_watermark[partition] = offset
        self.written[partition] = offset
        self.durable_offset[partition] = offset
        for group in self._in_flight:
            group.end_offsets[partition] = offset

    def advance(self, partition: int, offset: int) -> None:
        """Commits everything below the offset. The watermark never falls or passes the end."""
        offset = min(offset, self.next_offset[partition])
        if offset > self.high_watermark[partition]:
            self.high_watermark[partition] = offset

    def check(self) -> None:
        """Raises `AssertionError` for an invariant over all partitions that does not hold."""
        for partition, end in enumerate(self.next_offset):
            assert self.start_offsets[partition] <= end, "the log begins behind its end"
            assert self.high_watermark[partition] <= end, "high_watermark <= next_offset"
            assert self.written[partition] <= end, "written <= next_offset"
            assert self.durable_offset[partition] <= end, "durable_offset <= next_offset"
            builder = self._open[partition]
            assert builder is None or builder.base_offset + builder.count == end, "an open batch"
        for partition in self._unstored:
            ends = {self.start_offsets[partition], self.high_watermark[partition]}
            ends |= {self.written[partition], self.durable_offset[partition]}
            assert ends == {self.next_offset[partition]}, "records of a partition not stored"
        assert self.committed_sequence <= self.sequence, "more is committed than appended"
        sizes = [item.size_bytes for item in self._pending if isinstance(item, Batch)]
        assert sum(sizes) <= self.pending_bytes, "the pending bytes"
        for older, newer in zip(self.segments, self.segments[1:], strict=False):
            assert older.end_sequence() == newer.sequence, "a gap between segments"

    def checkpoint(self) -> Checkpoint:
        """The committed and durable offsets, for the file of watermarks. Without the second
        condition, the file may still have records that were cut off at committed offsets. A
        partition that is not stored has the end of its log. Counter-example: it has the offset of
        `place`. Its log begins again, and a restart takes uncommitted records for committed."""
        offsets = [min(pair) for pair in zip(self.high_watermark, self.durable_offset, strict=True)]
        position = self._durable_segment, self._durable_position
        return Checkpoint(self.logged(offsets), *position, self.committed_sequence)

    def logged(self, offsets: Sequence[int]) -> list[int]:
        """The offsets, with the end of the log for each partition that is not stored."""
        result = list(offsets)
        for partition, end in self._unstored.items():
            result[partition] = end
        return result

    def last_epoch(self, partition: int) -> int:
        """The epoch of the newest batch, pending ones included; 0 for an empty log."""
        return self._history.last_epoch(partition)

    def epoch_end(self, partition: int, epoch: int) -> tuple[int, int]:
        """The largest epoch that is at most `epoch`, and its end; or 0 and the start of the log."""
        found, end = self._history.end_of(partition, epoch, self.next_offset[partition])
        return found, max(end, self.start_offsets[partition])

    def start_epochs(self) -> list[tuple[int, int, int]]:
        """The (partition, epoch, first offset) under which each partition begins. They must be kept
        when segments are removed, for partitions that then have no batch."""
        return self._history.starts(self.start_offsets) if self.replicated else []

    def snapshot_sequence(self, offsets: Sequence[int]) -> int:
        """The name of a snapshot of everything before these offsets: a sequence such that no valid
        record before it is at or behind them."""
        segment = segment_list.last_within(self.segments, offsets)
        if segment is None:
            return self.segments[0].sequence if self.segments else self._closed_sequence
        all_of_it = segment is self.segments[-1] and list(offsets) == self.next_offset
        return self.sequence if all_of_it else segment.sequence

    def _mark_replaced(self, partition: int) -> None:
        if self.damaged.pop(partition, None) is not None:
            self._replaced_sequence = self.sequence

    def _cut(self, partition: int, offset: int) -> None:
        """Drops the partition's pending records from `offset` on; bytes in a file stay."""
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

    def size_bytes(self) -> int:
        """The bytes of all segments."""
        return segment_list.size_bytes(self.segments)

    def remove_oldest(self, count: int) -> list[Segment]:
        """Drops the oldest segments (never the active one) and returns them. Their files may be
        removed once the new `start_offsets` are durable. A replica keeps those a restart needs."""
        count = min(count, len(self.segments) - 1)
        if self.replicated:
            committed = self.logged(self.high_watermark)
            count = segment_list.removable(self.segments, count, committed)
        if count <= 0:
            return []
        removed = self.segments[:count]
        self.segments = self.segments[count:]
        self.start_offsets = list(self.segments[0].start_offsets())
        self._history.apply_floors(self.start_offsets)
        for partition in self._unstored:
            self.start_offsets[partition] = self.next_offset[partition]
        return removed

    def replace_segment(self, segment: Segment) -> None:
        """Replaces a segment whose file was rewritten: only its size and index differ."""
        for at, other in enumerate(self.segments[:-1]):
            if other.sequence == segment.sequence:
                self.segments[at] = segment
                return
