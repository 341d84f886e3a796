"""Chooses the step of the report's time axes: the longer the span, the longer each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc

STEPS_MAX: Final = 300
"""The most steps of a time axis."""
SECOND_US: Final = 1_000_000
MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400
_LENGTHS_S: Final = (
    1, 5, 15, MINUTE_S, 300, 900, 3600, 4 * 3600, 12 * 3600, DAY_S, 2 * DAY_S, 7 * DAY_S,
    30 * DAY_S,
)  # fmt: skip
"""Each is at most five times the one before. So a span of more than a minute, if there are steps of
seconds, has at least 60 of them."""
_NAMES: Final = {1: "second", MINUTE_S: "minute", 3600: "hour", DAY_S: "day"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TimeGrain:
    """The length of the steps of a time axis."""

    seconds: int

    @property
    def name(self) -> str:
        """The length in words: `second`, `15 minutes`, `day`."""
        for length, name in reversed(_NAMES.items()):
            if self.seconds % length == 0:
                number = self.seconds // length
                return name if number == 1 else f"{number} {name}s"
        raise AssertionError("a second divides every step")

    @property
    def us(self) -> int:
        """The length in microseconds."""
        return self.seconds * SECOND_US

    def steps(self, times: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
        """Returns the begin of the step of each time."""
        micros = times.cast(pyarrow.int64())
        begins = pc.multiply(pc.floor(pc.divide(micros.cast(pyarrow.float64()), self.us)), self.us)
        return begins.cast(pyarrow.int64()).cast(pyarrow.timestamp("us", tz="UTC"))


def grain_of(times: Sequence[datetime | None], least_s: int = MINUTE_S) -> TimeGrain:
    """Returns the shortest grain with which a span has at most STEPS_MAX steps. `least_s` is that
    of the table: most tables have a row for each minute."""
    known = [time for time in times if time is not None]
    span_s = (max(known) - min(known)).total_seconds() if known else 0.0
    lengths = [length for length in _LENGTHS_S if length >= least_s]
    fitting = (each for each in lengths if span_s / each < STEPS_MAX)
    longest = lengths[-1] * (int(span_s // (lengths[-1] * STEPS_MAX)) + 1)
    return TimeGrain(next(fitting, longest))


def time_of(us: int) -> datetime:
    """Returns a time that is given in microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=int(us))


def summed(
    rows: pyarrow.Table, time: str, measures: Sequence[str], grain: TimeGrain
) -> tuple[list[datetime], dict[str, list[int]]]:
    """Returns the steps from the first to the last time, and the sums of some columns in each.

    A step without rows has 0: nothing happened then.
    """
    stepped = rows.append_column("step", grain.steps(rows[time]))
    found = stepped.group_by("step").aggregate([(name, "sum") for name in measures])
    found = found.sort_by("step")
    begins = np.asarray(found["step"].cast(pyarrow.int64()).to_pylist(), np.int64)
    places = (begins - begins[0]) // grain.us
    count = int(places[-1]) + 1
    steps = pyarrow.array(begins[0] + np.arange(count) * grain.us)
    sums = {}
    for name in measures:
        values = np.zeros(count, np.int64)
        values[places] = [value or 0 for value in found[f"{name}_sum"].to_pylist()]
        sums[name] = values.tolist()
    return steps.cast(pyarrow.timestamp("us", tz="UTC")).to_pylist(), sums
