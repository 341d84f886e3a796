"""Lists a journal's segments, oldest first: adds to the last one, overrides in earlier ones, and
removes from the front.
"""

from collections.abc import Sequence

from holdfast.log.batch import ATTRIBUTE_RESET, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.segment import Segment
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.index import SegmentIndex


def add_batches(
    segments: list[Segment], pending: list[BatchBuilder | Batch], data: list[bytes]
) -> None:
    """Adds batches and their bytes at the end of the last segment."""
    segment = segments[-1]
    active = segment.index
    assert isinstance(active, ActiveIndex)
    at = segment.size_bytes
    ends = active.head.end_offsets
    for number, item in enumerate(pending):
        length = len(data[number])
        if item.base_offset < ends[item.partition]:
            # Truncated records may lie in earlier segments, too. The active one voids its own.
            override(segments[:-1], item.partition, item.base_offset)
        if isinstance(item, BatchBuilder):
            active.add_built(at, length, item)
        else:
            active.add_parsed(at, item)
        at += length
    segment.size_bytes = at


def cut_starts(
    segments: list[Segment],
    ends: list[int],
    next_offset: list[int],
    pending: list[BatchBuilder | Batch],
) -> list[int]:
    """The start of each partition in a new segment that begins with these batches: its end in
    `ends`, or the lower offset at which it was cut. A cut overrides the segments before at once,
    whatever the new segment receives."""
    starts = list(next_offset)
    # Backwards, so that the first pending batch of a partition decides.
    for item in reversed(pending):
        starts[item.partition] = item.base_offset
    for partition, end in enumerate(ends):
        if starts[partition] < end:
            override(segments, partition, starts[partition])
        else:
            starts[partition] = end
    return starts


def override(segments: list[Segment], partition: int, offset: int) -> None:
    """Voids the partition's records from `offset` on in these segments."""
    for segment in reversed(segments):
        if segment.end_offsets()[partition] <= offset:
            break
        segment.override(partition, offset)


def last_within(segments: list[Segment], offsets: Sequence[int]) -> Segment | None:
    """The newest segment that begins at or before these offsets in every partition."""
    for segment in reversed(segments):
        if _is_at_most(segment.start_offsets(), offsets):
            return segment
    return None


def removable(segments: list[Segment], count: int, committed: Sequence[int]) -> int:
    """The number of the `count` oldest segments that may go. The next one may override only
    committed records. Otherwise a restart would take void records for valid ones."""
    while count > 0 and not _is_at_most(segments[count].head.start_offsets, committed):
        count -= 1
    return count


def forgotten(segments: list[Segment]) -> dict[int, int]:
    """Per partition that began again, the sequence of the segment with the newest mark of that. Its
    batches before the mark are dead."""
    marks: dict[int, int] = {}
    for segment in segments:
        for partition in segment.head.resets:
            marks[partition] = segment.sequence
    return marks


def claims(segments: list[Segment], checkpoint: Checkpoint) -> list[int]:
    """The committed offsets by the checkpoint, 0 for each partition that may have begun again after
    it was made. Smallest counter-example: a partition was committed up to 7, began again at 3, and
    has the uncommitted record 3. It would count as committed. If the segment of the checkpoint was
    removed, the marks behind it may have gone, too."""
    if segments and checkpoint.segment < segments[0].sequence:
        return [0] * len(checkpoint.offsets)
    offsets = list(checkpoint.offsets)
    for segment in segments:
        if segment.sequence < checkpoint.segment:
            continue
        index = segment.index
        for partition in segment.head.resets:
            is_covered = False
            if segment.sequence == checkpoint.segment and index is not None:
                is_covered = _last_mark(index, partition) < checkpoint.position
            if not is_covered:
                offsets[partition] = 0
    return offsets


def _last_mark(index: SegmentIndex, partition: int) -> int:
    """The position of the newest mark of the partition."""
    found = -1
    for number, attributes in enumerate(index.attributes):
        if attributes & ATTRIBUTE_RESET and index.partitions[number] == partition:
            found = index.positions[number]
    return found


def size_bytes(segments: list[Segment]) -> int:
    """The bytes of all segments."""
    total = 0
    for segment in segments:
        total += segment.size_bytes
    return total


def partition_bytes(segments: list[Segment], partitions: int) -> list[int]:
    """Estimates the bytes of each partition by its share of the records of each segment."""
    found = [0] * partitions
    for segment in segments:
        size, records = segment.size_bytes, max(1, segment.head.records)
        starts, ends = segment.start_offsets(), segment.end_offsets()
        for partition, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end > start:
                found[partition] += size * min(end - start, records) // records
    return found


def _is_at_most(starts: Sequence[int], offsets: Sequence[int]) -> bool:
    """True if no start is behind its offset."""
    return all(start <= offset for start, offset in zip(starts, offsets, strict=True))
