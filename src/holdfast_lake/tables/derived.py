"""Tables made from `readings` and `records`, except those of presence (availability.py).

Silver `gaps`: numbers found missing, and those that came later; gold `missing`: the rest. Gold
`device_minutes` and `device_hours`: statistics per device and metric. Gold `latency`, from
publishing to the broker's log, `quality`, repetitions and the like per device, and `topics`,
messages and bytes per topic.
"""

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType

from holdfast_lake.lake.table import RECORDS, Column, Grain, Table
from holdfast_lake.tables.statistics import (
    ArrowColumns,
    GroupedRows,
    Results,
    WindowFold,
    percentile,
    put_moments,
)
from holdfast_lake.tables.stream import REPEATED

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
    number = F.col("sequence")
    return rows.select(
        "stream", "run", "device",
        F.when(opened, "missing").otherwise("filled").alias("event"),
        F.when(opened, number - F.col("gap_before")).otherwise(number).alias("first"),
        F.when(opened, number - 1).otherwise(number).alias("last"),
        F.when(opened, F.col("gap_before")).otherwise(F.lit(1)).alias("count"),
        F.col("gap_opened_at").alias("opened_at"),
        "store_time", "partition", "offset",
    )  # fmt: skip


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
        "stream", "device", "window_start", "run", "range.first", "range.last",
        (F.col("range.last") - F.col("range.first") + 1).alias("count"), "opened_at",
    )  # fmt: skip


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


SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
READING_ORDER: Final = ("event_time", "partition", "offset", "position")
"""The columns that identify a reading among those of a device and metric."""
_INPUT: Final = (
    "device", "metric", "value_double", "value_string", "value_boolean", "unit", "is_late",
    *READING_ORDER,
)  # fmt: skip


def _columns(unit: str) -> tuple[Column, ...]:
    return (
        Column("device", "string", "the device"),
        Column("metric", "string", "what was read"),
        Column("window_start", "timestamp", f"begin of the {unit}, by the event time, UTC"),
        Column("readings", "bigint", "readings of any type, null as well"),
        Column("rate", "double", f"readings per second of the observed part of the {unit}; null if "
               "that is under 10 s"),
        Column("late", "bigint", "of them late"),
        Column("numbers", "bigint", "of them numbers; what follows is about these"),
        Column("unit", "string", "their unit; null if none is known. Several are listed, as in "
               "`°C, °F`, and the next nine columns are null"),
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
    )  # fmt: skip


