"""Retention waits for a registered lake, up to its own limit."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from holdfast.cli.main import main
from holdfast.pipeline.lake.lake import Lake
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_retention import SMALL, first_offsets, publish_many
from tests.support.spark_free_lake import no_spark
from tests.support.waiting import until


def run(broker: Holdfast, path: Path, **options: str) -> None:
    lake = Lake(path, spark=no_spark())
    source = {"servers": f"127.0.0.1:{broker.admin_port}", **options}
    assert lake.run(["records"], source=source).errors == {}


def metric(broker: Holdfast, name: str) -> float:
    found = re.search(rf'{name}\{{node="n1"\}} (\S+)', broker.admin("/metrics")[1])
    assert found is not None
    return float(found[1])


def test_the_log_stays_until_both_lakes_have_it(
    start_holdfast: StartHoldfast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retention: dict[str, Any] = {"bytes": 131_072, "keep_until_lake": 50_000_000}
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    admin = f"127.0.0.1:{broker.admin_port}"
    publish_many(broker, 50)
    run(broker, tmp_path / "one")
    run(broker, tmp_path / "two")
    publish_many(broker, 600)
    until(lambda: "retention_held_back" in broker.log_text(), "retention never looked")
    assert metric(broker, "log_lake_pinned_bytes") > 500_000
    run(broker, tmp_path / "one")
    broker.kill()  # The positions outlive the broker.
    broker.start()
    until(lambda: metric(broker, "log_lake_pinned_bytes") > 500_000, "the lake was forgotten")
    assert max(first_offsets(broker)) < 100
    assert main(["log", "groups", "--admin", admin]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert [name.split(".")[:2] for name in names] == [["lake", "one"], ["lake", "two"]]
    # The second lake is gone for good.
    assert main(["log", "groups", "--admin", admin, "--remove", names[1]]) == 0
    until(lambda: max(first_offsets(broker)) > 300, "the log waits for a lake that was removed")
    assert metric(broker, "log_lake_lost_records_total") == 0
    run(broker, tmp_path / "one")


def test_beyond_its_limit_a_lake_loses_records_and_is_told(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    retention: dict[str, Any] = {"bytes": 131_072, "keep_until_lake": 262_144}
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    publish_many(broker, 20)
    run(broker, tmp_path / "lake")
    publish_many(broker, 1500)
    until(lambda: max(first_offsets(broker)) > 300, "the log waits beyond the limit")
    assert "retention_overtook_lake lake='lake.lake." in broker.log_text()
    assert metric(broker, "log_lake_lost_records_total") > 0
    run(broker, tmp_path / "lake", failOnDataLoss="false")


def test_no_lake_registers_where_retention_does_not_wait(
    start_holdfast: StartHoldfast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_holdfast({"log": SMALL})
    publish_many(broker, 20)
    run(broker, tmp_path / "lake")
    assert main(["log", "groups", "--admin", f"127.0.0.1:{broker.admin_port}"]) == 0
    assert capsys.readouterr().out == ""
