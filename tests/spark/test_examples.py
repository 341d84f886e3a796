"""The examples for programs that run the pipeline, or Spark, on a schedule."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from holdfast_lake.java import java_home
from tests.support.journal_files import TIME_US, Journal, record

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "spark_pipelines"
RUN_MAX_S = 400.0


def publish(journal: Journal, first: int, count: int) -> None:
    for number in range(first, first + count):
        payload = json.dumps({"temperature": number * 1.5}).encode()
        if number % 10 == 9:
            payload = b"rubbish"
        topic = f"plant/p{number % 3}/telemetry"
        journal.append(number % 2, [record(topic, payload, timestamp_us=TIME_US + number)])


def run_project(folder: Path) -> None:
    """What a user types: spark-pipelines run."""
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "JAVA_HOME": str(java_home()),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": "conf",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [str(bin_folder / "spark-pipelines"), "run"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_MAX_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Run is COMPLETED" in done.stdout + done.stderr


def test_a_declarative_project_reads_each_message_once(tmp_path: Path) -> None:
    pytest.importorskip("pyspark.pipelines")
    pytest.importorskip("grpc")
    pytest.importorskip("yaml")
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text().replace("/var/lib/holdfast", str(tmp_path))
    assert "servers=127.0.0.1:18083" in text
    defaults = project / "conf" / "spark-defaults.conf"
    defaults.write_text(defaults.read_text().replace("/var/lib/holdfast", str(tmp_path)))
    journal = Journal(tmp_path / "data", partitions=2)
    spec.write_text(text.replace("127.0.0.1:18083", journal.address))
    sent = 0
    for count in (40, 20):  # the second run goes on where the first ended
        publish(journal, sent, count)
        sent += count
        run_project(project)
        rows = {
            name: ds.dataset(tmp_path / "warehouse" / name).to_table().to_pylist()
            for name in ("messages", "readings", "device_minutes")
        }
        assert len({(row["partition"], row["offset"]) for row in rows["messages"]}) == sent
        assert len(rows["messages"]) == len(rows["readings"]) == sent
        assert {row["device"] for row in rows["readings"]} == {"p0", "p1", "p2"}
        rubbish = [row for row in rows["readings"] if row["temperature"] is None]
        assert len(rubbish) == sent // 10
        assert sum(row["readings"] for row in rows["device_minutes"]) == sent


def test_the_notebook(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run one after the other, as a notebook runs them."""
    journal = Journal(tmp_path / "data", partitions=2)
    publish(journal, 0, 40)
    monkeypatch.setenv("HOLDFAST_SOURCE", journal.address)
    monkeypatch.setenv("HOLDFAST_LAKE", str(tmp_path / "lake"))
    cells = json.loads((ROOT / "examples" / "lake.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            if "startingTimestamp" in text:
                for number in range(3):
                    payload, time_us = b'{"temperature": %d}' % number, time.time_ns() // 1000
                    journal.publish(f"plant/p{number}/telemetry", payload, timestamp_us=time_us)
            exec(text, names)
    assert names["report"].rows["records"] == 40
    assert set(names["minutes"]["device"]) == {f"plant/p{n}/telemetry" for n in range(3)}
    assert spark.sql("SELECT sum(readings) FROM plant.device_minutes").first() == (
        40,
    )  # 4 are texts
    joined = {row.device: row for row in names["live"].join(names["usual"], "device").collect()}
    assert {device: row.now for device, row in joined.items()} == {
        f"plant/p{n}/telemetry": str(n) for n in range(3)
    }
    assert (joined["plant/p1/telemetry"].least, joined["plant/p1/telemetry"].greatest) == (
        1.5,
        55.5,
    )
