"""Finds the promises that a run broke, proved from its events alone.

Each check applies to a durable subscriber, or a shared group of them, and a message that its
filters match with QoS 1 or 2:

- `lost`: the broker confirmed the message to its publisher and never delivered it. It is `missed
  after SUBACK` if nothing of that publisher and topic was delivered before it.
- `duplicate`: it was delivered twice with QoS 2 on both sides, or at QoS 1 without a reason
  (`topic_checks`).
- `reordered`: a publisher's messages on one topic came first in another order than they were
  sent. Groups, wills, and clients that may reorder are not checked.
- `disagreement`: two subscribers saw a topic's messages in different orders, or several saw
  orders with which no single order agrees.
- `invented`: no client sent it.
- `will not due`: it is the will of a client that had sent DISCONNECT.

Per client, `two owners`: a connection received a message that was sent after the client's next
connection was accepted. Per topic, `retained`: the retained message is older than a confirmed one,
or was not sent to be retained. Per writer of events, `incomplete`: some of its events are missing,
so the rest proves nothing. Accusations of clients are taken over unchanged.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Final

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from holdfast_lab.messages import of_kind
from holdfast_lab.topic_checks import (
    Finding,
    TopicCounts,
    check_topic,
    count_topic,
)
from holdfast_lab.topic_history import OF_ALL, OF_MESSAGES, History, Row

REPETITION: Final = "repetition"
_COUNTED: Final = [field.name for field in fields(TopicCounts) if field.name != "qos"]
_NUMBERS: Final = {"sequence": "bigint", "qos": "int", "effective_qos": "int"}
_COLUMNS: Final = ("run", *Finding._fields)
_SCHEMA: Final = ", ".join(f"{name} {_NUMBERS.get(name, 'string')}" for name in _COLUMNS)
_ARROW_TYPES: Final = {"bigint": pyarrow.int64(), "int": pyarrow.int32()}
_ARROW: Final = pyarrow.schema(
    [(name, _ARROW_TYPES.get(_NUMBERS.get(name, ""), pyarrow.string())) for name in _COLUMNS]
)


def violations(events: DataFrame) -> DataFrame:
    """Returns every broken promise; no rows mean that all were kept.

    The columns are run, kind, who (subscriber, group or client), the message (null if it is not
    about one), and a text.
    """
    found = findings(events).where(F.col("kind") != REPETITION)
    return found.unionByName(_accused(events)).unionByName(_incomplete(events))


def findings(events: DataFrame) -> DataFrame:
    """Returns the broken promises and explained repetitions of each topic, with the publisher's
    `qos`.

    For a repetition `text` is the reason. One task has a topic's events of one run in memory, at
    some hundred bytes each.
    """
    return _rows_of_topics(events).groupBy("run", "topic").applyInArrow(_judge, _SCHEMA)


def counts(events: DataFrame) -> DataFrame:
    """Returns per run and QoS of the publisher the published and owed messages and the broken
    promises."""
    schema = f"run string, qos int, {', '.join(f'{name} bigint' for name in _COUNTED)}"
    of_topics = _rows_of_topics(events).groupBy("run", "topic").applyInArrow(_count, schema)
    return of_topics.groupBy("run", "qos").agg(*(F.sum(name).alias(name) for name in _COUNTED))


def _rows_of_topics(events: DataFrame) -> DataFrame:
    """Returns the events of each topic, each topic with a copy of the events that concern all."""
    of_topics = of_kind(events, *OF_MESSAGES).select("run", "topic", *Row._fields)
    topics = of_topics.select("run", "topic").distinct()
    of_all = of_kind(events, *OF_ALL).drop("topic").join(F.broadcast(topics), "run")
    return of_topics.unionByName(of_all.select("run", "topic", *Row._fields))


def _history(rows: pyarrow.Table) -> tuple[str, History]:
    """Returns the name of the run and the history of the topic."""
    columns = (rows[name].to_pylist() for name in Row._fields)
    history = History(rows["topic"][0].as_py(), map(Row, *columns))
    return rows["run"][0].as_py(), history


def _judge(rows: pyarrow.Table) -> pyarrow.Table:
    run, history = _history(rows)
    found = [(run, *finding) for finding in check_topic(history)]
    values = zip(*found, strict=True) if found else [()] * len(_COLUMNS)
    arrays = [pyarrow.array(value, field.type) for value, field in zip(values, _ARROW, strict=True)]
    return pyarrow.Table.from_arrays(arrays, schema=_ARROW)


def _count(rows: pyarrow.Table) -> pyarrow.Table:
    run, history = _history(rows)
    numbers = [(name, pyarrow.int64()) for name in _COUNTED]
    schema = pyarrow.schema([("run", pyarrow.string()), ("qos", pyarrow.int32()), *numbers])
    found = [{"run": run, **asdict(one)} for one in count_topic(history)]
    return pyarrow.Table.from_pylist(found, schema=schema)


def _accused(events: DataFrame) -> DataFrame:
    return of_kind(events, "accused").select(
        "run",
        "kind",
        F.col("client").alias("who"),
        F.lit(None).cast("string").alias("publisher"),
        F.lit(None).cast("string").alias("topic"),
        F.lit(None).cast("bigint").alias("sequence"),
        F.lit(None).cast("int").alias("qos"),
        F.lit(None).cast("int").alias("effective_qos"),
        "text",
    )


def _incomplete(events: DataFrame) -> DataFrame:
    """Returns the writers of whose events some are missing."""
    writers = events.groupBy("run", "writer").agg(
        F.count("*").alias("present"),
        F.max("n").alias("newest"),
        F.max(F.when(F.col("event") == "run_ended", F.col("n"))).alias("last"),
    )
    text = (
        F.when(
            F.col("present") != F.col("newest"),
            F.format_string(
                "%d of %d events are missing", F.col("newest") - F.col("present"), F.col("newest")
            ),
        )
        .when(F.col("last").isNull(), F.lit("it has not ended"))
        .when(F.col("last") != F.col("newest"), F.lit("it goes on after its end"))
    )
    found = writers.withColumn("text", text).where(F.col("text").isNotNull())
    return found.select(
        "run",
        F.lit("incomplete").alias("kind"),
        F.col("writer").alias("who"),
        F.lit(None).cast("string").alias("publisher"),
        F.lit(None).cast("string").alias("topic"),
        F.lit(None).cast("bigint").alias("sequence"),
        F.lit(None).cast("int").alias("qos"),
        F.lit(None).cast("int").alias("effective_qos"),
        "text",
    )


VIOLATIONS_MAX: Final = 10_000
"""The most violations of a run in the verdict. The table has all of them."""
SHOWN_MAX: Final = 3
"""The most violations per kind and client in the text."""

Key = tuple[str, str, int]
"""A message: its publisher, topic and sequence."""


@dataclass(frozen=True, order=True)
class Violation:
    """A broken promise."""

    kind: str
    who: str
    key: Key | None
    """The message that it is about."""
    text: str


@dataclass
class Verdict:
    """The violations of one run, as far as its events prove them."""

    run: str
    events: int
    violations: list[Violation] = field(default_factory=list)
    is_cut: bool = False
    """True if there are more violations than these."""

    @property
    def is_kept(self) -> bool:
        """True if every promise was kept, as far as the events prove. No events prove nothing."""
        return self.events > 0 and not self.violations

    def text(self) -> str:
        """Returns the violations as lines: the number of each kind and client, and the first of
        them."""
        if not self.events:
            return f"run {self.run}: no events"
        if not self.violations:
            return f"run {self.run}: every promise was kept ({self.events:,} events)"
        counts = Counter((one.kind, one.who) for one in self.violations)
        lines = [f"run {self.run}: promises were broken"]
        for (kind, who), count in counts.items():
            lines.append(f"{kind}, {who}: {count} times")
            found = [one for one in self.violations if (one.kind, one.who) == (kind, who)]
            lines += [f"  {_about(one)}" for one in found[:SHOWN_MAX]]
        if self.is_cut:
            lines.append("and more")
        return "\n".join(lines)


def _about(violation: Violation) -> str:
    if violation.key is None:
        return violation.text
    publisher, topic, sequence = violation.key
    return f"{publisher}, {topic}, {sequence}: {violation.text}"


def verdict(events: DataFrame, run: str) -> Verdict:
    """Returns the verdict over one run, from prepared events
    (`stored_events.events_of_records`)."""
    of_run = events.where(F.col("run") == run).persist()
    try:
        count = of_run.count()
        rows = violations(of_run).limit(VIOLATIONS_MAX + 1).collect() if count else []
    finally:
        of_run.unpersist()
    found = [
        Violation(
            row["kind"],
            row["who"],
            None if row["publisher"] is None else (row["publisher"], row["topic"], row["sequence"]),
            row["text"] or "",
        )
        for row in rows[:VIOLATIONS_MAX]
    ]
    found.sort(key=lambda one: (one.kind, one.who, one.key or ("", "", 0), one.text))
    return Verdict(run, count, found, len(rows) > VIOLATIONS_MAX)
