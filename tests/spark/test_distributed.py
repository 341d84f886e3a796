"""The jobs on a real Spark standalone cluster: the same bytes of gold as in one process, and
exactly what was acknowledged after kill -9 of everything that takes part."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

import pyspark
from pyspark.sql import SparkSession

import holdfast
from holdfast.client.log.lake.commits import CommitLog
from holdfast_lake import Lake
from holdfast_lake.session import write_package
from holdfast_lake.tables import TABLES
from tests.e2e.cluster_processes import ClusterProcesses
from tests.support.factory_log import write_factory_log
from tests.support.journal_files import Journal
from tests.support.ledger_devices import Ledger
from tests.support.pipeline_process import (
    PipelineProcess,
    gold_files,
    java_processes,
    kill9_tree,
    rows_total,
)
from tests.support.spark_cluster import spark_cluster, spark_environment

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]

GOLD = [table.name for table in TABLES if table.layer == "gold"]
RUN_S = 800
INSTALLED = ["--conf", f"spark.executorEnv.PYTHONPATH={Path(holdfast.__file__).parents[1]}"]
"""As if the package were installed where the workers run, also where it is not."""
SETTINGS = {"cluster": {"partitions": 8}}
BETWEEN = 100
"""Messages, at least, that come into the lake between two kills."""


def has_merged(lake: Path, table: str) -> bool:
    log = CommitLog(lake, table)
    last = log.last()
    return last is not None and any(file.since for file in log.live(last.version))


@pytest.fixture(scope="module")
def factory(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Journal, dict[str, bytes]]:
    """A log, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("here")
    journal = write_factory_log(folder / "data", 3000)
    report = Lake(folder / "lake", spark=spark).run(source=journal.address)
    assert report.ok, report.errors
    assert report.quarantined["readings"] > 0
    files = gold_files(folder / "lake", GOLD)
    assert {name.split("/")[0] for name in files} == set(GOLD)
    return journal, files


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its workers know nothing but what a run sends along."""
    with spark_cluster(tmp_path_factory.mktemp("spark")) as url:
        yield url


def test_same_bytes_as_in_one_process(
    factory: tuple[Journal, dict[str, bytes]], master: str, tmp_path: Path
) -> None:
    journal, expected = factory
    words = ["all", "--from", journal.address, "--master", master]
    # Other steps, too: none of it may be seen in gold.
    words += ["--max-records-per-trigger", "1100"]
    words += INSTALLED
    run = PipelineProcess(tmp_path / "lake", tmp_path / "log", words)
    try:
        assert run.process.wait(RUN_S) == 0, run.log_text()
    finally:
        run.kill9()
    assert gold_files(tmp_path / "lake", GOLD) == expected


def test_same_bytes_by_spark_submit(
    factory: tuple[Journal, dict[str, bytes]], master: str, tmp_path: Path
) -> None:
    journal, expected = factory
    archive, script = write_package(tmp_path / "package")
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    command = [submit, "--master", master, "--py-files", str(archive), str(script), "run", "all"]
    command += ["--from", journal.address, "--lake", str(tmp_path / "lake")]
    done = subprocess.run(
        [*command, "--conf", "spark.sql.shuffle.partitions=3"],
        env=spark_environment(),
        cwd=tmp_path,  # nothing there to import
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert gold_files(tmp_path / "lake", GOLD) == expected


def test_kill_9_of_driver_worker_executor_and_leader(spark: SparkSession, tmp_path: Path) -> None:
    lake, log = tmp_path / "lake", tmp_path / "log"
    with (
        spark_cluster(tmp_path / "spark", workers=2) as master,
        ClusterProcesses(tmp_path / "cluster", settings=SETTINGS) as cluster,
    ):
        servers = [f"127.0.0.1:{node.admin_port}" for node in cluster.nodes.values()]
        words = ["all", "--continuous", "--trigger", "200ms", "--from", ",".join(servers)]
        words += ["--master", master, *INSTALLED, "--compact-at", "10"]
        ledger = Ledger(cluster.addresses, pause_s=0.03)
        runs = [PipelineProcess(lake, log, words)]

        def go_on() -> None:
            run = runs[-1]
            run.wait_for_rows("records", rows_total(lake, "records") + BETWEEN)
            run.wait_for_rows("readings", rows_total(lake, "readings") + BETWEEN)

        try:
            ledger.start()
            runs[-1].wait_for_rows("device_minutes", 1)
            leader = cluster.leader_of(cluster.partition_of(ledger.devices[0].topic))
            cluster.kill9(leader)
            executor = java_processes("CoarseGrainedExecutorBackend")[0]
            kill9_tree(executor)
            go_on()
            runs[-1].kill9()
            cluster.restart(leader)
            runs.append(PipelineProcess(lake, log, words))
            go_on()
            kill9_tree(java_processes("worker.Worker", str(tmp_path))[0])
            go_on()
        finally:
            ledger.finish()
        everything = ledger.acknowledged
        run = runs[-1]
        try:
            run.wait_for(lambda: rows_total(lake, "readings") >= everything, "the rest")
            run.process.terminate()
            assert run.process.wait(RUN_S) == 0, run.log_text()
        finally:
            for each in runs:
                each.kill9()
        assert has_merged(lake, "records")
        # What a stop between two tables has left, and the same from the beginning in one process.
        there, here = Lake(lake, spark=spark), Lake(tmp_path / "here", spark=spark)
        assert there.run().ok
        ledger.check(lake)
        assert here.run(source=servers[0]).ok
        ledger.check(tmp_path / "here")
        assert gold_files(lake, GOLD) == gold_files(tmp_path / "here", GOLD)
