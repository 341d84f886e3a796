"""Tabulates latencies of messages, and the reasons of repetitions."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from holdfast_lab import messages
from holdfast_lab.judge import REPETITION, findings
from holdfast_lab.messages import MESSAGE
from holdfast_lab.run_tables import number, parameters

CONFIRM = "publish to confirm"
DELIVER = "publish to deliver"


def latency(events: DataFrame) -> DataFrame:
    """Returns latencies per run, measure and QoS of the publisher, without wills.

    They are from the first PUBLISH to the confirmation, and to each subscription's first delivery.
    """
    sent = messages.outcomes(events).where("NOT is_will")
    to_confirm = sent.where("confirmed_us IS NOT NULL").select(
        "run", "qos", F.lit(CONFIRM).alias("measure"), _took("confirmed_us"),
        F.lit(0).alias("error_us"),
    )  # fmt: skip
    doubt_us = F.when(F.col("delivered_host") == F.col("sent_host"), F.lit(0)).otherwise(
        F.col("delivered_error_us") + F.col("sent_error_us")
    )
    to_deliver = (
        messages.first_deliveries(events)
        .join(sent, MESSAGE)
        .select(
            "run",
            "qos",
            F.lit(DELIVER).alias("measure"),
            _took("delivered_us"),
            doubt_us.alias("error_us"),
        )
    )
    ranks = (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))
    return (
        to_confirm.unionByName(to_deliver)
        .groupBy("run", "measure", "qos")
        .agg(
            F.count("*").alias("messages"),
            # Sums of whole numbers do not depend on the order.
            (F.sum("took_us") / F.count("*") / 1000).alias("mean_ms"),
            *((F.percentile("took_us", rank) / 1000).alias(name) for name, rank in ranks),
            (F.max("took_us") / 1000).alias("max_ms"),
            (F.max("error_us") / 1000).alias("clock_error_ms"),
        )
        .join(parameters(events), "run", "left")
        .withColumn("clients", F.expr(number("clients")))
        .drop("parameters")
    )


def _took(end_column: str) -> Column:
    return (F.col(end_column) - F.col("sent_us")).cast("bigint").alias("took_us")


def repetitions(events: DataFrame) -> DataFrame:
    """Returns per run, subscription and QoS the deliveries after the first, by their reason."""
    reason = F.when(F.col("kind") == REPETITION, F.col("text")).otherwise(F.lit("broken promise"))
    return (
        findings(events)
        .where(F.col("kind").isin(REPETITION, "duplicate"))
        .groupBy("run", F.col("who").alias("subscription"), "effective_qos", reason.alias("reason"))
        .agg(F.count("*").alias("deliveries"))
    )
