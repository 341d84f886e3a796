"""Sums and percentiles that do not depend on the order of the rows.

Adding doubles in another order changes the last digits. So the values of a group are collected,
sorted, and added from the least to the greatest.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column as SparkColumn
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, IntegerType

WINDOW_SECONDS: Final = {"minute": 60, "hour": 3600, "day": 86_400}
OBSERVED_MIN_S: Final = 10.0
"""The fewest observed seconds of a window that has a rate. Two readings a second apart would
otherwise make two a second."""


def gathered(value: SparkColumn) -> SparkColumn:
    """Aggregate the values that are not null to a sorted array."""
    return F.sort_array(F.collect_list(value))


def mean_of(values: SparkColumn) -> SparkColumn:
    """Return the mean of a sorted array of doubles, which is never outside its least and greatest.

    A sum of rounded doubles is not exact: 33 times 10.7 gives a mean of 10.699999999999994. The sum
    of what the values differ from that mean corrects it. It is null for no values, or if the sum
    overflows a double.
    """
    count = F.size(values)
    rough = F.aggregate(values, F.lit(0.0), lambda sum_, value: sum_ + value) / count
    rest = F.aggregate(values, F.lit(0.0), lambda sum_, value: sum_ + (value - rough)) / count
    mean = F.when(F.abs(rest) < F.lit(float("inf")), rough + rest).otherwise(rough)
    inside = F.least(F.greatest(mean, F.get(values, F.lit(0))), F.get(values, count - 1))
    return F.when((count > 0) & (F.abs(rough) < F.lit(float("inf"))), inside)


def deviation(values: SparkColumn, mean: SparkColumn) -> SparkColumn:
    """Return the standard deviation of a sample. It is null for fewer than two values."""
    squares = F.aggregate(
        values, F.lit(0.0), lambda sum_, value: sum_ + (value - mean) * (value - mean)
    )
    found = F.sqrt(squares / (F.size(values) - 1))
    return F.when((F.size(values) > 1) & (squares < F.lit(float("inf"))), found)


def percentile(values: SparkColumn, share: float) -> SparkColumn:
    """Return a percentile of a sorted array, interpolated linearly (as numpy does). It is null if
    empty."""
    rank = (F.size(values) - 1) * F.lit(share)
    below = F.floor(rank).cast(IntegerType())
    part = rank - below
    low = F.get(values, below).cast(DoubleType())
    high = F.coalesce(F.get(values, below + 1).cast(DoubleType()), low)
    # Not low + (high - low) * part, because that difference may overflow a double.
    return F.when(F.size(values) > 0, F.when(part == 0, low)
                  .otherwise(low * (1 - part) + high * part))  # fmt: skip


def per_second(count: str, unit: str) -> SparkColumn:
    """Return a count divided by the observed seconds of its window.

    The frame has `window_start`, and `first_time` and `last_time` of each group. A minute that is
    not over is not divided by 60: what is observed of an hour begins with the first time of all its
    rows and ends with the last one. It is null below OBSERVED_MIN_S.
    """
    hour = Window.partitionBy(F.date_trunc("hour", "window_start"))
    start = F.unix_micros("window_start")
    end = start + WINDOW_SECONDS[unit] * 1_000_000
    begin = F.greatest(start, F.min(F.unix_micros("first_time")).over(hour))
    until = F.least(end, F.max(F.unix_micros("last_time")).over(hour))
    seconds = (until - begin) / 1_000_000.0
    return F.when(seconds >= OBSERVED_MIN_S, F.col(count) / seconds)


def earliest_by(value: SparkColumn, order: Sequence[str]) -> SparkColumn:
    """Aggregate to the first value that is not null, in the order of columns that identify a
    row."""
    return F.min_by(value, F.when(value.isNotNull(), F.struct(*order)))


def latest_by(value: SparkColumn, order: Sequence[str]) -> SparkColumn:
    """Aggregate to the last value that is not null, in the order of columns that identify a row."""
    return F.max_by(value, F.when(value.isNotNull(), F.struct(*order)))
