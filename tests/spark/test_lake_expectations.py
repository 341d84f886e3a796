"""Expectations: what is counted, quarantined or stopped, and that a stop leaves nothing."""

import json
from pathlib import Path

import pytest

from tests.support.journal_files import TIME_US, Journal, record

pytest.importorskip("pyspark.sql")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.client.log.lake.commits import CommitLog
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.table import Column, Grain, Table, TableError, expect
from holdfast_lake.tables import readings_table

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default")]

READINGS = readings_table(
    expectations=(
        expect("hot", "value_double < 100", on_fail="quarantine"),
        expect("cold", "value_double > 0"),
        expect("clock", "claimed_time IS NULL", on_fail="stop"),
    )
)
BIG = (Column("device", "string", "d"), Column("v", "double", "v"))


def _double(readings: DataFrame) -> DataFrame:
    return readings.select("device", (F.col("value_double") * 2).alias("v"))


DOUBLED = Table(
    "doubled", "silver", "readings", _double, BIG, "twice",
    expectations=(expect("small", "v < 50", on_fail="quarantine"),),
)  # fmt: skip
PER_DEVICE = Table(
    "per_device", "gold", "doubled",
    lambda rows: rows.groupBy("device").agg(F.max("v").alias("v")), BIG, "greatest",
    keys=("device",), grain=Grain.whole(), expectations=(expect("even", "v % 4 = 0"),),
)  # fmt: skip


def publish(journal: Journal, *payloads: object) -> None:
    for payload in payloads:
        journal.append(0, [record("t", json.dumps(payload).encode(), timestamp_us=TIME_US)])


def counts(lake: Lake) -> dict[str, dict[str, int]]:
    found = {}
    for name in ("readings", "doubled", "per_device"):
        commit = CommitLog(lake.path, name).last()
        found[name] = {} if commit is None else dict(commit.counts_total)
    return found


def test_rows_are_counted_quarantined_or_stop_the_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "data", partitions=1)
    publish(journal, {"a": 5}, {"a": 150, "text": "no number"}, {"a": -1}, {"a": 30}, {"a": 2})
    lake = Lake(tmp_path / "lake", spark=spark, tables=[READINGS, DOUBLED, PER_DEVICE])
    names = ["records", "readings", "doubled", "per_device"]
    report = lake.run(names, source=journal.address)
    assert report.ok, report.errors
    assert counts(lake) == {
        "readings": {"failed hot": 1, "failed cold": 1},
        "doubled": {"failed small": 1},
        "per_device": {"failed even": 1},
    }
    assert report.counts["readings"] == {"failed hot": 1, "failed cold": 1}
    rows = lake.table("readings").orderBy("offset", "position").collect()
    assert [row.value_double for row in rows] == [5.0, None, None, -1.0, 30.0, 2.0]
    assert [row.metric for row in rows][:3] == ["a", "$quarantined", "text"]
    assert [row.v for row in lake.table("per_device").collect()] == [10.0]
    bad = {row.table: row for row in lake.table("quarantine").collect()}
    assert bad["readings"].reason == "fails hot: value_double < 100"
    assert bad["readings"].code == "expectation"
    assert (bad["readings"].topic, bad["readings"].offset) == ("t", 1)
    assert json.loads(bytes(bad["readings"].payload))["value_double"] == 150.0
    assert json.loads(bytes(bad["doubled"].payload)) == {"device": "t", "v": 60.0}
    assert "readings: 1 failed hot" in str(lake.status())

    # A stop: nothing of the step is there, and the next run comes to the same rows.
    publish(journal, {"a": 7}, {"ts": 5, "a": 8})
    for _ in range(2):
        report = lake.run(names)
        assert list(report.errors) == ["readings"]
        text = str(report.errors["readings"])
        assert "1 rows fail the expectation clock (claimed_time IS NULL), and nothing was" in text
        assert '"value_double":8.0' in text
        assert lake.table("readings").count() == 6
    calm = readings_table()
    report = Lake(lake.path, spark=spark, tables=[calm, DOUBLED, PER_DEVICE]).run(names)
    assert report.ok, report.errors
    assert lake.table("readings").count() == 8
    assert counts(lake)["readings"] == {"failed hot": 1, "failed cold": 1}


def test_no_expectation_hides_a_message(spark: SparkSession, tmp_path: Path) -> None:
    """Else a device whose values are all implausible is down, and a gap before them is lost."""
    journal = Journal(tmp_path / "data", partitions=1)
    for number in [*range(60), *range(65, 90)]:
        hot = {"seq": number, "a": 999.0 if number > 20 else 5.0, "b": number}
        at_us = TIME_US + number * 1_000_000
        journal.append(0, [record("t", json.dumps(hot).encode(), timestamp_us=at_us)])
    found = []
    for name, tables in (("checked", [READINGS]), ("free", [])):
        lake = Lake(tmp_path / name, spark=spark, tables=tables)
        report = lake.run("all", source=journal.address)
        assert report.ok, report.errors
        found.append({
            table: sorted(map(str, lake.table(table).collect()))
            for table in ("gaps", "missing", "outages", "availability", "quality", "latency")
        })  # fmt: skip
    assert found[0] == found[1]
    assert found[0]["missing"]


@pytest.mark.parametrize(
    ("condition", "told"),
    [("nothing > 1", "UNRESOLVED_COLUMN"), ("v +", "PARSE"), ("v + 1", "is of type double")],
)
def test_conditions_that_are_none(
    spark: SparkSession, tmp_path: Path, condition: str, told: str
) -> None:
    journal = Journal(tmp_path / "data", partitions=1)
    publish(journal, {"a": 5})
    table = Table(
        "doubled", "silver", "readings", _double, BIG, "twice",
        expectations=(expect("wrong", condition),),
    )  # fmt: skip
    lake = Lake(tmp_path / "lake", spark=spark, tables=[table])
    report = lake.run(["records", "readings", "doubled"], source=journal.address)
    assert list(report.errors) == ["doubled"]
    assert "table doubled: expectation wrong" in str(report.errors["doubled"])
    assert told in str(report.errors["doubled"])


def test_declarations_that_cannot_work() -> None:
    with pytest.raises(TableError, match="on_fail is 'drop'; there are warn, quarantine, stop"):
        expect("a", "v > 1", on_fail="drop")  # type: ignore[arg-type]
    with pytest.raises(TableError, match="expectation 'No Name'"):
        expect("No Name", "v > 1")
    with pytest.raises(TableError, match="two expectations have the same name"):
        readings_table(expectations=(expect("a", "true"), expect("a", "false")))
    with pytest.raises(TableError, match="on_fail='quarantine' is for silver tables"):
        Table(
            "g", "gold", "readings", _double, BIG, "g", keys=("device",), grain=Grain.whole(),
            expectations=(expect("a", "true", on_fail="quarantine"),),
        )  # fmt: skip
