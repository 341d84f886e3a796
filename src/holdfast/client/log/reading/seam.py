"""Divides a read between a lake and the log that goes on behind it.

Invariant: the parts of a range that are read in the lake, that are read in the log, and that are
missing in both do not overlap, and together they are exactly the range. `Seam.divide` asserts it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.client.log.reading.offsets import OffsetRange, Offsets, PartitionBounds

NOTHING = PartitionBounds(0, 0)


@dataclass(frozen=True)
class SeamParts:
    """The parts of some ranges, in the order of the ranges."""

    lake: list[OffsetRange]
    log: list[OffsetRange]
    missing: list[OffsetRange]
    """The offsets that neither has."""


@dataclass(frozen=True)
class Seam:
    """The offsets of a lake, as of one version, and those of the log at one time."""

    lake: Mapping[int, PartitionBounds]
    log: Mapping[int, PartitionBounds]
    skipped: Sequence[OffsetRange] = field(default=())
    """The offsets inside its bounds that the lake lacks."""

    def bounds(self) -> dict[int, PartitionBounds]:
        """Returns the offsets of both together. Some between may be missing."""
        found = dict(self.log)
        for partition, lake in self.lake.items():
            log = found.get(partition, lake)
            if lake.first < lake.end:
                found[partition] = PartitionBounds(
                    min(lake.first, log.first), max(lake.end, log.end)
                )
            else:
                found.setdefault(partition, lake)
        return found

    def divide(self, ranges: Iterable[OffsetRange]) -> SeamParts:
        """Divides ranges inside `bounds`. What both have is read in the lake."""
        parts = SeamParts([], [], [])
        for item in ranges:
            found = list(self._divided(item))
            at = item.start
            for where, start, end in found:
                assert start == at < end, (item, found)
                at = end
                where_to = {"lake": parts.lake, "log": parts.log, "missing": parts.missing}[where]
                where_to.append(OffsetRange(item.partition, start, end))
            assert at == max(item.start, item.end), (item, found)
        return parts

    def _divided(self, item: OffsetRange) -> Iterable[tuple[str, int, int]]:
        """Yields the parts of a range in the order of their offsets."""
        lake = self.lake.get(item.partition, NOTHING)
        log = self.log.get(item.partition)
        at, end = item.start, item.end
        if lake.first >= lake.end:
            lake = PartitionBounds(end, end)
        if at < min(lake.first, end):
            yield "log", at, min(lake.first, end)
            at = min(lake.first, end)
        own_end = min(lake.end, end)
        holes = (each for each in self.skipped if each.partition == item.partition)
        for hole in sorted(holes, key=lambda each: each.start):
            start, stop = max(hole.start, at), min(hole.end, own_end)
            if start >= stop:
                continue
            if at < start:
                yield "lake", at, start
            yield "missing", start, stop
            at = stop
        if at < own_end:
            yield "lake", at, own_end
            at = own_end
        if lake.first < lake.end:
            begin = end if log is None else min(max(at, log.first), end)
            if at < begin:
                yield "missing", at, begin
                at = begin
        if at < end:
            yield "log", at, end


def joined_offsets(seam: Seam, lake: Offsets, log: Offsets) -> Offsets:
    """Returns the first offsets of a time in both, from those in the lake and those in the log."""
    mine = {p: at for p, at in lake.items() if p in seam.lake and at < seam.lake[p].end}
    return log | {p: min(at, log.get(p, at)) for p, at in mine.items()}


IN_NEITHER: Final = (
    "neither the lake nor the log has them. Retention had removed them before the lake read them,"
    " or they were damaged"
)
"""Why a part of a read is missing."""
