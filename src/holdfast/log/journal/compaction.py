"""Compaction: emptying messages that `per_topic_last` no longer keeps, without moving any offset,
and dropping the batches of partitions that the node has forgotten. It uses os, through files.

An emptied message leaves its head behind as a CONTROL record without topic and payload. So offsets
stay dense, batches keep their order and count, and a segment still begins at its sequence. Only
segments counted by retention.count_unpinned may be rewritten so: no session needs them, and
recovery begins after them. Records of other kinds stay unchanged.

A batch is dropped if its partition began again behind it, by a mark that is on the disk. It is void
in every version, and each reader begins at that mark. So any sealed segment may be rewritten so.
"""

from collections.abc import Callable, Mapping
from typing import Final

from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_RESET,
    HEADER_BYTES,
    Batch,
    CorruptBatch,
)
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.filesystem import TemporaryFile
from holdfast.log.files.layout import DataDirectory, segment_name
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.index import SegmentIndex
from holdfast.log.record import CONTROL, MESSAGE, Record

WRITE_BYTES: Final = 1 << 20
"""The bytes read before a write."""


class SegmentCompactor:
    """Rewrites the batches of one segment, in their order.

    `beyond` is the number of a topic's oldest messages in this segment to empty; see
    retention.messages_beyond.
    """

    def __init__(self, beyond: Mapping[bytes, int]) -> None:
        self._beyond = dict(beyond)
        self.emptied = 0
        self.bytes_freed = 0

    def rewrite(self, batch: Batch) -> bytes:
        """The batch with superseded messages emptied; the same bytes if it has none."""
        emptied = self.emptied
        builder = BatchBuilder(batch.partition, batch.base_offset)
        for record in batch.records():
            left = self._beyond.get(record.topic, 0) if record.kind == MESSAGE else 0
            if left:
                self._beyond[record.topic] = left - 1
                self.emptied += 1
                builder.add(Record(builder.partition, CONTROL, timestamp_us=record.timestamp_us))
            else:
                builder.add(record)
        if self.emptied == emptied:
            return bytes(batch.data[batch.start : batch.start + batch.length])
        builder.attributes = batch.attributes & ~(ATTRIBUTE_GROUPED | ATTRIBUTE_MORE)
        data = builder.build(batch.epoch)
        self.bytes_freed += batch.length - len(data)
        return data


def is_worthwhile(counts: Mapping[bytes, int], beyond: Mapping[bytes, int]) -> bool:
    """True if at least half of a segment's messages go. For less, rewriting costs more disk time
    than it saves space, and the rest goes with a later, larger share."""
    return 2 * sum(beyond.values()) >= max(1, sum(counts.values()))


def compact_segment(
    directory: DataDirectory, segment: Segment, beyond: Mapping[bytes, int]
) -> Segment | None:
    """Rewrites a sealed segment without superseded messages, and returns its replacement in the
    journal. None, and nothing is changed, if the segment is damaged, has void records, or nothing
    would be freed. For the caller's part see `SegmentRewrite.finish`. Raises OSError."""
    if segment.has_void():
        return None
    compactor = SegmentCompactor(beyond)
    made = SegmentRewrite(directory, segment, lambda batch, position: compactor.rewrite(batch))
    try:
        while made.step():
            pass
    except BaseException:
        made.discard()
        raise
    if made.is_complete and compactor.bytes_freed:
        return made.finish()
    made.discard()
    return None


