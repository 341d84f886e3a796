"""Gold `latency`, from publishing to the broker's log, `quality`, repetitions and the like per
device, and `topics`, messages and bytes per topic."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.lake.table import RECORDS, Column, Grain, Table
from holdfast.pipeline.tables.statistics import (
    ArrowColumns,
    GroupedRows,
    Results,
    WindowFold,
    percentile,
)
from holdfast.pipeline.tables.stream import REPEATED

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
        "offset_min_ms": pc.divide(groups.least("offset_us").cast(pa.float64()), 1000.0),
        "offset_max_ms": pc.divide(groups.greatest("offset_us").cast(pa.float64()), 1000.0),
    }


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


LATENCY: Final = Table(
    name="latency",
    layer="gold",
    source="readings",
    build=WindowFold(
        table=_LATENCY_COLUMNS,
        columns=_LATENCY_INPUT,
        prepare=prepare_latency,
        aggregate=aggregate_latency,
    ),
    columns=_LATENCY_COLUMNS,
    description="Time from publishing to the log, where payloads say when they were published",
    keys=("window_start", "device"),
    grain=Grain.hours(source_time="store_time"),
)
QUALITY: Final = Table(
    name="quality",
    layer="gold",
    source="readings",
    build=WindowFold(
        table=_QUALITY_COLUMNS,
        columns=_QUALITY_INPUT,
        prepare=prepare_quality,
        aggregate=aggregate_quality,
    ),
    columns=_QUALITY_COLUMNS,
    description="Repetitions, late messages, wrong clocks and gaps of each device and minute",
    keys=("window_start", "device"),
    grain=Grain.hours(source_time="store_time"),
)
TOPICS: Final = Table(
    name="topics",
    layer="gold",
    source=RECORDS,
    build=WindowFold(
        table=_TOPIC_COLUMNS,
        columns=("topic", "timestamp", "payload", "retain", "client_id"),
        prepare=prepare_topics,
        aggregate=aggregate_topics,
        keys=("topic",),
        time="timestamp",
        order=("client_id",),
        rates={"rate": "messages", "bytes_rate": "bytes"},
    ),
    columns=_TOPIC_COLUMNS,
    description="Messages and bytes of each topic and minute",
    keys=("window_start", "topic"),
    grain=Grain.hours(source_time="timestamp"),
)
