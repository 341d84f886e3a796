"""Compaction: emptying messages that `per_topic_last` no longer keeps, without moving any offset.
It uses os, through files.

An emptied message leaves its head behind as a CONTROL record without topic and payload. So offsets
stay dense, batches keep their order and count, and a segment still begins at its sequence. Only
segments counted by retention.count_settled may be rewritten: no session needs them, and recovery
begins after them. Records of other kinds stay unchanged.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    HEADER_BYTES,
    Batch,
    CorruptBatch,
)
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.filesystem import ReadFile, TemporaryFile
from holdfast.log.files.layout import DataDirectory, segment_name
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.segment import Segment
from holdfast.log.record import CONTROL, MESSAGE, Record

WRITE_BYTES: Final = 1 << 20
"""The bytes collected before a write."""


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
    """Rewrites a sealed segment's file and index, and returns its replacement in the journal.

    None, and nothing is changed, if the segment is damaged, has void records, or nothing would be
    freed. Once this has run, what a LogReader knows of the old file is wrong: run it in the
    reader's thread and call `forget_segment`. Raises OSError.

    The index goes before the new file comes, so no crash leaves the index of the other file. A
    segment without an index is scanned. Smallest counter-example: a holder of a shared directory
    is stopped between the two files. Its successor, which does not scan old segments, would look
    for batches where they were before.
    """
    if segment.has_void():
        return None
    compactor = SegmentCompactor(beyond)
    index = ActiveIndex(segment.sequence, segment.start_offsets())
    output = TemporaryFile(directory.files, segment_name(segment.sequence))
    try:
        size_bytes = _rewrite(directory.open_segment(segment.sequence), compactor, index, output)
    except CorruptBatch:
        output.discard()
        return None
    except BaseException:
        output.discard()
        raise
    # If damage was skipped when the segment was opened, the offsets differ.
    if not compactor.bytes_freed or index.head.end_offsets != segment.end_offsets():
        output.discard()
        return None
    directory.remove_index(segment.sequence)
    output.finish()
    directory.write_index(segment.sequence, index.encode())
    return Segment(segment.sequence, index.head, None, size_bytes)


def _rewrite(
    source: ReadFile, compactor: SegmentCompactor, index: ActiveIndex, output: TemporaryFile
) -> int:
    """Writes the segment's batches to the output and returns its size in bytes.

    Raises `CorruptBatch` if a batch is damaged.
    """
    position = 0
    pieces: list[bytes] = []
    gathered_bytes = 0
    for batch in _batches(source):
        data = compactor.rewrite(batch)
        index.add_parsed(position, Batch(data, check=False))
        position += len(data)
        pieces.append(data)
        gathered_bytes += len(data)
        if gathered_bytes >= WRITE_BYTES:
            output.write(pieces)
            pieces = []
            gathered_bytes = 0
    output.write(pieces)
    return position


def _batches(source: ReadFile) -> Iterator[Batch]:
    position = 0
    end = source.size()
    while position < end:
        header = source.read(position, HEADER_BYTES)
        length = int.from_bytes(header[4:8], "little")
        batch = Batch(source.read(position, min(length, end - position)))
        yield batch
        position += batch.length
