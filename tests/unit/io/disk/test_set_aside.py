"""A damaged directory is put aside, however often that is interrupted."""

import asyncio
import shutil
from pathlib import Path

import pytest

from holdfast.io.disk import quarantine as set_aside
from holdfast.io.disk import replacement
from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.io.disk.storage import Storage
from holdfast.log.files.data_directory import DataDirectoryError, lock_root
from tests.support.replica_bench import build_batch


def make(root: Path, incarnation: str) -> None:
    """As a node of a cluster leaves it."""
    Storage.open(root, "n1", 4, 1 << 20, incarnation).close()
    (root / "raft").mkdir(exist_ok=True)
    (root / "raft" / "log").write_bytes(b"raft")
    (root / "journal" / "00.log").write_bytes(b"records")
    (root / "quarantine").mkdir(exist_ok=True)
    (root / "quarantine" / "piece").write_bytes(b"damaged")


def test_nothing_is_moved_unless_it_was_decided(tmp_path: Path) -> None:
    make(tmp_path, "first")
    assert not set_aside.begin_anew(tmp_path)
    assert not set_aside.exists(tmp_path)
    assert (tmp_path / "journal" / "00.log").exists()


def test_the_node_begins_with_an_empty_directory(tmp_path: Path) -> None:
    make(tmp_path, "first")
    set_aside.mark(tmp_path)
    assert set_aside.begin_anew(tmp_path)
    assert set_aside.exists(tmp_path)
    aside = tmp_path / "damaged"
    assert (aside / "journal" / "00.log").read_bytes() == b"records"
    assert (aside / "raft" / "log").read_bytes() == b"raft"
    assert (tmp_path / "quarantine" / "piece").read_bytes() == b"damaged"
    storage = Storage.open(tmp_path, "n1", 4, 1 << 20, "second")
    try:
        assert storage.directory.manifest.incarnation == "second"
        assert not storage.journal.segments
    finally:
        storage.close()
    assert not set_aside.begin_anew(tmp_path)
    assert set_aside.forget(tmp_path, range(4), 0) is None
    assert not set_aside.exists(tmp_path)
    assert (tmp_path / "quarantine" / "piece").exists()


def test_the_logs_of_other_processes_stay(tmp_path: Path) -> None:
    """They run. An operator lets one of them lead what the damaged one had, so that has no part in
    anything any more. The users of the admin port stay, too."""
    make(tmp_path, "first")
    other = tmp_path / "processes" / "1"
    make(other, "other")
    (tmp_path / "access.json").write_bytes(b"users")
    set_aside.mark(tmp_path)
    assert set_aside.begin_anew(tmp_path)
    assert (other / "journal" / "00.log").read_bytes() == b"records"
    assert (tmp_path / "access.json").read_bytes() == b"users"
    assert {"journal", "manifest.json", "raft"} <= {
        path.name for path in (tmp_path / "damaged").iterdir()
    }


