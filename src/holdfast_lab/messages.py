"""Derives each message's fate, as DataFrames for the verdict and the tables.

All functions take the events of any number of runs (`stored_events`). The columns MESSAGE
identify a message.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

MESSAGE: Final = ["run", "publisher", "topic", "sequence"]


def of_kind(events: DataFrame, *names: str) -> DataFrame:
    """Returns the events with some names."""
    return events.where(F.col("event").isin(*names))


def outcomes(events: DataFrame) -> DataFrame:
    """Returns per published message its first PUBLISH, the number of sends, and the broker's
    response.

    `confirmed_us` is the time of the confirmation, and `is_refused` is true if there was a refusal.
    """
    is_published = F.col("event") == "published"
    place = F.when(is_published, F.struct("n", "writer"))

    def at_first(column: str) -> Column:
        """The value of `column` in the first event of each message."""
        return F.min_by(column, place)

    def when(name: str) -> Column:
        """The time of the first event `name`."""
        return F.min(F.when(F.col("event") == name, F.col("time_us")))

    return (
        of_kind(events, "published", "confirmed", "refused")
        .groupBy(*MESSAGE)
        .agg(
            when("published").alias("sent_us"),
            F.count_if(is_published).alias("sends"),
            at_first("qos").alias("qos"),
            F.coalesce(at_first("will"), F.lit(False)).alias("is_will"),
            at_first("host").alias("sent_host"),
            at_first("error_us").alias("sent_error_us"),
            when("confirmed").alias("confirmed_us"),
            F.count_if(F.col("event") == "refused").cast("boolean").alias("is_refused"),
        )
        .where("sent_us IS NOT NULL")
    )


def first_deliveries(events: DataFrame) -> DataFrame:
    """Returns per subscription (a client's own, or that of its group) and message its first
    delivery.

    The time comes with the host of its clock.
    """
    groups = (
        of_kind(events, "subscribing")
        .where("group IS NOT NULL")
        .groupBy("run", "client")
        .agg(F.max_by("group", "n").alias("member_of"))
    )
    place = F.struct("time_us", "n", "writer")
    return (
        of_kind(events, "delivered")
        .join(F.broadcast(groups), ["run", "client"], "left")
        .groupBy(*MESSAGE, F.coalesce("member_of", "client").alias("subscription"))
        .agg(
            F.min("time_us").alias("delivered_us"),
            F.min_by("host", place).alias("delivered_host"),
            F.min_by("error_us", place).alias("delivered_error_us"),
        )
    )


def faults(events: DataFrame) -> DataFrame:
    """Returns per fault its kind, the affected nodes, its begin and its end.

    A fault that was never healed lasts until the end of the run.
    """
    ends = events.groupBy("run").agg(F.max("time_us").alias("end_us"))
    injected = (
        of_kind(events, "fault_injected")
        .groupBy("run", "fault")
        .agg(
            F.min_by("kind", "n").alias("kind"),
            F.min_by("nodes", "n").alias("nodes"),
            F.min("time_us").alias("from_us"),
        )
    )
    healed = (
        of_kind(events, "fault_healed")
        .groupBy("run", "fault")
        .agg(F.max("time_us").alias("healed_us"))
    )
    return (
        injected.join(healed, ["run", "fault"], "left")
        .join(ends, "run")
        .withColumn("to_us", F.coalesce("healed_us", "end_us"))
        .drop("healed_us", "end_us")
    )
