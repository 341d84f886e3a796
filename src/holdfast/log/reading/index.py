"""Indexes a segment: its batches, their times, and the messages of every topic.

Batches are numbered from 0 in file order. A *posting* names one record of the segment as `batch
number << INDEX_BITS | index in the batch`. So postings sort in journal order, and the batch arrays
have the rest. Only records of kind MESSAGE have postings.

An ActiveIndex (`journal.active_index`) grows while its segment is written. A SealedIndex
(`index_file`) is read from an .idx file.

In a replica's journal a batch may begin below the end of earlier ones of its partition. It
*overrides* them, and their records from there on are void. An index describes its own segment
alone. Void batches have a count of 0 (or of the rest that is valid) and are in no partition's list.
`start_offsets` are as low as the lowest batch. An index does not show overrides by a later segment;
Segment.end_offsets does.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

INDEX_BITS: Final = 24
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
MATCHED_FILTERS_MAX: Final = 256
"""The number of filters whose matching topics an index remembers."""
TOPICS_BETWEEN_PAUSES: Final = 2000
"""The number of topics that compiled code processes before it lets other threads run."""


class DamagedOffsets:
    """The offsets `start` to `end` of a partition, lost to damage. If nothing later shows the
    number of lost records, `end` is an upper bound."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        self.partition = partition
        self.start = start
        self.end = end


class FilterMatch:
    """The topics of an index that match one filter."""

    def __init__(self) -> None:
        self.topics: list[int] = []
        # Topics below this number were matched.
        self.seen = 0
        self.overflow = False


class IndexHead:
    """The description of a segment that needs no body of its index."""

    def __init__(self, sequence: int, start_offsets: Sequence[int]) -> None:
        self.sequence = sequence
        self.start_offsets: list[int] = list(start_offsets)
        self.end_offsets: list[int] = list(start_offsets)
        self.log_bytes = 0
        # The records appended here, void ones included; a reset counts as one. The next segment's
        # sequence is larger by this number and `missing`.
        self.records = 0
        # The records lost to damage, which `records` does not count.
        self.missing = 0
        # The part of `records` that later batches of this segment have overridden.
        self.void = 0
        # (partition, epoch, offset) of each change of epoch. A partition's first batch in the
        # segment is a change. Epoch 0 is left out.
        self.epochs: list[tuple[int, int, int]] = []
        # The partitions that were reset in this segment, with the offset.
        self.resets: dict[int, int] = {}
        self.first_timestamp_us = 0
        self.last_timestamp_us = 0
        self.gaps: list[DamagedOffsets] = []
        # The sizes of the encoded form; 0 before it exists.
        self.head_bytes = 0
        self.body_bytes = 0
        self.body_crc = 0
        self.batches = 0
        self.topics = 0


class SegmentIndex:
    """The batches of one segment; the subclasses have its topics."""

    def __init__(self, head: IndexHead) -> None:
        self.head = head
        self.base_offsets = array("Q")
        self.first_timestamps_us = array("q")
        self.positions = array("I")
        self.counts = array("I")
        # The microseconds from a batch's first record to its newest.
        self.last_deltas_us = array("I")
        self.partitions = array("H")
        self.attributes = array("B")
        self.by_partition: list[array[int]] = [array("I") for _ in head.start_offsets]
        self.matched: dict[str, FilterMatch] = {}

    def batch_count(self) -> int:
        return len(self.attributes)

    def batch_end(self, batch: int) -> int:
        """The position up to which a read from the batch's start gets all of it. Before a damaged
        place, that includes the damage."""
        if batch + 1 < len(self.positions):
            return self.positions[batch + 1]
        return self.head.log_bytes

    def find_batch(self, partition: int, offset: int) -> int:
        """The number of the first batch with records at or after `offset`; -1 without one."""
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
        """The first offset of the partition at or after a posting's position in the file."""
        number = posting >> INDEX_BITS
        if number < len(self.partitions) and self.partitions[number] == partition:
            return self.base_offsets[number] + (posting & INDEX_MASK)
        numbers = self.by_partition[partition]
        at = bisect_left(numbers, number)
        if at < len(numbers):
            return self.base_offsets[numbers[at]]
        return self.head.end_offsets[partition]

    def size_bytes(self) -> int:
        """The approximate size in memory."""
        return 40 * len(self.positions) + 100 * self.topic_count() + 8 * self.head.records

    def topic_count(self) -> int:
        raise NotImplementedError

    def topic(self, number: int) -> bytes:
        raise NotImplementedError

    def find_topic(self, topic: bytes) -> int:
        """The topic's number; -1 if the segment has no message of it."""
        raise NotImplementedError

    def topic_range(self, prefix: bytes) -> tuple[int, int]:
        """The numbers `start` to `end` that contain all topics with this prefix."""
        raise NotImplementedError

    def postings(self, number: int) -> "array[int]":
        """The postings of a topic, in journal order."""
        raise NotImplementedError

    def posting_count(self, number: int) -> int:
        """The number of a topic's postings."""
        raise NotImplementedError

    def message_counts(
        self, starts: Sequence[int] | None = None, ends: Sequence[int] | None = None
    ) -> dict[bytes, int]:
        """The number of messages per topic; only those between two offsets per partition, if
        given."""
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
