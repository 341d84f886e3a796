"""Gold `device_minutes` and `device_hours`: statistics per device and metric."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from holdfast.pipeline.lake.table import Column, Grain, Table
from holdfast.pipeline.tables.statistics import (
    earliest_by,
    gathered,
    latest_by,
    per_second,
    percentile,
    with_moments,
)

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
READING_ORDER: Final = ("event_time", "partition", "offset", "position")
"""The columns that identify a reading among those of a device and metric."""


def _columns(unit: str) -> tuple[Column, ...]:
    return (
        Column("device", "string", "the device"),
        Column("metric", "string", "what was read"),
        Column("window_start", "timestamp", f"begin of the {unit}, by the event time, UTC"),
        Column("readings", "bigint", "readings of any type, null as well"),
        Column(
            "rate",
            "double",
            f"readings per second of the observed part of the {unit}; null if that is under 10 s",
        ),
        Column("late", "bigint", "of them late"),
        Column("numbers", "bigint", "of them numbers; what follows is about these"),
        Column("min", "double", "least"),
        Column("max", "double", "greatest"),
        Column("mean", "double", "mean, within min and max; null if the sum is beyond double"),
        Column("stddev", "double", "standard deviation of the sample; null for one number"),
        Column("first", "double", "by the event time"),
        Column("last", "double", "by the event time"),
        *(
            Column(name, "double", f"exact percentile {share * 100:g}, linear between two values")
            for name, share in SHARES.items()
        ),
        Column("trues", "bigint", "readings that are true"),
        Column("falses", "bigint", "readings that are false"),
        Column("last_string", "string", "the last text, by the event time"),
    )


def build_windows(readings: DataFrame, unit: str) -> DataFrame:
    """Compute the statistics per device, metric and window of `unit`."""
    rows = readings.where(~F.col("metric").startswith("$"))
    window = F.date_trunc(unit, "event_time").alias("window_start")
    number = F.col("value_double")
    grouped = rows.groupBy("device", "metric", window).agg(
        F.count(F.lit(1)).alias("readings"),
        F.count_if(F.col("is_late")).alias("late"),
        F.min("event_time").alias("first_time"),
        F.max("event_time").alias("last_time"),
        gathered(number).alias("values"),
        earliest_by(number, READING_ORDER).alias("first"),
        latest_by(number, READING_ORDER).alias("last"),
        F.count_if(F.col("value_boolean")).alias("trues"),
        F.count_if(~F.col("value_boolean")).alias("falses"),
        latest_by(F.col("value_string"), READING_ORDER).alias("last_string"),
    )
    values = F.col("values")
    return with_moments(grouped, "values").select(
        "device",
        "metric",
        "window_start",
        "readings",
        per_second("readings", unit).alias("rate"),
        "late",
        F.size(values).cast(LongType()).alias("numbers"),
        F.get(values, F.lit(0)).alias("min"),
        F.get(values, F.size(values) - 1).alias("max"),
        "mean",
        "stddev",
        "first",
        "last",
        *(percentile(values, share).alias(name) for name, share in SHARES.items()),
        "trues",
        "falses",
        "last_string",
    )


def _table(name: str, unit: str) -> Table:
    return Table(
        name=name,
        layer="gold",
        source="readings",
        build=lambda readings: build_windows(readings, unit),
        columns=_columns(unit),
        description=f"Statistics of each device and metric, for each {unit}",
        keys=("window_start", "device", "metric"),
        grain=Grain.hours(),
    )


DEVICE_MINUTES: Final = _table("device_minutes", "minute")
DEVICE_HOURS: Final = _table("device_hours", "hour")
