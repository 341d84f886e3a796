"""The writer of a run's events: nothing is lost, nothing is malformed."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast_lab.events import (
    COMMON,
    EVENTS,
    FIELDS,
    PARAMETERS,
    check_event,
    check_run,
    topic_of,
)
from holdfast_lab.log import ExperimentLog


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_events_are_written_in_order_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with ExperimentLog("run-1", path, writer="w", host="h", parameters={"clients": "2"}) as log:
        log.write("published", 12.5, publisher="p", topic="t/ü\n", sequence=1, qos=1)
        log.write("delivered", client="c", publisher="p", topic="t", sequence=1, connection=1)
    events = read(path)
    names = [event["event"] for event in events]
    assert names == ["run_started", "clock", "published", "delivered", "run_ended"]
    assert [event["n"] for event in events] == [1, 2, 3, 4, 5]
    assert {(event["v"], event["run"], event["writer"], event["host"]) for event in events} == {
        (1, "run-1", "w", "h")
    }
    assert events[0]["parameters"] == {"clients": "2"}
    assert (events[2]["at_us"], events[2]["topic"]) == (12_500_000, "t/ü\n")
    assert events[-1]["disturbed"] == 0


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with ExperimentLog("run", path, buffer_bytes_max=2000) as log:

        def write(client: str) -> None:
            for number in range(300):
                log.write("connected", client=client, node=str(number))

        threads = [threading.Thread(target=write, args=(f"c{at}",)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = read(path)
    assert [event["n"] for event in events] == list(range(1, 1204))
    for at in range(4):
        nodes = [event["node"] for event in events if event.get("client") == f"c{at}"]
        assert nodes == [str(number) for number in range(300)]
    # A buffer of some events cannot hold what four threads write at once.
    assert events[-1]["disturbed"] > 0


@pytest.mark.parametrize(
    ("event", "fields", "complaint"),
    [
        ("exploded", {}, "one of"),
        ("published", {"publisher": "p", "topic": "t", "sequence": 1}, "lacks qos"),
        ("subscribed", {"client": "c", "colour": 1}, "no field colour"),
    ],
)
def test_unknown_events_are_refused(
    tmp_path: Path, event: str, fields: dict[str, Any], complaint: str
) -> None:
    with (
        ExperimentLog("run", tmp_path / "run.jsonl") as log,
        pytest.raises(ValueError, match=complaint),
    ):
        log.write(event, **fields)


@pytest.mark.parametrize("run", ["", "a/b", "a+", "#", "..", "a b", "x" * 101, "ü"])
def test_names_of_runs(run: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        check_run(run)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "full"
    os.symlink("/dev/full", path)
    log = ExperimentLog("run", path)
    with pytest.raises(OSError, match="No space"):
        log.close()


def test_after_the_end(tmp_path: Path) -> None:
    log = ExperimentLog("run", tmp_path / "run.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write("subscribed", client="c")


def test_the_schema_names_its_fields_once() -> None:
    names = [field.name for field in (*COMMON, *FIELDS)]
    assert len(set(names)) == len(names)
    used = {name for event in EVENTS for name in (*event.required, *event.optional)}
    assert used == {field.name for field in FIELDS}
    for event in EVENTS:
        check_event(event.name, frozenset(event.required + event.optional))
    assert topic_of("r", "published") == "experiment/r/published"


def test_the_documentation_has_the_schema() -> None:
    text = (Path(__file__).parents[3] / "docs" / "test-runs.md").read_text()
    for field in (*COMMON, *FIELDS):
        assert f"| `{field.name}` | {field.type} | {field.meaning} |" in text
    for event in EVENTS:
        fields = ", ".join([*event.required, *(f"[{name}]" for name in event.optional)])
        assert f"| `{event.name}` | {fields or '–'} | {event.meaning} |" in text
    for name, meaning in PARAMETERS.items():
        assert f"| `{name}` | {meaning} |" in text


def test_the_documentation_has_the_tables() -> None:
    pytest.importorskip("pyspark.sql")
    from holdfast_lab.tables import TABLES

    text = (Path(__file__).parents[3] / "docs" / "test-runs.md").read_text()
    for table in TABLES:
        assert f"`{table.name}`" in text
