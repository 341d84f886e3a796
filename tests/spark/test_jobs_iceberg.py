"""The pipeline's tables as Iceberg tables: written by Iceberg's own library in Spark's Java, read
back by pyiceberg."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

from holdfast.client.log.lake.commits import CommitLog
from holdfast_lake.lake.stores.iceberg import EXPIRE_EVERY, IcebergStore
from tests.support.iceberg_tables import MISSING, can_test_iceberg, iceberg_table
from tests.support.journal_files import Journal
from tests.support.lake_site import OWN, Site

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),
]

with_iceberg = pytest.mark.skipif(not can_test_iceberg(), reason=MISSING)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(spark: SparkSession, tmp_path: Path) -> Site:
    return Site(spark, tmp_path, "iceberg")


@with_iceberg
def test_a_commit_is_applied_once(site: Site) -> None:
    for _ in range(2):
        site.publish(30)
        assert site.run().ok
    store = IcebergStore(site.path, lambda: site.spark)
    for name in OWN:
        before = iceberg_table(site.path / name).metadata
        log = CommitLog(site.path, name)
        last = log.last()
        assert last is not None
        store.apply(last, log.read(last.version - 1))
        after = iceberg_table(site.path / name).metadata
        assert after == before
        assert after.properties[f"holdfast.version.{last.lineage}"] == str(last.version)
        newest = after.snapshots[-1].summary
        assert newest is not None
        assert newest.additional_properties["holdfast.version"] == str(last.version)
    site.check()


@with_iceberg
def test_times_and_counts_are_known_without_the_files(site: Site) -> None:
    site.publish(40)
    assert site.run().ok
    table = iceberg_table(site.path / "numbered")
    numbers = table.inspect.files().to_pylist()
    assert sum(each["record_count"] for each in numbers) == 36
    assert all("n" in each["readable_metrics"] for each in numbers)
    found = table.scan(row_filter="n >= 30", selected_fields=("n",)).to_arrow()["n"].to_pylist()
    assert sorted(found) == [n for n in range(30, 40) if n != 33]


@with_iceberg
def test_compaction_of_iceberg(site: Site) -> None:
    for _ in range(3):
        site.publish(20)
        assert site.run().ok
    site.check()
    saved = site.lake().compact()
    assert saved["records"] > 0
    site.check()
    newest = iceberg_table(site.path / "records").metadata.snapshots[-1]
    assert newest.summary.operation.value == "replace"
    site.publish(20)
    assert site.run().ok
    site.check()


@with_iceberg
def test_old_snapshots_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_lake.lake.stores.iceberg.EXPIRE_EVERY", 4)
    monkeypatch.setattr(
        "holdfast_lake.lake.stores.iceberg.PROPERTIES",
        {
            "format-version": "2",
            "history.expire.max-snapshot-age-ms": "1",
            "history.expire.min-snapshots-to-keep": "2",
        },
    )
    assert EXPIRE_EVERY > 4
    for _ in range(4):
        site.publish(20)
        assert site.run().ok
    for name in OWN:
        assert len(iceberg_table(site.path / name).metadata.snapshots) == 2
    site.check()
    site.publish(20)
    assert site.run().ok
    site.check()


def test_a_spark_without_the_jar(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "data")
    journal.publish("a", b"1")
    words = ["pipeline", "run", "--format", "iceberg", "--master", "local[1]"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "holdfast.cli.main", *words),
            *("--from", journal.address, "--lake", str(tmp_path / "lake")),
            *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "the store iceberg needs Iceberg's jar in Spark" in done.stderr
    assert "spark.jars.packages=org.apache.iceberg:iceberg-spark-runtime-" in done.stderr
    # It was tried before Java whether the lake can be written.
    assert [each.name for each in (tmp_path / "lake").iterdir()] == ["_locks"]
