"""Rules that are proposed from messages: by convention, by levels, and safe with any topic."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.cli.main import main
from holdfast.pipeline.lake.catalog import load_tables
from holdfast.pipeline.tables.inference import infer, tables_file
from holdfast.pipeline.tables.readings import ReadingsFold
from holdfast.pipeline.tables.topics import Topics
from tests.support.journal_files import Journal, record

JSON = json.dumps({"v": 1}).encode()
NASTY = 'a"\n/import os\n"""/'


def devices(messages: list[tuple[str, bytes]], tmp_path: Path) -> dict[str, str | None]:
    """The device of each topic by the proposed rules, from the file that they are written to."""
    file = tmp_path / "rules.py"
    file.write_text(tables_file(infer(messages), {"messages": len(messages), "topics": 1}))
    (table,) = load_tables(file)
    assert isinstance(table.build, ReadingsFold)
    topics = Topics(table.build.rules)
    found = {}
    for topic, _ in messages:
        reader = topics[topic].reader
        found[topic] = None if reader is None or reader.device_of is None else (
            reader.device_of(topic, "")
        )  # fmt: skip
    return found


def test_a_level_that_tells_devices_apart(tmp_path: Path) -> None:
    messages = [(f"plant/line{n % 3}/dev-{n}/telemetry", JSON) for n in range(20)]
    assert devices(messages, tmp_path) == {t: t.split("/")[2] for t, _ in messages}
    # The same name in two lines is two devices.
    messages = [(f"plant/line{n % 3}/press{n // 3}/telemetry", JSON) for n in range(30)]
    assert devices(messages, tmp_path) == {t: t.removesuffix("/telemetry") for t, _ in messages}


def test_values_of_their_own_have_the_metric_in_the_last_level(tmp_path: Path) -> None:
    messages = [
        (f"site/line1/dev{n}/{metric}", b"21.5") for n in range(9) for metric in ("temp", "rpm")
    ]
    assert set(devices(messages, tmp_path).values()) == {f"dev{n}" for n in range(9)}
    (proposal,) = infer(messages)
    assert 'decode="number"' in proposal.rule
    assert 'metric="level 4"' in proposal.rule


def test_conventions(tmp_path: Path) -> None:
    tasmota = [
        ("tele/plug/LWT", b"Online"), ("tele/plug/SENSOR", b'{"Time":"2026-11-22T18:00:00"}'),
        ("stat/plug/RESULT", b"{}"), ("cmnd/plug/POWER", b"ON"),
    ]  # fmt: skip
    assert list(devices(tasmota, tmp_path).values()) == ["plug", "plug", "plug", None]
    zigbee = [
        ("z2m/bridge/state", b"online"), ("z2m/lamp", JSON), ("z2m/lamp/availability", b"online"),
        ("homeassistant/sensor/x/config", JSON),
    ]  # fmt: skip
    assert list(devices(zigbee, tmp_path).values()) == [None, "lamp", "lamp", None]


def test_a_gateway_names_its_devices_in_the_payload() -> None:
    messages = [
        (f"gateway/{n % 2}/up", json.dumps({"deviceId": f"d{n}", "v": 1}).encode())
        for n in range(10)
    ]
    (proposal,) = infer(messages)
    assert proposal.rule == (
        'Rule("gateway/+/up", decode="json", device="field deviceId")'.replace(
            '"gateway/+/up"', "'gateway/+/up'"
        )
    )


@pytest.mark.parametrize("messages", [[], [("a", b"")], [("$SYS/x", b"1")], [("spBv1.0/G/x", b"")]])
def test_nothing_to_propose(messages: list[tuple[str, bytes]]) -> None:
    assert infer(messages) == []


def test_names_of_topics_cannot_become_code(tmp_path: Path) -> None:
    messages = [(f"{NASTY}{n}", JSON) for n in range(5)]
    assert set(devices(messages, tmp_path).values()) == {str(n) for n in range(5)}


def test_the_command_reads_the_newest_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / "data", partitions=2)
    for number in range(40):
        topic = f"old/{number}" if number < 20 else f"plant/dev{number}/json"
        journal.append(number % 2, [record(topic, JSON)])
    rules = tmp_path / "rules.py"
    words = ["pipeline", "infer", "--from", str(journal.directory), "-o", str(rules)]
    assert main([*words, "--messages", "20"]) == 0
    assert "1 rules from 20 messages of 20 topics" in capsys.readouterr().out
    assert "# 20 devices in 20 topics, such as plant/dev2" in rules.read_text()
    assert main(words) == 2  # an own file is not replaced
    assert "cannot be written: File exists" in capsys.readouterr().err
