"""What a segment holds and where: its batches, their times, and the messages of every topic.

Batches are numbered from 0 in file order. A *posting* names one record of the segment as
`batch number << INDEX_BITS | index in the batch`, so postings sort in journal order and batch
arrays say the rest. Only records of kind MESSAGE have postings.

An ActiveIndex (active_index) grows while its segment is written; a SealedIndex (index_file) is
read from an .idx file.

In a replica's journal a batch may begin below the end of earlier ones of its partition: it
*overrides* them, and what they hold from there on is void. An index says what counts of its own
segment taken by itself: void batches have a count of 0 (or of what is left), are in no partition's
list, and `start offsets` are as low as the lowest batch in here. What a later segment overrides is
not in the index; Segment.end_offsets has it.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

INDEX_BITS: Final = 24
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
MATCHED_FILTERS_MAX: Final = 256
"""Filters whose matching topics an index remembers."""
TOPICS_BETWEEN_PAUSES: Final = 2000
"""Looked at by compiled code before it lets other threads run."""


class DamagedOffsets:
    """Offsets `start` to `end` of a partition that damage has taken. Where nothing later tells how
    many records a damaged place held, `end` is an upper bound."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        self.partition = partition
        self.start = start
        self.end = end


class FilterMatch:
    """The topics of an index that match one filter."""

    def __init__(self) -> None:
        self.topics: list[int] = []
        # Topics below this number were looked at.
        self.seen = 0
        self.overflow = False


class IndexHead:
    """What is known of a segment without its index' body."""

    def __init__(self, sequence: int, start_offsets: Sequence[int]) -> None:
        self.sequence = sequence
        self.start_offsets: list[int] = list(start_offsets)
        self.end_offsets: list[int] = list(start_offsets)
        self.log_bytes = 0
        # Appended here, void ones included; a reset counts as one. The next segment's sequence is
        # so much larger.
        self.records = 0
        # What `records` lacks because of damage.
        self.missing = 0
        # Of `records`: those that others in here have overridden.
        self.void = 0
        # (partition, epoch, offset): where the epoch of a partition's batches changes; its first
        # batch in here is a change. Epoch 0 is left out.
        self.epochs: list[tuple[int, int, int]] = []
        # Partitions that began anew in here, and at which offset.
        self.resets: dict[int, int] = {}
        self.first_timestamp_us = 0
        self.last_timestamp_us = 0
        self.gaps: list[DamagedOffsets] = []
        # Of the encoded form; 0 as long as there is none.
        self.head_bytes = 0
        self.body_bytes = 0
        self.body_crc = 0
        self.batches = 0
        self.topics = 0


class SegmentIndex:
    """The batches of one segment; the subclasses know its topics."""

    def __init__(self, head: IndexHead) -> None:
        self.head = head
        self.base_offsets = array("Q")
        self.first_timestamps_us = array("q")
        self.positions = array("I")
        self.counts = array("I")
        # Of the newest record, after the batch's first.
        self.last_deltas_us = array("I")
        self.partitions = array("H")
        self.attributes = array("B")
        self.by_partition: list[array[int]] = [array("I") for _ in head.start_offsets]
        self.matched: dict[str, FilterMatch] = {}

    def batch_count(self) -> int:
        return len(self.attributes)

    def batch_end(self, batch: int) -> int:
        """Position up to which reading from the batch's own gets all of it; after the last batch
        before a damaged place that is the damage too."""
        if batch + 1 < len(self.positions):
            return self.positions[batch + 1]
        return self.head.log_bytes

    def find_batch(self, partition: int, offset: int) -> int:
        """Number of the first batch that has records at or after `offset`; -1 if none has."""
        numbers = self.by_partition[partition]
        bases = self.base_offsets
        counts = self.counts
        low = 0
        high = len(numbers)
        while low < high:
            middle = (low + high) // 2
            number = numbers[middle]
            if bases[number] + counts[number] > offset:
                high = middle
            else:
                low = middle + 1
        return numbers[low] if low < len(numbers) else -1

    def offset_at(self, partition: int, posting: int) -> int:
        """The first offset of the partition at or after a posting's place in the file."""
        number = posting >> INDEX_BITS
        if number < len(self.partitions) and self.partitions[number] == partition:
            return self.base_offsets[number] + (posting & INDEX_MASK)
        numbers = self.by_partition[partition]
        at = bisect_left(numbers, number)
        if at < len(numbers):
            return self.base_offsets[numbers[at]]
        return self.head.end_offsets[partition]

    def size_bytes(self) -> int:
        """Roughly, in memory."""
        return 40 * len(self.positions) + 100 * self.topic_count() + 8 * self.head.records

    def topic_count(self) -> int:
        raise NotImplementedError

    def topic(self, number: int) -> bytes:
        raise NotImplementedError

    def find_topic(self, topic: bytes) -> int:
        """The topic's number; -1 if the segment has no message of it."""
        raise NotImplementedError

    def topic_range(self, prefix: bytes) -> tuple[int, int]:
        """Numbers `start, end` between which all topics with this prefix are."""
        raise NotImplementedError

    def postings(self, number: int) -> "array[int]":
        """Of a topic, in journal order."""
        raise NotImplementedError

    def message_counts(
        self, starts: Sequence[int] | None = None, ends: Sequence[int] | None = None
    ) -> dict[bytes, int]:
        """Messages per topic; those between two offsets per partition, if given."""
        counts: dict[bytes, int] = {}
        all_count = starts is None and ends is None and not self.head.void
        for number in range(self.topic_count()):
            postings = self.postings(number)
            count = len(postings)
            if not all_count:
                count = 0
                for posting in postings:
                    count += self._counts_between(posting, starts, ends)
            if count:
                counts[self.topic(number)] = count
        return counts

    def _counts_between(
        self, posting: int, starts: Sequence[int] | None, ends: Sequence[int] | None
    ) -> bool:
        batch = posting >> INDEX_BITS
        inside = posting & INDEX_MASK
        if inside >= self.counts[batch]:
            return False
        partition = self.partitions[batch]
        offset = self.base_offsets[batch] + inside
        if starts is not None and offset < starts[partition]:
            return False
        return ends is None or offset < ends[partition]
