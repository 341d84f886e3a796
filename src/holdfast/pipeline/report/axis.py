"""Time axis that the charts of a report share, and the gaps in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow

from holdfast.pipeline.report.grain import (
    MINUTE_S,
    SECOND_US,
    Integers,
    TimeGrain,
    grain_of,
    time_of,
)

BREAK_INTERVALS: Final = 1.5
"""A line breaks between two points that are further apart than this many usual intervals."""
USUAL_SHARE: Final = 0.9
"""The share of intervals that are not longer than the usual one."""
GAP_INTERVALS: Final = 5
"""The number of usual intervals without any message that is an interruption."""
INTERVALS_MIN: Final = 20
"""The fewest intervals from which a usual one is computed."""
GAP_US_MIN: Final = SECOND_US
"""The shortest interruption, in microseconds."""

Floats = npt.NDArray[np.float64]
Line = list[float | None]


@dataclass(frozen=True)
class Interruption:
    """A time without a message of any client."""

    from_us: int
    to_us: int

    @property
    def duration_us(self) -> int:
        """The length in microseconds."""
        return self.to_us - self.from_us

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """The last message before it and the first one after it."""
        return time_of(self.from_us), time_of(self.to_us)


def gaps_of(times_us: Integers) -> list[Interruption]:
    """Returns the times between two messages that are far longer than usual. `times_us` is
    sorted."""
    intervals = np.diff(times_us)
    if len(intervals) < INTERVALS_MIN:
        return []
    usual = float(np.quantile(intervals, USUAL_SHARE))
    places = np.flatnonzero(intervals > max(GAP_INTERVALS * usual, GAP_US_MIN))
    return [Interruption(int(times_us[at]), int(times_us[at + 1])) for at in places]


@dataclass(frozen=True)
class TimeAxis:
    """A span of time in equal steps."""

    begin_us: int
    end_us: int
    grain: TimeGrain
    gaps: list[Interruption] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The number of the first step, counted from 1970."""
        return self.begin_us // self.grain.us

    @property
    def count(self) -> int:
        """The number of steps."""
        return self.end_us // self.grain.us - self.first + 1

    @property
    def begins_us(self) -> Integers:
        """The begin of each step."""
        found: Integers = (self.first + np.arange(self.count, dtype=np.int64)) * self.grain.us
        return found

    @property
    def steps(self) -> list[datetime]:
        """The time at which each step is drawn: its begin, or its middle if it is shorter than a
        minute. Otherwise the first messages after a gap would seem to be in it."""
        shift_us = self.grain.us // 2 if self.grain.seconds < MINUTE_S else 0
        return [time_of(each + shift_us) for each in self.begins_us.tolist()]

    def longest_gaps(self, count: int) -> list[Interruption]:
        """Returns the longest gaps, in the order of time."""
        longest = sorted(self.gaps, key=lambda gap: -gap.duration_us)[:count]
        return sorted(longest, key=lambda gap: gap.from_us)

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """The begin of the first step and the end of the last one, so that each is in sight."""
        begins_us = self.begins_us
        return time_of(int(begins_us[0])), time_of(int(begins_us[-1]) + self.grain.us)

    def places(self, times_us: Integers) -> Integers:
        """Returns the number of the step of each time, from 0. Times outside have other numbers."""
        found: Integers = times_us // self.grain.us - self.first
        return found

    def quantiles(self, places: Integers, values: Floats, shares: Sequence[float]) -> list[Line]:
        """Returns some quantiles of the values of each step (nearest rank). A step without values
        has None. `places` are in the span."""
        order = np.lexsort((values, places))
        values = values[order]
        counts = np.bincount(places, minlength=self.count)
        firsts = np.cumsum(counts) - counts
        found = []
        for share in shares:
            ranks = firsts + np.maximum(np.ceil(share * counts).astype(np.int64) - 1, 0)
            found.append([
                float(values[rank]) if count else None
                for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True)
            ])  # fmt: skip
        return found

    def bridged(self, line: Line) -> Line:
        """Fills steps that are empty only because there is no value in every step, on the straight
        line between their neighbours. Longer silences and the gaps of all stay empty."""
        values = np.array([np.nan if value is None else value for value in line])
        known = np.flatnonzero(~np.isnan(values))
        if len(known) < 3:
            return line
        distances = np.diff(known)
        limit = max(BREAK_INTERVALS * float(np.quantile(distances, USUAL_SHARE, method="lower")), 1)
        is_empty = np.ones(len(values), np.bool_)
        for before, distance in zip(known.tolist(), distances.tolist(), strict=False):
            if distance <= limit:
                is_empty[before : before + distance + 1] = False
        for gap in self.gaps:
            before, after = self.places(np.array([gap.from_us, gap.to_us]))
            is_empty[before + 1 : after] = True
        is_empty[known] = False
        filled = np.interp(np.arange(len(values)), known, values[known])
        pairs = zip(filled.tolist(), is_empty.tolist(), strict=True)
        return [None if empty else value for value, empty in pairs]


def axis_of_rows(times: pyarrow.ChunkedArray, row_s: int = MINUTE_S) -> TimeAxis:
    """Returns the axis of a table whose rows are of minutes, or of `row_s` seconds, with those that
    are missing."""
    row_us = row_s * SECOND_US
    found = np.unique(times.cast(pyarrow.int64()).to_numpy())
    intervals = np.diff(found)
    gaps = []
    if len(intervals):
        usual = float(np.quantile(intervals, USUAL_SHARE, method="lower"))
        places = np.flatnonzero(intervals > BREAK_INTERVALS * usual)
        gaps = [Interruption(int(found[at]) + row_us, int(found[at + 1])) for at in places]
    grain = grain_of([time_of(found[0]), time_of(found[-1])], row_s)
    return TimeAxis(int(found[0]), int(found[-1]) + row_us - 1, grain, gaps)
