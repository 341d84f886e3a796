"""Compaction of a lake's tables: every row stays, once, for all who read, wherever it ends."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from holdfast.client.log.lake import files
from holdfast.client.log.lake import files as exchanging
from holdfast.client.log.lake.commits import File, changed, spans
from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake import compaction as compacting
from holdfast_lake.lake import readers
from holdfast_lake.lake.compaction import plan
from tests.support.small_files_lake import COLUMNS, TABLE, SmallFiles, grow_at_random, is_ordered

ROOT = Path(__file__).parents[4]


def file(path: str, version: int, since: int = 0, rows: int = 1, size: int = 1) -> File:
    return File(
        path=path,
        rows=rows,
        bytes=size,
        version=version,
        since=since,
        partition={"date": path.split("/", 1)[0]},
    )


def parquet_files(site: SmallFiles) -> int:
    return len(list((site.lake / TABLE).rglob("*.parquet")))


def test_many_files_become_one_of_each_day(tmp_path: Path) -> None:
    site = SmallFiles(tmp_path)
    for day in (1, 1, 1, 2, 2):
        site.grow([day])
    before = site.log.last()
    made = list(site.compaction().run())
    assert [commit.rows for commit in made] == [0, 0]
    assert all(commit.merges for commit in made)
    assert parquet_files(site) == 2
    assert site.listed() == site.by_commits() == site.everything()
    last = site.log.last()
    assert before is not None
    assert last is not None
    assert (last.rows_total, last.offsets) == (before.rows_total, before.offsets)
    assert [(each.since, each.version) for each in site.log.live(last.version)] == [(1, 3), (4, 5)]
    merged = site.log.live(last.version)[0]
    assert merged.times["time"] == (0, 8_000_000)
    assert list(site.compaction().run()) == []
    assert not list((tmp_path / "_work").rglob("*.parquet"))


def test_a_table_without_partitions(tmp_path: Path) -> None:
    site = SmallFiles(tmp_path, partitioned=False)
    for _ in range(4):
        site.grow([1])
    list(site.compaction().run())
    assert parquet_files(site) == 1
    assert site.listed() == site.by_commits() == site.everything()
    site.grow([1])
    site.recover()
    assert site.listed() == site.everything()


def test_a_file_that_is_older_than_a_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    site = SmallFiles(tmp_path, partitioned=False)
    site.grow([1])
    site.grow([1])
    last = site.log.last()
    assert last is not None
    first = site.lake / site.log.live(1)[0].path
    pq.write_table(pq.read_table(first).drop_columns(["date"]), first)
    list(site.compaction().run())
    found = pq.read_table(next((site.lake / TABLE).glob("*.parquet")))
    assert found.column_names == [name for name, _ in COLUMNS]
    assert found["date"].to_pylist() == [None] * 3 + ["d1"] * 3
    assert found["n"].type == pa.int64()


@pytest.mark.parametrize("seed", range(6))
def test_whoever_reads_gets_each_row_once_and_in_order(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(compacting, "WINDOW_ROWS", rng.choice([10, 30, 1000]))
    site = SmallFiles(tmp_path)
    upto: dict[str, int] = {}
    for _ in range(6):
        for _ in range(rng.randint(1, 8)):
            grow_at_random(site, rng)
        for name in ("made", "other"):
            for _ in range(rng.randint(0, 3)):
                upto[name] = site.read_on(name, upto.get(name, 0), rng.randint(1, 20))
        list(site.compaction().run())
        assert site.listed() == site.by_commits() == site.everything()
        for after in {0, *upto.values()}:
            for rows_max in (1, 7, 1000):
                steps = site.steps(after, rows_max)
                assert [n for rows in steps for n in rows] == site.rows_behind(after)
                assert is_ordered(steps)


def test_what_somebody_has_not_read_is_left_alone(tmp_path: Path) -> None:
    site = SmallFiles(tmp_path)
    for _ in range(6):
        site.grow([1])
    site.read_upto(3)
    list(site.compaction().run())
    last = site.log.last()
    assert last is not None
    spans_there = [(each.since, each.version) for each in site.log.live(last.version)]
    assert spans_there == [(1, 3), (0, 4), (0, 5), (0, 6)]
    assert site.steps(3, 1) == [[9, 10, 11], [12, 13, 14], [15, 16, 17]]


def test_an_empty_table_that_was_built_in_once_holds_nothing_back(tmp_path: Path) -> None:
    for rows, left in ((0, 1), (5, 4)):
        site = SmallFiles(tmp_path / str(rows))
        for _ in range(6):
            site.grow([1])
        site.read_upto(3, compacting.FORMERLY_BUILT_IN, rows)
        list(site.compaction().run())
        assert parquet_files(site) == left


def test_a_table_that_begins_meanwhile(tmp_path: Path) -> None:
    site = SmallFiles(tmp_path)
    for _ in range(6):
        site.grow([1])
    compaction = site.compaction()
    compaction.reached = lambda point: site.read_upto(2) if point.endswith("staged") else None
    assert list(compaction.run()) == []
    assert parquet_files(site) == 6
    assert site.steps(2, 1000) == [site.everything()[6:]]
    assert not list((tmp_path / "_work").rglob("*.parquet"))


def test_merged_with_what_was_read_is_an_error() -> None:
    merged = file("a/1", 6, since=2)
    assert changed([merged], 1) == [merged]
    assert changed([merged], 6) == []
    with pytest.raises(LakeError, match="commits 2 to 6, of which those up to 3 were read before"):
        changed([merged], 3)


def test_spans() -> None:
    names = [
        [each.path for each in span]
        for span in spans(
            [file("b/4", 4), file("a/3", 3, since=1), file("c/2", 2), file("d/6", 6, since=5)]
        )
    ]
    assert names == [["c/2", "a/3"], ["b/4"], ["d/6"]]
    assert spans([]) == []


def test_plan_leaves_large_files_and_lonely_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "WINDOW_ROWS", 5)
    small, target = compacting.SMALL_BYTES, compacting.TARGET_BYTES
    assert plan([file("a/1", 1), file("b/2", 2)], 2) == []
    assert plan([file("a/1", 1, size=small), file("a/2", 2)], 2) == []
    many = [file(f"a/{n}", n) for n in range(1, 13)]
    found = [[each.path for each in merges[0].files] for merges in plan(many, 12)]
    assert [len(names) for names in found] == [5, 5, 2]
    monkeypatch.setattr(compacting, "WINDOW_ROWS", 100)
    heavy = [file(f"a/{n}", n, size=target // 2 - 1) for n in range(1, 8)]
    assert [len(each.files) for each in plan(heavy, 7)[0]] == [3, 3]


def test_rows_that_are_missing_stop_it(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    site = SmallFiles(tmp_path)
    site.grow([1])
    site.grow([1])
    path = site.lake / site.log.live(1)[0].path
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(LakeError, match="have 5 rows, their commits say 6"):
        list(site.compaction().run())
    assert parquet_files(site) == 2


class Ended(BaseException):
    """Stands for a process that ends."""


STEPS: list[tuple[Any, str]] = [
    (os, "replace"),
    (os, "link"),
    (Path, "unlink"),
    (Path, "mkdir"),
    (shutil, "rmtree"),
    (exchanging, "exchange"),
    (files, "sync_directory"),
]


def end_at(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """At the call with this number of what changes the directory, before it or after it."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Ended
            return function(*args, **kwargs)

        return call

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("partitioned", [True, False])
def test_it_may_end_anywhere(tmp_path: Path, partitioned: bool) -> None:
    first = SmallFiles(tmp_path / "first", partitioned=partitioned)
    for day in (1, 2, 1, 1, 2):
        first.grow([day])
    limit = 0
    done = False
    while not done:
        site = first.copy_to(tmp_path / str(limit))
        with pytest.MonkeyPatch.context() as patched:
            end_at(patched, limit)
            try:
                list(site.compaction().run())
                done = True
            except Ended:
                pass
        assert site.listed() == site.by_commits() == site.everything(), limit
        site.recover()
        site.recover()
        assert site.listed() == site.by_commits() == site.everything(), limit
        list(site.compaction().run())
        assert parquet_files(site) == (2 if partitioned else 1)
        assert not list((site.lake / "_work").rglob("*.parquet"))
        assert site.listed() == site.by_commits() == site.everything(), limit
        limit += 1
    assert limit > 20


