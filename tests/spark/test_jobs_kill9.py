"""A run of the jobs that is killed in the middle of its work, and goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.files import LakeError
from tests.support import lake_tables
from tests.support.lake_site import OWN, Site

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
WAIT_S = 300
ENOUGH = 5
"""Commits of `records` before the kill; the other tables are in the middle of something then."""


def start(site: Site, log: Path) -> "subprocess.Popen[bytes]":
    words = ["--continuous", "--trigger", "0s", "--max-records-per-trigger", "20"]
    words += ["--from", site.journal.address, "--lake", str(site.path)]
    words += ["--tables", lake_tables.__file__, "--master", "local[2]"]
    words += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "pipeline", "run", *OWN, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """The process, and the Java and Python processes it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(10)


def version(commits: CommitLog) -> int:
    last = commits.last()
    return 0 if last is None else last.version


def test_kill_9(spark: SparkSession, tmp_path: Path) -> None:
    site = Site(spark, tmp_path, "parquet")
    site.publish(200)
    log = tmp_path / "log"
    process = start(site, log)
    try:
        deadline = time.monotonic() + WAIT_S
        commits = CommitLog(site.path, "records")
        while version(commits) < ENOUGH:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            site.publish(2)
            time.sleep(0.05)
        with pytest.raises(LakeError, match=f"is being written by process {process.pid} on"):
            site.run()
        process.kill()
        process.wait(10)
        # What is left of it may go on for a moment, but nothing of that counts.
        site.publish(50)
        assert site.run().ok
        site.check()
        assert site.run().commits == {}
    finally:
        end_all(process)
