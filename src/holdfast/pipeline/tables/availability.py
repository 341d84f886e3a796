"""Gold `outages` and `availability`: the times at which a device was down, by the broker's clock.

A device is down if it says so, if its will says so, or if it is silent for too long. A day is
computed from its rows and those of the day before, in which an outage may have begun. So an outage
is cut at midnight, and each day has its part.
"""

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from holdfast.pipeline.decoders.text_payload import ONLINE
from holdfast.pipeline.lake.table import Column, Grain, Table
from holdfast.pipeline.tables.statistics import gathered, percentile
from holdfast.pipeline.tables.stream import REPEATED

SILENCE_FACTOR: Final = 5
"""The usual intervals of silence that make an outage."""
USUAL_SHARE: Final = 0.9
"""The share of intervals that are not longer than the usual one. The median would be 0 for a device
that sends several messages at once."""
INTERVALS_MIN: Final = 5
"""The fewest intervals from which a usual one is computed."""
SILENCE_MIN_US: Final = 10_000_000
"""The shortest silence in microseconds that is an outage."""
DAY_US: Final = 86_400_000_000

_OUTAGE_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "the day, UTC"),
    Column("outage_from", "timestamp", "the last message before the outage, or its report as "
           "offline; midnight if the outage began the day before"),
    Column("outage_to", "timestamp", "the first message after the outage; without one, the end "
           "of the day or the last message of any device"),
    Column("duration_s", "double", "seconds between the two"),
    Column("cause", "string", "`offline`: it was reported as offline; `silence`: longer than "
           f"{SILENCE_FACTOR} usual intervals"),
    Column("began_before", "boolean", "it began on the day before"),
    Column("is_open", "boolean", "it did not end on this day"),
)  # fmt: skip

_AVAILABILITY_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "the day, UTC"),
    Column("messages", "bigint", "messages of the device on this day"),
    Column("observed_s", "double", "seconds from midnight, or from its first message if that is "
           "newer, to the last message of any device on this day"),
    Column("up_s", "double", "of them not in an outage"),
    Column("down_s", "double", "of them in an outage"),
    Column("availability", "double", "up_s / observed_s; null if nothing was observed"),
    Column("outages", "bigint", "outages on this day"),
    Column("longest_s", "double", "the longest part of one on this day"),
    Column("usual_interval_s", "double", "nine of ten intervals between messages are not longer; "
           f"null for fewer than {INTERVALS_MIN} intervals: then silence is no outage"),
)  # fmt: skip


def build_outages(readings: DataFrame) -> DataFrame:
    """Compute the outages of each device and day."""
    return (
        _spans(_events(readings))
        .where(F.col("down_us") > 0)
        .select(
            "device",
            F.timestamp_micros("day_us").alias("window_start"),
            F.timestamp_micros("from_us").alias("outage_from"),
            F.timestamp_micros("to_us").alias("outage_to"),
            (F.col("down_us") / 1_000_000.0).alias("duration_s"),
            F.when(F.col("gone_us").isNotNull(), "offline").otherwise("silence").alias("cause"),
            (F.col("begin_us") < F.col("day_us")).alias("began_before"),
            F.col("again_us").isNull().alias("is_open"),
        )
    )


def build_availability(readings: DataFrame) -> DataFrame:
    """Compute the availability of each device and day."""
    none = F.lit(0).cast(LongType())
    days = (
        _spans(_events(readings))
        .groupBy("day_us", "device")
        .agg(
            F.greatest(F.min("first_us"), F.col("day_us")).alias("begin_us"),
            F.max("as_of_us").alias("as_of_us"),
            F.max("usual_us").alias("usual_us"),
            F.sum("messages").alias("messages"),
            F.count_if(F.col("down_us") > 0).alias("outages"),
            F.sum("down_us").alias("down_us"),
            F.max("down_us").alias("longest_us"),
        )
        .withColumn("observed_us", F.greatest(F.col("as_of_us") - F.col("begin_us"), none))
        .withColumn("up_us", F.col("observed_us") - F.col("down_us"))
    )
    return days.select(
        "device",
        F.timestamp_micros("day_us").alias("window_start"),
        "messages",
        *(
            (F.col(f"{name}_us") / 1_000_000.0).alias(f"{name}_s")
            for name in ("observed", "up", "down", "longest")
        ),
        F.when(F.col("observed_us") > 0, F.col("up_us") / F.col("observed_us")).alias(
            "availability"
        ),
        "outages",
        (F.col("usual_us") / 1_000_000.0).alias("usual_interval_s"),
    )


