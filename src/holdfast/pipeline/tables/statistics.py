"""Sums and percentiles that do not depend on the order of the rows.

Adding doubles in another order changes the last digits. So the values of a group are collected,
sorted, and added from the least to the greatest.
"""

from collections.abc import Callable, Sequence
from typing import Final

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, IntegerType

WINDOW_SECONDS: Final = {"minute": 60, "hour": 3600, "day": 86_400}
OBSERVED_MIN_S: Final = 10.0
"""The fewest observed seconds of a window that has a rate. Two readings a second apart would
otherwise make two a second."""


def gathered(value: SparkColumn) -> SparkColumn:
    """Aggregate the values that are not null to a sorted array."""
    return F.sort_array(F.collect_list(value))


def with_moments(frame: DataFrame, values: str) -> DataFrame:
    """Add the columns `mean` and `stddev` of a sorted array of doubles.

    The mean is never outside the least and the greatest value. A sum of rounded doubles is not
    exact: 33 times 10.7 gives a mean of 10.699999999999994. The sum of what the values differ from
    that mean corrects it. The mean is null for no values, or if the sum overflows a double. The
    standard deviation is that of a sample, and null for fewer than two values.

    Each sum is a column of its own. Spark evaluates an expression inside a lambda again for each
    value: a mean there took 3,600 sums for each hour of a device at 1 Hz.
    """
    array, rough, rest, mean = (F.col(each) for each in (values, "__rough", "__rest", "mean"))
    count, limit = F.size(array), F.lit(float("inf"))
    frame = frame.withColumn("__rough", F.try_divide(_sum(array, lambda value: value), count))
    frame = frame.withColumn(
        "__rest", F.try_divide(_sum(array, lambda value: value - rough), count)
    )
    better = F.when(F.abs(rest) < limit, rough + rest).otherwise(rough)
    inside = F.least(F.greatest(better, F.get(array, F.lit(0))), F.get(array, count - 1))
    frame = frame.withColumn("mean", F.when((count > 0) & (F.abs(rough) < limit), inside))
    frame = frame.withColumn("__squares", _sum(array, lambda v: (v - mean) * (v - mean)))
    squares = F.col("__squares")
    found = F.when((count > 1) & (squares < limit), F.sqrt(squares / (count - 1)))
    return frame.withColumn("stddev", found).drop("__rough", "__rest", "__squares")


def _sum(values: SparkColumn, of: Callable[[SparkColumn], SparkColumn]) -> SparkColumn:
    return F.aggregate(values, F.lit(0.0), lambda sum_, value: sum_ + of(value))


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
