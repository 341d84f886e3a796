"""A set of offsets of one partition, stored as ranges.

The records that a group has finished behind one that is not finished are nearly contiguous, so
their ranges are few, however many they are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class OffsetRanges:
    """Disjoint ranges of offsets in ascending order. Two of them never touch."""

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for offset in offsets:
            self.add(offset)

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetRanges) and self.ranges() == other.ranges()

    def ranges(self) -> list[tuple[int, int]]:
        """Returns (first offset, end) of each range."""
        return list(zip(self._starts, self._ends, strict=True))

    def offsets(self) -> Iterator[int]:
        """Yields the offsets in ascending order."""
        for start, end in self.ranges():
            yield from range(start, end)

    def copy(self) -> "OffsetRanges":
        found = OffsetRanges()
        found._starts = list(self._starts)
        found._ends = list(self._ends)
        return found

    def add(self, offset: int) -> None:
        self.add_range(offset, offset + 1)

    def add_range(self, start: int, end: int) -> None:
        """Adds the offsets from `start` up to below `end`."""
        assert start < end, "an empty range"
        starts, ends = self._starts, self._ends
        # The ranges that overlap the new one or touch it become one with it.
        first = bisect_left(ends, start)
        last = bisect_right(starts, end)
        if first < last:
            start = min(start, starts[first])
            end = max(end, ends[last - 1])
        starts[first:last] = [start]
        ends[first:last] = [end]

    def check(self) -> None:
        """Raises `AssertionError` unless the ranges are in order and do not touch."""
        before = -1
        for start, end in self.ranges():
            assert before < start < end, "two ranges touch"
            before = end

    def drop_below(self, offset: int) -> None:
        """Removes the offsets below `offset`."""
        passed = bisect_right(self._ends, offset)
        if passed:
            del self._starts[:passed]
            del self._ends[:passed]
        if self._starts and self._starts[0] < offset:
            self._starts[0] = offset


class FinishedOffsets:
    """The finished offsets of one group at or above its positions."""

    def __init__(self) -> None:
        self._of: dict[int, OffsetRanges] = {}

    def __len__(self) -> int:
        """The number of ranges in all partitions."""
        return sum(map(len, self._of.values()))

    def __contains__(self, place: tuple[int, int]) -> bool:
        ranges = self._of.get(place[0])
        return ranges is not None and place[1] in ranges

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FinishedOffsets) and self._of == other._of

    def items(self) -> list[tuple[int, OffsetRanges]]:
        """Returns the ranges of each partition with any."""
        return list(self._of.items())

    def copy(self) -> "FinishedOffsets":
        found = FinishedOffsets()
        found._of = {partition: ranges.copy() for partition, ranges in self._of.items()}
        return found

    def add(self, partition: int, start: int, end: int) -> None:
        """Adds the offsets from `start` up to below `end`."""
        self._of.setdefault(partition, OffsetRanges()).add_range(start, end)

    def drop_below(self, partition: int, offset: int) -> None:
        """Removes the offsets below a position."""
        ranges = self._of.get(partition)
        if ranges is not None:
            ranges.drop_below(offset)
            if not len(ranges):
                del self._of[partition]
