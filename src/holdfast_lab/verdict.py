"""Verdict over a run, for programs and for people."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from holdfast_lab.judge import violations

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
