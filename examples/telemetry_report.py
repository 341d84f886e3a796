"""A table per device from the telemetry in the log, and a check of what the log promised.

Expects messages on `telemetry/<device>/...` whose payload is JSON with `device`, `seq`, `ts` and
`value`; `seq` counts up per topic. On its own, over a running node::

    python examples/telemetry_report.py servers=127.0.0.1:18083
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from holdfast_lake import spark_session

SHOWN_MAX = 10
"""Lost messages that are listed by name."""


@dataclass(frozen=True)
class Device:
    name: str
    records: int
    first: datetime
    last: datetime
    mean: float | None
    gaps: int
    """Sequence numbers that are missing between the first and the last of a topic."""


@dataclass(frozen=True)
class ReportResult:
    devices: list[Device]
    records: int
    acknowledged: int
    lost: int
    """Acknowledged messages that the log does not have."""
    lost_examples: list[tuple[str, int]]
    out_of_order: int
    """Messages stored after one of the same topic with a higher sequence number."""
    duplicates: int
    """Messages stored again: a QoS 1 publisher may repeat one whose acknowledgement it missed."""

    @property
    def ok(self) -> bool:
        return self.lost == 0 and self.out_of_order == 0


def report(
    spark: SparkSession,
    source_options: Mapping[str, str],
    acknowledged: Sequence[tuple[str, int]],
) -> ReportResult:
    """Read the log, print the table and the check. `acknowledged` are (topic, seq) of the messages
    whose publisher was answered."""
    messages = read_telemetry(spark, source_options).cache()
    # A repeated message counts where it was stored first.
    stored = messages.groupBy("topic", "device", "seq").agg(
        F.min("offset").alias("offset"), F.count("*").alias("copies")
    )
    in_order = Window.partitionBy("topic").orderBy("offset")
    highest_before = F.max("seq").over(in_order.rowsBetween(Window.unboundedPreceding, -1))
    topics = (
        stored.withColumn("late", (F.col("seq") < highest_before).cast("int"))
        .groupBy("topic", "device")
        .agg(
            (F.max("seq") - F.min("seq") + 1 - F.count("*")).alias("gaps"),
            F.sum("copies").alias("records"),
            F.sum(F.col("copies") - 1).alias("duplicates"),
            F.sum("late").alias("late"),
        )
        .collect()
    )
    lost = _acknowledged_table(spark, acknowledged).join(stored, ["topic", "seq"], "left_anti")
    lost_rows = lost.orderBy("topic", "seq").collect() if acknowledged else []
    result = ReportResult(
        devices=_devices(messages, {row.topic: (row.device, row.gaps) for row in topics}),
        records=sum(row.records for row in topics),
        acknowledged=len(acknowledged),
        lost=len(lost_rows),
        lost_examples=[(row.topic, row.seq) for row in lost_rows[:SHOWN_MAX]],
        out_of_order=sum(row.late or 0 for row in topics),
        duplicates=sum(row.duplicates for row in topics),
    )
    messages.unpersist()
    print_report(result)
    return result


def read_telemetry(spark: SparkSession, source_options: Mapping[str, str]) -> DataFrame:
    """One row a message: topic, device, seq, value, offset, timestamp (when it was stored)."""
    table = (
        spark.read.format("holdfast")
        .options(**source_options)
        .option("columns", "topic,payload,offset,timestamp")
        .load()
        .where(F.col("topic").startswith("telemetry/"))
    )
    payload = F.from_json(F.col("payload").cast("string"), "seq bigint, value double")
    return table.select(
        "topic",
        F.split("topic", "/")[1].alias("device"),
        payload["seq"].alias("seq"),
        payload["value"].alias("value"),
        "offset",
        "timestamp",
    ).where("seq IS NOT NULL")


def print_report(result: ReportResult) -> None:
    heading = ("device", "records", "first", "last", "mean", "gaps")
    rows = [
        (
            device.name,
            str(device.records),
            f"{device.first:%H:%M:%S}",
            f"{device.last:%H:%M:%S}",
            "-" if device.mean is None else f"{device.mean:,.2f}",
            str(device.gaps),
        )
        for device in result.devices
    ]
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(len(heading))]
    for row in [heading, *rows]:
        name, *numbers = row
        cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells]))
    print(
        f"{result.records} records; of {result.acknowledged} acknowledged messages {result.lost} "
        f"lost, {result.out_of_order} out of order, {result.duplicates} stored twice"
    )
    for topic, sequence in result.lost_examples:
        print(f"  lost: {topic} seq {sequence}")


def _acknowledged_table(spark: SparkSession, acknowledged: Sequence[tuple[str, int]]) -> DataFrame:
    return spark.createDataFrame(list(acknowledged), "topic string, seq bigint")


def _devices(messages: DataFrame, topics: Mapping[str, tuple[str, int]]) -> list[Device]:
    gaps: dict[str, int] = {}
    for device, missing in topics.values():
        gaps[device] = gaps.get(device, 0) + missing
    rows = (
        messages.groupBy("device")
        .agg(
            F.count("*").alias("records"),
            F.min("timestamp").alias("first"),
            F.max("timestamp").alias("last"),
            F.avg("value").alias("mean"),
        )
        .orderBy("device")
        .collect()
    )
    return [
        Device(row.device, row.records, row["first"], row["last"], row.mean, gaps[row.device])
        for row in rows
    ]


def main(arguments: Sequence[str]) -> int:
    options = {name: value for name, _, value in (each.partition("=") for each in arguments)}
    if set(options) != {"servers"}:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        spark = spark_session("telemetry-report", **{"spark.log.level": "ERROR"})
        try:
            return 0 if report(spark, options, []).ok else 1
        finally:
            spark.stop()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
