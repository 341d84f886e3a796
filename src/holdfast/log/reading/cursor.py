"""Reads of the journal, for sessions that are behind, for replicas, and for Spark.

A session's read goes through the journal in its own order, segment by segment. In each segment it
finds the topics that its filters match. If these are few it goes from posting to posting; otherwise
it reads every batch. Both ways give the same records in the same order. Both stop at a posting (see
`index`), from which the position in every partition follows.

Invariant: every record below the resulting positions was returned, did not match, or counts as
lost. Positions of all partitions move together. Otherwise a session with one rare filter would scan
the segments again for the other partitions.

Any thread may call the methods while the loop appends: data is only added, shared state is locked.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from holdfast.log.batch import Batch, CorruptBatch
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.byte_ranges import Extents
from holdfast.log.reading.cache import SegmentCache
from holdfast.log.reading.index import INDEX_BITS, INDEX_MASK, SegmentIndex
from holdfast.log.reading.interest import Matcher, ReadInterest, matching_topics
from holdfast.log.reading.segment_store import SegmentStore
from holdfast.log.reading.starts import StartFinder
from holdfast.log.reading.topic_history import TopicHistory
from holdfast.log.record import MESSAGE, Record

WORK_BYTES_MAX: Final = 16 << 20
"""The most bytes of batches that one call to `read` processes, even without a match."""
WORK_SEGMENTS_MAX: Final = 8
"""The most segments that one call to `read` processes."""
WINDOW_BYTES: Final = 256 << 10
RECORDS_MASK: Final = 63
"""Other threads may run after 64 records. Compiled code by itself lets none run."""
INTERESTS_KEPT_MIN: Final = 256
"""The number of filters from which a reader's matcher is kept."""
MATCHERS_MAX: Final = 4
"""The number of matchers that are kept from one read to the next."""


class ReadResult:
    """The result of one read: messages, and the positions after it."""

    def __init__(self, records: list[Record], positions: list[int], done: bool, lost: int) -> None:
        # The matching messages, in journal order.
        self.records = records
        self.positions = positions
        # True if the positions have reached the limits.
        self.done = done
        # The records between the old and new positions that retention or damage had removed.
        self.lost = lost


class _Reading:
    """The state of one call to `read`."""

    def __init__(
        self,
        positions: list[int],
        ends: list[int],
        matcher: Matcher,
        records_max: int,
        bytes_max: int,
    ) -> None:
        self.positions = positions
        self.ends = ends
        self.matcher = matcher
        self.records_max = max(1, records_max)
        self.bytes_max = max(1, bytes_max)
        self.records: list[Record] = []
        self.size_bytes = 0
        self.work_bytes = 0
        self.lost = 0

    def is_full(self) -> bool:
        return (
            len(self.records) >= self.records_max
            or self.size_bytes >= self.bytes_max
            or self.work_bytes >= WORK_BYTES_MAX
        )

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.size_bytes += len(record.topic) + len(record.payload) + len(record.properties)

    def is_before(self, ends: list[int]) -> bool:
        for partition, position in enumerate(self.positions):
            if position < ends[partition] and position < self.ends[partition]:
                return True
        return False


