"""Gold `latency`, from publishing to the broker's log, `quality`, repetitions and the like per
device, and `topics`, messages and bytes per topic."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from holdfast.pipeline.lake.table import RECORDS, Column, Grain, Table
from holdfast.pipeline.tables.statistics import gathered, per_second, percentile
from holdfast.pipeline.tables.stream import REPEATED

LATENCY_MAX_S: Final = 86_400
"""The largest plausible latency in seconds. Beyond it a clock is wrong."""
AHEAD_MAX_S: Final = 300
"""The most seconds by which a device's clock may be ahead of the broker's, as in Rule.future_s."""
_SHARES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}

_LATENCY_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "begin of the minute, by store_time, UTC"),
    Column("messages", "bigint", "messages that say when they were published"),
    Column("wrong_clock", "bigint", "of them by a clock that is not believed: more than a day "
           "behind, more than 5 minutes ahead, or `claimed_time` is set; left out below"),
    Column("ahead", "bigint", "of them stored before they were published, by the device's clock: "
           "their latency is below zero"),
    Column("min_ms", "double", "least latency, milliseconds: store_time less sent_time"),
    Column("p50_ms", "double", "median, exact"),
    Column("p90_ms", "double", "percentile 90, exact"),
    Column("p99_ms", "double", "percentile 99, exact"),
    Column("max_ms", "double", "greatest"),
    Column("mean_ms", "double", "mean"),
)  # fmt: skip

_QUALITY_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "begin of the minute, by store_time, UTC"),
    Column("messages", "bigint", "messages with readings, each once"),
    Column("repetitions", "bigint", "messages that had come before, which were dropped"),
    Column("late", "bigint", "messages that are late"),
    Column("wrong_clock", "bigint", "messages with an event time that is not believed"),
    Column("missing", "bigint", "message numbers found missing in this minute"),
    Column("filled", "bigint", "messages whose number was missing before"),
)

_TOPIC_COLUMNS: Final = (
    Column("topic", "string", "the topic"),
    Column("window_start", "timestamp", "begin of the minute, by the broker's time, UTC"),
    Column("messages", "bigint", "messages stored, repetitions too"),
    Column(
        "rate",
        "double",
        "messages per second of the observed part of the minute; null if that is under 10 s",
    ),
    Column("bytes", "bigint", "of payload", "bytes"),
    Column("bytes_rate", "double", "the same of bytes", "bytes/s"),
    Column("bytes_min", "bigint", "least payload", "bytes"),
    Column("bytes_max", "bigint", "greatest payload", "bytes"),
    Column("retained", "bigint", "messages with the retain flag"),
    Column("clients", "bigint", "client ids that published"),
)


def build_latency(readings: DataFrame) -> DataFrame:
    """Compute the latency per device and minute."""
    sent = readings.where(
        (F.col("position") == 0) & F.col("sent_time").isNotNull() & ~F.col("is_historical")
    )
    latency_us = F.unix_micros("store_time") - F.unix_micros("sent_time")
    least, most = (F.lit(each * 1_000_000) for each in (-AHEAD_MAX_S, LATENCY_MAX_S))
    believed = F.col("claimed_time").isNull() & latency_us.between(least, most)
    rows = sent.select(
        "device",
        F.date_trunc("minute", "store_time").alias("window_start"),
        F.when(believed, latency_us).alias("latency_us"),
    )
    values = F.col("values")
    grouped = rows.groupBy("device", "window_start").agg(
        F.count(F.lit(1)).alias("messages"),
        F.count_if(F.col("latency_us").isNull()).alias("wrong_clock"),
        F.count_if(F.col("latency_us") < 0).alias("ahead"),
        # Sums of whole microseconds are exact in any order.
        F.sum("latency_us").alias("sum_us"),
        gathered(F.col("latency_us")).alias("values"),
    )
    return grouped.select(
        "device",
        "window_start",
        "messages",
        "wrong_clock",
        "ahead",
        (F.get(values, F.lit(0)) / 1000.0).alias("min_ms"),
        *((percentile(values, share) / 1000.0).alias(name) for name, share in _SHARES.items()),
        (F.get(values, F.size(values) - 1) / 1000.0).alias("max_ms"),
        F.when(F.size(values) > 0, F.col("sum_us") / F.size(values) / 1000.0).alias("mean_ms"),
    )


def build_quality(readings: DataFrame) -> DataFrame:
    """Count repetitions, late messages and gaps per device and minute."""
    rows = readings.where(F.col("position") == 0)
    again = F.col("metric") == REPEATED
    gap = F.coalesce("gap_before", F.lit(0))
    minute = F.date_trunc("minute", "store_time").alias("window_start")
    return rows.groupBy("device", minute).agg(
        F.count_if(~again).alias("messages"),
        F.count_if(again).alias("repetitions"),
        F.count_if(F.col("is_late")).alias("late"),
        F.count_if(F.col("claimed_time").isNotNull()).alias("wrong_clock"),
        F.sum(gap).alias("missing"),
        F.count_if(F.col("gap_opened_at").isNotNull() & (gap == 0)).alias("filled"),
    )


def build_topics(records: DataFrame) -> DataFrame:
    """Compute messages and bytes per topic and minute."""
    size = F.length("payload").cast(LongType())
    window = F.date_trunc("minute", "timestamp").alias("window_start")
    return (
        records.groupBy("topic", window)
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum(size).alias("bytes"),
            F.min(size).alias("bytes_min"),
            F.max(size).alias("bytes_max"),
            F.count_if(F.col("retain")).alias("retained"),
            F.count_distinct("client_id").alias("clients"),
            F.min("timestamp").alias("first_time"),
            F.max("timestamp").alias("last_time"),
        )
        .withColumn("rate", per_second("messages", "minute"))
        .withColumn("bytes_rate", per_second("bytes", "minute"))
    )


LATENCY: Final = Table(
    name="latency",
    layer="gold",
    source="readings",
    build=build_latency,
    columns=_LATENCY_COLUMNS,
    description="Time from publishing to the log, where payloads say when they were published",
    keys=("window_start", "device"),
    grain=Grain.hours(source_time="store_time"),
)
QUALITY: Final = Table(
    name="quality",
    layer="gold",
    source="readings",
    build=build_quality,
    columns=_QUALITY_COLUMNS,
    description="Repetitions, late messages, wrong clocks and gaps of each device and minute",
    keys=("window_start", "device"),
    grain=Grain.hours(source_time="store_time"),
)
TOPICS: Final = Table(
    name="topics",
    layer="gold",
    source=RECORDS,
    build=build_topics,
    columns=_TOPIC_COLUMNS,
    description="Messages and bytes of each topic and minute",
    keys=("window_start", "topic"),
    grain=Grain.hours(source_time="timestamp"),
)
