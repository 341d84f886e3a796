"""The second judge of a campaign: its events go into the log of a broker, the pipeline makes its
tables of them, and what those say must be what the ledger says."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast_lab.publication import publish_events
from tests.e2e.brokers import Holdfast
from tests.e2e.ledger import Key, Violation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast_lake.lake.lake import Lake

SHOWN_MAX: Final = 5
Form = tuple[str, str, Key | None]


class JudgesDisagree(AssertionError):
    """One of them is wrong."""


def judge_again(
    events: Path, run: str, violations: list[Violation], directory: Path
) -> "tuple[Lake, str]":
    """The lake with the run's events and violations (`holdfast pipeline run gold --tables
    holdfast_lab` makes the other tables of it), and a summary in words.
    `violations`: what the ledger found. Raises JudgesDisagree."""
    # Spark is not needed to collect the tests.
    from holdfast_lab.tables import EVENTS, VIOLATIONS
    from holdfast_lake.lake.lake import Lake

    place = directory / "events"
    place.mkdir()
    broker = Holdfast(place)
    broker.start()
    try:
        count = publish_events(events, [f"127.0.0.1:{broker.port}"])
        lake = Lake(directory / "lake", tables=["holdfast_lab"])
        names = ["records", EVENTS.name, VIOLATIONS.name]
        report = lake.run(names, source=f"127.0.0.1:{broker.admin_port}")
        if not report.ok:
            raise AssertionError(f"the pipeline failed: {report}")
    finally:
        broker.kill()
    stored = lake.table(EVENTS.name).where(f"run = '{run}'").count()
    if stored != count:
        raise JudgesDisagree(f"{count} events were published, the pipeline has {stored}")
    found = lake.table(VIOLATIONS.name).where(f"run = '{run}'")
    _compare(
        _forms_of_rows(found), Counter(_form(one.kind, one.who, one.key) for one in violations)
    )
    broken = found.count()
    return lake, f"judged again by Spark, {count:,} events in {lake.path}: {broken} broken promises"


def _form(kind: str, who: str, key: Key | None) -> Form:
    """The ledger names neither the message of what is retained nor, in the same way, the
    disagreement of a topic."""
    if kind == "disagreement":
        return kind, "", None
    return kind, who, None if kind == "retained" else key


def _forms_of_rows(found: "DataFrame") -> Counter[Form]:
    return Counter(
        _form(
            row["kind"],
            row["who"],
            None if row["publisher"] is None else (row["publisher"], row["topic"], row["sequence"]),
        )
        for row in found.collect()
    )


def _compare(spark: Counter[Form], ledger: Counter[Form]) -> None:
    """A topic's disagreement may be several to the ledger."""
    for counts in (spark, ledger):
        for form in counts:
            if form[0] == "disagreement":
                counts[form] = 1
    if spark == ledger:
        return
    lines = [
        f"{name} alone: {sum(alone.values())}: {list(alone)[:SHOWN_MAX]}"
        for name, alone in (("Spark", spark - ledger), ("the ledger", ledger - spark))
        if alone
    ]
    raise JudgesDisagree("\n".join(lines))