def _events(readings: DataFrame) -> DataFrame:
    """Return one row per message and day that it counts for: its own day and the next.

    Each row has the day's last time (`as_of_us`) and the device's usual interval.
    """
    first = (F.col("position") == 0) & (F.col("metric") != REPEATED) | (F.col("metric") == ONLINE)
    gone = (F.col("metric") == ONLINE) & ~F.coalesce("value_boolean", F.lit(True))
    at_us = F.unix_micros("store_time")
    own_us = at_us - F.pmod(at_us, F.lit(DAY_US))
    messages = (
        readings.where(first)
        .groupBy("device", at_us.alias("at_us"), "partition", "offset", own_us.alias("own_us"))
        .agg(F.max(gone).alias("gone"))
    )
    as_of = messages.groupBy(F.col("own_us").alias("day_us")).agg(F.max("at_us").alias("as_of_us"))
    days = F.explode(F.array("own_us", F.col("own_us") + DAY_US))
    events = messages.withColumn("day_us", days).join(as_of, "day_us")
    usual = F.col("values")
    heard = Window.partitionBy("day_us", "device").orderBy("at_us", "partition", "offset")
    interval = F.col("at_us") - F.lag("at_us").over(heard)
    intervals = (
        events.where(~F.col("gone"))
        .select("day_us", "device", interval.alias("interval_us"))
        .groupBy("day_us", "device")
        .agg(gathered(F.col("interval_us")).alias("values"))
        .select(
            "day_us",
            "device",
            F.when(F.size(usual) >= INTERVALS_MIN, percentile(usual, USUAL_SHARE)).alias(
                "usual_us"
            ),
        )
    )
    return events.join(intervals, ["day_us", "device"], "left")


def _spans(events: DataFrame) -> DataFrame:
    """Return the spans between the messages of a device, per day, with their down time.

    A device is down (`down_us`, from `from_us` to `to_us`) if it said so, or if the next message
    came too late.
    """
    order = Window.partitionBy("day_us", "device").orderBy("at_us", "partition", "offset")
    heard = ~F.col("gone")
    spans = (
        events.withColumn("span", F.count_if(heard).over(order))
        .groupBy("day_us", "device", "span")
        .agg(
            F.min("at_us").alias("first_us"),
            F.min(F.when(heard, F.col("at_us"))).alias("heard_us"),
            F.min(F.when(~heard, F.col("at_us"))).alias("gone_us"),
            F.count_if(F.col("at_us") >= F.col("day_us")).alias("messages"),
            F.max("as_of_us").alias("as_of_us"),
            F.max("usual_us").alias("usual_us"),
        )
    )
    following = Window.partitionBy("day_us", "device").orderBy("span")
    limit_us = F.greatest(F.col("usual_us") * SILENCE_FACTOR, F.lit(float(SILENCE_MIN_US)))
    silent = F.col("usual_us").isNotNull() & (F.col("end_us") - F.col("heard_us") > limit_us)
    length_us = F.col("to_us") - F.col("from_us")
    return (
        spans.withColumn("again_us", F.lead("heard_us").over(following))
        .withColumn("end_us", F.coalesce("again_us", "as_of_us"))
        .withColumn("begin_us", F.when(silent, F.col("heard_us")).otherwise(F.col("gone_us")))
        .withColumn("from_us", F.greatest("begin_us", "day_us"))
        .withColumn("to_us", F.least("end_us", "as_of_us"))
        # It is 0 if no outage began, or if it ended the day before: that day has it then.
        .withColumn(
            "down_us",
            F.when(F.col("begin_us").isNotNull() & (length_us > 0), length_us).otherwise(0),
        )
    )


OUTAGES: Final = Table(
    name="outages",
    layer="gold",
    source="readings",
    build=build_outages,
    columns=_OUTAGE_COLUMNS,
    description="When each device was not there, by day",
    keys=("window_start", "device", "outage_from"),
    grain=Grain.days(source_time="store_time", before=1),
)
AVAILABILITY: Final = Table(
    name="availability",
    layer="gold",
    source="readings",
    build=build_availability,
    columns=_AVAILABILITY_COLUMNS,
    description="Up and down time of each device and day",
    keys=("window_start", "device"),
    grain=Grain.days(source_time="store_time", before=1),
)