@pytest.mark.parametrize("moved", range(5))
def test_it_is_carried_on_after_an_interruption(
    moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever that was, nothing is lost and nothing stays behind."""
    make(tmp_path, "first")
    names = {path.name for path in tmp_path.iterdir()} - {"lock", "quarantine"}
    assert len(names) >= 3
    set_aside.mark(tmp_path)
    rename = Path.rename
    moves = 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal moves
        moves += 1
        if moves > moved:
            raise OSError("the power is gone")
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupted)
        if moved < len(names):
            with pytest.raises(OSError, match="power"):
                set_aside.begin_anew(tmp_path)
            assert (tmp_path / "begin-anew").exists()
    assert set_aside.begin_anew(tmp_path)
    assert {path.name for path in (tmp_path / "damaged").iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "quarantine", "damaged"}


def test_not_while_another_process_has_it(tmp_path: Path) -> None:
    make(tmp_path, "first")
    set_aside.mark(tmp_path)
    lock = lock_root(tmp_path)
    try:
        with pytest.raises(DataDirectoryError, match="served by another process"):
            set_aside.begin_anew(tmp_path)
    finally:
        lock.release()
    assert set_aside.begin_anew(tmp_path)


def test_records_that_the_others_dropped_are_named_until_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "POLL_S", 0.001)
    make(tmp_path, "first")
    set_aside.mark(tmp_path, keep=True)
    aside = replacement.AsideDirectory(tmp_path)
    assert aside.path
    assert aside.kept == []

    async def follow() -> None:
        changes: asyncio.Queue[list[str]] = asyncio.Queue()
        following = asyncio.create_task(aside.follow_kept(changes.put_nowait))
        await aside.forget(lambda: True, lambda: range(4), lambda: 0)
        while await changes.get() != ["diverged-1"]:
            pass
        shutil.rmtree(tmp_path / "diverged-1")
        while await changes.get():
            pass
        following.cancel()

    asyncio.run(asyncio.wait_for(follow(), 10.0))
    assert replacement.AsideDirectory(tmp_path).kept == []


def write(root: Path, batches: list[tuple[int, int, list[bytes]]], start: int = 0) -> None:
    """The log of partition 0: offset, epoch and payloads of each batch. It begins at `start`."""
    storage = Storage.open(root, "n1", 1, 1 << 20, "first")
    journal = storage.journal
    if start:
        journal.reset(0, start)
    for offset, epoch, payloads in batches:
        journal.append_batch(build_batch(0, offset, epoch, payloads))
    group = journal.close_write_group()
    if group is not None:
        GroupWriter(storage.directory, durable=True).write(group)
    storage.close()


FORMER = [(0, 1, [b"a", b"b"]), (2, 2, [b"c"])]


@pytest.mark.parametrize(
    ("present", "start", "is_kept"),
    [
        pytest.param(FORMER, 0, False, id="the same"),
        pytest.param([*FORMER, (3, 4, [b"d"])], 0, False, id="and more"),
        pytest.param([(0, 1, [b"a", b"b"])], 0, True, id="less"),
        pytest.param([(0, 1, [b"a", b"b"]), (2, 3, [b"x", b"y"])], 0, True, id="other records"),
        pytest.param([], 0, True, id="nothing"),
        pytest.param([(9, 5, [b"z"])], 9, False, id="removed by retention"),
    ],
)
def test_a_log_with_records_that_nobody_else_has_is_kept(
    tmp_path: Path, present: list[tuple[int, int, list[bytes]]], start: int, is_kept: bool
) -> None:
    """It was damaged, and the others were told to go on without it."""
    write(tmp_path, FORMER)
    set_aside.mark(tmp_path)
    assert set_aside.begin_anew(tmp_path)
    write(tmp_path, [*present], start)
    kept = set_aside.forget(tmp_path, [0], 0)
    assert (kept is not None) == is_kept
    assert set_aside.kept(tmp_path) == ["diverged-1"] * is_kept
    assert not set_aside.exists(tmp_path)


@pytest.mark.parametrize("generation", [0, 7])
def test_a_log_that_is_not_stored_here_any_more_is_not_compared(
    generation: int, tmp_path: Path
) -> None:
    """It is kept if records were given up since. They may have been those of this log."""
    write(tmp_path, FORMER)
    set_aside.mark(tmp_path)
    assert set_aside.begin_anew(tmp_path)
    write(tmp_path, [(0, 5, [b"x"])])
    kept = set_aside.forget(tmp_path, [], generation)
    assert (kept is not None) == (generation == 7)


def test_a_comparison_that_fails_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention removes a file of the present log while it is read."""
    monkeypatch.setattr(replacement, "AGAIN_S", 0.001)
    write(tmp_path, FORMER)
    set_aside.mark(tmp_path)
    aside = replacement.AsideDirectory(tmp_path)
    write(tmp_path, FORMER)
    answers: list[Exception | None] = [FileNotFoundError("gone"), DataDirectoryError("half"), None]
    forget = set_aside.forget

    def forget_at_last(root: Path, partitions: range, generation: int) -> Path | None:
        if (error := answers.pop(0)) is not None:
            raise error
        return forget(root, partitions, generation)

    monkeypatch.setattr(set_aside, "forget", forget_at_last)
    asyncio.run(aside.forget(lambda: True, lambda: range(1), lambda: 0))
    assert not answers
    assert not set_aside.exists(tmp_path)
    assert aside.path == ""
