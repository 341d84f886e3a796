"""The independent ledger finds what is planted in the files of its clients."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.event_log import EventWriter
from tests.e2e.paho_clients import payload_of
from tests.e2e.paho_ledger import INVENTED, LOST, OUT_OF_ORDER, TWICE, Verdict, judge

COUNT = 30
QOS = {"p1": 1, "p2": 2}
Lines = list[dict[str, Any]]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The files of two publishers and two readers, all of whose promises were kept."""
    paths = [tmp_path / f"{name}.events" for name in ("r1", "r2", *QOS)]
    writers = [EventWriter(path, path.stem) for path in paths]
    for qos, reader in enumerate(writers[:2], 1):
        reader.write("subscribe", filters=[("paho/#", qos)])
        reader.write("subscribed")
        reader.write("connected", node="n1")
    for number in range(COUNT):
        for writer in writers[2:]:
            key = (writer.client, "paho/x", number)
            writer.message("send", key, qos=QOS[writer.client], dup=False)
            writer.message("ok", key, packet_id=number + 1)
            for reader in writers[:2]:
                reader.message("deliver", key, connection=1, dup=False, is_changed=False)
    for writer in writers:
        writer.close()
    return paths


def edit(path: Path, change: Callable[[Lines], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_at(lines: Lines, publisher: str, number: int) -> int:
    return next(
        at
        for at, line in enumerate(lines)
        if line["event"] == "deliver" and (line["publisher"], line["number"]) == (publisher, number)
    )


def found(verdict: Verdict) -> list[tuple[str, str, int, str]]:
    return [(one.kind, one.publisher, one.number, one.reader) for one in verdict.findings]


def test_kept_promises(files: list[Path]) -> None:
    verdict = judge(files)
    assert (verdict.findings, verdict.repeated) == ([], 0)
    assert len(verdict.acknowledged_s) == 2 * COUNT


@pytest.mark.parametrize("number", [0, 12, COUNT - 1])
@pytest.mark.parametrize("publisher", QOS)
@pytest.mark.parametrize("reader", [0, 1])
def test_a_planted_loss(files: list[Path], publisher: str, number: int, reader: int) -> None:
    """The last one, too, behind which nothing was read."""
    edit(files[reader], lambda lines: lines.pop(read_at(lines, publisher, number)) and None)
    verdict = judge(files)
    assert found(verdict) == [(LOST, publisher, number, f"r{reader + 1}")]
    at_s = verdict.findings[0].at_s
    assert verdict.counts(at_s, at_s + 1e-9)[LOST] == 1
    assert verdict.counts(at_s + 1e-9, float("inf"))[LOST] == 0


def test_a_planted_repetition(files: list[Path]) -> None:
    """At QoS 2 from the publisher to the reader only; elsewhere it is allowed."""

    def repeat(lines: Lines) -> None:
        for publisher in QOS:
            lines.append(dict(lines[read_at(lines, publisher, 7)]))

    for file in files[:2]:
        edit(file, repeat)
    verdict = judge(files)
    assert found(verdict) == [(TWICE, "p2", 7, "r2")]
    assert verdict.repeated == 3


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_inversion(files: list[Path], seed: int) -> None:
    earlier, later = sorted(random.Random(seed).sample(range(COUNT), 2))

    def swap(lines: Lines) -> None:
        one, other = read_at(lines, "p1", earlier), read_at(lines, "p1", later)
        lines[one], lines[other] = lines[other], lines[one]

    edit(files[1], swap)
    assert (OUT_OF_ORDER, "p1", earlier, "r2") in found(judge(files))


def test_a_planted_invention(files: list[Path]) -> None:
    def change(lines: Lines) -> None:
        lines[read_at(lines, "p1", 3)]["is_changed"] = True
        lines.append(lines[read_at(lines, "p2", 4)] | {"number": COUNT})

    edit(files[0], change)
    kinds = [(kind, number) for kind, _, number, _ in found(judge(files))]
    # What came with another content was not read.
    assert kinds == [(INVENTED, 3), (INVENTED, COUNT), (LOST, 3)]


def test_what_is_not_owed(files: list[Path]) -> None:
    """Neither what was never acknowledged, nor what was sent before the SUBACK."""

    def forget(lines: Lines) -> None:
        del lines[read_at(lines, "p1", 9)]
        del lines[read_at(lines, "p1", 0)]

    def unanswer(lines: Lines) -> None:
        lines[0]["at_s"] = 0.0
        del lines[2 * 9 + 1]

    edit(files[0], forget)
    assert [number for _, _, number, _ in found(judge(files))] == [0, 9]
    edit(files[2], unanswer)
    assert found(judge(files)) == []


def test_no_files_are_no_verdict(tmp_path: Path, files: list[Path]) -> None:
    for chosen in ([], files[:2], files[2:]):
        with pytest.raises(ValueError, match="no file"):
            judge(chosen)


def test_payloads_differ_in_every_part() -> None:
    one, other = payload_of("p1", 1), payload_of("p1", 2)
    assert len(one) == len(other)
    assert sum(a != b for a, b in zip(one, other, strict=True)) > len(one) - 10
