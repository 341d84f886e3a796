"""The grain of the report's time axes: the longer the span, the longer each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import pyarrow
import pyarrow.compute as pc

STEPS_MAX: Final = 240
"""The most steps of a time axis."""
MINUTE_US: Final = 60_000_000
_MINUTES: Final = (1, 5, 15, 60, 360, 1440, 7 * 1440, 30 * 1440)
_NAMES: Final = {1: "minute", 60: "hour", 1440: "day"}


@dataclass(frozen=True)
class TimeGrain:
    """The length of the steps of a time axis."""

    minutes: int

    @property
    def name(self) -> str:
        """The length in words: `minute`, `15 minutes`, `day`."""
        for length, name in reversed(_NAMES.items()):
            if self.minutes % length == 0:
                number = self.minutes // length
                return name if number == 1 else f"{number} {name}s"
        raise AssertionError("a minute divides every step")

    def steps(self, times: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
        """Return the begin of the step of each time."""
        length = self.minutes * MINUTE_US
        micros = times.cast(pyarrow.int64())
        begins = pc.multiply(pc.floor(pc.divide(micros.cast(pyarrow.float64()), length)), length)
        return begins.cast(pyarrow.int64()).cast(pyarrow.timestamp("us", tz="UTC"))


def grain_of(times: Sequence[datetime | None]) -> TimeGrain:
    """Return the shortest grain with which a span has at most STEPS_MAX steps."""
    known = [time for time in times if time is not None]
    span = (max(known) - min(known)).total_seconds() / 60 if known else 0.0
    return TimeGrain(next((m for m in _MINUTES if span / m < STEPS_MAX), _MINUTES[-1]))


def summed(
    rows: pyarrow.Table, time: str, measures: Sequence[str], grain: TimeGrain
) -> tuple[list[datetime], dict[str, list[int]]]:
    """Return the steps from the first to the last time, and the sums of some columns in each.

    A step without rows has 0: nothing happened then.
    """
    stepped = rows.append_column("step", grain.steps(rows[time]))
    found = stepped.group_by("step").aggregate([(name, "sum") for name in measures])
    found = found.sort_by("step")
    begins = np.asarray(found["step"].cast(pyarrow.int64()).to_pylist(), np.int64)
    length = grain.minutes * MINUTE_US
    places = (begins - begins[0]) // length
    count = int(places[-1]) + 1
    steps = pyarrow.array(begins[0] + np.arange(count) * length)
    sums = {}
    for name in measures:
        values = np.zeros(count, np.int64)
        values[places] = [value or 0 for value in found[f"{name}_sum"].to_pylist()]
        sums[name] = values.tolist()
    return steps.cast(pyarrow.timestamp("us", tz="UTC")).to_pylist(), sums