class SegmentRewrite:
    """The new file of a sealed segment, while it is written under a temporary name.

    The segment's offsets and sequences stay the same. A crash at any moment leaves the old file, or
    the new one.
    """

    def __init__(
        self, directory: DataDirectory, segment: Segment, rewrite: Callable[[Batch, int], bytes]
    ) -> None:
        """`rewrite` returns the new bytes of the batch at a position of the old file, b"" to drop
        it. Raises OSError."""
        self.sequence = segment.sequence
        self._directory = directory
        self._segment = segment
        self._rewrite = rewrite
        self._source = directory.open_segment(segment.sequence)
        self._output = TemporaryFile(directory.files, segment_name(segment.sequence))
        self._index = ActiveIndex(segment.sequence, segment.head.start_offsets, is_lowest=True)
        self._from = 0
        self._to = 0
        self.is_complete = False

    def step(self) -> bool:
        """Writes about WRITE_BYTES, and syncs the file after the last of them. Returns whether
        there is more. It is not complete after that if the segment is damaged. Raises OSError."""
        pieces: list[bytes] = []
        begun_at, end = self._from, self._source.size()
        while self._from < end and self._from - begun_at < WRITE_BYTES:
            length = int.from_bytes(self._source.read(self._from + 4, 4), "little")
            try:
                batch = Batch(self._source.read(self._from, min(length, end - self._from)))
            except CorruptBatch:
                return False
            data = self._rewrite(batch, self._from)
            if data:
                self._index.add_parsed(self._to, Batch(data, check=False))
                self._to += len(data)
                pieces.append(data)
            self._from += batch.length
        self._output.write(pieces)
        if self._from < end:
            return True
        self._output.sync()
        # If offsets are missing in the segment or before it, they differ. Counter-example: without
        # its gap, a segment ends before the sequence with which the next one begins.
        new, old = self._index.head, self._segment.head
        self.is_complete = (new.end_offsets, new.records, new.missing) == (
            old.end_offsets, old.records, old.missing,
        )  # fmt: skip
        return False

    def finish(self) -> Segment:
        """Replaces the old file and its index, and returns the segment's replacement in the
        journal. What a LogReader knows of the old file is wrong then: run it in the reader's thread
        and call `forget_segment`. Raises OSError.

        The index goes before the new file comes, so no crash leaves the index of the other file. A
        segment without an index is scanned. Smallest counter-example: a holder of a shared
        directory is stopped between the two files. Its successor, which does not scan old segments,
        would look for batches where they were before.
        """
        assert self.is_complete, "a part of a segment"
        data = self._index.encode()
        self._directory.remove_index(self.sequence)
        self._output.finish()
        self._directory.write_index(self.sequence, data)
        return self._segment.rewritten(self._index.head, self._to)

    def discard(self) -> None:
        """Removes the new file."""
        self._output.discard()


class ForgottenBatches:
    """The dead batches of one segment. A mark takes the place of those of a partition. It has their
    end, so no offset seems to be missing, and their number of records."""

    def __init__(self, index: SegmentIndex, marks: Mapping[int, int]) -> None:
        """`marks`: see `segment_list.forgotten`."""
        head = index.head
        # Per partition the position below which its batches are dead, and that of the last of them.
        self._ends = {each: head.log_bytes for each, at in marks.items() if head.sequence < at}
        self._last: dict[int, int] = {}
        self._dropped: dict[int, int] = {}
        self._end_offsets = head.end_offsets
        self.bytes_freed = 0
        for number, attributes in enumerate(index.attributes):
            partition = index.partitions[number]
            if attributes & ATTRIBUTE_RESET and marks.get(partition) == head.sequence:
                self._ends[partition] = index.positions[number]
        for number, partition in enumerate(index.partitions):
            position = index.positions[number]
            if position < self._ends.get(partition, 0):
                if partition not in self._last:
                    self.bytes_freed -= HEADER_BYTES
                self._last[partition] = position
                self.bytes_freed += index.batch_end(number) - position

    def rewrite(self, batch: Batch, position: int) -> bytes:
        """The `rewrite` of a SegmentRewrite."""
        partition = batch.partition
        if position >= self._ends.get(partition, 0):
            return batch.content()
        dropped = self._dropped.get(partition, 0) + (batch.count or max(1, batch.epoch))
        self._dropped[partition] = dropped
        if position < self._last[partition]:
            return b""
        mark = BatchBuilder(partition, self._end_offsets[partition])
        mark.attributes = ATTRIBUTE_RESET
        return mark.build(dropped)
