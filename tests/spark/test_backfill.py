"""The backfill of days: what it changes is what a new lake has, and nothing else changes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")
pytest.importorskip("deltalake")

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from holdfast.client.log.lake.commits import CommitLog, history
from holdfast.client.log.lake.errors import LakeError
from holdfast.log.partition import partition_of
from holdfast_lake.cli.backfill import _lines
from holdfast_lake.lake.backfill.backfill import Backfill, BackfillReport
from holdfast_lake.lake.backfill.parts import parse_days
from holdfast_lake.lake.lake import Lake
from tests.support.journal_files import TIME_US, Journal, record

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),
]

HOUR_US = 3_600_000_000
DAY = ["2026-09-21", "2026-09-22", "2026-09-23"]
TABLES = ("records", "readings", "gaps", "missing", "device_minutes")
RULES = """
from holdfast_lake.tables import Rule, readings_table

TABLES = [readings_table([Rule("plant/+/data", decode="json", device="level 2", time="{time}")])]
"""


class Crash(Exception):
    """Stands for a process that ends."""


def rules(folder: Path, time: str) -> Path:
    """A file of --tables whose rule takes the event time from a field of the payload."""
    folder.mkdir(exist_ok=True)
    path = folder / "my_tables.py"
    path.write_text(RULES.format(time=time))
    return path


def fill(journal: Journal) -> None:
    """60 messages of three devices over three days, with gaps, repetitions and rubbish."""
    for number in range(60):
        at_us = TIME_US + number * HOUR_US
        device, count = f"d{number % 3}", number // 3
        text = {"ts": at_us // 1000, "at": (at_us - 5 * HOUR_US) // 1000, "seq": count, "v": number}
        payload = b'{"ts":' if number % 20 == 7 else json.dumps(text).encode()
        if number % 11 == 5:
            continue  # a gap
        topic = f"plant/{device}/data"
        for _ in range(2 if number % 13 == 4 else 1):
            put(journal, topic, payload, at_us)


def put(journal: Journal, topic: str, payload: bytes, at_us: int) -> None:
    partition = partition_of(topic.encode(), journal.partitions)
    journal.append(partition, [record(topic, payload, timestamp_us=at_us)])


def rows(lake: Lake, name: str, days: list[str] | None = None) -> Counter[Any]:
    """The rows of a table, of some days of its partitions."""
    frame = lake.table(name)
    found = frame.collect()
    return Counter(row for row in found if days is None or str(row["date"]) in days)


def states(lake: Lake) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (lake.path / "_state/readings").iterdir()}


def everything(lake: Lake) -> dict[str, Counter[Any]]:
    return {name: rows(lake, name) for name in (*TABLES, "quarantine")}


def backfill(lake: Lake, *names: str, first: str, last: str | None = None) -> BackfillReport:
    return Backfill(lake, names, parse_days(first, last)).run()


def crash_at(lake: Lake, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def reached(point: str) -> None:
        if point == where:
            raise Crash(point)

    engine = lake.engine()
    monkeypatch.setattr(lake, "writing_engine", lambda: replace(engine, reached=reached))


@pytest.mark.parametrize("store", ["delta", pytest.param("parquet", marks=pytest.mark.long)])
def test_a_backfill_is_what_a_new_lake_has(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    journal = Journal(tmp_path / "data", partitions=4, segment_bytes=1 << 20)
    fill(journal)
    old, new = rules(tmp_path / "old", "ts"), rules(tmp_path / "new", "at")
    lake = Lake(tmp_path / "lake", spark=spark, store=store, tables=[old])
    wanted = Lake(tmp_path / "wanted", spark=spark, store=store, tables=[new])
    for each in (lake, wanted):
        assert each.run(TABLES, source=journal.address).ok
    before, state = everything(lake), states(lake)
    position = {name: CommitLog(lake.path, name).last() for name in TABLES}

    # By the same rules it changes no row, no state and no position.
    report = backfill(lake, first=DAY[1], last=DAY[1])
    assert everything(lake) == before
    assert states(lake) == state
    for name in TABLES[:2]:
        last, then = CommitLog(lake.path, name).last(), position[name]
        assert last is not None
        assert then is not None
        assert (last.consumed, last.offsets) == (then.consumed, then.offsets)
        assert (last.rows_total, last.quarantined_total) == (
            then.rows_total,
            then.quarantined_total,
        )
    assert any(line.startswith(f"readings, {DAY[1]} to {DAY[1]}:") for line in _lines(report))
    told = [each for each in history(lake.path, "readings") if each.kind == "backfill"]
    assert told[0].change.startswith(f"{DAY[1]} to {DAY[1]}, ")

    # Other rules: from the first day on as in a lake that had them always, and as before until it.
    lake = Lake(tmp_path / "lake", spark=spark, tables=[new])
    with pytest.raises(LakeError, match="leave --to out"):
        Backfill(lake, (), parse_days(DAY[1], DAY[1]))
    crash_at(lake, monkeypatch, "readings recorded")
    with pytest.raises(Crash):
        backfill(lake, first=DAY[1])
    monkeypatch.undo()
    again = Lake(tmp_path / "lake", spark=spark)
    with pytest.raises(LakeError, match=f"run `holdfast pipeline backfill .* --from {DAY[1]}`"):
        again.run(TABLES)
    assert backfill(again, first=DAY[1]).run.ok
    for name in ("readings", "quarantine"):
        assert rows(again, name, DAY[:1]) == +Counter(
            {row: n for row, n in before[name].items() if str(row["date"]) == DAY[0]}
        )
        assert rows(again, name, DAY[1:]) == rows(wanted, name, DAY[1:])
    # The hours of rows that have gone are made again, and those of the new rows are.
    minutes = rows(again, "device_minutes")
    assert minutes != before["device_minutes"]
    assert rows(again, "device_minutes", DAY[2:]) == rows(wanted, "device_minutes", DAY[2:])
    if store == "delta":
        seen = DeltaTable(tmp_path / "lake" / "readings").to_pyarrow_table()
        assert seen.num_rows == sum(rows(again, "readings").values())
        bad = DeltaTable(tmp_path / "lake" / "quarantine").to_pyarrow_table()
        assert bad.num_rows == sum(rows(again, "quarantine").values())

    # The next run goes on, from the state of the new rules.
    number = 60 // 3
    at_us = TIME_US + 60 * HOUR_US
    text = {"ts": at_us // 1000, "at": at_us // 1000, "seq": number, "v": 1}
    put(journal, "plant/d0/data", json.dumps(text).encode(), at_us)
    for each in (again, wanted):
        assert each.run(TABLES).ok
    assert rows(again, "readings", DAY[1:]) == rows(wanted, "readings", DAY[1:])


@pytest.mark.long
def test_a_backfill_that_ends_anywhere(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a lake that began too late, read from the log: nothing changes, or all does."""
    journal = Journal(tmp_path / "data", partitions=4, segment_bytes=1 << 20)
    fill(journal)
    whole = Lake(tmp_path / "whole", spark=spark)
    assert whole.run(TABLES, source=journal.address).ok
    for point in ("staged", "recorded"):
        for table in ("gaps", "device_minutes"):
            path = tmp_path / f"{table}-{point}"
            late = Lake(path, spark=spark)
            source = {"servers": journal.address, "startingTimestamp": f"{DAY[1]}T00:00:00Z"}
            assert late.run(TABLES, source=source).ok
            before = everything(late)
            crash_at(late, monkeypatch, f"{table} {point}")
            report = backfill(late, "records", first=DAY[0], last=DAY[0])
            assert isinstance(report.run.errors[table], Crash)
            monkeypatch.undo()
            late = Lake(path, spark=spark)
            assert late.run(TABLES).ok
            assert rows(late, "records") == rows(whole, "records")
            for name in ("readings", "quarantine"):
                assert rows(late, name, DAY[:1]) == rows(whole, name, DAY[:1])
                assert rows(late, name, [*DAY[1:], "2026-09-24"]) == +Counter(
                    {row: n for row, n in before[name].items() if str(row["date"]) != DAY[0]}
                )
            assert rows(late, "device_minutes") == rows(whole, "device_minutes")
