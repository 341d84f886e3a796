"""What a member must not forget: crashes, full disks, foreign files."""

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.sqlite import trouble_of
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.streams import FORMER_MAX
from holdfast_federation.sidecar.store import file as store_file
from holdfast_federation.sidecar.store import store as store_module
from holdfast_federation.sidecar.store.file import (
    MemberStoreChange,
    MemberStoreError,
    MemberStoreFull,
    StoredMember,
    StoreFile,
)
from holdfast_federation.sidecar.store.member_files import StoreFileThread
from holdfast_federation.sidecar.store.store import MemberStore
from tests.support.scripted_edge import until
from tests.support.small_disk import small_disk
from tests.support.store_process import NODE, ORIGIN

ROOT = Path(__file__).parents[4]


def own(sequence: int) -> MessageId:
    return MessageId(NODE, 1, sequence)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 100)

    asyncio.run(limited())


def read(path: Path) -> StoredMember:
    file = StoreFile(path, NODE)
    kept = file.open()
    file.close()
    return kept


def sequences(kept: StoredMember) -> list[int]:
    return [int(data.rstrip(b"\0")) for data, _ in kept.custody]


class Owner:
    def __init__(self) -> None:
        self.stored: list[MessageId] = []
        self.broken: MemberStoreError | None = None

    def on_stored(self, ids: list[MessageId]) -> None:
        self.stored += ids

    def on_broken(self, error: MemberStoreError) -> None:
        self.broken = error


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    file = StoreFile(path, NODE)
    assert file.open() == StoredMember([], {}, {}, [])
    file.apply(
        MemberStoreChange(
            {own(1): b"1", own(2): b"2", MessageId(NODE, 0, 9): b"9"},
            positions={ORIGIN: (3, 8)},
            retained={"a": b"A", "b": b"B"},
            memory=[b"m", b"n"],
        )
    )
    file.apply(
        MemberStoreChange(
            {own(2): b"22"}, {own(1)}, {ORIGIN: (4, 1)}, {"a": None, "b": b"BB"}, memory=[b"k"]
        )
    )
    file.close()
    kept = read(path)
    assert [data for data, _ in kept.custody] == [b"9", b"22"]
    assert all(0 <= age_s < 60 for _, age_s in kept.custody)
    assert (kept.positions, kept.retained, kept.memory) == ({ORIGIN: (4, 1)}, {"b": b"BB"}, [b"k"])


def test_positions_of_former_epochs_are_kept(tmp_path: Path) -> None:
    async def test() -> None:
        for epoch in range(1, 3 * FORMER_MAX):
            owner = Owner()
            store = MemberStore(StoreFileThread(StoreFile(tmp_path / "s.db", NODE)), owner)
            await store.open()
            store.pass_to(ORIGIN, (epoch, 2 * epoch), [own(1)])
            store.pass_to(ORIGIN, (max(1, epoch - 1), 2 * epoch - 1), [own(2)])
            await until(lambda owner=owner: len(owner.stored) == 2)  # type: ignore[misc]
            await store.close()

    run(test)
    kept = read(tmp_path / "s.db")
    last = 3 * FORMER_MAX - 1
    assert kept.positions == {ORIGIN: (last, 2 * last)}
    newest = range(last - FORMER_MAX, last)
    assert kept.former == {(ORIGIN, epoch): 2 * epoch + 1 for epoch in newest}


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    read(path)
    with pytest.raises(
        MemberStoreError, match=f"belongs to member {NODE.hex()}, this is {ORIGIN.hex()}"
    ):
        StoreFile(path, ORIGIN).open()
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(MemberStoreError, match="another program's database"):
        StoreFile(other, NODE).open()
    (tmp_path / "text.db").write_text("no database " * 1000)
    with pytest.raises(MemberStoreError, match="damaged"):
        StoreFile(tmp_path / "text.db", NODE).open()
    with pytest.raises(MemberStoreError, match="cannot be written"):
        StoreFile(tmp_path / "nowhere" / "s.db", NODE).open()
    held = StoreFile(path, NODE)
    held.open()
    with pytest.raises(MemberStoreError, match="in use by another process"):
        StoreFile(path, NODE).open()
    held.close()


def test_a_group_is_one_transaction(tmp_path: Path) -> None:
    async def test() -> None:
        owner = Owner()
        store = MemberStore(StoreFileThread(StoreFile(tmp_path / "s.db", NODE)), owner)
        await store.open()
        for sequence in range(1, 501):
            store.add(own(sequence), b"x")
        store.remove(own(500))
        store.pass_to(ORIGIN, (1, 2), [MessageId(ORIGIN, 1, 77)])
        assert owner.stored == []
        await until(lambda: len(owner.stored) == 500)
        assert owner.stored == [own(at) for at in range(1, 500)] + [MessageId(ORIGIN, 1, 77)]
        assert store.waiting() == 0
        await store.close()
        assert len(read(tmp_path / "s.db").custody) == 499

    run(test)


