"""Compaction of a lake that Spark writes, and what is made from it afterwards."""

import threading
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")
pytest.importorskip("deltalake")

from pyspark.sql import SparkSession

from holdfast.cli.main import main
from holdfast.client.log.lake.commits import Commit, CommitLog
from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake.compaction import Compaction
from holdfast_lake.lake.engine import finish, locked
from tests.support import lake_tables
from tests.support.lake_site import OWN, Crash, Site

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),
]


def grow(site: Site, times: int) -> None:
    for _ in range(times):
        site.publish(20)
        assert site.run().ok


def live_files(site: Site, table: str) -> int:
    log = CommitLog(site.path, table)
    last = log.last()
    assert last is not None
    return len(log.live(last.version))


@pytest.mark.parametrize("store", ["parquet", "delta"])
def test_compaction_changes_no_row(spark: SparkSession, tmp_path: Path, store: str) -> None:
    site = Site(spark, tmp_path / "compacted", store)
    grow(site, 4)
    saved = site.lake().compact()
    assert saved["records"] > 0
    assert saved["numbered"] > 0
    assert "per_hour" not in saved
    assert live_files(site, "numbered") == 1
    site.check()
    assert site.lake().table("records").count() == len(site.sent)
    assert site.run().commits == {}
    grow(site, 2)
    site.check()
    # Whoever begins anew reads merged files, and makes the same of them.
    assert site.lake().rebuild("numbered").ok
    site.check()
    if store == "parquet":
        plain = Site(spark, tmp_path / "plain", store)
        plain.publish(len(site.sent))
        assert plain.run().ok
        assert gold_of(site) == gold_of(plain)


def gold_of(site: Site) -> dict[str, bytes]:
    return {str(path.relative_to(site.path)): path.read_bytes() for path in site.gold_files()}


@pytest.mark.parametrize("point", ["staged", "recorded", "applied"])
def test_compaction_of_delta_may_end_anywhere(
    spark: SparkSession, tmp_path: Path, point: str
) -> None:
    site = Site(spark, tmp_path, "delta")
    grow(site, 3)
    engine = site.lake().engine()

    def reached(at: str) -> None:
        if at == f"records {point}":
            raise Crash(at)

    log = CommitLog(site.path, "records")
    with pytest.raises(Crash):
        list(Compaction(site.path, engine.store, log, {}, reached).run())
    site.check()
    assert site.lake().table("records").count() == len(site.sent)
    finish(site.path, engine.store, CommitLog(site.path, "records"))
    site.check()
    site.lake().compact()
    grow(site, 1)
    site.check()


def test_a_run_compacts_what_it_makes(spark: SparkSession, tmp_path: Path) -> None:
    site = Site(spark, tmp_path, "parquet")
    site.publish(20)
    lake = site.lake()
    source = site.journal.address
    runner = lake.runner(list(OWN), source=source, compact_at=3)
    thread = threading.Thread(target=runner.continuously, args=(0.05,))
    thread.start()
    waiting = threading.Event()
    try:
        for _ in range(1200):
            if any(commit.merges for name in OWN[:2] for commit in commits_of(site, name)):
                break
            assert thread.is_alive()
            site.publish(2)
            waiting.wait(0.05)
        else:
            raise AssertionError("nothing was compacted")
    finally:
        runner.stop()
        thread.join(60)
    assert runner.report.ok, runner.report.errors
    assert site.run().ok
    site.check()


def commits_of(site: Site, table: str) -> list[Commit]:
    log = CommitLog(site.path, table)
    last = log.last()
    return [log.read(version) for version in range(1, last.version + 1)] if last else []


def test_the_command(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(spark, tmp_path, "parquet")
    words = ["pipeline", "compact", "--lake", str(site.path), "--tables", lake_tables.__file__]
    assert main(words) == 2
    assert "there is no lake in" in capsys.readouterr().err
    grow(site, 3)
    assert main([*words, "per_hour"]) == 2
    assert "per_hour: a gold table has one file for each grain already" in capsys.readouterr().err
    with locked(site.path, ["records"]):
        assert main([*words, "records"]) == 2
    assert "is being written by process" in capsys.readouterr().err
    before = live_files(site, "records")
    assert main([*words, "records", "numbered"]) == 0
    said = capsys.readouterr().out
    assert f"records: {before - live_files(site, 'records')} files fewer" in said
    assert main([*words, "records"]) == 0
    assert "records: nothing to do" in capsys.readouterr().out
    site.check()


def test_gold_alone_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    site = Site(spark, tmp_path, "parquet")
    grow(site, 1)
    with pytest.raises(LakeError, match="gold: a gold table has one file"):
        site.lake().compact("gold")
