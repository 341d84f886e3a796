"""Silver `readings`: one row for each device, metric and time, made of the records.

The messages of a stream go to one task, in order, behind the state that the step before has left;
there `fold.Folder` decodes and marks them in one pass.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from holdfast.pipeline.decoders.decoded import PAYLOAD_BYTES_MAX
from holdfast.pipeline.jobs.table import RECORDS, Column, Outputs, Table
from holdfast.pipeline.tables.columns import (
    OUTPUT,
    QUARANTINE,
    QUARANTINED_BYTES_MAX,
    READING,
    STATE,
)
from holdfast.pipeline.tables.fold import INPUT, Folder
from holdfast.pipeline.tables.rules import SPARKPLUG, Rule, with_defaults

COLUMNS: Final = (
    Column("device", "string", "what the reading is of: by the rule, else the topic"),
    Column("metric", "string", "what was read; nested names with dots; $online: whether the device "
           "is there"),
    Column("event_time", "timestamp", "when it was read: by the payload, else store_time"),
    Column("value_double", "double", "the value if it is a number"),
    Column("value_string", "string", "the value if it is a text; of an integer beyond 2^53, which "
           "a double cannot hold, its digits"),
    Column("value_boolean", "boolean", "the value if it is true or false; all three null: null"),
    Column("store_time", "timestamp", "when the broker stored the message"),
    Column("sent_time", "timestamp", "when it was published, by the payload; null if that does not "
           "say"),
    Column("claimed_time", "timestamp", "the payload's event time if it was not believed: before "
           "2000 or too far ahead of store_time, which then is the event_time"),
    Column("topic", "string", "topic of the message"),
    Column("partition", "int", "log partition"),
    Column("offset", "bigint", "offset in the log partition"),
    Column("position", "int", "number of the reading in its message, from 0"),
    Column("message_id", "string", "the payload's id, if a rule names one"),
    Column("stream", "string", "whose messages are counted together: the topic, the device, or the "
           "Sparkplug edge node"),
    Column("run", "bigint", "tells the runs of a stream apart: another one when the numbers begin "
           "anew; null without numbers"),
    Column("sequence", "bigint", "the message's number in the run (Sparkplug: counted on beyond "
           "255)"),
    Column("gap_before", "bigint", "numbers missing before this one when it came; null without "
           "numbers"),
    Column("gap_opened_at", "timestamp", "of a message behind a gap its store_time; of one that "
           "was missing, when that was found; else null"),
    Column("is_late", "boolean", "the event time is older than the device's newest by more than "
           "the rule's lateness"),
    Column("is_historical", "boolean", "Sparkplug: sent as a value of the past"),
    Column("date", "date", "day of store_time, UTC"),
)  # fmt: skip

STATE_COLUMNS: Final = (
    Column("stream", "string", "the stream"),
    Column("state", "string", "what is remembered of it, as JSON"),
    Column("last_time", "timestamp", "store_time of its last message"),
)

IDLE_DAYS_MAX: Final = 7
"""A stream without messages for longer is forgotten."""

_INPUT_TYPES: Final = (
    "string", "string", "string", "binary", "bigint", "int", "bigint", "bigint", "string", "string",
    "bigint", "bigint", "int",
)  # fmt: skip
_SQL_TYPES: Final = {
    pa.int8(): "tinyint", pa.int32(): "int", pa.int64(): "bigint", pa.float64(): "double",
    pa.string(): "string", pa.binary(): "binary", pa.bool_(): "boolean",
    pa.timestamp("us", tz="UTC"): "timestamp",
}  # fmt: skip
_OUTPUT_DDL: Final = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in OUTPUT)


def readings_table(rules: Sequence[Rule] = (), name: str = "readings") -> Table:
    """The table with some rules before the default ones."""
    wanted = with_defaults(rules)
    return Table(
        name=name,
        layer="silver",
        source=RECORDS,
        build=lambda rows, state: build_readings(rows, state, wanted),
        columns=COLUMNS,
        description="Decoded readings, each message once; gaps, late and unbelievable times marked",
        keys=("device", "metric", "event_time", "partition", "offset", "position"),
        partition_by=("date",),
        state=STATE_COLUMNS,
    )


def build_readings(records: DataFrame, state: DataFrame, rules: Sequence[Rule]) -> Outputs:
    """`rules`: all of them, with the default ones."""
    messages = _messages(records, rules)
    known = _known(state, records)

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return Folder(rules).fold(batches)

    folded = (
        messages.unionByName(known)
        .repartition("stream")
        # The state has nulls, and nulls come first.
        .sortWithinPartitions("stream", "order_us", "rank", "partition", "offset")
        .select(*INPUT)
        .mapInArrow(fold, _OUTPUT_DDL)
    )
    rows = folded.where(F.col("kind") == READING).withColumn("date", F.to_date("store_time"))
    quarantine = folded.where(F.col("kind") == QUARANTINE)
    return Outputs(
        rows=rows,
        quarantine=quarantine.withColumn("timestamp", F.col("store_time")),
        state=folded.where(F.col("kind") == STATE).select(
            "stream", "state", F.col("store_time").alias("last_time")
        ),
        shared=(folded,),
    )


def _known(state: DataFrame, records: DataFrame) -> DataFrame:
    """The states in the form of messages, without those that are too old for every record here."""
    oldest = records.agg(F.min("timestamp").alias("oldest"))
    idle = F.expr(f"INTERVAL {IDLE_DAYS_MAX} DAYS")
    kept = state.crossJoin(F.broadcast(oldest)).where(
        F.col("oldest").isNull() | (F.col("last_time") >= F.col("oldest") - idle)
    )
    given = {"stream": F.col("stream"), "state": F.col("state"),
             "store_us": F.unix_micros("last_time")}  # fmt: skip
    return kept.select(
        *(
            given.get(name, F.lit(None)).cast(kind).alias(name)
            for name, kind in zip(INPUT, _INPUT_TYPES, strict=True)
        ),
        F.lit(None).cast("bigint").alias("order_us"),
    )


def _messages(records: DataFrame, rules: Sequence[Rule]) -> DataFrame:
    """The messages with something to read, in the form of fold.INPUT and with their place in the
    order of the stream."""
    topic, size = F.col("topic"), F.length("payload")
    stream, in_order = F.col("topic"), F.lit(0).cast("bigint")
    for wanted, name in reversed(_several(rules)):
        stream = F.when(wanted, name).otherwise(stream)
        # A topic is in one partition, whose offsets are the order. For what is in several there
        # is the broker's clock.
        in_order = F.when(wanted, F.unix_micros("timestamp")).otherwise(in_order)
    # An empty payload clears a retained message and says nothing of the device.
    with_content = size > 0
    if not any(rule.filter.startswith("$") for rule in rules):
        with_content &= ~topic.startswith("$")  # which no wildcard matches
    return records.where(with_content).select(
        stream.alias("stream"),
        F.lit(None).cast("string").alias("state"),
        "topic",
        F.when(size <= PAYLOAD_BYTES_MAX, F.col("payload"))
        .otherwise(F.substring("payload", 1, QUARANTINED_BYTES_MAX))
        .alias("payload"),
        size.cast("bigint").alias("bytes"),
        "partition",
        "offset",
        F.unix_micros("timestamp").alias("store_us"),
        "client_id",
        F.col("producer.id").alias("producer_id"),
        F.col("producer.epoch").alias("producer_epoch"),
        F.col("producer.sequence").alias("producer_sequence"),
        # Births before what they explain, where both were stored in the same microsecond.
        F.when(~topic.startswith(f"{SPARKPLUG}/"), 2)
        .when(topic.contains("/NBIRTH/"), 0)
        .when(topic.contains("/DBIRTH/"), 1)
        .otherwise(2)
        .alias("rank"),
        in_order.alias("order_us"),
    )


def _several(rules: Sequence[Rule]) -> list[tuple[SparkColumn, SparkColumn]]:
    """Of the rules whose streams are more than a topic: which messages, and the stream's name.
    Cheap for all other topics: those are not looked at by their own rules here."""
    topic = F.col("topic")
    found = []
    for index, rule in enumerate(rules):
        if rule.decode == "sparkplug":
            levels = F.split(topic, "/")
            parts = [F.get(levels, F.lit(level)) for level in (0, 1, 3)]
            stream = F.concat_ws("/", *parts)
        elif rule.sequence_per == "device":
            stream = _device(rule)
        else:
            continue
        wanted = topic.startswith(rule.literal_prefix()) & topic.rlike(rule.pattern())
        for earlier in rules[:index]:
            wanted &= ~topic.rlike(earlier.pattern())
        found.append((wanted, stream))
    return found


def _device(rule: Rule) -> SparkColumn:
    """The stream of a rule with sequence_per="device". A topic with too few levels is its own; the
    fold then says what is wrong."""
    if rule.device == "client":
        return F.concat(F.lit("client "), F.coalesce(F.col("client_id"), F.lit("")))
    device_of = rule.level_range()
    if device_of is None:
        return F.col("topic")
    begin, end = device_of
    levels = F.split(F.col("topic"), "/")
    count = F.size(levels)
    first = F.lit(begin) if begin > 0 else count + begin + 1
    last = F.lit(end) if end > 0 else count + end + 1
    some = F.array_join(F.slice(levels, F.greatest(first, F.lit(1)),
                                F.greatest(last - first + 1, F.lit(0))), "/")  # fmt: skip
    fits = (first >= 1) & (first <= last) & (last <= count)
    return F.when(fits, F.concat(F.lit("device "), some)).otherwise(F.col("topic"))
