"""A plan of the bytes of segments that a reader wants, so that they can be sent unchanged.

A plan goes through the journal in its own order. Where most of a stretch is wanted, it is taken as
a whole, with the unwanted batches in between. Elsewhere only the wanted batches are taken. No
function parses a batch, and positions are found by bisection, so a plan costs little.

Methods may be called in any thread, like those of `LogReader`.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from holdfast.log.batch import HEADER_BYTES
from holdfast.log.files.filesystem import ReadFile
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.segment import Segment
from holdfast.log.reading.cache import SegmentCache
from holdfast.log.reading.index import INDEX_BITS, SegmentIndex
from holdfast.log.reading.topic_postings import TopicChoice

EXTENTS_MAX: Final = 256
"""The most extents of a plan."""
SEGMENTS_MAX: Final = 8
"""The most segments of a plan, even without a match, because each may need its index loaded."""
WARM_SEGMENTS: Final = 3
"""The newest segments, with the one that is written, whose pages stay in the kernel's cache for
sessions and replicas that are a little behind."""
GAP_BYTES: Final = 8 << 10
"""The most unwanted bytes between two wanted batches that are cheaper to send than to leave out."""

Wanted = tuple[int, int, int]
"""A partition, the first offset, and the end."""


class Extent(NamedTuple):
    """A range of an open segment file: complete batches, and damage that may lie between them."""

    file: ReadFile
    position: int
    length: int
    is_cold: bool = False
    """True if the file is some segments behind the one that is written, so that only readers of the
    past have use for it."""


class Plan:
    """The extents to send, and the knowledge about the wanted offsets after that."""

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        self.extents: list[Extent] = []
        self.size_bytes = 0
        # Per partition, the offset below which every wanted record is in the extents, passed, or
        # lost.
        self.next: dict[int, int] = {}
        # Offsets without a match, which are not in the extents.
        self.passed: list[Wanted] = []
        self._passed_last: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        for partition, start, end in wanted:
            self.next[partition] = start
            self.ends[partition] = end

    def add(self, file: ReadFile, position: int, length: int, is_cold: bool) -> None:
        self.extents.append(Extent(file, position, length, is_cold))
        self.size_bytes += length

    def note_passed(self, partition: int, start: int, end: int) -> None:
        """Notes offsets without a match. Adjacent ranges are joined."""
        if start >= end:
            return
        at = self._passed_last.get(partition, -1)
        if at >= 0 and self.passed[at][2] == start:
            self.passed[at] = (partition, self.passed[at][1], end)
            return
        self._passed_last[partition] = len(self.passed)
        self.passed.append((partition, start, end))


class Extents:
    """Makes plans for one journal."""

    def __init__(self, journal: Journal, cache: SegmentCache) -> None:
        self._journal = journal
        self._cache = cache

    def plan(
        self, wanted: Sequence[Wanted], bytes_max: int, topics: TopicChoice | None = None
    ) -> Plan:
        """A plan of about the first `bytes_max` bytes with wanted offsets, and at least one batch
        if there is any. Batches that are not in the file yet are left out. Raises `OSError` if the
        disk fails."""
        plan = Plan(wanted)
        written = self._journal.written
        for partition, end in plan.ends.items():
            plan.ends[partition] = min(end, written[partition])
        visited = 0
        segments = list(self._journal.segments)
        for number, segment in enumerate(segments):
            here = {
                partition: min(end, segment.end_offsets()[partition])
                for partition, end in plan.ends.items()
                if plan.next[partition] < min(end, segment.end_offsets()[partition])
            }
            if not here:
                continue
            if plan.size_bytes >= bytes_max or len(plan.extents) >= EXTENTS_MAX:
                break
            if visited >= SEGMENTS_MAX:
                break
            visited += 1
            try:
                # The index comes first. If the file is replaced between the two, the reader finds
                # no batches at these positions and notices.
                index = self._cache.index(segment)
                file = self._cache.file(segment.sequence)
            except FileNotFoundError:
                continue  # retention was faster
            is_cold = number < len(segments) - WARM_SEGMENTS
            if not _Stretch(plan, segment, index, file, here, is_cold).take(bytes_max, topics):
                break
        return plan


class _Stretch:
    """The part of a plan that is in one segment. `limits` are the ends by partition."""

    def __init__(
        self,
        plan: Plan,
        segment: Segment,
        index: SegmentIndex,
        file: ReadFile,
        limits: dict[int, int],
        is_cold: bool,
    ) -> None:
        self.plan = plan
        self.is_cold = is_cold
        self.segment = segment
        self.index = index
        self.file = file
        self.limits = limits
        # Per partition, the range of its list with the wanted batches.
        self.spans: dict[int, tuple[int, int]] = {}
        for partition, limit in limits.items():
            numbers = index.by_partition[partition]
            first = index.find_batch(partition, plan.next[partition])
            low = bisect_left(numbers, first) if first >= 0 else len(numbers)
            high = bisect_left(numbers, limit, low, key=lambda each: index.base_offsets[each])
            self.spans[partition] = (low, high)

    def take(self, bytes_max: int, topics: TopicChoice | None) -> bool:
        """Adds this segment to the plan. Returns True if all of it fitted."""
        chosen = None
        if topics is not None:
            chosen = topics.batches(self.segment, self.index)
        total = sum(high - low for low, high in self.spans.values())
        if chosen is not None:
            stop = self._scattered(self._among(chosen), bytes_max, passing=True)
        elif not total:
            stop = -1
        elif self.segment.has_void() or not self._is_dense(total):
            # The receiver takes every batch in an extent as valid. So an extent of a segment with
            # overridden batches has no gap: the old leader's records could lie in it.
            gap = 0 if self.segment.has_void() else GAP_BYTES
            stop = self._scattered(self._numbers(), bytes_max, gap_bytes=gap)
        else:
            stop = self._take_extent(bytes_max)
        for partition, limit in self.limits.items():
            reached = limit
            if stop >= 0:
                reached = min(limit, self.index.offset_at(partition, stop << INDEX_BITS))
            self.plan.next[partition] = max(self.plan.next[partition], reached)
        return stop < 0

    def _is_dense(self, total: int) -> bool:
        """True if more than half of the batches in between are wanted."""
        first, last = self._ends()
        return total * 2 > last - first

    def _ends(self) -> tuple[int, int]:
        """The first and the last wanted batch."""
        by_partition = self.index.by_partition
        used = [(p, low, high) for p, (low, high) in self.spans.items() if low < high]
        return (
            min(by_partition[p][low] for p, low, _ in used),
            max(by_partition[p][high - 1] for p, _, high in used),
        )

    def _take_extent(self, bytes_max: int) -> int:
        """Takes one extent. Returns the first batch that did not fit; -1 if all did."""
        first, last = self._ends()
        positions = self.index.positions
        start = positions[first]
        budget = bytes_max - self.plan.size_bytes
        # At least one batch, even above the budget, or a large batch would stop a reader for good.
        stop = max(first + 1, bisect_right(positions, start + budget, first + 1, last + 1) - 1)
        if stop >= last:
            stop = last + 1
        self.plan.add(self.file, start, self._end_of(stop - 1) - start, self.is_cold)
        return stop if stop <= last else -1

    def _scattered(
        self,
        numbers: Iterable[int],
        bytes_max: int,
        *,
        gap_bytes: int = GAP_BYTES,
        passing: bool = False,
    ) -> int:
        """Takes some batches in ascending order; the result is that of `_take_extent`. With
        `passing`, the offsets between them are noted as passed."""
        plan = self.plan
        index = self.index
        covered = {partition: plan.next[partition] for partition in self.limits}
        start = end = -1
        stop = -1
        for number in numbers:
            position = index.positions[number]
            if start >= 0 and position - end > gap_bytes:
                plan.add(self.file, start, end - start, self.is_cold)
                start = -1
            full = plan.size_bytes + (end - start if start >= 0 else 0) >= bytes_max
            if full or len(plan.extents) >= EXTENTS_MAX:
                stop = number
                break
            if start < 0:
                start = position
            end = self._end_of(number)
            if passing:
                partition = index.partitions[number]
                self._pass(partition, covered[partition], index.base_offsets[number])
                covered[partition] = index.base_offsets[number] + index.counts[number]
        if start >= 0:
            plan.add(self.file, start, end - start, self.is_cold)
        if passing:
            for partition, limit in self.limits.items():
                reached = limit
                if stop >= 0:
                    reached = min(limit, index.offset_at(partition, stop << INDEX_BITS))
                self._pass(partition, covered[partition], reached)
        return stop

    def _pass(self, partition: int, start: int, end: int) -> None:
        """Notes passed offsets. Damaged offsets are left out, because their content is unknown."""
        for gap in self.segment.gaps():
            if gap.partition == partition and start < gap.end and gap.start < end:
                self.plan.note_passed(partition, start, gap.start)
                start = gap.end
        self.plan.note_passed(partition, start, end)

    def _numbers(self) -> Iterator[int]:
        """The wanted batches of all partitions, in the order of the file."""
        by_partition = self.index.by_partition
        parts = [by_partition[p][low:high] for p, (low, high) in self.spans.items() if low < high]
        return heapq.merge(*parts)

    def _among(self, chosen: Sequence[int]) -> Iterator[int]:
        """The chosen batches that have wanted offsets."""
        index = self.index
        for number in chosen:
            partition = index.partitions[number]
            limit = self.limits.get(partition)
            if limit is not None and index.base_offsets[number] < limit:
                end = index.base_offsets[number] + index.counts[number]
                if end > self.plan.next[partition]:
                    yield number

    def _end_of(self, number: int) -> int:
        """The end of a batch; before a damaged place, the end of the damage."""
        positions = self.index.positions
        if number + 1 < len(positions):
            return positions[number + 1]
        # This is the newest batch, and more may be appended at this time.
        header = self.file.read(positions[number], HEADER_BYTES)
        return positions[number] + int.from_bytes(header[4:8], "little")
