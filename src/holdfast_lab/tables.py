"""Builds the experiments' tables in the lake: one of events, and those recomputed from it.

The others are recomputed for each run with new events.
"""

from collections.abc import Callable
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from holdfast_lab import fault_tables, quality_tables, run_tables
from holdfast_lab.events import COMMON, FIELDS
from holdfast_lab.judge import counts, violations
from holdfast_lab.stored_events import parse, prepare
from holdfast_lake.lake.table import QUARANTINE_COLUMNS, Column, Grain, Outputs, Table

EVENTS_TABLE: Final = "experiment_events"
_RUN: Final = Column("run", "string", "the run")
_FAULT: Final = Column("fault", "bigint", "the run's faults, counted from 1")
_QOS: Final = Column("qos", "int", "of the publisher")
_SCOPE: Final = (
    Column("scope", "string", "client, partition (of the log) or all"),
    Column("name", "string", "which client, which partition; empty for all"),
)


def build_events(records: DataFrame) -> Outputs:
    """Returns the events among new records. Other records on their topics go to quarantine."""
    parsed = parse(records)
    rejected = parsed.where(F.col("reason").isNotNull())
    names = [each.name for each in QUARANTINE_COLUMNS if each.name in parsed.columns]
    return Outputs(
        rows=parsed.where(F.col("reason").isNull()).select("parsed.*"),
        quarantine=rejected.select(*names),
    )


def _prepared(build: Callable[[DataFrame], DataFrame]) -> Callable[[DataFrame], DataFrame]:
    """Returns a build that prepares all events of a run first.

    Events may be stored more than once, and the event `clock` may come late. So preparation needs
    all events of the run, and cannot be done when an event is stored.
    """

    def built(rows: DataFrame) -> DataFrame:
        # Every branch of the build reads the prepared events. Spark drops them with the last
        # reference.
        return build(prepare(rows).localCheckpoint())

    return built


def _gold(
    name: str,
    build: Callable[[DataFrame], DataFrame],
    description: str,
    keys: tuple[str, ...],
    *columns: Column,
) -> Table:
    return Table(
        name=f"experiment_{name}",
        layer="gold",
        source=EVENTS_TABLE,
        build=_prepared(build),
        description=description,
        columns=(_RUN, *columns),
        keys=("run", *keys),
        grain=Grain.by("run"),
    )


EVENTS: Final = Table(
    name=EVENTS_TABLE,
    layer="silver",
    source="records",
    build=build_events,
    description="The events of test runs, as they were written.",
    columns=tuple(Column(each.name, each.type, each.meaning) for each in (*COMMON, *FIELDS)),
    keys=("run", "writer", "n"),
    partition_by=("run",),
)

RUNS: Final = _gold(
    "runs",
    run_tables.runs,
    "One row a run: what was tested, and how much it did.",
    (),
    Column("name", "string", "what was tested"),
    Column("software", "string", "broker and version"),
    Column("started", "timestamp", "first event"),
    Column("duration_s", "double", "first event to last, in seconds"),
    Column("clients", "bigint", "number of clients"),
    Column("nodes", "bigint", "number of nodes"),
    Column("rate_per_s", "double", "messages a second that were to be sent"),
    Column("qos", "string", "of the publishers"),
    Column("payload_bytes", "bigint", "of a message"),
    Column("fault_plan", "string", "the faults that were planned"),
    Column("faults", "bigint", "the faults that were injected"),
    Column("published", "bigint", "messages, each counted once, without wills"),
    Column("confirmed", "bigint", "of these"),
    Column("delivered", "bigint", "deliveries to all subscribers, repetitions too"),
    Column("confirmed_per_s", "double", "messages a second over the whole run"),
)

SECONDS: Final = _gold(
    "seconds",
    run_tables.seconds,
    "One row a second of a run: what was published in it and became of that, and what arrived.",
    ("second",),
    Column("second", "bigint", "second of the run, from 0"),
    Column("published", "bigint", "messages published for the first time"),
    Column("confirmed", "bigint", "of the messages published in this second"),
    Column("delivered", "bigint", "of these messages: to one subscriber at least"),
    Column("unconfirmed", "bigint", "of these messages: never confirmed"),
    Column("not_delivered", "bigint", "of these messages: to nobody"),
    Column("lost", "bigint", "of these messages: confirmed, and not delivered to all it is owed"),
    Column("confirmations", "bigint", "that arrived in this second"),
    Column("deliveries", "bigint", "that arrived in this second"),
    Column("faults", "bigint", "how many there were in this second"),
)

DOWNTIME: Final = _gold(
    "downtime",
    fault_tables.downtime,
    "Per fault and scope: the longest time without a confirmation while something was broken.",
    ("fault", "scope", "name"),
    _FAULT,
    Column("kind", "string", "what was done"),
    *_SCOPE,
    Column("injected_s", "double", "when, in seconds of the run"),
    Column("broken_s", "double", "until all nodes were in sync again, in seconds"),
    Column("last_before_s", "double", "last confirmation before the silence, second of the run"),
    Column("first_after_s", "double", "first one after it; null: none came"),
    Column("downtime_s", "double", "from the one to the other (or the end of the run), in seconds"),
    Column("service_after_s", "double", "from the fault to the first confirmation, in seconds"),
    Column("usual_s", "double", "median time between two confirmations, in seconds"),
)

