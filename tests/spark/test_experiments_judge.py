"""Spark judges runs from their events alone, as the ledger does from what it was told."""

import random
from pathlib import Path

import pytest

from tests.support.experiment_scripts import PLANTED, RandomRun, broken, counted, right_run

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

from holdfast_lab.judge import verdict, violations
from holdfast_lab.stored_events import events_of_files

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(240),
]


def test_finds_what_is_planted_and_agrees_with_the_ledger(
    spark: SparkSession, tmp_path: Path
) -> None:
    """All runs at once, as a job over a lake does."""
    paths = {name: tmp_path / f"{name}.jsonl" for name in PLANTED}
    for name, (plant, _) in PLANTED.items():
        script = right_run()
        plant(script)
        script.write(paths[name], name)
    expected, accused = {}, {}
    for seed in range(8):
        run = f"seed-{seed}"
        paths[run] = tmp_path / f"{run}.jsonl"
        script = RandomRun(random.Random(seed)).make()
        script.accuse("session lost", "all", "at connection 2")
        ledger = script.write(paths[run], run)
        expected[run], accused[run] = broken(ledger), len(ledger.accusations)
    rows = violations(events_of_files(spark, *paths.values())).collect()
    for name, (_, wanted) in PLANTED.items():
        assert {(row["kind"], row["who"]) for row in rows if row["run"] == name} == wanted, name
    for run, wanted_of_run in expected.items():
        found = [row for row in rows if row["run"] == run]
        judged = [row for row in found if row["kind"] != "session lost"]
        keys = [
            None if row["publisher"] is None else (row["publisher"], row["topic"], row["sequence"])
            for row in judged
        ]
        kinds = [(row["kind"], row["who"]) for row in judged]
        assert counted((*one, key) for one, key in zip(kinds, keys, strict=True)) == wanted_of_run
        assert len(found) - len(judged) == accused[run]
    assert all(accused.values())


def test_events_that_are_missing_or_twice(spark: SparkSession, tmp_path: Path) -> None:
    """What is missing could prove anything; what is stored twice changes nothing."""
    lines = {}
    for run in ("hole", "cut", "twice"):
        path = tmp_path / f"{run}.jsonl"
        right_run().write(path, run)
        lines[run] = path.read_bytes().splitlines(keepends=True)
    count = len(lines["hole"])
    del lines["hole"][20]
    del lines["cut"][10:]
    lines["twice"] *= 2
    everything = tmp_path / "all.jsonl"
    everything.write_bytes(b"".join(line for found in lines.values() for line in found))
    events = events_of_files(spark, everything).localCheckpoint()
    rows = violations(events).where("kind = 'incomplete'").collect()
    assert {row["run"]: row["text"] for row in rows} == {
        "hole": f"1 of {count} events are missing",
        "cut": "it has not ended",
    }
    twice = verdict(events, "twice")
    assert twice.is_kept, twice.text()
    assert twice.events == count
    assert not verdict(events, "another").is_kept
