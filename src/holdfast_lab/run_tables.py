"""Tabulates runs: their parameters, and their course from second to second."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from holdfast_lab import messages
from holdfast_lab.judge import findings
from holdfast_lab.messages import MESSAGE, of_kind
from holdfast_lab.topic_checks import LOST

US: Final = 1_000_000
SECONDS_MAX: Final = 7 * 86_400
"""The most seconds of a run. A wrong clock must not make millions of empty seconds."""


def bounds(events: DataFrame) -> DataFrame:
    """Returns per run the times of its first and its last event."""
    return events.groupBy("run").agg(
        F.min("time_us").alias("start_us"), F.max("time_us").alias("end_us")
    )


def parameters(events: DataFrame) -> DataFrame:
    """Returns per run the parameters that its first writer gave."""
    return (
        of_kind(events, "run_started")
        .groupBy("run")
        .agg(F.min_by("parameters", F.struct("time_us", "writer")).alias("parameters"))
    )


def number(name: str) -> str:
    """Returns the SQL for a numeric parameter. It is null if the parameter is missing or no
    number."""
    return f"try_cast(parameters['{name}'] AS bigint)"


def runs(events: DataFrame) -> DataFrame:
    """Returns one row per run: its parameters and totals."""
    published = (
        messages.outcomes(events)
        .where("NOT is_will")
        .groupBy("run")
        .agg(F.count("*").alias("published"), F.count("confirmed_us").alias("confirmed"))
    )
    happened = events.groupBy("run").agg(
        F.min("time_us").alias("start_us"),
        F.max("time_us").alias("end_us"),
        F.count_if(F.col("event") == "delivered").alias("delivered"),
        F.count_if(F.col("event") == "fault_injected").alias("faults"),
    )
    duration_s = (F.col("end_us") - F.col("start_us")) / US
    joined = happened.join(parameters(events), "run", "left")
    return joined.join(published, "run", "left").select(
        "run",
        F.expr("parameters['name'] AS name"),
        F.expr("parameters['software'] AS software"),
        F.timestamp_micros("start_us").alias("started"),
        duration_s.alias("duration_s"),
        F.expr(f"{number('clients')} AS clients"),
        F.expr(f"{number('nodes')} AS nodes"),
        F.expr("try_cast(parameters['rate_per_s'] AS double) AS rate_per_s"),
        F.expr("parameters['qos'] AS qos"),
        F.expr(f"{number('payload_bytes')} AS payload_bytes"),
        F.expr("parameters['fault_plan'] AS fault_plan"),
        "faults",
        F.coalesce("published", F.lit(0)).alias("published"),
        F.coalesce("confirmed", F.lit(0)).alias("confirmed"),
        "delivered",
        F.when(duration_s > 0, F.coalesce("confirmed", F.lit(0)) / duration_s).alias(
            "confirmed_per_s"
        ),
    )


def seconds(events: DataFrame) -> DataFrame:
    """Returns one row for each second of each run.

    It has the messages published in it and their fate, the confirmations and deliveries in it, and
    the number of faults.
    """
    every = bounds(events).select(
        "run",
        "start_us",
        F.explode(
            F.sequence(
                F.lit(0),
                F.least(F.floor((F.col("end_us") - F.col("start_us")) / US), F.lit(SECONDS_MAX)),
            )
        ).alias("second"),
    )
    joined = every
    for each in (_fates(events), _happened(events), _broken(events, every)):
        joined = joined.join(each, ["run", "second"], "left")
    counts = (
        "published", "confirmed", "delivered", "unconfirmed", "not_delivered", "lost",
        "confirmations", "deliveries", "faults",
    )  # fmt: skip
    return joined.select(
        "run",
        F.col("second").cast("bigint"),
        *(F.coalesce(name, F.lit(0)).alias(name) for name in counts),
    )


def _second(events: DataFrame, rows: DataFrame, time_column: str) -> DataFrame:
    """Adds the second of the run to rows."""
    second = F.floor((F.col(time_column) - F.col("start_us")) / US)
    starts = F.broadcast(bounds(events).select("run", "start_us"))
    return rows.join(starts, "run").withColumn("second", second)


def _fates(events: DataFrame) -> DataFrame:
    delivered = of_kind(events, "delivered").groupBy(*MESSAGE).agg(F.count("*").alias("copies"))
    lost = findings(events).where(F.col("kind").isin(*LOST))
    is_lost = lost.select(*MESSAGE).distinct().withColumn("is_lost", F.lit(1))
    told = (
        messages.outcomes(events)
        .where("NOT is_will")
        .join(delivered, MESSAGE, "left")
        .join(is_lost, MESSAGE, "left")
    )
    return (
        _second(events, told, "sent_us")
        .groupBy("run", "second")
        .agg(
            F.count("*").alias("published"),
            F.count("confirmed_us").alias("confirmed"),
            F.count("copies").alias("delivered"),
            F.count_if(F.col("confirmed_us").isNull()).alias("unconfirmed"),
            F.count_if(F.col("copies").isNull()).alias("not_delivered"),
            F.count("is_lost").alias("lost"),
        )
    )


def _happened(events: DataFrame) -> DataFrame:
    happened = of_kind(events, "confirmed", "delivered")
    return (
        _second(events, happened, "time_us")
        .groupBy("run", "second")
        .agg(
            F.count(F.when(F.col("event") == "confirmed", 1)).alias("confirmations"),
            F.count(F.when(F.col("event") == "delivered", 1)).alias("deliveries"),
        )
    )


def _broken(events: DataFrame, every: DataFrame) -> DataFrame:
    """Returns the number of faults that overlap each second."""
    from_us = F.col("start_us") + F.col("second") * US
    return (
        every.join(F.broadcast(messages.faults(events)), "run")
        .where((F.col("from_us") < from_us + US) & (F.col("to_us") >= from_us))
        .groupBy("run", "second")
        .agg(F.count("*").alias("faults"))
    )


def traffic(events: DataFrame) -> DataFrame:
    """Returns per client and node the messages each way, like the conversations of a packet
    capture."""
    acting = F.when(F.col("event").isin("connected", "delivered"), F.col("client")).otherwise(
        F.col("publisher")
    )
    order = Window.partitionBy("run", "acting").orderBy("n")
    node = F.last(F.when(F.col("event") == "connected", F.col("node")), ignorenulls=True)
    acted = (
        of_kind(events, "connected", "published", "confirmed", "refused", "delivered")
        .withColumn("acting", acting)
        .withColumn("at_node", F.coalesce(node.over(order), F.lit("")))
    )

    def count(name: str) -> Column:
        """The number of events `name`."""
        return F.count(F.when(F.col("event") == name, 1))

    def payload(name: str) -> Column:
        """The payload bytes of all events `name`."""
        return F.coalesce(F.sum(F.when(F.col("event") == name, F.col("bytes"))), F.lit(0))

    starts = bounds(events).select("run", "start_us")
    grouped = acted.groupBy("run", F.col("acting").alias("client"), F.col("at_node").alias("node"))
    found = grouped.agg(
        count("connected").alias("connections"),
        count("published").alias("publishes"),
        count("confirmed").alias("confirmations"),
        count("refused").alias("refusals"),
        count("delivered").alias("deliveries"),
        payload("published").alias("bytes_to_node"),
        payload("delivered").alias("bytes_to_client"),
        F.min("time_us").alias("first_us"),
        F.max("time_us").alias("last_us"),
    )
    duration_s = (F.col("last_us") - F.col("first_us")) / US
    return (
        found.join(F.broadcast(starts), "run")
        .withColumn("from_s", (F.col("first_us") - F.col("start_us")) / US)
        .withColumn("duration_s", duration_s)
        .withColumn(
            "bits_per_s_to_node", F.when(duration_s > 0, F.col("bytes_to_node") * 8 / duration_s)
        )
        .withColumn(
            "bits_per_s_to_client",
            F.when(duration_s > 0, F.col("bytes_to_client") * 8 / duration_s),
        )
        .drop("first_us", "last_us", "start_us")
    )