def test_what_may_wait_and_is_removed_soon_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[MemberStoreChange] = []
    apply = StoreFile.apply

    def note(file: StoreFile, change: MemberStoreChange) -> None:
        written.append(change)
        apply(file, change)

    monkeypatch.setattr(StoreFile, "apply", note)
    monkeypatch.setattr(store_module, "LAZY_S", 60.0)

    async def test() -> None:
        owner = Owner()
        store = MemberStore(StoreFileThread(StoreFile(tmp_path / "s.db", NODE)), owner)
        await store.open()
        for sequence in range(1, 500):
            store.add(own(sequence), b"%d" % sequence, may_wait=True)
            store.remove(own(sequence))
            await asyncio.sleep(0)
        assert written == []
        # Many do not wait, nor does one behind which there is another.
        for sequence in range(501, 501 + store_module.UNHURRIED_MAX):
            store.add(own(sequence), b"%d" % sequence, may_wait=True)
        await until(lambda: len(owner.stored) == store_module.UNHURRIED_MAX)
        store.add(own(600), b"600", may_wait=True)
        store.add(own(601), b"601")
        await until(lambda: own(601) in owner.stored)
        assert owner.stored[-2:] == [own(600), own(601)]
        # What was written is removed there.
        store.remove(own(600))
        store.add(own(602), b"602", may_wait=True)
        await store.close()
        assert owner.stored[-1] == own(602)
        left = [*range(501, 501 + store_module.UNHURRIED_MAX), 601, 602]
        assert sequences(read(tmp_path / "s.db")) == left

    run(test)


def test_what_may_wait_is_stored_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LAZY_S", 0.01)

    async def test() -> None:
        owner = Owner()
        store = MemberStore(StoreFileThread(StoreFile(tmp_path / "s.db", NODE)), owner)
        await store.open()
        for sequence in range(1, 4):
            # Also when there was nothing to be written any more at the time.
            store.add(own(9), b"9", may_wait=True)
            store.remove(own(9))
            await asyncio.sleep(0.03)
            store.add(own(sequence), b"%d" % sequence, may_wait=True)
            await until(lambda sequence=sequence: own(sequence) in owner.stored)  # type: ignore[misc]
        await store.close()

    run(test)


def test_removals_of_what_is_being_written(tmp_path: Path) -> None:
    """Whenever it is asked for, what is removed does not come back."""

    async def test() -> None:
        rng = random.Random(1)
        owner = Owner()
        store = MemberStore(StoreFileThread(StoreFile(tmp_path / "s.db", NODE)), owner)
        await store.open()
        left = set()
        for sequence in range(1, 2000):
            store.add(own(sequence), b"%d" % sequence, may_wait=rng.random() < 0.5)
            left.add(sequence)
            if rng.random() < 0.5:
                gone = rng.choice(sorted(left)[-20:])
                left.discard(gone)
                store.remove(own(gone))
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        await store.close()
        assert sequences(read(tmp_path / "s.db")) == sorted(left)

    run(test)


