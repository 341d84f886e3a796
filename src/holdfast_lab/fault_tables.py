"""Tabulates the effects of faults: downtime, the failover's timeline, and availability.

Downtime is what clients see, as the studies that this reproduces measure it. It lasts from the last
confirmation before the service stops to the first one after. It is meaningful if publishers send
all the time. Its resolution is the time between confirmations without a fault (`usual_s`).
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from holdfast_lab import messages
from holdfast_lab.messages import of_kind
from holdfast_lab.run_tables import US, bounds, number, parameters

OUTAGE_FACTOR: Final = 10
OUTAGE_US_MIN: Final = 50_000
"""The silence in microseconds beyond which there is an outage, if it is also `OUTAGE_FACTOR` times
the usual one."""
AFTERWARDS_US: Final = 5_000_000
"""The microseconds after the end of a fault that its timeline still covers."""
PARTITION: Final = f"try_mod(crc32(CAST(topic AS BINARY)), {number('partitions')})"
"""The partition of the topic, as the broker computes it. It is null if the run does not give the
number of partitions."""
_SCOPE: Final = ["run", "scope", "name"]


def confirmations(events: DataFrame) -> DataFrame:
    """Returns first confirmations, once for each scope they belong to.

    The scopes are the client, the partition (if the run gives their number) and all.
    """
    partition = F.expr(PARTITION)
    known = (
        messages.outcomes(events)
        .where("confirmed_us IS NOT NULL AND NOT is_will")
        .join(F.broadcast(parameters(events)), "run", "left")
    )
    return known.select("run", "confirmed_us", _scopes(partition).alias("one")).select(
        "run", "confirmed_us", "one.scope", "one.name"
    )


def _scopes(partition: Column) -> Column:
    def scope(name: str, value: Column) -> Column:
        return F.struct(F.lit(name).alias("scope"), value.cast("string").alias("name"))

    every = F.array(
        scope("client", F.col("publisher")), scope("partition", partition), scope("all", F.lit(""))
    )
    return F.explode(F.filter(every, lambda one: one["name"].isNotNull()))


def silences(events: DataFrame) -> DataFrame:
    """Returns per scope the times between one confirmation and the next: `before_us`, `after_us`.

    If a message was published in vain after the last confirmation, a silence without an end
    follows: `after_us` is null and `until_us` is the end of the run.
    """
    order = Window.partitionBy(*_SCOPE).orderBy("confirmed_us")
    heard = confirmations(events)
    between = heard.select(
        *_SCOPE,
        F.lag("confirmed_us").over(order).alias("before_us"),
        F.col("confirmed_us").alias("after_us"),
        F.col("confirmed_us").alias("until_us"),
    ).where(F.col("before_us").isNotNull())
    newest = heard.groupBy(*_SCOPE).agg(F.max("confirmed_us").alias("before_us"))
    open_ended = (
        newest.join(_last_in_vain(events), _SCOPE)
        .where("in_vain_us > before_us")
        .join(bounds(events), "run")
        .select(
            *_SCOPE,
            "before_us",
            F.lit(None).cast("bigint").alias("after_us"),
            F.col("end_us").alias("until_us"),
        )
    )
    return between.unionByName(open_ended)


def _last_in_vain(events: DataFrame) -> DataFrame:
    """Returns per scope the time of the last message that was never answered."""
    partition = F.expr(PARTITION)
    return (
        messages.outcomes(events)
        .where("confirmed_us IS NULL AND NOT is_refused AND NOT is_will")
        .join(F.broadcast(parameters(events)), "run", "left")
        .select("run", "sent_us", _scopes(partition).alias("one"))
        .groupBy("run", "one.scope", "one.name")
        .agg(F.max("sent_us").alias("in_vain_us"))
    )


def _usual(events: DataFrame) -> DataFrame:
    """Returns per scope the median time between two confirmations."""
    return (
        silences(events)
        .where(F.col("after_us").isNotNull())
        .groupBy(*_SCOPE)
        .agg(F.percentile(F.col("after_us") - F.col("before_us"), 0.5).alias("usual_us"))
    )


def downtime(events: DataFrame) -> DataFrame:
    """Returns per fault and scope the longest silence that overlaps the fault.

    `downtime_s` is from confirmation to confirmation. `service_after_s` is from the fault to the
    first confirmation after the silence (null: none came).
    """
    silent = silences(events).withColumn("silent_us", F.col("until_us") - F.col("before_us"))
    longest = (
        silent.join(F.broadcast(messages.faults(events)), "run")
        .where("until_us >= from_us AND before_us <= to_us")
        .groupBy("run", "fault", "scope", "name")
        .agg(
            F.max(F.struct("silent_us", "before_us", "after_us")).alias("one"),
            F.first("kind").alias("kind"),
            F.first("from_us").alias("from_us"),
            F.first("to_us").alias("to_us"),
        )
    )
    start = F.broadcast(bounds(events).select("run", "start_us"))
    return (
        longest.join(start, "run")
        .join(_usual(events), _SCOPE, "left")
        .select(
            "run",
            "fault",
            "kind",
            "scope",
            "name",
            ((F.col("from_us") - F.col("start_us")) / US).alias("injected_s"),
            ((F.col("to_us") - F.col("from_us")) / US).alias("broken_s"),
            ((F.col("one.before_us") - F.col("start_us")) / US).alias("last_before_s"),
            ((F.col("one.after_us") - F.col("start_us")) / US).alias("first_after_s"),
            (F.col("one.silent_us") / US).alias("downtime_s"),
            ((F.col("one.after_us") - F.col("from_us")) / US).alias("service_after_s"),
            (F.col("usual_us") / US).alias("usual_s"),
        )
    )


def availability(events: DataFrame) -> DataFrame:
    """Returns per scope the share of the observed time that was not an outage.

    The time is from the first to the last confirmation, or to the end of the run if that was a
    silence.
    """
    silent = silences(events).withColumn("silent_us", F.col("until_us") - F.col("before_us"))
    longest_us = F.greatest(F.lit(OUTAGE_US_MIN), OUTAGE_FACTOR * F.col("usual_us"))
    is_outage = (F.col("silent_us") > longest_us) | F.col("after_us").isNull()
    outage_us = F.when(is_outage, F.col("silent_us"))
    observed_us = F.col("last_us") - F.col("first_us")
    return (
        silent.join(_usual(events), _SCOPE, "left")
        .groupBy(*_SCOPE)
        .agg(
            F.min("before_us").alias("first_us"),
            F.max("until_us").alias("last_us"),
            F.count("*").alias("confirmed"),
            F.first("usual_us").alias("usual_us"),
            F.count(outage_us).alias("outages"),
            F.coalesce(F.sum(outage_us), F.lit(0)).alias("outage_us"),
            F.coalesce(F.max(outage_us), F.lit(0)).alias("longest_us"),
        )
        .select(
            *_SCOPE,
            (observed_us / US).alias("observed_s"),
            "confirmed",
            (F.col("usual_us") / US).alias("usual_s"),
            "outages",
            (F.col("outage_us") / US).alias("outage_s"),
            (F.col("longest_us") / US).alias("longest_s"),
            F.when(observed_us > 0, 100 * (observed_us - F.col("outage_us")) / observed_us).alias(
                "availability_percent"
            ),
        )
    )


def timeline(events: DataFrame) -> DataFrame:
    """Returns per fault the events from its beginning until AFTERWARDS_US after its end.

    They are roles, connections, and the first confirmation of each partition, in seconds after the
    fault.
    """
    faults = F.broadcast(messages.faults(events).drop("kind", "nodes"))
    happened = (
        of_kind(
            events, "fault_injected", "fault_healed", "role_changed", "connected", "disconnected"
        )
        .withColumn("of_fault", F.col("fault"))
        .drop("fault")
        .join(faults, "run")
        .where(F.col("time_us").between(F.col("from_us"), F.col("to_us") + AFTERWARDS_US))
        .where(F.coalesce(F.col("of_fault") == F.col("fault"), F.lit(True)))
        .select(
            "run", "fault", "from_us", "time_us", F.col("event").alias("what"),
            "node", "client", "partition",
            F.coalesce("role", "kind", "text", F.lit("")).alias("text"),
        )
    )  # fmt: skip
    served = (
        downtime(events)
        .where("scope = 'partition' AND first_after_s IS NOT NULL")
        .select(
            "run",
            "fault",
            F.lit("first confirmation").alias("what"),
            F.lit(None).cast("string").alias("node"),
            F.lit(None).cast("string").alias("client"),
            F.col("name").cast("int").alias("partition"),
            F.format_string("after %.3f s of silence", "downtime_s").alias("text"),
            F.col("service_after_s").alias("after_s"),
        )
    )
    after_s = (F.col("time_us") - F.col("from_us")) / US
    return happened.withColumn("after_s", after_s).drop("from_us", "time_us").unionByName(served)
