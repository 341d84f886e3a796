"""The segments of a journal as a list, oldest first: what is added to the last one, what later ones
override in earlier ones, what may be removed."""

from collections.abc import Sequence

from holdfast.storage.journal.active_index import ActiveIndex
from holdfast.storage.journal.segment import Segment
from holdfast.storage.record import Batch, BatchBuilder


def add_batches(
    segments: list[Segment], pending: list[BatchBuilder | Batch], data: list[bytes]
) -> None:
    """Batches, and their bytes, at the end of the last segment."""
    segment = segments[-1]
    active = segment.index
    assert isinstance(active, ActiveIndex)
    at = segment.size_bytes
    ends = active.head.end_offsets
    for number, item in enumerate(pending):
        length = len(data[number])
        if item.base_offset < ends[item.partition]:
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
    """Where the partitions stand before these batches, the first of a new segment: at `ends`, or
    where they were cut. Then the new segment overrides the ones before, whatever comes."""
    starts = list(next_offset)
    for item in reversed(pending):
        starts[item.partition] = item.base_offset
    for partition, end in enumerate(ends):
        if starts[partition] < end:
            override(segments, partition, starts[partition])
        else:
            starts[partition] = end
    return starts


def override(segments: list[Segment], partition: int, offset: int) -> None:
    """These hold nothing of the partition from `offset` on."""
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
    """How many of the `count` oldest may go: the one after them overrides only what is below
    these offsets, or a restart would not know that the rest is void."""
    while count > 0 and not _is_at_most(segments[count].head.start_offsets, committed):
        count -= 1
    return count


def size_bytes(segments: list[Segment]) -> int:
    total = 0
    for segment in segments:
        total += segment.size_bytes
    return total


def _is_at_most(starts: Sequence[int], offsets: Sequence[int]) -> bool:
    return all(start <= offset for start, offset in zip(starts, offsets, strict=True))
