"""Sums and percentiles that do not depend on the order of the rows.

Adding doubles in another order changes the last digits. So the values of a group are collected,
sorted, and added from the least to the greatest.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F

WINDOW_SECONDS: Final = {"minute": 60, "hour": 3600, "day": 86_400}


def gathered(value: SparkColumn) -> SparkColumn:
    """Aggregate the values that are not null to a sorted array."""
    return F.sort_array(F.collect_list(value))


def total(values: SparkColumn) -> SparkColumn:
    """Return the sum of a sorted array of doubles. It is null for no values, or if it overflows a
    double."""
    added = F.aggregate(values, F.lit(0.0), lambda sum_, value: sum_ + value)
    return F.when((F.size(values) > 0) & (F.abs(added) < F.lit(float("inf"))), added)


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
    below = F.floor(rank).cast("int")
    part = rank - below
    low = F.get(values, below).cast("double")
    high = F.coalesce(F.get(values, below + 1).cast("double"), low)
    # Not low + (high - low) * part, because that difference may overflow a double.
    return F.when(F.size(values) > 0, F.when(part == 0, low)
                  .otherwise(low * (1 - part) + high * part))  # fmt: skip


def earliest_by(value: SparkColumn, order: Sequence[str]) -> SparkColumn:
    """Aggregate to the first value that is not null, in the order of columns that identify a
    row."""
    return F.min_by(value, F.when(value.isNotNull(), F.struct(*order)))


def latest_by(value: SparkColumn, order: Sequence[str]) -> SparkColumn:
    """Aggregate to the last value that is not null, in the order of columns that identify a row."""
    return F.max_by(value, F.when(value.isNotNull(), F.struct(*order)))
