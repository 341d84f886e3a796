"""The independent ledger of a campaign: it judges by the files of the paho processes alone.

Each publisher counts its messages on a topic of its own, each reader has a durable subscription
to all of them. The rules, per reader and publisher:

- *lost*: acknowledged, sent after the reader's SUBACK, and never read;
- *twice*: read again, published and subscribed with QoS 2;
- *out of order*: read for the first time after one with a higher number;
- *invented*: read and never sent, or with another content.

It shares no code with `ledger` and `ledger_checks`, so a mistake there does not hide here.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

LOST: Final = "lost"
TWICE: Final = "twice"
OUT_OF_ORDER: Final = "out of order"
INVENTED: Final = "invented"
KINDS: Final = (LOST, TWICE, OUT_OF_ORDER, INVENTED)


@dataclass(frozen=True)
class Finding:
    kind: str
    publisher: str
    number: int
    reader: str
    at_s: float
    """When the message was acknowledged, or of one without an acknowledgement, read."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.publisher} {self.number} at {self.reader}"


@dataclass
class Verdict:
    acknowledged_s: list[float] = field(default_factory=list)
    """When each message was acknowledged."""
    repeated: int = 0
    """Messages read again below QoS 2, as that allows."""
    findings: list[Finding] = field(default_factory=list)

    def counts(self, from_s: float, to_s: float) -> dict[str, int]:
        """Count the failures of each kind, of messages acknowledged in this time."""
        found = Counter(one.kind for one in self.findings if from_s <= one.at_s < to_s)
        return {kind: found[kind] for kind in KINDS}

    def acknowledged(self, from_s: float, to_s: float) -> int:
        return sum(from_s <= at_s < to_s for at_s in self.acknowledged_s)


Message = tuple[str, int]


def judge(files: Iterable[Path]) -> Verdict:
    """Raises ValueError when no reader and no publisher is among the files."""
    lines = [
        json.loads(line)
        for path in files
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    sent: dict[Message, dict[str, Any]] = {}
    acknowledged_s: dict[Message, float] = {}
    readers: dict[str, _Reader] = {}
    for line in lines:
        event = line["event"]
        if event == "send":
            sent.setdefault((line["publisher"], line["number"]), line)
        elif event == "ok":
            acknowledged_s.setdefault((line["publisher"], line["number"]), line["at_s"])
        elif event == "subscribe":
            readers[line["client"]] = _Reader(max(qos for _, qos in line["filters"]))
        elif event == "subscribed":
            readers[line["client"]].since_s = line["at_s"]
        elif event == "deliver":
            readers[line["client"]].reads.append(line)
    if not sent or not readers:
        raise ValueError("no file of a publisher, or none of a reader")
    verdict = Verdict(sorted(acknowledged_s.values()))
    for name, reader in readers.items():
        _judge_reader(verdict, name, reader, sent, acknowledged_s)
    return verdict


@dataclass
class _Reader:
    qos: int
    since_s: float = float("inf")
    reads: list[dict[str, Any]] = field(default_factory=list)


def _judge_reader(
    verdict: Verdict,
    name: str,
    reader: _Reader,
    sent: dict[Message, dict[str, Any]],
    acknowledged_s: dict[Message, float],
) -> None:
    def note(kind: str, message: Message, at_s: float) -> None:
        at_s = acknowledged_s.get(message, at_s)
        verdict.findings.append(Finding(kind, *message, name, at_s))

    newest: dict[str, int] = {}
    seen: set[Message] = set()
    for line in reader.reads:
        publisher, number, at_s = line["publisher"], line["number"], line["at_s"]
        message = (publisher, number)
        if message not in sent or line["is_changed"]:
            note(INVENTED, message, at_s)
            continue
        if message in seen:
            if min(sent[message]["qos"], reader.qos) == 2:
                note(TWICE, message, at_s)
            else:
                verdict.repeated += 1
        elif number < newest.get(publisher, -1):
            note(OUT_OF_ORDER, message, at_s)
        seen.add(message)
        newest[publisher] = max(number, newest.get(publisher, -1))
    for message, at_s in acknowledged_s.items():
        if message not in seen and sent[message]["at_s"] > reader.since_s:
            note(LOST, message, at_s)
