"""The pipeline's jobs in a real Spark session, over a journal in real files."""

import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")
pytest.importorskip("deltalake")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.reading.offsets import DataLossError
from holdfast.log.record import MESSAGE
from holdfast_lake import Column, Grain, Lake, Outputs, Table
from holdfast_lake.lake.engine import locked
from tests.support.iceberg_tables import MISSING, can_test_iceberg
from tests.support.lake_site import OWN, Crash, Site
from tests.support.lake_tables import NUMBERED, PER_HOUR, TABLES, numbered

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(
    params=[
        pytest.param("parquet", marks=pytest.mark.long),
        "delta",
        pytest.param("iceberg", marks=pytest.mark.skipif(not can_test_iceberg(), reason=MISSING)),
    ]
)
def site(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Site:
    return Site(spark, tmp_path, request.param)


@pytest.fixture
def plain(spark: SparkSession, tmp_path: Path) -> Site:
    return Site(spark, tmp_path, "parquet")


def test_steps_that_end_anywhere(site: Site) -> None:
    site.publish(30)
    assert site.run().ok
    site.check()
    for table in OWN:
        for point in ("staged", "recorded"):
            site.publish(30)
            report = site.run(crash_at=f"{table} {point}")
            assert isinstance(report.errors[table], Crash)
            assert list(report.errors) == [table]
    # What was committed but not put in its place is there after the next run.
    assert site.run().ok
    site.check()
    assert not any(site.run().rows.values())
    site.check()
    assert not list((site.path / "_work").rglob("*.parquet"))


def test_status_and_tables(plain: Site) -> None:
    lake = plain.lake()
    with pytest.raises(LakeError, match="has not been written yet"):
        lake.table("numbered")
    assert lake.tables() == []
    plain.publish(40)
    plain.run(["records", "numbered"])
    plain.publish(25)
    lake = plain.lake()
    tables = {table.name: table for table in lake.status().tables}
    assert (tables["records"].rows, tables["records"].lag) == (40, 25)
    assert (tables["numbered"].rows, tables["numbered"].quarantined) == (36, 4)
    assert (tables["per_hour"].lag, tables["per_hour"].version) == (36, 0)
    assert lake.status(ask_servers=False).tables[0].lag is None
    assert "numbered" in str(lake.status())
    assert lake.tables() == ["records", "numbered", "quarantine"]
    stranger = Lake(plain.path).status(ask_servers=False)
    assert stranger.undeclared == ["numbered"]
    assert "also there: numbered; give --tables with the file" in str(stranger)
    assert plain.journal.server is not None
    plain.journal.server.fail_next = 1000
    status = lake.status()
    assert status.ends is None
    assert "503" in status.problem


def test_columns_of_records(plain: Site) -> None:
    plain.publish(20)
    plain.run(["bronze"])
    row = plain.lake().table("records").orderBy("timestamp").first()
    assert row is not None
    assert (row.topic, bytes(row.payload), row.partition, row.offset) == ("t/0", b'{"n": 0}', 0, 0)
    assert (row.qos, row.retain, row.producer) == (1, False, None)
    assert str(row.date) == "2026-09-21"


def test_many_small_commits_are_listed_once(plain: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.client.log.lake.commits.LIVE_EVERY", 3)
    monkeypatch.setattr("holdfast.client.log.lake.commits.COMMITS_KEPT", 2)
    for _ in range(8):
        plain.publish(5)
        plain.run(["bronze"])
    names = sorted(path.name for path in (plain.path / "records" / "_commits").iterdir())
    assert "00000006.live" in names
    assert "00000001.json" not in names
    assert plain.lake().table("records").count() == 40
    plain.run()
    plain.check()


def test_another_run_is_refused(plain: Site) -> None:
    plain.publish(5)
    plain.run(["bronze"])
    with (
        locked(plain.path, ["records"]),
        pytest.raises(LakeError, match=r"table records .* is being written by process \d+"),
    ):
        plain.run()
    assert plain.run().ok


def test_continuous_run_stops_after_its_step(plain: Site) -> None:
    plain.publish(20)
    lake = plain.lake()
    runner = lake.runner(list(OWN), source=plain.journal.address)
    thread = threading.Thread(target=runner.continuously, args=(0.05,))
    thread.start()
    try:
        reader = plain.lake()
        for size in (20, 50):
            plain.publish(size - len(plain.sent))
            _wait(lambda size=size: _rows(reader, "per_hour") and _consumed(reader) == size)
    finally:
        runner.stop()
        thread.join(60)
    assert not thread.is_alive()
    assert runner.report.ok
    plain.check()


def _wait(condition: Any) -> None:
    waiting = threading.Event()
    for _ in range(1200):
        if condition():
            return
        waiting.wait(0.05)
    raise AssertionError("not in time")


def _rows(lake: Lake, table: str) -> int:
    return {each.name: each.rows for each in lake.status(ask_servers=False).tables}[table]


def _consumed(lake: Lake) -> int:
    """Records that have come through to the gold table."""
    tables = {each.name: each for each in lake.status(ask_servers=False).tables}
    done = not tables["numbered"].lag and not tables["per_hour"].lag
    return tables["records"].rows if done else -1


def test_retention_gap(plain: Site) -> None:
    plain.publish(20)
    plain.run()
    plain.publish(400)
    while len(plain.journal.segments()) > 1:
        plain.journal.remove_first_segment()
    report = plain.run()
    assert isinstance(report.errors["records"], DataLossError)
    assert "were asked for, the log has" in str(report.errors["records"])
    lake = plain.lake()
    source = {"servers": plain.journal.address, "failOnDataLoss": "false"}
    assert lake.run(["records"], source=source).ok
    left = len([r for r in plain.journal.records() if r.kind == MESSAGE])
    assert lake.table("records").count() == 20 + left
    assert 0 < left < 400
    status = plain.lake().status()
    gone = sum(each.end - each.first for each in status.skipped)
    assert status.skipped_total == gone > 0
    assert {each.partition for each in status.skipped} == {0, 1, 2}
    assert json.loads(json.dumps(status.as_dict()))["skipped_total"] == gone
    assert f"skipped {gone:,} offsets of the log are in no table" in str(status)
    # It was for that run: the next gap stops the run again.
    plain.publish(400)
    while len(plain.journal.segments()) > 1:
        plain.journal.remove_first_segment()
    assert isinstance(plain.lake().run("records").errors["records"], DataLossError)


def test_starting_at_the_end(plain: Site) -> None:
    plain.publish(12)
    source = {"servers": plain.journal.address, "startingOffsets": "latest"}
    lake = plain.lake()
    assert lake.run("bronze", source=source).rows == {"records": 0}
    plain.publish(7)
    # What was said first is remembered, and the place where it led to.
    assert plain.lake().run("bronze").rows == {"records": 7}
    assert plain.lake().table("records").count() == 7


@pytest.mark.long
def test_columns_may_be_added(site: Site) -> None:
    site.publish(20)
    site.run()

    def doubled(rows: DataFrame, state: DataFrame) -> Outputs:
        outputs = numbered(rows, state)
        return replace(outputs, rows=outputs.rows.withColumn("twice", F.col("n") * 2))

    new = Column("twice", "bigint", "two times n")
    more = replace(NUMBERED, columns=(*NUMBERED.columns, new), build=doubled)
    site.publish(20)
    assert site.run(tables=[more, PER_HOUR]).ok
    found = [(row["n"], row.get("twice")) for row in site.rows("numbered")]
    if site.store == "parquet":
        rows = site.lake([more, PER_HOUR]).table("numbered").collect()
        found = [(row.n, row.twice) for row in rows]
    assert Counter(twice is None for _, twice in found) == {True: 18, False: 18}
    assert all(twice in (None, 2 * n) for n, twice in found)
    last = json.loads((site.path / "numbered/_commits/00000002.json").read_text())
    assert last["change"] == "added twice bigint"


def test_other_changes_are_refused(plain: Site) -> None:
    plain.publish(20)
    plain.run()
    plain.publish(1)
    text = replace(
        NUMBERED, columns=(replace(NUMBERED.columns[0], type="binary"), *NUMBERED.columns[1:])
    )
    fewer = replace(NUMBERED, columns=NUMBERED.columns[1:], keys=("number",))
    for changed, said in (
        (text, "is stored as string, declared as binary"),
        (fewer, "is stored with topic, which is not declared"),
        (replace(NUMBERED, partition_by=()), "is partitioned by date"),
        (replace(NUMBERED, revision=2), "in revision 1, declared in revision 2"),
    ):
        report = plain.run(["numbered"], tables=[changed, PER_HOUR])
        assert said in str(report.errors["numbered"])
        assert "rebuild numbered" in str(report.errors["numbered"])
    assert plain.run().ok
    plain.check()


@pytest.mark.long
def test_rebuild(site: Site) -> None:
    site.publish(30)
    assert site.run().ok
    later = replace(NUMBERED, revision=2)
    site.publish(30)
    assert "revision 2" in str(site.run(tables=[later, PER_HOUR]).errors["numbered"])
    lake = site.lake([later, PER_HOUR])
    report = lake.rebuild("numbered")
    assert report.ok
    assert report.rows["numbered"] == 54
    assert set(report.commits) == {"numbered", "per_hour"}
    site.check()
    assert site.run(tables=[later, PER_HOUR]).commits == {}


def test_a_build_that_is_wrong_stops_only_what_needs_it(plain: Site) -> None:
    plain.publish(20)

    def unlucky(rows: DataFrame) -> DataFrame:
        return rows.select(F.raise_error(F.lit("no luck")).cast("string").alias("topic"))

    def forgetful(rows: DataFrame) -> DataFrame:
        return rows.select("offset")

    columns = (Column("topic", "string", "t"),)
    bad = Table("bad", "silver", "records", unlucky, columns, "fails")
    after = Table("after_bad", "silver", "bad", forgetful, columns, "is not tried")
    incomplete = Table("incomplete", "silver", "records", forgetful, columns, "lacks a column")
    tables = [*TABLES, bad, after, incomplete]
    report = plain.run([*OWN, "bad", "after_bad", "incomplete"], tables=tables)
    assert set(report.errors) == {"bad", "incomplete"}
    assert "no luck" in str(report.errors["bad"])
    assert "returned no column topic; it returned offset" in str(report.errors["incomplete"])
    plain.check()


def test_a_source_that_was_replaced(plain: Site) -> None:
    plain.publish(20)
    plain.run()
    shutil.rmtree(plain.path / "records")
    report = plain.run()
    assert "was made from another records" in str(report.errors["numbered"])


def test_another_time_zone_is_refused(plain: Site) -> None:
    plain.spark = plain.spark.newSession()
    plain.spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    with pytest.raises(LakeError, match="has the time zone Asia/Kolkata"):
        plain.run()


@pytest.mark.long
def test_gold_by_values_and_whole(plain: Site) -> None:
    plain.publish(40)

    def counted(rows: DataFrame) -> DataFrame:
        return rows.groupBy("topic").agg(F.count("*").alias("rows"))

    columns = (Column("topic", "string", "t"), Column("rows", "bigint", "how many"))
    by = Table(
        "by_topic", "gold", "numbered", counted, columns, "d", ("topic",), (), (), Grain.by("topic")
    )
    whole = replace(by, name="everything", grain=Grain.whole())
    days = Table(
        "days",
        "gold",
        "records",
        lambda rows: rows.groupBy(F.date_trunc("day", "timestamp").alias("window_start")).agg(
            F.count("*").alias("rows")
        ),
        (Column("window_start", "timestamp", "day"), columns[1]),
        "d",
        ("window_start",),
        grain=Grain.days(source_time="timestamp"),
    )
    tables = [NUMBERED, by, whole, days]
    names = ["records", *(table.name for table in tables)]
    for _ in range(2):
        assert plain.run(names, tables=tables).ok
        expected = Counter(topic for topic, _, n in plain.sent if n >= 0)
        lake = plain.lake(tables)
        for name in ("by_topic", "everything"):
            assert {row.topic: row.rows for row in lake.table(name).collect()} == expected
        assert [row.rows for row in lake.table("days").collect()] == [len(plain.sent)]
        assert (plain.path / "by_topic/topic=t%2F1/data.parquet").exists()
        plain.publish(10)


def test_gold_has_the_same_bytes_however_it_came_about(spark: SparkSession, tmp_path: Path) -> None:
    one, other = (Site(spark, tmp_path / name, "parquet") for name in ("one", "other"))
    for size in (7, 60, 33):
        one.publish(size)
        one.run()
    other.publish(100)
    spark.conf.set("spark.sql.shuffle.partitions", 5)
    try:
        other.run()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", 1)
    files = [
        {str(path.relative_to(site.path)): path.read_bytes() for path in site.gold_files()}
        for site in (one, other)
    ]
    assert len(files[0]) == 5
    assert files[0] == files[1]
