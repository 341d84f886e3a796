"""The benchmarks of the Publish Queue and of failover, as small as they get, on real brokers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.brokers import SOURCE

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0


def run(module: str, directory: Path, *options: str) -> Any:
    """The figures a benchmark wrote; it must have ended well."""
    figures = directory / "figures.json"
    command = [sys.executable, "-m", f"bench.{module}", "--directory", str(directory)]
    done = subprocess.run(
        [*command, "--json", str(figures), *options],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(SOURCE)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text())


def test_a_killed_holder_costs_a_moment_and_no_message(tmp_path: Path) -> None:
    figures = run(
        "failover", tmp_path, "--rounds", "kill -9=1", "--library", "queue", "--skip-loss"
    )
    (campaign,) = figures["campaigns"]
    assert [each["fault"] for each in campaign["rounds"]] == ["kill -9"]
    assert campaign["rounds"][0]["downtime_s"] > 0
    assert campaign["findings"]["confirmed"] >= 100
    assert campaign["violations"] == []


# A pair is measured above; the takeover with more than this is `make failover`.
@pytest.mark.long
def test_takeover_is_measured_with_sessions_and_a_journal(tmp_path: Path) -> None:
    figures = run("takeover", tmp_path, "--sessions", "20", "--journal", "100KB", "--rounds", "1")
    (stage,) = figures["stages"]
    assert stage["sessions"] == 20
    assert stage["journal_bytes"] >= 100_000
    assert stage["rounds"][0]["downtime_s"] > 0


def test_the_publish_queue_is_compared_with_qos_2(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--messages", "50", "--broker", "holdfast"]
    runs = run("pubqueue", tmp_path, *options, "--only", "qos2", "--only", "sqlite-together")
    assert [each["variant"] for each in runs] == ["qos2", "sqlite-together"]
    assert all(each["time_s"] > 0 for each in runs)