def prepare_readings(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the readings of devices, without what the pipeline adds, such as `$online`."""
    return rows.filter(pc.invert(pc.starts_with(rows["metric"], "$")))


def aggregate_readings(groups: GroupedRows) -> ArrowColumns:
    """Computes the statistics of readings."""
    numbers = groups.present("value_double")
    found = Results(len(groups.begins))
    for each, values in numbers.sorted():
        found.put("min", each, values[:, 0])
        found.put("max", each, values[:, -1])
        put_moments(found, each, values)
        for name, share in SHARES.items():
            found.put(name, each, percentile(values, share))
    truth = groups.rows["value_boolean"]
    units, is_mixed = groups.listed("unit")
    statistics = {name: found.array(name) for name in ("min", "max", "mean", "stddev", *SHARES)}
    statistics |= {"first": numbers.first(), "last": numbers.last()}
    nothing = pa.scalar(None, pa.float64())
    return {
        "readings": groups.size(),
        "late": groups.count(groups.rows["is_late"]),
        "numbers": numbers.size(),
        "unit": units,
        **{name: pc.if_else(is_mixed, nothing, each) for name, each in statistics.items()},
        "trues": groups.count(truth),
        "falses": groups.count(pc.invert(truth)),
        "last_string": groups.present("value_string").last(),
    }


def _windows(
    name: str,
    table: tuple[Column, ...],
    description: str,
    time: str,
    *keys: str,
    source: str = "readings",
    **fold: Any,
) -> Table:
    """Returns a table with a row for each window of some keys. `fold` are fields of WindowFold."""
    return Table(
        name=name,
        layer="gold",
        source=source,
        build=WindowFold(table=table, keys=keys, time=time, **fold),
        columns=table,
        description=description,
        keys=("window_start", *keys),
        grain=Grain.hours(source_time=time),
    )


DEVICE_MINUTES, DEVICE_HOURS = (
    _windows(
        f"device_{unit}s", _columns(unit), f"Statistics of each device and metric, for each {unit}",
        "event_time", "device", "metric", columns=_INPUT, prepare=prepare_readings,
        aggregate=aggregate_readings, unit=unit, order=READING_ORDER, rates={"rate": "readings"},
    )
    for unit in ("minute", "hour")
)  # fmt: skip


LATENCY_MAX_S: Final = 86_400
"""The largest plausible latency in seconds. Beyond it a clock is wrong."""
AHEAD_MAX_S: Final = 300
"""The most seconds by which a device's clock may be ahead of the broker's, as in Rule.future_s."""
_SHARES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}

_LATENCY_INPUT: Final = (
    "device", "position", "store_time", "sent_time", "claimed_time", "is_historical",
)  # fmt: skip
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
    Column("offset_min_ms", "double", "least of store_time less sent_time, of all messages, also "
           "by clocks that are not believed"),
    Column("offset_max_ms", "double", "greatest"),
)  # fmt: skip

_QUALITY_INPUT: Final = (
    "device", "metric", "position", "store_time", "claimed_time", "is_late", "gap_before",
    "gap_opened_at",
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
    Column("rate", "double", "messages per second of the observed part of the minute; null if "
           "that is under 10 s"),
    Column("bytes", "bigint", "of payload", "bytes"),
    Column("bytes_rate", "double", "the same of bytes", "bytes/s"),
    Column("bytes_min", "bigint", "least payload", "bytes"),
    Column("bytes_max", "bigint", "greatest payload", "bytes"),
    Column("retained", "bigint", "messages with the retain flag"),
    Column("clients", "bigint", "client ids that published"),
)  # fmt: skip


def prepare_latency(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the messages that say when they were published, with `latency_us`. It is null if the
    clock is not believed."""
    wanted = pc.and_(pc.equal(rows["position"], 0), pc.is_valid(rows["sent_time"]))
    rows = rows.filter(pc.and_(wanted, pc.invert(rows["is_historical"])))
    stored, sent = (rows[name].cast(pa.int64()) for name in ("store_time", "sent_time"))
    latency_us = pc.subtract(stored, sent)
    is_plausible = pc.and_(
        pc.greater_equal(latency_us, -AHEAD_MAX_S * 1_000_000),
        pc.less_equal(latency_us, LATENCY_MAX_S * 1_000_000),
    )
    believed = pc.and_(pc.is_null(rows["claimed_time"]), is_plausible)
    found = rows.select(["device", "store_time"]).append_column("offset_us", latency_us)
    latency_us = pc.if_else(believed, latency_us, pa.scalar(None, pa.int64()))
    return found.append_column("latency_us", latency_us)


def aggregate_latency(groups: GroupedRows) -> ArrowColumns:
    """Computes the latency of messages."""
    latency = groups.present("latency_us")
    found = Results(len(groups.begins))
    for each, values in latency.sorted():
        found.put("min_ms", each, values[:, 0] / 1000)
        found.put("max_ms", each, values[:, -1] / 1000)
        found.put("mean_ms", each, values.sum(axis=1) / values.shape[1] / 1000)
        for name, share in _SHARES.items():
            found.put(name, each, percentile(values, share) / 1000)
    return {
        "messages": groups.size(),
        "wrong_clock": groups.count(groups.rows["latency_us"].is_null()),
        "ahead": groups.count(pc.less(groups.rows["latency_us"], 0)),
        **{name: found.array(name) for name in ("min_ms", "max_ms", "mean_ms", *_SHARES)},
        "offset_min_ms": _milliseconds(groups.least("offset_us")),
        "offset_max_ms": _milliseconds(groups.greatest("offset_us")),
    }


def _milliseconds(microseconds: pa.Array) -> pa.Array:
    """Returns the nearest doubles: a clock may be thousands of years off."""
    return pc.divide(microseconds.cast(pa.float64(), safe=False), 1000.0)


def prepare_quality(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the messages, with a column for each thing that is counted."""
    rows = rows.filter(pc.equal(rows["position"], 0))
    again = pc.equal(rows["metric"], REPEATED)
    gap = rows["gap_before"].fill_null(0)
    columns = {
        "device": rows["device"],
        "store_time": rows["store_time"],
        "messages": pc.invert(again),
        "repetitions": again,
        "late": rows["is_late"],
        "wrong_clock": pc.is_valid(rows["claimed_time"]),
        "missing": gap,
        "filled": pc.and_(pc.is_valid(rows["gap_opened_at"]), pc.equal(gap, 0)),
    }
    return pa.RecordBatch.from_pydict(columns)


def aggregate_quality(groups: GroupedRows) -> ArrowColumns:
    """Counts repetitions, late messages and gaps."""
    names = ("messages", "repetitions", "late", "wrong_clock", "filled")
    counts = {name: groups.count(groups.rows[name]) for name in names}
    return {**counts, "missing": groups.sum("missing")}


def prepare_topics(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the messages with the size of their payload in place of it."""
    size = pc.binary_length(rows["payload"]).cast(pa.int64())
    return rows.drop_columns(["payload"]).append_column("bytes", size)


def aggregate_topics(groups: GroupedRows) -> ArrowColumns:
    """Computes messages and bytes."""
    return {
        "messages": groups.size(),
        "bytes": groups.sum("bytes"),
        "bytes_min": groups.least("bytes"),
        "bytes_max": groups.greatest("bytes"),
        "retained": groups.count(groups.rows["retain"]),
        "clients": groups.distinct("client_id"),
    }


LATENCY: Final = _windows(
    "latency", _LATENCY_COLUMNS,
    "Time from publishing to the log, where payloads say when they were published",
    "store_time", "device", columns=_LATENCY_INPUT, prepare=prepare_latency,
    aggregate=aggregate_latency,
)  # fmt: skip
QUALITY: Final = _windows(
    "quality", _QUALITY_COLUMNS,
    "Repetitions, late messages, wrong clocks and gaps of each device and minute",
    "store_time", "device", columns=_QUALITY_INPUT, prepare=prepare_quality,
    aggregate=aggregate_quality,
)  # fmt: skip
TOPICS: Final = _windows(
    "topics", _TOPIC_COLUMNS, "Messages and bytes of each topic and minute", "timestamp", "topic",
    source=RECORDS, columns=("topic", "timestamp", "payload", "retain", "client_id"),
    prepare=prepare_topics, aggregate=aggregate_topics, order=("client_id",),
    rates={"rate": "messages", "bytes_rate": "bytes"},
)  # fmt: skip