def test_it_may_end_anywhere_where_directories_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lists the files may see rows twice then, but never misses one."""
    monkeypatch.setattr(exchanging, "_renameat2", lambda: None)
    first = SmallFiles(tmp_path / "first")
    for _ in range(4):
        first.grow([1])
    limit = 0
    done = False
    while not done:
        site = first.copy_to(tmp_path / str(limit))
        with pytest.MonkeyPatch.context() as patched:
            end_at(patched, limit)
            try:
                list(site.compaction().run())
                done = True
            except Ended:
                pass
        assert site.by_commits() == site.everything(), limit
        assert set(site.listed()) == set(site.everything()), limit
        site.recover()
        assert site.listed() == site.by_commits() == site.everything(), limit
        limit += 1
    assert parquet_files(site) == 1
    assert limit > 10


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    site = SmallFiles(tmp_path)
    site.grow([1])
    site.grow([1])
    list(site.compaction().run())
    assert parquet_files(site) == 1
    assert site.listed() == site.by_commits() == site.everything()


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.client.log.lake import files as exchanging
from holdfast_lake.lake.stores import store
from tests.support.small_files_lake import SmallFiles

def end(point):
    if point == "records " + sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

def replace_in(*words):
    done = exchanging.replace_in(*words)
    end("records exchanged")
    return done

store.replace_in = replace_in
compaction = SmallFiles(Path(sys.argv[1])).compaction()
compaction.reached = end
list(compaction.run())
"""


@pytest.mark.parametrize("point", ["began", "staged", "recorded", "exchanged", "applied"])
def test_kill_9(tmp_path: Path, point: str) -> None:
    site = SmallFiles(tmp_path)
    for day in (1, 1, 2, 2):
        site.grow([day])
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), point],
        env={**os.environ, "PYTHONPATH": paths},
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert site.listed() == site.by_commits() == site.everything()
    site.recover()
    list(site.compaction().run())
    assert site.listed() == site.by_commits() == site.everything()
    assert parquet_files(site) == 2


def test_nobody_replaces_what_is_being_read(tmp_path: Path) -> None:
    site = SmallFiles(tmp_path)
    site.grow([1])
    site.grow([1])
    with readers.reading(tmp_path, TABLE), readers.reading(tmp_path, TABLE):
        thread = threading.Thread(target=lambda: list(site.compaction().run()))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert parquet_files(site) == 2
    thread.join(60)
    assert not thread.is_alive()
    assert parquet_files(site) == 1


def test_waits_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READING_MAX_S", 0.05)
    monkeypatch.setattr(readers, "REPLACING_MAX_S", 0.05)
    with (
        readers.reading(tmp_path, TABLE),
        pytest.raises(readers.BusyError, match="is being read"),
        readers.exclusively(tmp_path, TABLE),
    ):
        pass
    with (
        readers.exclusively(tmp_path, TABLE),
        pytest.raises(TimeoutError, match="have been replaced for"),
        readers.reading(tmp_path, TABLE),
    ):
        pass
