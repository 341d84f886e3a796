"""Silver `gaps`: numbers found missing, and those that came later. Gold `missing`: the rest."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType

from holdfast.pipeline.lake.table import Column, Grain, Table

_GAP_COLUMNS: Final = (
    Column("stream", "string", "the numbered stream: a topic, device or Sparkplug edge node"),
    Column("run", "bigint", "the run of the stream"),
    Column("device", "string", "the device of the message that told"),
    Column("event", "string", "`missing`: the numbers were skipped; `filled`: one of them came"),
    Column("first", "bigint", "first number"),
    Column("last", "bigint", "last number"),
    Column("count", "bigint", "how many"),
    Column("opened_at", "timestamp", "when the gap was found: store_time of the message behind it"),
    Column("store_time", "timestamp", "when the broker stored the message that told"),
    Column("partition", "int", "log partition of that message"),
    Column("offset", "bigint", "its offset"),
)

_MISSING_COLUMNS: Final = (
    Column("stream", "string", "the numbered stream: a topic, device or Sparkplug edge node"),
    Column("device", "string", "the device of the message behind the gap"),
    Column("window_start", "timestamp", "day of opened_at, UTC"),
    Column("run", "bigint", "the run of the stream"),
    Column("first", "bigint", "first missing number"),
    Column("last", "bigint", "last missing number"),
    Column("count", "bigint", "how many"),
    Column("opened_at", "timestamp", "when the gap was found"),
)


def build_gaps(readings: DataFrame) -> DataFrame:
    """Returns the gaps that were opened, and the missing numbers that came later."""
    rows = readings.where((F.col("position") == 0) & F.col("gap_opened_at").isNotNull())
    opened = F.col("gap_before") > 0
    return rows.select(
        "stream",
        "run",
        "device",
        F.when(opened, "missing").otherwise("filled").alias("event"),
        F.when(opened, F.col("sequence") - F.col("gap_before"))
        .otherwise(F.col("sequence"))
        .alias("first"),
        F.when(opened, F.col("sequence") - 1).otherwise(F.col("sequence")).alias("last"),
        F.when(opened, F.col("gap_before")).otherwise(F.lit(1)).alias("count"),
        F.col("gap_opened_at").alias("opened_at"),
        "store_time",
        "partition",
        "offset",
    )


def build_missing(gaps: DataFrame) -> DataFrame:
    """Returns each gap without the numbers that came later, as ranges."""
    day = F.date_trunc("day", "opened_at").alias("window_start")
    key = ["stream", "run", "opened_at"]
    opened = gaps.where(F.col("event") == "missing").select(*key, day, "device", "first", "last")
    filled = (
        gaps.where(F.col("event") == "filled")
        .groupBy(*key)
        .agg(F.sort_array(F.collect_set("first")).alias("numbers"))
    )
    numbers = F.coalesce(F.col("numbers"), F.array().cast(ArrayType(LongType())))
    inside = F.filter(numbers, lambda n: (n >= F.col("first")) & (n <= F.col("last")))
    cuts = F.concat(F.array(F.col("first") - 1), inside, F.array(F.col("last") + 1))
    ranges = F.zip_with(
        F.slice(cuts, F.lit(1), F.size(cuts) - 1),
        F.slice(cuts, F.lit(2), F.size(cuts) - 1),
        lambda before, behind: F.struct((before + 1).alias("first"), (behind - 1).alias("last")),
    )
    left = opened.join(filled, key, "left").select(
        "stream", "device", "window_start", "run", "opened_at", F.explode(ranges).alias("range")
    )
    return left.where(F.col("range.first") <= F.col("range.last")).select(
        "stream",
        "device",
        "window_start",
        "run",
        "range.first",
        "range.last",
        (F.col("range.last") - F.col("range.first") + 1).alias("count"),
        "opened_at",
    )


GAPS: Final = Table(
    name="gaps",
    layer="silver",
    source="readings",
    build=build_gaps,
    columns=_GAP_COLUMNS,
    description="Missing message numbers when they were noticed, and those that came later",
    keys=("stream", "run", "opened_at", "partition", "offset"),
)
MISSING: Final = Table(
    name="missing",
    layer="gold",
    source="gaps",
    build=build_missing,
    columns=_MISSING_COLUMNS,
    description="Message numbers that have not come until now, as ranges",
    keys=("window_start", "stream", "run", "first"),
    grain=Grain.days(source_time="opened_at"),
)
