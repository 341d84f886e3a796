"""`holdfast pipeline` as a process: what it prints, and that it starts no Java for nothing."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.journal_files import TIME_US, Journal, record
from tests.support.pipeline_process import PipelineProcess
from tests.support.ports import free_port

pytest.importorskip("pyspark.sql")

pytestmark = pytest.mark.spark
RUN_MAX_S = 300.0


def holdfast(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "pipeline", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_MAX_S,
        check=False,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "data", partitions=2)
    publish(journal, 0)
    return journal


def publish(journal: Journal, first: int) -> None:
    for number in range(first, first + 30):
        payload = json.dumps({"seq": number // 2, "v": number}).encode()
        for _ in range(2 if number == 7 else 1):
            journal.append(0, [record("t/a", payload, timestamp_us=TIME_US + number)])


def publish_meters(journal: Journal) -> None:
    """Two meters that one radio hears."""
    for number in range(10):
        payload = json.dumps({"Message": {"ID": number % 2, "Use": number}}).encode()
        journal.append(1, [record("amr", payload, timestamp_us=TIME_US + number)])


def test_a_run_prints_its_own_lines_only_and_nothing_new_needs_no_java(
    journal: Journal, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    publish_meters(journal)
    first = holdfast("run", "records", "readings", "--from", journal.address, "--lake", lake)
    assert first.returncode == 0, first.stderr
    lines = first.stderr.splitlines()
    # The server of these tests has no state of a broker.
    start, records, readings, end, hint = (line for line in lines if "state_not_saved" not in line)
    assert start.startswith("starting Spark: ")
    assert records == "records: 41 rows in 1 commit"
    # Each number comes twice, with another value; one message comes again.
    assert readings == "readings: 51 rows in 1 commit, 1 repetitions"
    assert end.startswith("2 tables have new rows, in ")
    assert hint.startswith("hint: readings: Message.ID has 2 values such as 0 and 1 in 10 messages")

    no_java = tmp_path / "no_java"
    no_java.mkdir()
    again = holdfast("run", "records", "readings", "--lake", lake, JAVA_HOME=str(no_java), PATH="/")
    assert (again.returncode, again.stderr) == (0, "nothing new\n")

    status = holdfast("status", "--lake", lake, "--json")
    tables = {table["name"]: table for table in json.loads(status.stdout)["tables"]}
    assert tables["readings"]["counts"] == {"repetitions": 1}
    assert tables["records"]["lag_s"] == 0.0
    publish(journal, 30)  # long ago, by their times
    late = holdfast("status", "--lake", lake, "--fail-if-lag", "60s")
    assert late.returncode == 1
    assert "holdfast: records is" in late.stderr
    assert "s behind the log, more than 60 s (30 missing)" in late.stderr
    assert holdfast("status", "--lake", lake, "--offline", "--fail-if-lag", "60s").returncode == 1
    only = holdfast("status", "readings", "--lake", lake, "--fail-if-lag", "60s", "--json")
    assert only.returncode == 0
    assert [table["name"] for table in json.loads(only.stdout)["tables"]] == ["readings"]


def test_metrics_of_a_continuous_run(journal: Journal, tmp_path: Path) -> None:
    port = free_port()
    words = ["records", "readings", "--from", journal.address, "--continuous"]
    words += ["--trigger", "100ms", "--metrics", f"127.0.0.1:{port}"]
    process = PipelineProcess(tmp_path / "lake", tmp_path / "run.log", words)
    try:
        process.wait_for_rows("readings", 31)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'holdfast_pipeline_rows{table="records"} 31' in text
        assert 'holdfast_pipeline_lag_records{table="records"} 0' in text
        assert 'holdfast_pipeline_counted_total{table="readings",what="repetitions"} 1' in text
        assert "holdfast_pipeline_source_up 1" in text
    finally:
        process.kill9()
