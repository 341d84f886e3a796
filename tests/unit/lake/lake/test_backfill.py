"""The backfill of days: what it changes is what a new lake has, wherever it ends. Without Spark."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from holdfast.cli.main import main
from holdfast.client.log.lake.commits import CommitLog, history
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.files import remove_all
from holdfast.log.partition import partition_of
from holdfast_lake.cli import backfill as command
from holdfast_lake.lake.backfill.backfill import Backfill, BackfillReport
from holdfast_lake.lake.backfill.parts import TablePart, parse_days, quarantined_files
from holdfast_lake.lake.engine import locked
from holdfast_lake.lake.lake import Lake
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.small_s3 import BUCKET, small_s3
from tests.support.spark_free_lake import forget_offsets, no_spark, rows, state

HOUR_US = 3_600_000_000
DAY = ["2026-09-21", "2026-09-22", "2026-09-23"]
TABLES = ("records", "readings")
RULES = """
from holdfast_lake.tables import Rule, readings_table

TABLES = [readings_table([Rule("plant/+/data", decode="json", device="level 2", time="{time}")])]
"""


class Crash(BaseException):
    """Stands for a process that ends."""


class Site:
    """A journal of three days, and lakes of it."""

    def __init__(self, folder: Path, spark: Any, root: str) -> None:
        self.folder = folder
        self.spark = spark
        self.root = root
        self.journal = Journal(folder / "data", partitions=4, segment_bytes=300)
        for number in range(60):
            if number % 11 != 5:  # else a gap
                self.put(number, broken=number % 20 == 7)
                if number % 13 == 4:
                    self.put(number)  # a repetition

    def put(self, number: int, *, broken: bool = False) -> None:
        at_us = TIME_US + number * HOUR_US
        topic, count = f"plant/d{number % 3}/data", number // 3
        text = {"ts": at_us // 1000, "at": (at_us - 5 * HOUR_US) // 1000, "seq": count, "v": number}
        payload = b'{"ts":' if broken else json.dumps(text).encode()
        partition = partition_of(topic.encode(), self.journal.partitions)
        self.journal.append(partition, [record(topic, payload, timestamp_us=at_us)])

    def lake(self, name: str, time: str = "") -> Lake:
        """A lake; `time` is the field of the payload from which its rule takes the event time."""
        given = []
        if time:
            path = self.folder / time / "my_tables.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(RULES.format(time=time))
            given = [path]
        return Lake(f"{self.root}/{name}", spark=self.spark, tables=given)

    def run(self, lake: Lake, **options: str) -> Lake:
        report = lake.run(TABLES, source={"servers": self.journal.address, **options})
        assert report.errors == {}
        return lake


POINTS = [("file", "staged"), ("file", "recorded"), ("file", "applied"), ("s3", "recorded")]


@pytest.fixture
def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    spark = no_spark()
    if getattr(request, "param", "file") == "file":
        yield Site(tmp_path, spark, str(tmp_path))
        return
    with small_s3(monkeypatch):
        # The locks of this machine know a lake by its name: not that of another worker's test.
        yield Site(tmp_path, spark, f"s3://{BUCKET}/{os.getpid()}")


def quarantine(lake: Lake) -> dict[str, int]:
    found: Counter[str] = Counter()
    for file in quarantined_files(lake.path, "readings", TablePart()):
        found[str(file.partition["date"])] += file.rows
    return dict(found)


def everything(lake: Lake) -> Any:
    return [rows(lake, name) for name in TABLES], quarantine(lake), state(lake)


def backfill(lake: Lake, *names: str, first: str, last: str | None = None) -> BackfillReport:
    return Backfill(lake, names, parse_days(first, last)).run()


def crash_at(lake: Lake, where: str) -> None:
    def reached(point: str) -> None:
        if point == where:
            raise Crash(point)

    engine = lake.engine()
    lake.writing_engine = lambda: replace(engine, reached=reached)  # type: ignore[method-assign]


def test_the_same_rules_change_nothing(site: Site) -> None:
    lake = site.run(site.lake("lake", "ts"))
    before = everything(lake)
    commits = {name: CommitLog(lake.path, name).last() for name in TABLES}
    for names in ((), ("records",)):
        report = backfill(lake, *names, first=DAY[1], last=DAY[1])
        assert everything(lake) == before
        assert report.rows["readings"].keys() == {DAY[1]}
        assert len(set(report.rows["readings"][DAY[1]])) == 1
    for name, was in commits.items():
        last = CommitLog(lake.path, name).last()
        assert was is not None
        assert last is not None
        assert last.offsets == was.offsets
        assert (last.rows_total, last.quarantined_total) == (was.rows_total, was.quarantined_total)
    told = [each.change for each in history(lake.path, "readings") if each.kind == "backfill"]
    assert len(told) == 2
    assert told[0].startswith(f"{DAY[1]} to {DAY[1]}, ")
    # The files of a day that was made again are merged as others are, and a run goes on.
    for number in (61, 62):
        site.put(number)
        site.run(lake)
    assert lake.compact(["records"])["records"] == 2
    backfill(lake, first=DAY[1], last="2026-09-24")
    assert rows(lake, "readings") == rows(site.run(site.lake("wanted", "ts")), "readings")


@pytest.mark.parametrize(("site", "point"), POINTS, indirect=["site"])
def test_other_rules_hold_from_a_day_on(site: Site, point: str) -> None:
    lake, wanted = site.run(site.lake("lake", "ts")), site.run(site.lake("wanted", "at"))
    before = rows(lake, "readings", DAY[:1])
    position = CommitLog(lake.path, "readings").last()
    lake = site.lake("lake", "at")
    with pytest.raises(LakeError, match="leave --to out"):
        Backfill(lake, (), parse_days(DAY[1], DAY[1]))
    crash_at(lake, f"readings {point}")
    with pytest.raises(Crash):
        backfill(lake, first=DAY[1])
    again = site.lake("lake")
    with pytest.raises(LakeError, match=f"`holdfast pipeline backfill readings --from {DAY[1]}`"):
        site.run(again)
    backfill(again, first=DAY[1])
    assert rows(again, "readings", DAY[:1]) == before
    last = CommitLog(again.path, "readings").last()
    assert last is not None
    assert position is not None
    assert last.consumed == position.consumed
    site.put(61)
    for each in (again, wanted):
        site.run(each)
    later = [*DAY[1:], "2026-09-24"]
    assert rows(again, "readings", later) == rows(wanted, "readings", later)
    assert quarantine(again) == quarantine(wanted)
    assert state(again) == state(wanted)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("site", "point"), POINTS, indirect=["site"])
def test_days_of_the_log_before_the_lake_began(site: Site, table: str, point: str) -> None:
    """All tables have the days, or none has them, after the next run."""
    wanted = site.run(site.lake("wanted"))
    late = site.run(site.lake("late"), startingTimestamp=f"{DAY[1]}T00:00:00Z")
    before = everything(late)
    crash_at(late, f"{table} {point}")
    with pytest.raises(Crash):
        backfill(late, "records", first=DAY[0], last=DAY[0])
    late = site.run(site.lake("late"))
    if (table, point) == ("records", "staged"):
        assert everything(late) == before
        return
    assert rows(late, "records") == rows(wanted, "records")
    assert rows(late, "readings", DAY[:1]) == rows(wanted, "readings", DAY[:1])
    later = [*DAY[1:], "2026-09-24"]
    assert rows(late, "readings", later) == before[0][1]
    assert state(late) == before[2]


def test_a_backfill_without_rows_leaves_no_lag(site: Site) -> None:
    """A gold table notes that it has seen the replacement, although it has nothing to make."""
    site.journal = Journal(site.folder / "broken", partitions=4)
    site.put(1, broken=True)
    lake = site.lake("lake")
    names = (*TABLES, "device_minutes")
    assert lake.run(names, source={"servers": site.journal.address}).ok
    assert backfill(lake, first=DAY[0]).run.ok
    assert {table.lag for table in lake.status().tables if table.name in names} == {0}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_file_of_records_is_made_again(site: Site, is_there: bool) -> None:
    lake = site.run(site.lake("lake", "ts"))
    site.put(61)
    site.run(lake)
    before = everything(lake)
    log = CommitLog(lake.path, "records")
    path = lake.path / next(file for file in log.live(2) if file.partition["date"] == DAY[1]).path
    remove_all([path])
    if is_there:
        path.write_bytes(b"PAR1 and no more")
    backfill(lake, "records", first=DAY[1], last=DAY[1])
    assert everything(lake) == before
    # A file of a backfill has records of many commits, and its own commit tells which.
    path = lake.path / next(file for file in log.live(3) if file.partition["date"] == DAY[1]).path
    path.write_bytes(b"PAR1 and no more")
    backfill(lake, "records", first=DAY[1], last=DAY[1])
    assert everything(lake) == before
    # An older version did not note it.
    version, place = forget_offsets(log), DAY[1]
    path = lake.path / next(f for f in log.live(version) if f.partition["date"] == place).path
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(LakeError, match=r"is damaged: .* Restore it, or build the table again"):
        backfill(lake, "records", first=DAY[1], last=DAY[1])


@pytest.mark.parametrize("names", [(), ("records",)])
def test_a_missing_file_of_the_newest_commit_is_made_again(
    site: Site, names: tuple[str, ...]
) -> None:
    lake = site.run(site.lake("lake", "ts"))
    before = everything(lake)
    for name in names or ("readings",):
        files = CommitLog(lake.path, name).live(1)
        remove_all(lake.path / f.path for f in files if f.partition["date"] == DAY[1])
        with pytest.raises(LakeError, match="is missing: its commit is recorded"):
            site.run(lake)
        # Another day does not bring the rows back.
        with pytest.raises(LakeError, match="is missing: its commit is recorded"):
            backfill(lake, *names, first=DAY[2], last=DAY[2])
    backfill(lake, *names, first=DAY[1], last=DAY[1])
    assert everything(lake) == before
    # The state is that of the end of the table, which no day has.
    lake = site.run(site.lake("other", "ts"))
    last = CommitLog(lake.path, "readings").newest()
    assert last is not None
    remove_all(lake.path / file.path for file in last.state[:1])
    with pytest.raises(LakeError, match="is missing: its commit is recorded"):
        backfill(lake, first=DAY[1], last=DAY[1])


def test_records_are_not_read_again_by_other_rules(site: Site) -> None:
    """Else `readings` follow by the new rules, from a state of the old ones."""
    site.run(site.lake("lake", "ts"))
    for last in (None, DAY[1]):
        with pytest.raises(LakeError, match="without --tables first, and then name readings"):
            backfill(site.lake("lake", "at"), "records", first=DAY[1], last=last)


def test_a_table_that_has_not_read_all_is_made_again(site: Site) -> None:
    """Else the rows of the days after the replaced ones would never be read."""
    late = site.run(site.lake("late"), startingTimestamp=f"{DAY[1]}T00:00:00Z")
    site.put(62)
    assert late.run(["records"]).ok
    backfill(late, "records", first=DAY[0], last=DAY[0])
    assert rows(late, "readings") == rows(site.run(site.lake("wanted")), "readings")


def test_what_is_refused(site: Site) -> None:
    lake = site.lake("lake")
    with pytest.raises(LakeError, match="there is no lake"):
        Backfill(lake, (), parse_days(DAY[0], None))
    site.run(lake)
    with pytest.raises(LakeError, match=f"it has {DAY[0]} to 2026-09-24"):
        Backfill(lake, (), parse_days("2026-08-01", "2026-08-02"))
    with pytest.raises(LakeError, match="gaps has not been written yet"):
        Backfill(lake, ("gaps",), parse_days(DAY[0], None))
    with pytest.raises(LakeError, match="is before --from"):
        parse_days("2026-08-02", "2026-08-01")
    for text in ("yesterday", "2026-13-01", "0000-00-00", "2026-11-20T99"):
        with pytest.raises(LakeError, match="is no day such as"):
            parse_days(text, None)
    assert str(parse_days("2026-11-20T23:30-01:00", None)) == "2026-11-21 on"
    with locked(lake.path, ["readings"]), pytest.raises(LakeError, match="stop that run first"):
        backfill(lake, first=DAY[0])
    before = everything(lake)
    for _ in range(8):
        site.journal.remove_first_segment()
    with pytest.raises(LakeError, match=r"It has all of the days from 2026-09-2. on"):
        backfill(lake, "records", first=DAY[0], last=DAY[0])
    assert everything(lake) == before


def test_the_commands_of_the_document(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.run(site.lake("lake", "ts"))
    site.lake("other", "at")  # writes the file of rules
    monkeypatch.chdir(site.folder / "at")
    opened = []

    def open_lake(args: argparse.Namespace) -> Lake:
        opened.append(Lake(site.folder / args.lake, spark=site.spark, tables=args.tables))
        return opened[-1]

    monkeypatch.setattr(command, "open_lake", open_lake)
    monkeypatch.setattr(command, "spark_of", lambda *_: nullcontext())
    text = (Path(__file__).parents[4] / "docs/backfill.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("holdfast pipeline backfill")]
    for line in lines:
        assert main(line.split()[1:]) == 0
    assert len(opened) == len(lines) == 3
    printed = capsys.readouterr()
    assert "readings, 2026-09-21 to 2026-09-22: 63 rows, as before" in printed.out
    assert "  2026-09-22: 46 rows, as before" in printed.out
    assert "new rows" in printed.err
    # The same words through a real command line: what it refuses is one line.
    monkeypatch.undo()
    lake = str(site.folder / "lake")
    assert (
        main(["pipeline", "backfill", "--lake", lake, "--from", "2020-01-01", "--to", "2020"]) == 2
    )
    assert "holdfast: '2020' is no day such as 2026-11-20" in capsys.readouterr().err