TIMELINE: Final = _gold(
    "timeline",
    fault_tables.timeline,
    "What happened after each fault, until a moment after it was healed.",
    ("fault", "after_s", "what", "node", "client", "partition", "text"),
    _FAULT,
    Column("after_s", "double", "seconds after the fault"),
    Column("what", "string", "an event, or `first confirmation` of a partition"),
    Column("node", "string", "the server"),
    Column("client", "string", "the client"),
    Column("partition", "int", "of the log"),
    Column("text", "string", "the role, the kind of fault"),
)

AVAILABILITY: Final = _gold(
    "availability",
    fault_tables.availability,
    "Per scope: the share of the time that was not an outage; one is a time without confirmation "
    "that is over 50 ms and over 10 times the usual one.",
    ("scope", "name"),
    *_SCOPE,
    Column("observed_s", "double", "first confirmation to last, in seconds"),
    Column("confirmed", "bigint", "times between two confirmations"),
    Column("usual_s", "double", "median of these, in seconds"),
    Column("outages", "bigint", "how many"),
    Column("outage_s", "double", "all of them together, in seconds"),
    Column("longest_s", "double", "the longest one, in seconds"),
    Column("availability_percent", "double", "100 without an outage"),
)

LATENCY: Final = _gold(
    "latency",
    quality_tables.latency,
    "Percentiles of the time from a message's first PUBLISH to its confirmation and deliveries.",
    ("measure", "qos"),
    Column("measure", "string", f"{quality_tables.CONFIRM}, or {quality_tables.DELIVER}"),
    _QOS,
    Column("clients", "bigint", "number of clients of the run"),
    Column("messages", "bigint", "that were measured"),
    Column("mean_ms", "double", "milliseconds"),
    Column("p50_ms", "double", "milliseconds"),
    Column("p95_ms", "double", "milliseconds"),
    Column("p99_ms", "double", "milliseconds"),
    Column("max_ms", "double", "milliseconds"),
    Column("clock_error_ms", "double", "how far two hosts' clocks may be apart; 0 on one host"),
)

PROMISES: Final = _gold(
    "promises",
    counts,
    "Per QoS: what was published and owed, what arrived, what was lost, repeated, out of order.",
    ("qos",),
    _QOS,
    Column("published", "bigint", "messages, wills too"),
    Column("sends", "bigint", "PUBLISH packets, repetitions too"),
    Column("confirmed", "bigint", "messages"),
    Column("owed", "bigint", "confirmed messages, for each subscription that is owed them"),
    Column("deliveries", "bigint", "to all subscriptions, repetitions too"),
    Column("duplicates_explained", "bigint", "deliveries after the first that QoS 1 allows"),
    Column("duplicates", "bigint", "deliveries after the first that should not be"),
    Column("lost", "bigint", "messages, for each subscription that is owed them"),
    Column("reordered", "bigint", "messages, for each subscription"),
)

REPETITIONS: Final = _gold(
    "repetitions",
    quality_tables.repetitions,
    "Deliveries after the first, by subscription and by what explains them.",
    ("subscription", "effective_qos", "reason"),
    Column("subscription", "string", "a client, or a shared group"),
    Column("effective_qos", "int", "the lower one of publisher's and subscription's"),
    Column("reason", "string", "why it may be, or `broken promise`"),
    Column("deliveries", "bigint", "how many"),
)

TRAFFIC: Final = _gold(
    "traffic",
    run_tables.traffic,
    "Per client and node: messages and payload bytes each way.",
    ("client", "node"),
    Column("client", "string", "the client"),
    Column("node", "string", "the server; empty: none was named"),
    Column("connections", "bigint", "that the server accepted"),
    Column("publishes", "bigint", "PUBLISH packets to the server"),
    Column("confirmations", "bigint", "PUBACK or PUBREC to the client"),
    Column("refusals", "bigint", "the same, with an error"),
    Column("deliveries", "bigint", "messages to the client"),
    Column("bytes_to_node", "bigint", "payloads, where the events say their size"),
    Column("bytes_to_client", "bigint", "payloads, where the events say their size"),
    Column("from_s", "double", "first one, in seconds of the run"),
    Column("duration_s", "double", "first one to last, in seconds"),
    Column("bits_per_s_to_node", "double", "payload"),
    Column("bits_per_s_to_client", "double", "payload"),
)

VIOLATIONS: Final = _gold(
    "violations",
    violations,
    "Every broken promise that the events prove. No rows is what there should be.",
    ("kind", "who", "publisher", "topic", "sequence", "text"),
    Column("kind", "string", "lost, duplicate, reordered, ..."),
    Column("who", "string", "the subscription, or the client, or who wrote the events"),
    Column("publisher", "string", "with topic and sequence: the message"),
    Column("topic", "string", "of the message"),
    Column("sequence", "bigint", "of the message"),
    Column("text", "string", "what is wrong"),
)

TABLES: Final = (
    EVENTS, RUNS, SECONDS, DOWNTIME, TIMELINE, AVAILABILITY, LATENCY, PROMISES, REPETITIONS,
    TRAFFIC, VIOLATIONS,
)  # fmt: skip