def test_a_waiter_for_what_is_retained(tmp_path: Path) -> None:
    async def test() -> None:
        store = MemberStore(StoreFileThread(StoreFile(tmp_path / "s.db", NODE)), Owner())
        await store.open()
        durable = asyncio.Event()
        store.retain("a", b"A")
        store.when_written(durable.set)
        assert not durable.is_set()
        await asyncio.wait_for(durable.wait(), 60)
        with sqlite3.connect(f"file:{tmp_path}/s.db-wal?mode=ro", uri=True):
            assert b"A" in (tmp_path / "s.db-wal").read_bytes()
        await store.close()

    run(test)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """What it said was stored is there, what it did not ask for is not, positions never go back."""
    rng = random.Random(seed)
    path = tmp_path / "s.db"
    asked: set[int] = set()
    stored: set[int] = set()
    removed: set[int] = set()
    passed = 0
    environment = dict(os.environ, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    for round in range(4):
        command = [sys.executable, "-m", "tests.support.store_process"]
        command += [str(path), str(round * 1000000)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
        )
        assert process.stdout is not None
        lines: list[str] = []
        kill_after = rng.randint(50, 3000)
        while len(lines) < kill_after and (line := process.stdout.readline()):
            lines.append(line)
        process.kill()
        # What was said before the end counts; the last line may be torn.
        lines += process.stdout.read().splitlines(keepends=True)
        process.wait()
        process.stdout.close()
        for line in lines:
            if not line.endswith("\n"):
                continue
            word, number = line.split()
            if word == "passed":
                assert int(number) >= passed
                passed = int(number)
            else:
                {"asked": asked, "stored": stored, "removed": removed}[word].add(int(number))
        assert stored
        kept = read(path)
        there = set(sequences(kept))
        assert stored - removed <= there
        assert there <= asked
        epoch, place = kept.positions[ORIGIN]
        assert epoch == 1
        assert place >= passed + 1


async def fill(store: MemberStore, owner: Owner) -> int:
    """Messages until it is full; how many were asked for."""
    asked = 0
    while not store.is_full:
        asked += 1
        assert asked < 2000
        store.add(own(asked), b"%d" % asked + bytes(10_000))
        await until(lambda: store.is_full or not store.waiting())
    assert len(owner.stored) == asked - 1
    return asked


@pytest.mark.parametrize("reserve_bytes", [2 << 20, 0], ids=["reserve", "to the last byte"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve_bytes: int) -> None:
    """It stops confirming, says so, and goes on by itself when there is room."""
    monkeypatch.setattr(store_module, "FULL_RETRY_S", 0.05)
    monkeypatch.setattr(store_file, "RESERVE_BYTES", reserve_bytes)

    async def test(disk: Path) -> None:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(3 << 20))
        owner = Owner()
        store = MemberStore(StoreFileThread(StoreFile(disk / "s.db", NODE)), owner)
        await store.open()
        asked = await fill(store, owner)
        for _ in range(5):
            asked += 1
            store.add(own(asked), b"%d" % asked + bytes(10_000))
        before = len(owner.stored)
        # Long enough for some tries.
        until_at = time.monotonic() + 0.5
        while time.monotonic() < until_at:
            await asyncio.sleep(0.05)
            assert store.is_full
        assert len(owner.stored) == before
        store.pass_to(ORIGIN, (1, 2), [])
        ballast.unlink()
        await until(lambda: len(owner.stored) == asked)
        assert not store.is_full
        store.remove(own(1))
        await store.close()
        assert owner.broken is None
        kept = read(disk / "s.db")
        assert sequences(kept) == list(range(2, asked + 1))
        assert kept.positions == {ORIGIN: (1, 2)}

    with small_disk(tmp_path, "8m") as disk:
        run(lambda: test(disk))


def test_removals_make_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has filled the disk itself goes on when its messages are confirmed."""
    monkeypatch.setattr(store_module, "FULL_RETRY_S", 0.05)
    monkeypatch.setattr(store_file, "RESERVE_BYTES", 3 << 20)

    async def test(disk: Path) -> None:
        owner = Owner()
        store = MemberStore(StoreFileThread(StoreFile(disk / "s.db", NODE)), owner)
        await store.open()
        asked = await fill(store, owner)
        store.pass_to(ORIGIN, (1, 2), [MessageId(ORIGIN, 1, 1)])
        await until(lambda: len(owner.stored) == asked)
        assert store.is_full
        for gone in range(1, asked // 2):
            store.remove(own(gone))
        await until(lambda: own(asked) in owner.stored)
        await store.close()
        assert sequences(read(disk / "s.db")) == list(range(asked // 2, asked + 1))

    with small_disk(tmp_path, "8m") as disk:
        run(lambda: test(disk))


def test_a_broken_disk_is_not_tried_again(tmp_path: Path) -> None:
    """After a failed sync nobody knows what is there: nothing more is confirmed."""

    async def test() -> None:
        owner = Owner()
        file = StoreFile(tmp_path / "s.db", NODE)
        store = MemberStore(StoreFileThread(file), owner)
        await store.open()
        store.add(own(1), b"1")
        await until(lambda: owner.stored)
        # What the file system does when the disk fails: here, the log cannot be written any more.

        def fail(change: MemberStoreChange) -> None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise file._error(trouble_of(error), error)

        file.apply = fail  # type: ignore[method-assign]
        store.add(own(2), b"2")
        await until(lambda: owner.broken)
        assert "disk works" in str(owner.broken)
        store.add(own(3), b"3")
        await store.close()
        assert owner.stored == [own(1)]

    run(test)


def test_a_failure_stays(tmp_path: Path) -> None:
    file = StoreFile(tmp_path / "s.db", NODE)
    file.open()
    connection = file._connection
    assert connection is not None
    connection.execute("DROP TABLE custody")
    with pytest.raises(MemberStoreError, match="damaged"):
        file.apply(MemberStoreChange({own(1): b"1"}))
    with pytest.raises(MemberStoreError, match="damaged"):
        file.apply(MemberStoreChange(positions={ORIGIN: (1, 1)}))
    file.close()


def test_changes_in_parts_are_the_whole() -> None:
    """Whatever a store does with what is asked for while the disk is full or not."""
    rng = random.Random(7)
    for _ in range(500):
        state: dict[MessageId, bytes] = {}
        disk: dict[MessageId, bytes] = {}
        waiting = MemberStoreChange()
        for sequence in range(1, 30):
            action = rng.random()
            if action < 0.5:
                state[own(sequence)] = waiting.added[own(sequence)] = bytes(rng.randint(0, 9))
            elif state and action < 0.7:
                gone = rng.choice(sorted(state))
                del state[gone]
                waiting.added.pop(gone, None)
                waiting.removed.add(gone)
            else:
                change = waiting
                if rng.random() < 0.3:
                    change = waiting.without_data()
                else:
                    waiting = change.split(rng.randint(1, 4), 12)
                if rng.random() < 0.4:
                    waiting = change.followed_by(waiting)
                    continue
                apply(disk, change)
        apply(disk, waiting)
        assert disk == state


def apply(disk: dict[MessageId, bytes], change: MemberStoreChange) -> None:
    for id in change.removed:
        disk.pop(id, None)
    disk.update(change.added)


def test_full_is_no_failure() -> None:
    assert not issubclass(MemberStoreFull, MemberStoreError)
