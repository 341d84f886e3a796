"""The status of a lake tells what is missing for good."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.client.log.lake.commits import CommitLog, Skipped
from holdfast.client.log.lake.files import note_failure
from holdfast_lake.cli.metrics import metrics_text
from holdfast_lake.lake.catalog import load_catalog
from holdfast_lake.lake.runner import Runner
from holdfast_lake.lake.status import LakeStatus, lake_status, status_lines
from tests.support.gold_files import write_table
from tests.support.journal_files import Journal, record
from tests.unit.lake.lake.test_commits import commit


def status_of(lake: Path, source: dict[str, str], **records: Any) -> LakeStatus:
    CommitLog(lake, "records").record(commit(1, table="records", **records))
    return lake_status(lake, load_catalog(), source)


def test_what_was_skipped(tmp_path: Path) -> None:
    at_us = time.time_ns() // 1000 - 3 * 3_600_000_000
    skipped = Skipped(partition=2, first=70, end=90, version=1, at_us=at_us)
    status = status_of(tmp_path, {}, skipped=[skipped], skipped_total=1020)
    assert (
        "skipped 1,020 offsets of the log are in no table, the last 3 h ago: 70 to 90 of "
        "partition 2"
    ) in status_lines(status)
    told = json.loads(json.dumps(status.as_dict()))
    assert told["skipped_total"] == 1020
    assert told["skipped"] == [
        {"partition": 2, "first": 70, "end": 90, "version": 1, "at_us": at_us}
    ]


def test_nothing_is_said_where_nothing_is_missing(tmp_path: Path) -> None:
    status = status_of(tmp_path, {})
    assert not [line for line in status_lines(status) if "skipped" in line or "also" in line]


def test_a_log_that_ends_before_what_was_read(tmp_path: Path) -> None:
    """What is written below is not read: no lag shows it."""
    journal = Journal(tmp_path / "data", partitions=2)
    for _ in range(5):
        journal.append(0, [record()])
    source = {"servers": journal.address}
    status = status_of(tmp_path / "lake", source, offsets={"0": 8, "1": 0})
    assert status.tables[0].lag == 0
    (line,) = [line for line in status_lines(status) if "partition 0" in line]
    assert line.strip() == (
        "partition 0 is in the lake up to offset 8, the log ends at 5: it has lost its end, or is "
        "another log"
    )


def test_a_failed_step_is_a_metric(tmp_path: Path) -> None:
    note_failure(tmp_path, "latency", "out of range")
    text = metrics_text(status_of(tmp_path, {}))
    assert 'holdfast_pipeline_failed{table="latency"} 1\n' in text
    assert 'holdfast_pipeline_failed{table="readings"} 0\n' in text


@pytest.mark.parametrize(
    ("counts", "hint"),
    [
        # A device that counts over ten topics: each topic lacks nine numbers of ten.
        ({"missing": 90, "filled": 0}, "device d: 180 message numbers are missing, more than the "
         "20 messages that are there. If it counts over several topics, a rule with "
         "sequence_per='device'"),
        ({"missing": 90, "filled": 81}, ""),
        # The number of a step of a program: equal messages of one step look like repetitions.
        ({"repetitions": 11}, "device d: 22 messages were dropped as repetitions, beside 20 that "
         "are there. If their number or id is none, sequence=None or id=None"),
        ({"repetitions": 5}, ""),
    ],
)  # fmt: skip
def test_numbers_that_are_absurd(tmp_path: Path, counts: dict[str, int], hint: str) -> None:
    none = dict.fromkeys(("repetitions", "missing", "filled"), 0)
    rows = [{"device": "d", "messages": 10} | none | counts for _ in range(2)]
    write_table(tmp_path, load_catalog().table("quality"), rows)
    hints = lake_status(tmp_path, load_catalog(), {}).hints
    assert len(hints) == bool(hint)
    assert not hints or hints[0].startswith(hint)


def test_tables_that_nobody_declares_here(tmp_path: Path) -> None:
    CommitLog(tmp_path, "mine").record(commit(1, table="mine"))
    status = status_of(tmp_path, {})
    assert status.undeclared == ["mine"]
    assert "also there: mine; give --tables with the file or package that declares them" in str(
        status
    )


def test_the_error_of_a_table_until_a_step_succeeds(tmp_path: Path) -> None:
    """A table that fails in each run only looked late."""
    engine: Any = SimpleNamespace(lake=tmp_path)
    runner = Runner(engine, load_catalog(), ["latency", "quality"], None)

    def fail() -> None:
        raise ValueError("Integer value -18 not in range")

    runner._attempt("latency", fail)
    runner._attempt("quality", lambda: None)
    status = status_of(tmp_path, {})
    assert {table.name: table.error for table in status.tables if table.error} == {
        "latency": "Integer value -18 not in range"
    }
    assert "latency: failed in its last step: Integer value -18 not in range" in str(status)
    again = Runner(engine, load_catalog(), ["latency"], None)
    again._attempt("latency", lambda: None)
    assert "failed" not in str(lake_status(tmp_path, load_catalog(), {}))
