import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.log.lake import commits, files
from holdfast.client.log.lake.commits import Commit, CommitLog, File, changed
from holdfast.client.log.lake.errors import RaceError
from holdfast.client.log.lake.files import LakeError, move_all
from holdfast_lake.lake.stores.store import ParquetStore, is_applied


def file(path: str, version: int, staged: str = "", rows: int = 1) -> File:
    return File(path=path, rows=rows, bytes=1, version=version, staged=staged)


def commit(version: int, added: list[File] | None = None, **fields: Any) -> Commit:
    given: dict[str, Any] = {
        "table": "t",
        "lineage": "l",
        "version": version,
        "revision": 1,
        "columns": [("a", "int")],
        "partition_by": [],
        "committed_at_us": 0,
        "took_s": 0.0,
        "rows": 0,
        "quarantined": 0,
        "rows_total": 0,
        "quarantined_total": 0,
        "files": added if added is not None else [file(f"t/{version}", version)],
    }
    return Commit(**{**given, **fields})


def test_last_and_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "LIVE_EVERY", 4)
    monkeypatch.setattr(commits, "COMMITS_KEPT", 4)
    writer, reader = CommitLog(tmp_path, "t"), CommitLog(tmp_path, "t")
    assert reader.last() is None
    assert reader.live(0) == []
    for version in range(1, 16):
        removed = [f"t/{version - 1}"] if version % 5 == 0 else []
        writer.record(commit(version, removed=removed))
        writer.save_live()
        last = reader.last()
        assert last is not None
        assert last.version == version
        gone = {v - 1 for v in range(5, version + 1, 5)}
        expected = [f"t/{v}" for v in range(1, version + 1) if v not in gone]
        assert [each.path for each in reader.live(version)] == expected
        assert [each.path for each in CommitLog(tmp_path, "t").live(version)] == expected
    assert [each.version for each in changed(reader.live(15), 12)] == [13, 15]
    # An older state can be asked for as long as its commits are kept.
    assert [each.path for each in reader.live(14)][-2:] == ["t/13", "t/14"]
    assert not (tmp_path / "t/_commits/00000001.json").exists()


def test_nobody_else_writes(tmp_path: Path) -> None:
    CommitLog(tmp_path, "t").record(commit(1))
    with pytest.raises(RaceError, match="another driver has made version"):
        CommitLog(tmp_path, "t").record(commit(1))


def test_somebody_else_writes_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lock is not honoured, a look whether the file exists comes too early."""
    written = files._written

    def overtaken(path: Path, data: bytes) -> Path:
        temporary = written(path, data)
        path.write_bytes(b"theirs")
        return temporary

    monkeypatch.setattr(files, "_written", overtaken)
    with pytest.raises(RaceError, match="another driver has made version"):
        CommitLog(tmp_path, "t").record(commit(1))
    (path,) = (tmp_path / "t/_commits").iterdir()
    assert path.read_bytes() == b"theirs"


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)
    test_nobody_else_writes(tmp_path)


def test_names_are_durable_up_to_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    (tmp_path / "lake/_work/t/1/rows/device=a").mkdir(parents=True)
    (tmp_path / "lake/_work/other").mkdir()
    monkeypatch.setattr(files, "sync_directory", synced.append)
    files.sync_names(tmp_path / "lake", "_work/t/1")
    expected = ["", "_work", "_work/t", "_work/t/1", "_work/t/1/rows", "_work/t/1/rows/device=a"]
    assert sorted(synced) == [tmp_path / "lake" / each for each in expected]
    files.sync_names(tmp_path / "lake", "_work/none")


def test_a_table_that_was_removed(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, "t")
    log.record(commit(1))
    log.record(commit(2))
    for path in (tmp_path / "t/_commits").iterdir():
        path.unlink()
    assert log.last() is None


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{", "is damaged"), (b'{"table": 1}', "is damaged"), (None, "is missing")],
)
def test_damage(tmp_path: Path, data: bytes | None, said: str) -> None:
    log = CommitLog(tmp_path, "t")
    log.record(commit(1))
    path = tmp_path / "t/_commits/00000001.json"
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(LakeError, match=said):
        CommitLog(tmp_path, "t").read(1)


def test_a_newer_format(tmp_path: Path) -> None:
    CommitLog(tmp_path, "t").record(commit(1, format=2))
    with pytest.raises(LakeError, match="has format 2, this version reads 1"):
        CommitLog(tmp_path, "t").last()


def every_crash(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> int:
    """Do it again and again, each time ended one rename or removal later; how often."""
    calls = 0
    limit = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == limit:
                raise InterruptedError
            calls += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    while True:
        calls = 0
        try:
            work()
        except InterruptedError:
            limit += 1
            continue
        return limit


def test_applying_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").mkdir()
    staged = [f"w/{n}" for n in range(3)]
    for n, path in enumerate(staged):
        (tmp_path / path).write_text(f"new {n}")
    old = [tmp_path / "t/d=1/data", tmp_path / "t/d=9/data", tmp_path / "_state/t/1"]
    for each in old:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("old")
    before = commit(1, [], state=[file("_state/t/1", 1)])
    new = commit(
        2,
        [file("t/d=1/data", 2, staged[0]), file("t/d=2/data", 2, staged[1])],
        state=[file("_state/t/2", 2, staged[2])],
        removed=["t/d=9/data"],
    )
    assert not is_applied(tmp_path, new)
    store = ParquetStore(tmp_path)
    assert every_crash(monkeypatch, lambda: store.apply(new, before)) >= 3
    assert is_applied(tmp_path, new)
    texts = {
        str(path.relative_to(tmp_path)): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert texts == {"t/d=1/data": "new 0", "t/d=2/data": "new 1", "_state/t/2": "new 2"}


def test_a_file_that_is_lost(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="is missing: its commit is recorded"):
        move_all([(tmp_path / "a", tmp_path / "b" / "c")])
