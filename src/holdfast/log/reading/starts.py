"""Finds the offsets at which a reader of the past begins.

A start is per partition the first offset to read. For the last records of each topic there is also
a floor per topic: the offset of the first of them. A topic without a floor has no record yet, so
all of its later ones count.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import gt
from typing import Final

from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import Segment
from holdfast.log.partition import partition_of
from holdfast.log.reading.cache import SegmentCache
from holdfast.log.reading.index import (
    INDEX_BITS,
    INDEX_MASK,
    TOPICS_BETWEEN_PAUSES,
    SegmentIndex,
)
from holdfast.log.reading.interest import topics_of_filter
from holdfast.log.reading.segment_store import SegmentStore
from holdfast.log.reading.topic_history import TimeHistogram

TOPICS_MAX: Final = 10_000
"""The most topics of which the last records are looked up."""
FLOORS_BYTES_MAX: Final = 4 << 20
"""The most bytes of floors, their topics' names included, of one search and of one session."""
FLOOR_BYTES: Final = 150
"""The memory in bytes of one floor without its topic's name, approximately."""


def floors_bytes(floors: Mapping[bytes, int]) -> int:
    """The memory in bytes of floors by topic."""
    return sum(len(topic) + FLOOR_BYTES for topic in floors)


class StartQuery:
    """The question for a start: the first records from `since_us` on, or if `last` is not 0, the
    last records of each topic that the filter matches, or if there are `offsets`, those."""

    def __init__(self, filter: str, since_us: int, last: int, offsets: Sequence[int] = ()) -> None:
        self.filter = filter
        self.since_us = since_us
        self.last = last
        self.offsets = list(offsets)


class FoundStart:
    """The offsets at which a read begins: one per partition, and the floors by topic. `error` says
    why there is no such start; "": there is one."""

    size_bytes = 0
    """The bytes that the log has from there on."""

    def __init__(
        self, offsets: Iterable[int] = (), floors: dict[bytes, int] | None = None, error: str = ""
    ) -> None:
        self.offsets = list(offsets)
        self.floors: dict[bytes, int] = {} if floors is None else floors
        self.error = error
        # Of the last records of each topic: those that are still to be found in an older part.
        self.left: dict[bytes, int] = {}


def bytes_from(segments: Sequence[Segment], start: Sequence[int]) -> int:
    """The bytes of the segments from the first one on that has a record at or above `start`."""
    size_bytes = 0
    for segment in reversed(segments):
        if not any(map(gt, segment.end_offsets(), start)):
            break
        size_bytes += segment.size_bytes
    return size_bytes


class LastRecords:
    """The search for the last records of the topics that a filter matches, from the newest segment
    to the oldest.

    For a topic without wildcards it ends at the segment with the first of these records. A filter
    with wildcards may match a further topic in any older segment, so the search then reads the
    index of every segment.
    """

    def __init__(self, filter: str, count: int, limits: Sequence[int]) -> None:
        """`count`: the records of each topic. `limits`: the end of the log per partition."""
        self.filter = filter
        self.count = count
        self.limits = list(limits)
        # By topic: the records that are still to be found, and the lowest offset so far.
        self.left: dict[bytes, int] = {}
        self.floors: dict[bytes, int] = {}

    def search(self, journal: Journal, cache: SegmentCache, store: SegmentStore) -> FoundStart:
        """Searches the segments. Raises `OSError` if the disk fails."""
        for segment in reversed(list(journal.segments)):
            try:
                index = cache.index(segment)
            except FileNotFoundError:
                # Retention has removed it, and all older ones.
                break
            for number in topics_of_filter(index, self.filter, store):
                self._search_topic(segment, index, number, journal.start_offsets)
                if number % TOPICS_BETWEEN_PAUSES == 0:
                    store.pause()
            if len(self.floors) > TOPICS_MAX:
                return FoundStart(error=f"the filter has more than {TOPICS_MAX} topics")
            if floors_bytes(self.floors) > FLOORS_BYTES_MAX:
                text = f"the names of the filter's topics have more than {FLOORS_BYTES_MAX} bytes"
                return FoundStart(error=text)
            if self._is_complete():
                break
        # A partition without such a topic begins at its end: it has nothing of the past to read.
        offsets = list(self.limits)
        for topic, floor in self.floors.items():
            partition = partition_of(topic, len(offsets))
            offsets[partition] = min(offsets[partition], floor)
        found = FoundStart(offsets, self.floors)
        found.left = self.left
        return found

    def _is_complete(self) -> bool:
        """Whether no older segment can add anything: the filter is one topic, and it is found."""
        return self.left.get(self.filter.encode(), self.count) == 0

    def _search_topic(
        self, segment: Segment, index: SegmentIndex, number: int, starts: Sequence[int]
    ) -> None:
        """Counts the topic's records in one segment, from the newest to the oldest."""
        topic = index.topic(number)
        left = self.left.get(topic, self.count)
        if left == 0:
            return
        ends = segment.end_offsets()
        postings = index.postings(number)
        for place in range(len(postings) - 1, -1, -1):
            posting = postings[place]
            batch = posting >> INDEX_BITS
            at = posting & INDEX_MASK
            partition = index.partitions[batch]
            offset = index.base_offsets[batch] + at
            # Overridden records keep their postings. Their batch counts fewer records, or none.
            if at >= index.counts[batch] or offset >= min(ends[partition], self.limits[partition]):
                continue
            if offset < starts[partition]:
                # Retention has removed this record and all older ones.
                break
            self.floors[topic] = offset
            left -= 1
            if left == 0:
                break
        self.left[topic] = left


