"""Reads of the past by the postings of segments: the messages of one topic from the newest to the
oldest, and the number of messages in each span of time.

Both go through the segments one by one, the newest first, so that a caller may stop after each. A
step runs in a reader's thread while the event loop appends.
"""

from array import array
from typing import Final

from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.cache import SegmentCache
from holdfast.log.reading.index import (
    INDEX_BITS,
    INDEX_MASK,
    TOPICS_BETWEEN_PAUSES,
    SegmentIndex,
)
from holdfast.log.reading.interest import topics_of_filter
from holdfast.log.reading.segment_store import SegmentStore

BUCKETS_MAX: Final = 500


def _is_valid(segment: Segment, index: SegmentIndex, posting: int) -> bool:
    """Whether the record of a posting still counts. Overridden records keep their postings: a later
    batch of the same segment leaves theirs with fewer records, and a later segment lowers the end
    of this one."""
    batch, at = posting >> INDEX_BITS, posting & INDEX_MASK
    if at >= index.counts[batch]:
        return False
    offset = index.base_offsets[batch] + at
    return offset < segment.end_offsets()[index.partitions[batch]]


class TopicHistory:
    """The offsets of a topic's messages below an offset, the newest first."""

    def __init__(
        self, journal: Journal, cache: SegmentCache, topic: bytes, partition: int, before: int
    ) -> None:
        """`partition`: that of the topic. Messages at `before` and later are not found."""
        self._journal = journal
        self._cache = cache
        self._topic = topic
        self._partition = partition
        self._before = before
        self._waiting = list(journal.segments)
        self.offsets: list[int] = []
        """The offsets that the steps have found so far."""

    def is_done(self) -> bool:
        """Whether all segments are searched."""
        return not self._waiting

    @property
    def searched(self) -> int:
        """The offset from which on every message of the topic is found."""
        if not self._waiting:
            return self._journal.start_offsets[self._partition]
        return min(self._before, self._waiting[-1].end_offsets()[self._partition])

    def step(self) -> None:
        """Searches the newest segment that is not searched yet. Raises `OSError`."""
        segment = self._waiting.pop()
        start = self._journal.start_offsets[self._partition]
        if segment.start_offsets()[self._partition] >= self._before:
            return
        if segment.end_offsets()[self._partition] <= start:
            # Retention has removed this segment's records, and those of all older ones.
            self._waiting.clear()
            return
        try:
            index = self._cache.index(segment)
        except FileNotFoundError:
            self._waiting.clear()
            return
        number = index.find_topic(self._topic)
        if number < 0:
            return
        found: list[int] = []
        for posting in index.postings(number):
            offset = index.base_offsets[posting >> INDEX_BITS] + (posting & INDEX_MASK)
            if start <= offset < self._before and _is_valid(segment, index, posting):
                found.append(offset)
        found.reverse()
        self.offsets += found


class TimeHistogram:
    """The number of messages that a filter matches in each of some equal spans of time.

    A message counts at the time of its batch's first record. Records of a batch were appended
    within milliseconds of each other.
    """

    def __init__(
        self,
        journal: Journal,
        cache: SegmentCache,
        store: SegmentStore,
        filter: str,
        bounds_us: tuple[int, int],
        buckets: int,
        partitions: frozenset[int] | None = None,
    ) -> None:
        """`partitions`: those whose messages count; None: all."""
        self._partitions = partitions
        self._cache = cache
        self._store = store
        self._filter = filter
        self._from_us, self._to_us = bounds_us
        self._width_us = max(1, -(-(self._to_us - self._from_us) // buckets))
        self._waiting = [each for each in journal.segments if self._overlaps(each)]
        self.counts = [0] * buckets

    @property
    def width_us(self) -> int:
        """The span of one bucket in microseconds."""
        return self._width_us

    def _overlaps(self, segment: Segment) -> bool:
        if segment.last_timestamp_us() < self._from_us:
            return False
        return segment.head.first_timestamp_us < self._to_us

    def is_done(self) -> bool:
        """Whether every segment of the time is counted."""
        return not self._waiting

    @property
    def complete_from_us(self) -> int:
        """The time from which the counts are complete. Segments that are not counted are older."""
        if not self._waiting:
            return self._from_us
        return max(self._from_us, max(each.last_timestamp_us() for each in self._waiting) + 1)

    def step(self) -> None:
        """Counts the newest segment that is not counted yet. Raises `OSError`."""
        segment = self._waiting.pop()
        try:
            index = self._cache.index(segment)
        except FileNotFoundError:
            return
        bucket = self._bucket_of(segment.head.first_timestamp_us)
        is_plain = not segment.has_void() and bucket >= 0 and self._partitions is None
        if is_plain and bucket != self._bucket_of(segment.last_timestamp_us()):
            is_plain = False
        buckets = [] if is_plain else self._buckets(index)
        for number in topics_of_filter(index, self._filter, self._store):
            if number % TOPICS_BETWEEN_PAUSES == 0:
                self._store.pause()
            postings = index.postings(number)
            if is_plain:
                self.counts[bucket] += len(postings)
            else:
                self._count(segment, index, postings, buckets)

    def _bucket_of(self, timestamp_us: int) -> int:
        if not self._from_us <= timestamp_us < self._to_us:
            return -1
        return min(len(self.counts) - 1, (timestamp_us - self._from_us) // self._width_us)

    def _buckets(self, index: SegmentIndex) -> list[int]:
        """The bucket of each batch."""
        return [self._bucket_of(each) for each in list(index.first_timestamps_us)]

    def _count(
        self, segment: Segment, index: SegmentIndex, postings: "array[int]", buckets: list[int]
    ) -> None:
        counts, known = self.counts, len(buckets)
        has_void = segment.has_void()
        chosen = self._partitions
        for posting in postings:
            number = posting >> INDEX_BITS
            if chosen is not None and index.partitions[number] not in chosen:
                continue
            # The active segment may have grown since its batches were listed.
            bucket = buckets[number] if number < known else -1
            if bucket >= 0 and (not has_void or _is_valid(segment, index, posting)):
                counts[bucket] += 1