class LogReader:
    """A reader of a journal, by positions and filters or by batches."""

    def __init__(
        self,
        journal: Journal,
        store: SegmentStore,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Reads this journal. `lock` is needed if several threads call."""
        self._journal = journal
        self._store = store
        self._cache = SegmentCache(store, nullcontext() if lock is None else lock)
        self._matchers: list[tuple[list[ReadInterest], Matcher]] = []
        self.starts = StartFinder(journal, self._cache, store)

    def extents(self) -> Extents:
        return Extents(self._journal, self._cache)

    def read(
        self,
        positions: list[int],
        limits: list[int],
        interests: list[ReadInterest],
        records_max: int,
        bytes_max: int,
    ) -> ReadResult:
        """The messages between `positions` and `limits` that match any interest: about as many as
        asked for, and at least one if there is any. A call may return fewer, or none, after too
        much work. Records that are not in the file yet are not read, and the result is then not
        done. Raises `OSError` if the disk fails."""
        journal = self._journal
        ends = [min(limit, end) for limit, end in zip(limits, journal.written, strict=True)]
        reading = _Reading(list(positions), ends, self._matcher(interests), records_max, bytes_max)
        _pass_lost(reading, journal.start_offsets)
        visited = 0
        for segment in journal.segments:
            if not reading.is_before(segment.end_offsets()):
                continue
            if reading.is_full() or visited >= WORK_SEGMENTS_MAX:
                break
            visited += 1
            try:
                index = self._cache.index(segment)
                cut = self._read_segment(reading, segment, index)
            except FileNotFoundError:
                # Retention removed the segment meanwhile.
                _pass_lost(reading, segment.end_offsets())
                continue
            _advance(reading, segment, index, cut)
            if cut >= 0:
                break
        done = True
        for position, limit in zip(reading.positions, limits, strict=True):
            if position < limit:
                done = False
        return ReadResult(reading.records, reading.positions, done, reading.lost)

    def _matcher(self, interests: list[ReadInterest]) -> Matcher:
        """The matcher for these interests; kept for many, because the same list comes again."""
        if len(interests) < INTERESTS_KEPT_MIN:
            return Matcher(interests, self._store)
        for kept, matcher in self._matchers:
            if kept is interests:
                return matcher
        matcher = Matcher(interests, self._store)
        self._matchers.append((interests, matcher))
        if len(self._matchers) > MATCHERS_MAX:
            self._matchers.pop(0)
        return matcher

    def fetch(self, partition: int, offset: int) -> Record | None:
        """The message at an offset; None if it is not there. Raises `OSError` if the disk fails."""
        segment = self._segment_of(partition, offset)
        journal = self._journal
        if segment is None or offset >= journal.written[partition]:
            return None
        if offset < journal.start_offsets[partition]:
            return None
        try:
            index = self._cache.index(segment)
            number = index.find_batch(partition, offset)
            if number < 0 or index.base_offsets[number] > offset:
                return None
            batch = self._cache.batch(segment, index, number)
        except FileNotFoundError:
            return None
        if batch is None:
            return None
        record = batch.record(offset - batch.base_offset)
        return record if record.kind == MESSAGE else None

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]:
        """The complete batches with offsets from `start` up to `end`, unchanged: about `bytes_max`
        bytes, and at least one batch if there is any. Batches that are damaged or not in the file
        yet are left out; the offsets of the others show the gap. Raises `OSError`."""
        start = max(start, self._journal.start_offsets[partition])
        end = min(end, self._journal.written[partition])
        found: list[bytes] = []
        size_bytes = 0
        for segment in self._journal.segments:
            if start >= end or size_bytes >= bytes_max:
                break
            segment_end = min(end, segment.end_offsets()[partition])
            if segment_end <= start:
                continue
            try:
                index = self._cache.index(segment)
                number = index.find_batch(partition, start)
                numbers = index.by_partition[partition]
                at = bisect_left(numbers, number) if number >= 0 else len(numbers)
                while at < len(numbers) and size_bytes < bytes_max:
                    number = numbers[at]
                    if index.base_offsets[number] >= segment_end:
                        break
                    batch = self._cache.batch(segment, index, number)
                    if batch is not None:
                        data = batch.content()
                        found.append(data)
                        size_bytes += len(data)
                    at += 1
            except FileNotFoundError:
                continue
        return found

    def first_offset(self, partition: int) -> int:
        """The offset below which retention has removed everything."""
        return self._journal.start_offsets[partition]

    def offset_for_time(self, partition: int, timestamp_us: int) -> int:
        """The first offset in the file with a record not older; the end without one. Raises
        `OSError`."""
        return self.starts.offset_for_time(partition, timestamp_us)

    def topic_history(self, topic: bytes, partition: int, before: int) -> TopicHistory:
        """The search for a topic's messages below an offset of its partition."""
        return TopicHistory(self._journal, self._cache, topic, partition, before)

    def forget_segment(self, sequence: int) -> None:
        """Forgets a segment whose file was removed or rewritten."""
        self._cache.forget_segment(sequence)

    # One segment

    def _read_segment(self, reading: _Reading, segment: Segment, index: SegmentIndex) -> int:
        """Reads one segment. Returns the posting at which the read stopped; -1 at the end."""
        first = self._first_batch(reading, segment, index)
        if first < 0:
            return -1
        topics = matching_topics(index, reading.matcher, self._store)
        if topics is None:
            return self._scan_batches(reading, segment, index, first)
        if not topics:
            return -1
        return self._follow_postings(reading, segment, index, first, topics)

    def _first_batch(self, reading: _Reading, segment: Segment, index: SegmentIndex) -> int:
        first = -1
        ends = segment.end_offsets()
        for partition, position in enumerate(reading.positions):
            if position < ends[partition] and position < reading.ends[partition]:
                number = index.find_batch(partition, position)
                if number >= 0 and (first < 0 or number < first):
                    first = number
        return first

    def _follow_postings(
        self,
        reading: _Reading,
        segment: Segment,
        index: SegmentIndex,
        first: int,
        topics: list[int],
    ) -> int:
        ends = segment.end_offsets()
        heap: list[tuple[int, int]] = []
        sources: list[array[int]] = []
        places: list[int] = []
        for topic in topics:
            postings = index.postings(topic)
            place = bisect_left(postings, first << INDEX_BITS)
            if place < len(postings):
                heap.append((postings[place], len(sources)))
                sources.append(postings)
                places.append(place)
        heapq.heapify(heap)
        while heap:
            posting, source = heap[0]
            number = posting >> INDEX_BITS
            partition = index.partitions[number]
            offset = index.base_offsets[number] + (posting & INDEX_MASK)
            counts = offset < ends[partition] and posting & INDEX_MASK < index.counts[number]
            if counts and reading.positions[partition] <= offset < reading.ends[partition]:
                if reading.is_full():
                    return posting
                if len(reading.records) & RECORDS_MASK == 0:
                    self._store.pause()
                self._take_record(reading, segment, index, number, posting & INDEX_MASK)
            place = places[source] + 1
            postings = sources[source]
            if place < len(postings):
                places[source] = place
                heapq.heapreplace(heap, (postings[place], source))
            else:
                heapq.heappop(heap)
        return -1

    def _take_record(
        self, reading: _Reading, segment: Segment, index: SegmentIndex, number: int, at: int
    ) -> None:
        batch = self._cache.cached(segment, number)
        if batch is None:
            batch = self._cache.batch(segment, index, number)
            reading.work_bytes += index.batch_end(number) - index.positions[number]
            if batch is None:
                reading.lost += 1
                return
        record = batch.record(at)
        if reading.matcher.wants(record.topic, record.partition, record.offset):
            reading.add(record)

    def _scan_batches(
        self, reading: _Reading, segment: Segment, index: SegmentIndex, first: int
    ) -> int:
        file = self._cache.file(segment.sequence)
        ends = segment.end_offsets()
        window = b""
        window_start = 0
        for number in range(first, index.batch_count()):
            partition = index.partitions[number]
            base = index.base_offsets[number]
            count = index.counts[number]
            start = reading.positions[partition]
            end = min(reading.ends[partition], ends[partition], base + count)
            if not count or base >= end or end <= start:
                continue
            if reading.is_full():
                return number << INDEX_BITS
            position = index.positions[number]
            length = index.batch_end(number) - position
            if position < window_start or position + length > window_start + len(window):
                window = file.read(position, max(length, WINDOW_BYTES))
                window_start = position
            reading.work_bytes += length
            try:
                batch = Batch(window, position - window_start)
            except CorruptBatch as error:
                self._cache.note_damage(segment, position, length, str(error))
                reading.lost += end - max(start, base)
                continue
            stop = self._take_wanted(reading, batch, start, end)
            if stop >= 0:
                return (number << INDEX_BITS) + stop
        return -1

    def _take_wanted(self, reading: _Reading, batch: Batch, start: int, end: int) -> int:
        """Takes the matches between two offsets. Returns the index at which it stopped, or -1."""
        base = batch.base_offset
        for at in range(max(0, start - base), min(batch.count, end - base)):
            if at & RECORDS_MASK == 0:
                self._store.pause()
            topic = batch.topic(at)
            if topic and reading.matcher.wants(topic, batch.partition, base + at):
                if reading.is_full():
                    return at
                reading.add(batch.record(at, topic))
        return -1

    def _segment_of(self, partition: int, offset: int) -> Segment | None:
        segments = self._journal.segments
        low = 0
        high = len(segments)
        while low < high:
            middle = (low + high) // 2
            if segments[middle].end_offsets()[partition] <= offset:
                low = middle + 1
            else:
                high = middle
        return segments[low] if low < len(segments) else None


def _pass_lost(reading: _Reading, ends: Sequence[int]) -> None:
    """Counts as lost what lies between the positions and these offsets, and passes it."""
    for partition, end in enumerate(ends):
        end = min(end, reading.ends[partition])
        if reading.positions[partition] < end:
            reading.lost += end - reading.positions[partition]
            reading.positions[partition] = end


def _advance(reading: _Reading, segment: Segment, index: SegmentIndex, cut: int) -> None:
    """Moves all positions to a posting of the segment (-1: its end)."""
    positions = reading.positions
    ends = segment.end_offsets()
    before = list(positions)
    for partition, position in enumerate(before):
        reached = ends[partition]
        if cut >= 0:
            reached = min(reached, index.offset_at(partition, cut))
        reached = min(reached, reading.ends[partition])
        if reached > position:
            positions[partition] = reached
    for gap in segment.gaps():
        start = max(gap.start, before[gap.partition])
        end = min(gap.end, positions[gap.partition])
        if end > start:
            reading.lost += end - start
