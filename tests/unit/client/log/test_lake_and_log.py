"""One stream from a lake and the log behind it: no row twice, none missing at the seam."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("pyspark")

from holdfast.cli.main import main
from holdfast.client.log import LogClient, LogGapError, LogMessage, Position
from holdfast.client.log.lake import parquet
from holdfast.client.log.lake import records as lake_reading
from holdfast.client.log.lake.commits import CommitLog, File
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.files import remove_all
from holdfast.client.log.lake.records import LakeRecords
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange, PartitionBounds
from holdfast.client.log.reading.seam import Seam
from holdfast.log.batch import Batch
from holdfast.log.columns.decode import SCHEMA, select
from holdfast.log.partition import partition_of
from holdfast.log.reading.topic_filter import TopicFilter
from holdfast.log.record import MESSAGE, SESSION
from holdfast_lake.lake.backfill.backfill import Backfill
from holdfast_lake.lake.backfill.parts import parse_days
from holdfast_lake.lake.lake import Lake
from holdfast_lake.lake.stores.store import ParquetStore
from holdfast_lake.source import source
from holdfast_lake.source.options import OptionError, parse
from holdfast_lake.source.source import HoldfastReader, HoldfastStreamReader, read_work
from tests.support.journal_files import TIME_US, Journal, record, serving
from tests.support.small_s3 import BUCKET, small_s3
from tests.support.spark_free_lake import forget_offsets, no_spark

Key = tuple[int, int]
HOUR_US = 3_600_000_000


def test_the_parts_of_a_range_are_the_range() -> None:
    rng = random.Random(11)
    kinds = set()
    for _ in range(4000):
        first = rng.randrange(10)
        lake = PartitionBounds(first, first + rng.randrange(12))
        begin = rng.randrange(25)
        log = PartitionBounds(begin, max(lake.end, begin + rng.randrange(12)))
        skipped = []
        if rng.random() < 0.3 and lake.first < lake.end:
            start = rng.randrange(lake.first, lake.end)
            skipped.append(OffsetRange(0, start, start + rng.randrange(1, 4)))
        seam = Seam({0: lake}, {0: log} if rng.random() < 0.9 else {}, skipped)
        bound = seam.bounds()[0]
        start = rng.randrange(bound.first, bound.end + 1)
        end = rng.randrange(start, bound.end + 1)
        parts = seam.divide([OffsetRange(0, start, end)] if start < end else [])
        has = {
            "lake": {o for each in parts.lake for o in range(each.start, each.end)},
            "log": {o for each in parts.log for o in range(each.start, each.end)},
            "missing": {o for each in parts.missing for o in range(each.start, each.end)},
        }
        holes = {o for each in skipped for o in range(each.start, each.end)}
        for offset in range(start, end):
            is_in_lake = lake.first <= offset < lake.end
            if is_in_lake:
                expected = "missing" if offset in holes else "lake"
            else:
                is_hole = lake.first < lake.end and lake.end <= offset < log.first
                expected = "missing" if is_hole and 0 in seam.log else "log"
            assert [name for name, own in has.items() if offset in own] == [expected]
            kinds.add(expected)
        assert sum(map(len, has.values())) == end - start
    assert kinds == {"lake", "log", "missing"}


class Site:
    """A journal of three days, and a lake that has some of it."""

    def __init__(self, folder: Path, root: str) -> None:
        self.journal = Journal(folder / "data", partitions=4, segment_bytes=900)
        self.root = f"{root}/lake"
        self.rng = random.Random(5)
        self.number = 0

    def publish(self, count: int, *, hours: int = 1) -> None:
        for _ in range(count):
            items = []
            topic = f"plant/{self.rng.randrange(12)}"
            for _ in range(self.rng.randrange(1, 5)):
                at_us = TIME_US + self.number * HOUR_US // 3 * hours
                if self.rng.random() < 0.2:
                    items.append(record("", b"{}", kind=SESSION, timestamp_us=at_us))
                    continue
                number, self.number = self.number, self.number + 1
                items.append(record(topic, b"%d" % number, timestamp_us=at_us))
            if items:
                self.journal.append(partition_of(topic.encode(), 4), items)

    def run(self, **options: str) -> Lake:
        lake = Lake(self.root, spark=no_spark())
        source = {"servers": self.journal.address, **options}
        report = lake.run(["records"], source=source)
        assert report.errors == {}
        return lake

    def grown(self) -> "Site":
        """Several commits, a tail that only the log has, and a head that only the lake has."""
        for _ in range(4):
            self.publish(30)
            self.run()
        for _ in range(6):
            self.journal.remove_first_segment()
        self.publish(25)
        assert any(self.journal.first_offset)
        return self

    def remove_past_the_lake(self) -> None:
        """Retention does not wait for the lake."""
        last = CommitLog(lake_reading.location(self.root).absolute(), "records").last()
        assert last is not None
        while any(self.journal.first_offset[int(p)] <= end + 2 for p, end in last.offsets.items()):
            self.publish(10)
            self.journal.remove_first_segment()

    def expected(self, wanted: Callable[[Any], bool] = lambda _: True) -> list[Key]:
        """All messages that were ever written."""
        return sorted(
            (each.partition, each.offset)
            for data in self.journal.batches
            for each in Batch(data).records()
            if each.kind == MESSAGE and wanted(each)
        )

    def options(self, **more: str) -> dict[str, str]:
        return {"servers": self.journal.address, "lake": self.root, **more}


@pytest.fixture(params=["directory", "objects"])
def site(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 16)
    if request.param == "directory":
        yield Site(tmp_path, str(tmp_path))
        return
    with small_s3(monkeypatch):
        yield Site(tmp_path, f"s3://{BUCKET}/{tmp_path.name}-{os.getpid()}")


def batch(options: dict[str, str]) -> HoldfastReader:
    checked = parse(options)
    return HoldfastReader(checked, select(checked.columns))


def keys(rows: list[dict[str, Any]]) -> list[Key]:
    return [(each["partition"], each["offset"]) for each in rows]


def read(reader: HoldfastReader | HoldfastStreamReader, works: Any) -> list[dict[str, Any]]:
    return [
        row
        for work in works
        for found in read_work(reader.options, work, reader.schema)
        for row in found.to_pylist()
    ]


def assert_ordered(found: list[Key]) -> None:
    for partition in {p for p, _ in found}:
        own = [offset for p, offset in found if p == partition]
        assert own == sorted(set(own))


@pytest.mark.parametrize("tasks", ["1", "3", "8"])
def test_a_batch_has_every_message_once(site: Site, tasks: str) -> None:
    site.grown()
    reader = batch(site.options(tasks=tasks))
    works = reader.partitions()
    assert len(works) <= int(tasks)
    assert any(each.lake for each in works)
    assert any(each.ranges for each in works)
    rows = read(reader, works)
    assert sorted(keys(rows)) == site.expected()
    payloads = sorted(int(each["payload"]) for each in rows)
    assert payloads == list(range(site.number))


def test_the_same_over_http(site: Site) -> None:
    site.grown()
    with serving(site.journal) as server:
        servers = f"127.0.0.1:{server.port}"
        reader = batch({"servers": servers, "lake": site.root, "tasks": "3"})
        assert sorted(keys(read(reader, reader.partitions()))) == site.expected()


def test_a_lake_alone(site: Site) -> None:
    site.grown()
    reader = batch({"lake": site.root})
    position = CommitLog(Lake(site.root, spark=no_spark()).path, "records").last()
    assert position is not None
    found = sorted(keys(read(reader, reader.partitions())))
    assert found == site.expected(lambda r: r.offset < position.offsets[str(r.partition)])


def test_topics_columns_and_times(site: Site) -> None:
    site.grown()
    reader = batch(site.options(topics="plant/3,plant/4", columns="payload,topic"))
    rows = read(reader, reader.partitions())
    assert {*rows[0]} == {"payload", "topic"}
    names = (b"plant/3", b"plant/4")
    assert len(rows) == len(site.expected(lambda r: r.topic in names)) > 20
    assert len({each["payload"] for each in rows}) == len(rows)
    for hours in (0, 7, 31, 60):
        start_us = TIME_US + hours * HOUR_US
        more = {"startingTimestamp": str(start_us // 1000)}
        reader = batch(site.options(**more))
        found = sorted(keys(read(reader, reader.partitions())))
        assert found == site.expected(lambda r, at=start_us: r.timestamp_us >= at)


@pytest.mark.parametrize("per_trigger", ["7", "100000"])
def test_a_stream_goes_over_the_seam_in_order(site: Site, per_trigger: str) -> None:
    site.grown()
    options = site.options(startingOffsets="earliest", maxRecordsPerTrigger=per_trigger, tasks="2")
    checked = parse(options)
    stream = HoldfastStreamReader(checked, SCHEMA)
    start, found = stream.initialOffset(), list[Key]()
    for turn in range(1000):
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        if end == start:
            break
        if turn == 3:
            site.run()  # The seam moves.
        found += keys(read(stream, stream.partitions(start, end)))
        start = end
    stream.stop()
    assert sorted(found) == site.expected()
    assert_ordered(found)


def test_a_stream_has_more_tasks_than_partitions_if_the_user_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "TASK_RECORDS", 1)
    monkeypatch.setattr(offsets, "SPLIT_RECORDS_MIN", 1)
    site.grown()
    for tasks, most in (("9", 9), ("3", 3), ("", 4)):
        monkeypatch.setattr(source, "default_tasks", lambda _: 100)
        more = {"tasks": tasks} if tasks else {}
        options = parse(site.options(startingOffsets="earliest", **more))
        stream = HoldfastStreamReader(options, SCHEMA)
        start = stream.initialOffset()
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        works = stream.partitions(start, end)
        found = [keys(read(stream, [work])) for work in works]
        stream.stop()
        assert len(works) == most
        assert sorted(key for own in found for key in own) == site.expected()
        for own in found:
            assert_ordered(own)
        if most <= 4:
            homes = [{p for p, _ in own} for own in found]
            assert sum(map(len, homes)) == len(set[int]().union(*homes))


def compact(site: Site) -> None:
    saved = Lake(site.root, spark=no_spark()).compact(["records"])
    assert saved["records"] > 0


class Crash(BaseException):
    """Stands for a process that ends."""


def test_a_day_is_made_again_between_the_plan_and_the_read(site: Site) -> None:
    for _ in range(4):
        site.publish(30)
        site.run()
    site.publish(10)
    reader = batch(site.options(tasks="3"))
    works = reader.partitions()
    before = {each.file.path for work in works for each in work.lake}
    lake = Lake(site.root, spark=no_spark())
    Backfill(lake, ["records"], parse_days("2026-09-22", "2026-09-23")).run()
    compact(site)
    assert not before <= {each.path for each in live(site)}
    assert sorted(keys(read(reader, works))) == site.expected()
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected()


def live(site: Site) -> list[File]:
    log = CommitLog(lake_reading.location(site.root).absolute(), "records")
    last = log.last()
    assert last is not None
    return log.live(last.version)


@pytest.mark.parametrize("what", ["step", "compaction"])
def test_a_run_that_died_between_a_commit_and_its_files(
    site: Site, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    site.grown()

    def die(*_: object) -> None:
        raise Crash

    apply = ParquetStore.apply
    monkeypatch.setattr(ParquetStore, "apply", die)
    with pytest.raises(Crash):
        {"step": site.run, "compaction": lambda: compact(site)}[what]()
    monkeypatch.setattr(ParquetStore, "apply", apply)
    reader = batch(site.options(tasks="3"))
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected()
    site.run()
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected()


@pytest.mark.parametrize("tasks", ["1", "5"])
def test_files_are_merged_between_the_plan_and_the_read(site: Site, tasks: str) -> None:
    site.grown()
    reader = batch(site.options(tasks=tasks))
    works = reader.partitions()
    compact(site)
    assert sorted(keys(read(reader, works))) == site.expected()
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected()


@pytest.mark.parametrize("after", range(6))
def test_files_are_merged_while_they_are_read(site: Site, after: int) -> None:
    """The reader has had some row groups of a file, and the rest is in another one."""
    for _ in range(3):
        site.publish(35, hours=0)
        site.run()
    reader = batch(site.options(tasks="1"))
    [work] = reader.partitions()
    assert [each.file.rows > 64 for each in work.lake] == [True] * 3
    found: list[Key] = []
    for number, each in enumerate(read_work(reader.options, work, reader.schema)):
        found += keys(each.to_pylist())
        if number == after:
            compact(site)
    assert sorted(found) == site.expected()


def test_a_file_that_nothing_replaced(site: Site) -> None:
    site.grown()
    reader = batch(site.options(tasks="1"))
    works = reader.partitions()
    file = works[0].lake[0].file
    remove_all([lake_reading.location(site.root).absolute() / file.path])
    with pytest.raises(LakeError, match=r"is missing: restore it, or backfill date=2026"):
        read(reader, works)


def test_records_that_neither_has(site: Site) -> None:
    site.grown()
    site.remove_past_the_lake()
    reader = batch(site.options())
    with pytest.raises(DataLossError, match="neither the lake nor the log has them"):
        reader.partitions()
    reader = batch(site.options(failOnDataLoss="false"))
    last = CommitLog(lake_reading.location(site.root).absolute(), "records").last()
    assert last is not None
    first = site.journal.first_offset
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected(
        lambda r: r.offset < last.offsets[str(r.partition)] or r.offset >= first[r.partition]
    )


def test_retention_removes_the_tail_that_the_lake_has_meanwhile(site: Site) -> None:
    site.grown()
    with serving(site.journal) as server:
        options = {"servers": f"127.0.0.1:{server.port}", "lake": site.root, "tasks": "2"}
        reader = batch(options)
        works = reader.partitions()
        site.run()
        site.publish(400)
        while min(site.journal.first_offset) < max(
            each.end for work in works for each in work.ranges
        ):
            site.journal.remove_first_segment()
        ends = {each.partition: each.end for work in works for each in work.ranges}
        assert sorted(keys(read(reader, works))) == site.expected(
            lambda r: r.offset < ends.get(r.partition, 0)
        )


def test_a_lake_of_an_older_version(site: Site) -> None:
    """Its files do not note their offsets."""
    site.grown()
    log = CommitLog(lake_reading.location(site.root).absolute(), "records")
    forget_offsets(log)
    reader = batch(site.options(tasks="3"))
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected()
    works = reader.partitions()
    compact(site)
    assert sorted(keys(read(reader, works))) == site.expected()


def test_a_clock_that_was_set_back(site: Site) -> None:
    """A record of Monday is behind those of Tuesday."""
    for hours in (0, 30, 2, 31, 3):
        items = [
            record("plant/0", b"%d" % n, timestamp_us=TIME_US + hours * HOUR_US + n)
            for n in range(20)
        ]
        site.journal.append(1, items)
        site.run()
    stream = HoldfastStreamReader(
        parse({"lake": site.root, "startingOffsets": "earliest", "tasks": "1"}), SCHEMA
    )
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    found = keys(read(stream, stream.partitions(start, end)))
    assert found == site.expected()


# Bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lake": "{root}/nothing"}, "is no lake with records"),
        ({"lake": "ftp://x/y"}, "the lake ftp"),
        ({}, 'option\\("lake", DIR\\), or both'),
        ({"path": "{data}", "lake": "{root}/lake"}, "is read from the broker that serves it"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, options: dict[str, str], text: str) -> None:
    Site(tmp_path, str(tmp_path)).grown()
    given = {
        name: value.format(root=tmp_path, data=tmp_path / "data") for name, value in options.items()
    }
    with pytest.raises((OptionError, LakeError), match=text):
        batch(given).partitions()


def test_a_lake_of_another_log(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = Site(tmp_path / "one", str(tmp_path / "one")).grown()
    other = Journal(tmp_path / "other", partitions=4)
    other.publish("a", b"1")
    other.files.write_manifest(replace(other.files.manifest, created="2"))
    with pytest.raises(LakeError, match="has the records of another log"):
        batch({"servers": other.address, "lake": one.root}).partitions()


def test_a_lake_of_some_topics(tmp_path: Path) -> None:
    site = Site(tmp_path, str(tmp_path))
    site.publish(40)
    site.run(topics="plant/1,plant/2")
    site.publish(10)
    with pytest.raises(LakeError, match="has only messages of the topics plant/1,plant/2"):
        batch(site.options()).partitions()
    with pytest.raises(LakeError, match="give topics among these"):
        batch(site.options(topics="plant/+")).partitions()
    reader = batch(site.options(topics="plant/2"))
    found = sorted(keys(read(reader, reader.partitions())))
    assert found == site.expected(lambda r: r.topic == b"plant/2")


def test_a_lake_is_not_made_of_itself(tmp_path: Path) -> None:
    site = Site(tmp_path, str(tmp_path)).grown()
    report = Lake(site.root, spark=no_spark()).run(["records"], source=site.options())
    assert "is no source of itself" in str(report.errors["records"])
    copy = Lake(tmp_path / "copy", spark=no_spark())
    assert copy.run(["records"], source=site.options()).errors == {}
    reader = batch({"lake": str(copy.path)})
    assert sorted(keys(read(reader, reader.partitions()))) == site.expected()


# The client


def places(messages: list[LogMessage]) -> list[Key]:
    return [(each.partition, each.offset) for each in messages]


def test_a_cursor_goes_over_the_seam(site: Site) -> None:
    site.grown()
    with serving(site.journal) as server:
        clients = [
            LogClient(f"127.0.0.1:{server.port}", wait_s=0, lake=site.root),
        ]
        for log in clients:
            rng = random.Random(3)
            found: list[LogMessage] = []
            position = Position()
            while len(found) < site.number:
                with log.read(start=position) as cursor:
                    for _ in range(rng.randrange(1, 60)):
                        found += [each for each in [next(cursor, None)] if each is not None]
                    position = Position.parse(str(cursor.position))
            assert sorted(places(found)) == site.expected()
            assert_ordered(places(found))
            assert sorted(int(each.payload) for each in found) == list(range(site.number))
            table = log.read().to_arrow("offset,partition")
            assert table.column_names == ["offset", "partition"]
            assert sorted(keys(table.to_pylist())) == site.expected()
            rows: list[Key] = []
            position = Position()
            while len(rows) < site.number:
                with log.read(start=position) as cursor:
                    rows += keys(next(cursor.arrow()).to_pylist())
                    position = cursor.position
            assert sorted(rows) == site.expected()


def test_a_cursor_follows_behind_the_lake(tmp_path: Path) -> None:
    site = Site(tmp_path, str(tmp_path)).grown()
    with serving(site.journal) as server:
        log = LogClient(f"127.0.0.1:{server.port}", wait_s=0, lake=site.root)
        with log.read(follow=True, idle_s=5) as cursor:
            lists = cursor.batches()
            found: list[LogMessage] = []
            while len(found) < site.number:
                found += next(lists)
            site.publish(5)
            while len(found) < site.number:
                found += next(lists)
    assert sorted(places(found)) == site.expected()


def test_a_cursor_of_a_lake_alone(tmp_path: Path) -> None:
    site = Site(tmp_path, str(tmp_path)).grown()
    log = LogClient.offline(lake=site.root)
    table = log.read("plant/1", start="2026-09-22T00:00:00Z").to_arrow("payload,timestamp")
    assert 0 < table.num_rows < site.number / 6


def test_a_gap_between_lake_and_log_is_told(tmp_path: Path) -> None:
    site = Site(tmp_path, str(tmp_path)).grown()
    site.remove_past_the_lake()
    log = LogClient(site.journal.address, lake=site.root)
    with pytest.raises(LogGapError):
        list(log.read())
    gaps: list[Any] = []
    found = places(list(log.read(on_gap=gaps.append)))
    missing = {(g.partition, o) for g in gaps for o in range(g.start, g.end)}
    assert sorted(found) == [each for each in site.expected() if each not in missing]


# Generations


def restore(site: Site, number: int) -> tuple[int, ...]:
    """The log goes back to half of each partition, and has other messages behind it."""
    files = site.journal.files
    same = tuple(offset // 2 for offset in site.journal.next_offset)
    former = (*files.manifest.former, (files.manifest.log_generation, same))
    files.write_manifest(replace(files.manifest, generation=number, former=former))
    return same


def test_a_lake_of_an_earlier_generation_goes_on_only_when_told(site: Site) -> None:
    for _ in range(3):
        site.publish(25)
        site.run()
    restore(site, 5)
    site.publish(10)
    with pytest.raises(LakeError, match="is of generation 0 of the log, which was restored and is"):
        batch(site.options()).partitions()
    with pytest.raises(LakeError, match="generation 0"):
        LogClient(site.journal.address, lake=site.root).read()
    reader = batch(site.options(failOnDataLoss="false"))
    works = reader.partitions()
    assert sorted(keys(read(reader, works))) == site.expected()
    assert any(each.lake for each in works)


def test_a_lake_that_went_over_a_restore_has_each_offset_once(site: Site) -> None:
    for number in (5, 9):
        for _ in range(2):
            site.publish(25)
            site.run(failOnDataLoss="false")
        restore(site, number)
    site.publish(10)
    site.run(failOnDataLoss="false")
    total = sum(each.rows for each in live(site))
    assert total > len(site.expected())
    compact(site)
    site.publish(10)
    for _ in range(2):
        reader = batch(site.options(tasks="2"))
        assert sorted(keys(read(reader, reader.partitions()))) == site.expected()
        site.run()


def test_what_a_lake_skipped_is_missing(site: Site) -> None:
    site.publish(30)
    site.run()
    site.remove_past_the_lake()
    site.publish(5)
    site.run(failOnDataLoss="false")
    site.publish(5)
    with pytest.raises(DataLossError, match="neither the lake nor the log has them"):
        batch(site.options()).partitions()
    reader = batch(site.options(failOnDataLoss="false"))
    found = sorted(keys(read(reader, reader.partitions())))
    last = CommitLog(lake_reading.location(site.root).absolute(), "records").last()
    assert last is not None
    skipped = [OffsetRange(each.partition, each.first, each.end) for each in last.skipped]
    assert skipped
    lost = {(each.partition, o) for each in skipped for o in range(each.start, each.end)}
    assert found == [each for each in site.expected() if each not in lost]


# The command


def test_dump_prints_a_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, str(tmp_path)).grown()
    data = str(site.journal.directory)

    def dumped(*words: str) -> list[dict[str, Any]]:
        assert main(["log", "dump", "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    found = dumped("--lake", site.root)
    # Each line is that of the directory, where that has the message.
    own = dumped("--kind", "message", data)
    both = [each for each in own if each in found]
    assert 0 < len(both) < len(own)
    places = {(each["partition"], each["offset"]) for each in (*found, *own)}
    assert sorted(places) == site.expected()
    alone = dumped("--lake", site.root, "--topic", "plant/1", "--from", "2026-09-23T00:00:00Z")
    assert 0 < len(alone) < len(found) / 6
    assert {each["topic"] for each in alone} == {"plant/1"}
    for words, text in (
        (["log", "dump"], "give either a data directory or --lake LAKE"),
        (["log", "dump", "--lake", site.root, data], "give either a data directory"),
        (["log", "dump", "--lake", str(tmp_path / "none")], "is no lake with records"),
        (["log", "dump", "--lake", "ftp://a/b"], "is no directory and in no object store"),
    ):
        assert main(words) == 2
        assert text in capsys.readouterr().err


def test_two_requests_for_a_small_file_of_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end and its rows; its size is in the commit. One that is gone or was overwritten is told
    in one line."""
    journal = Journal(tmp_path / "data")
    for number in range(50):
        journal.publish("a", b"%d" % number)
    with small_s3(monkeypatch) as s3:
        place = f"s3://{BUCKET}/plant"
        assert Lake(place, spark=no_spark()).run(["records"], source=journal.address).ok
        lake = LakeRecords(place)
        lake.refresh()
        pieces = lake.pieces([OffsetRange(p, b.first, b.end) for p, b in lake.bounds.items()])

        def read() -> int:
            found = lake_reading.read_lake(place, pieces, SCHEMA, TopicFilter())
            return sum(each.rows.num_rows for each in found)

        before = s3.requests
        assert read() == 50
        assert s3.requests - before == 2
        key = next(each for each in s3.objects if each.endswith(".parquet"))
        content = s3.objects[key]
        for other in (content[:-100], content[100:] + bytes(100), content[:40], b""):
            s3.objects[key] = other
            with pytest.raises(LakeError, match=f"{key} is damaged"):
                read()
        del s3.objects[key]
        with pytest.raises(LakeError, match=f"{key} is missing: restore it, or backfill date="):
            read()
