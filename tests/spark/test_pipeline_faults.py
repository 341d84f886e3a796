"""The pipeline and the cluster it reads, killed in one run: in the end the tables are what was
acknowledged, each message once."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

from holdfast_lake import Lake
from tests.e2e.cluster_processes import ClusterProcesses
from tests.support.ledger_devices import Ledger
from tests.support.pipeline_process import PipelineProcess, rows_total

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),
]

SETTINGS = {"cluster": {"partitions": 8}}
BEFORE = 200
"""Messages, at least, in the lake before the first kill."""


def admin_ports(cluster: ClusterProcesses) -> str:
    return ",".join(f"127.0.0.1:{node.admin_port}" for node in cluster.nodes.values())


def test_kill_9_of_the_driver_and_of_a_leader(spark: SparkSession, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    with ClusterProcesses(tmp_path / "cluster", settings=SETTINGS) as cluster:
        servers = admin_ports(cluster)
        words = ["all", "--continuous", "--trigger", "100ms", "--from", servers]
        words += ["--master", "local[2]"]
        run = PipelineProcess(lake, tmp_path / "log", words)
        ledger = Ledger(cluster.addresses)
        try:
            ledger.start()
            run.wait_for_rows("device_minutes", 1)
            leader = cluster.leader_of(cluster.partition_of(ledger.devices[0].topic))
            cluster.kill9(leader)
            stored, acknowledged = rows_total(lake, "records"), ledger.acknowledged
            run.wait_for_rows("records", stored + BEFORE)
            run.kill9()
            assert ledger.acknowledged > acknowledged
            cluster.restart(leader)
        finally:
            run.kill9()
            ledger.finish()
        report = Lake(lake, spark=spark).run()
        assert report.ok, report.errors
        ledger.check(lake)
