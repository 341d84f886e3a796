"""Payloads of devices with the rows that they give, kept as TOML.

    [[example]]
    about = "what it shows"
    rules = ['Rule("x/#", device="level 2")']      # before the default rules
    messages = [["topic", "payload"], ["topic", "base64:AAA="]]
    rows = [["device", "metric", 1.5, "°C"], ["device", "null"]]     # value and unit, if any
    quarantined = ["code"]
    repetitions = 1
    times = ["2026-09-21T14:13:20Z"]               # the event times of the rows, if they matter

A message is stored one second after the one before.
"""

import base64
import tomllib
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast_lake.decoders.text_payload import boolean
from holdfast_lake.tables.rules import Rule
from holdfast_lake.tables.topics import Topics
from tests.support.fold_log import Found, Log, value


@dataclass(frozen=True)
class Example:
    """One example of a file."""

    name: str
    about: str
    messages: list[list[str]]
    rows: list[list[Any]]
    rules: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    repetitions: int = 0
    times: list[str] | None = None

    def read(self, rules: list[Rule] | None = None, *, together: bool = True) -> Found:
        """Fold the messages by some rules, or by those of the example."""
        if rules is None:
            rules = [eval(rule, {"Rule": Rule}) for rule in self.rules]
        log = Log(*rules)
        topics = Topics(log.rules)
        for topic, payload in self.messages:
            log.add(topic, as_bytes(payload), stream=topics[topic].stream)
        return log.read(together=together)

    def check(self, found: Found) -> None:
        """Assert that what was found is what the example says."""
        read = sorted(found.readings, key=lambda row: (row["offset"], row["position"]))
        rows = [[row["device"], row["metric"], value(row), row["unit"]] for row in read]
        wanted = [[*row, None, None][:4] for row in self.rows]
        for row in wanted:  # a word such as OFF is a boolean, with its text beside it
            truth = boolean(row[2]) if isinstance(row[2], str) else None
            row[2] = row[2] if truth is None else truth
        assert sorted(map(repr, rows)) == sorted(map(repr, wanted)), self.about
        bad = sorted(found.quarantine, key=lambda row: row["offset"])
        assert [row["code"] for row in bad] == self.quarantined, [row["reason"] for row in bad]
        assert len(found.repeated) == self.repetitions
        if self.times is not None:
            times = [row["event_time"] for row in read]
            assert times == [datetime.fromisoformat(text) for text in self.times], self.about


def as_bytes(payload: str) -> bytes:
    """Return the bytes of a payload of an example."""
    if payload.startswith("base64:"):
        return base64.b64decode(payload.removeprefix("base64:"))
    return payload.encode()


def examples(path: Path) -> list[Example]:
    """Return the examples of a file."""
    found = tomllib.loads(path.read_text())["example"]
    return [Example(f"{path.stem} {number}", **each) for number, each in enumerate(found, 1)]
