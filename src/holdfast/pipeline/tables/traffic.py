"""Gold `latency`, from publishing to the broker's log, and `topics`, messages and bytes per
topic."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from holdfast.pipeline.lake.table import RECORDS, Column, Grain, Table
from holdfast.pipeline.tables.statistics import WINDOW_SECONDS, gathered, percentile

LATENCY_MAX_S: Final = 86_400
"""The largest plausible latency in seconds, positive or negative. Beyond it a clock is wrong."""
_SHARES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}

_LATENCY_COLUMNS: Final = (
    Column("device", "string", "the device"),
    Column("window_start", "timestamp", "begin of the minute, by store_time, UTC"),
    Column("messages", "bigint", "messages that say when they were published"),
    Column("wrong_clock", "bigint", "of them with a latency beyond a day; left out below"),
    Column("ahead", "bigint", "of them stored before they were published, by the device's clock: "
           "their latency is below zero"),
    Column("min_ms", "double", "least latency, milliseconds: store_time less sent_time"),
    Column("p50_ms", "double", "median, exact"),
    Column("p90_ms", "double", "percentile 90, exact"),
    Column("p99_ms", "double", "percentile 99, exact"),
    Column("max_ms", "double", "greatest"),
    Column("mean_ms", "double", "mean"),
)  # fmt: skip

_TOPIC_COLUMNS: Final = (
    Column("topic", "string", "the topic"),
    Column("window_start", "timestamp", "begin of the minute, by the broker's time, UTC"),
    Column("messages", "bigint", "messages stored, repetitions too"),
    Column("rate", "double", "messages per second of the minute"),
    Column("bytes", "bigint", "of payload"),
    Column("bytes_rate", "double", "bytes per second of the minute"),
    Column("bytes_min", "bigint", "least payload"),
    Column("bytes_max", "bigint", "greatest payload"),
    Column("retained", "bigint", "messages with the retain flag"),
    Column("clients", "bigint", "client ids that published"),
)


def build_latency(readings: DataFrame) -> DataFrame:
    """Compute the latency per device and minute."""
    sent = readings.where("position = 0 AND sent_time IS NOT NULL AND NOT is_historical")
    latency_us = F.unix_micros("store_time") - F.unix_micros("sent_time")
    limit = LATENCY_MAX_S * 1_000_000
    rows = sent.select(
        "device",
        F.date_trunc("minute", "store_time").alias("window_start"),
        F.when(F.abs(latency_us) <= limit, latency_us).alias("latency_us"),
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


def build_topics(records: DataFrame) -> DataFrame:
    """Compute messages and bytes per topic and minute."""
    size = F.length("payload").cast("bigint")
    seconds = F.lit(float(WINDOW_SECONDS["minute"]))
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
        )
        .withColumn("rate", F.col("messages") / seconds)
        .withColumn("bytes_rate", F.col("bytes") / seconds)
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