class StartFinder:
    """The search for the offsets at which readers begin."""

    def __init__(self, journal: Journal, cache: SegmentCache, store: SegmentStore) -> None:
        self._journal = journal
        self._cache = cache
        self._store = store

    def find(self, query: StartQuery, limits: list[int]) -> FoundStart:
        """The start that is asked for, in each partition at most its limit. A partition with the
        limit 0 is left out. Raises `OSError`."""
        if query.last:
            search = LastRecords(query.filter, query.last, limits)
            found = search.search(self._journal, self._cache, self._store)
        elif query.offsets:
            found = FoundStart(map(min, query.offsets, limits))
        else:
            segments = self._segments_from(query.since_us)
            found = FoundStart(
                [
                    min(limit, self._offset_in(segments, partition, query.since_us)) if limit else 0
                    for partition, limit in enumerate(limits)
                ]
            )
        ends = self._journal.next_offset
        triples = zip(found.offsets, limits, ends, strict=False)
        pinned = [at if limit else end for at, limit, end in triples]
        found.size_bytes = bytes_from(list(self._journal.segments), pinned)
        return found

    def histogram(
        self,
        filter: str,
        bounds_us: tuple[int, int],
        buckets: int,
        partitions: frozenset[int] | None = None,
    ) -> TimeHistogram:
        """The count of the messages that a filter matches, by their time; in all partitions or in
        these."""
        return TimeHistogram(
            self._journal, self._cache, self._store, filter, bounds_us, buckets, partitions
        )

    def offset_for_time(self, partition: int, timestamp_us: int) -> int:
        """The first offset in the file with a record not older; the end without one. Raises
        `OSError`.

        It does not bisect: timestamps are not in order, because the clock of a new leader may be
        behind that of the one before. Whole segments and batches are passed by their newest
        timestamp.
        """
        return self._offset_in(self._segments_from(timestamp_us), partition, timestamp_us)

    def _segments_from(self, timestamp_us: int) -> list[Segment]:
        """The segments with a record that is not older. A log has thousands of others."""
        segments = list(self._journal.segments)
        return [each for each in segments if each.last_timestamp_us() >= timestamp_us]

    def _offset_in(self, segments: list[Segment], partition: int, timestamp_us: int) -> int:
        start = self._journal.start_offsets[partition]
        end = self._journal.written[partition]
        for segment in segments:
            try:
                index = self._cache.index(segment)
                segment_end = min(end, segment.end_offsets()[partition])
                for number in index.by_partition[partition]:
                    base = index.base_offsets[number]
                    if base >= segment_end:
                        break
                    if base + index.counts[number] <= start:
                        continue
                    newest_us = index.first_timestamps_us[number] + index.last_deltas_us[number]
                    if newest_us < timestamp_us:
                        continue
                    batch = self._cache.batch(segment, index, number)
                    if batch is None:
                        continue
                    for record in batch.records():
                        if record.offset >= min(segment_end, base + index.counts[number]):
                            break
                        if record.timestamp_us >= timestamp_us and record.offset >= start:
                            return record.offset
            except FileNotFoundError:
                continue
        return end
