"""The publish queue's file: identity over openings, damage, foreign files, locks, full disks."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.client.pubqueue.messages import Failed, QueueEntry, StoreError, StoreFull
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.pubqueue.store import Opened, QueueChange
from holdfast.protocol.mqtt import properties as pr
from tests.support.small_disk import small_disk

CLOCK = 1_800_000_000.0


def entry(sequence: int, payload: bytes = b"x", epoch: int = 1) -> QueueEntry:
    return QueueEntry(sequence, epoch, "tópic", payload, None, False, 5.5, 0.0, 70 + len(payload))


def filled(path: Path, count: int, clock: float = CLOCK) -> Opened:
    """A file with messages 1 to `count`, closed."""
    store = SqliteStore(path)
    opened = store.open("sequence", clock)
    store.apply(QueueChange([entry(n, str(n).encode(), opened.epoch) for n in range(1, count + 1)]))
    store.close()
    return opened


def sequences(store: SqliteStore) -> list[int]:
    return [one.sequence for one in store.read(0, 1_000_000, 1 << 40)]


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "q.db")
    store.open("sequence", CLOCK)
    properties: pr.Properties = {pr.CONTENT_TYPE: "x", pr.USER_PROPERTY: [("a", "b")]}
    first = QueueEntry(1, 7, "a/b", b"\x00\xff", properties, True, 1.25, 2.5, 100)
    store.apply(QueueChange([first, entry(2)]))
    store.close()
    store = SqliteStore(tmp_path / "q.db")
    opened = store.open("sequence", CLOCK)
    assert (opened.count, opened.last_sequence) == (2, 2)
    loaded = store.read(0, 10, 1 << 20)
    assert opened.size == sum(one.size for one in loaded)
    for name in ("sequence", "epoch", "topic", "payload", "properties", "put_at", "expires_at"):
        assert getattr(loaded[0], name) == getattr(first, name)
    assert loaded[0].retain is True
    assert [one.sequence for one in store.read(1, 10, 1 << 20)] == [2]
    assert [one.sequence for one in store.read(0, 1, 1 << 20)] == [1]
    assert [one.sequence for one in store.read(0, 10, 1)] == [1]
    store.close()


def test_identity_over_openings(tmp_path: Path) -> None:
    """The producer stays, sequences go on, and every opening has a greater epoch."""
    path = tmp_path / "q.db"
    first = filled(path, 3)
    assert first.epoch == int(CLOCK)
    store = SqliteStore(path)
    second = store.open("sequence", CLOCK - 1000)
    assert (second.producer, second.last_sequence) == (first.producer, 3)
    assert second.epoch == first.epoch + 1
    store.apply(QueueChange(removed=[1, 2, 3]))
    store.close()
    shutil.copy(path, tmp_path / "backup.db")
    third = SqliteStore(path).open("sequence", CLOCK + 50)
    assert (third.last_sequence, third.epoch) == (3, int(CLOCK) + 50)
    restored = SqliteStore(tmp_path / "backup.db").open("sequence", CLOCK + 51)
    assert restored.epoch > third.epoch


def test_renewed_identity(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    first = filled(path, 2)
    store = SqliteStore(path, renew_identity=True)
    second = store.open("sequence", CLOCK)
    assert {one.epoch for one in store.read(0, 10, 1 << 20)} == {second.epoch}
    assert second.epoch > first.epoch
    store.renew(second.epoch + 1)
    assert {one.epoch for one in store.read(0, 10, 1 << 20)} == {second.epoch + 1}
    store.close()
    assert SqliteStore(path).open("sequence", CLOCK).epoch == second.epoch + 2


def test_producers_and_forms_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    store = SqliteStore(path, producer="meter-1")
    assert store.open("sequence", CLOCK).producer == "meter-1"
    store.apply(QueueChange([entry(1)]))
    store.close()
    with pytest.raises(StoreError, match="belongs to producer 'meter-1', not 'meter-2'"):
        SqliteStore(path, producer="meter-2").open("sequence", CLOCK)
    with pytest.raises(StoreError, match="1 messages of the form 'sequence'"):
        SqliteStore(path).open("paper", CLOCK)
    with pytest.raises(ValueError):
        SqliteStore(path, producer="a:b")


def test_failed_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.client.pubqueue.sqlite.FAILED_MAX", 3)
    store = SqliteStore(tmp_path / "q.db")
    store.open("sequence", CLOCK)
    store.apply(QueueChange([entry(n) for n in range(1, 7)]))
    store.apply(QueueChange(failed=[Failed(entry(n), 0x87, f"no {n}", 9.0) for n in range(1, 6)]))
    assert sequences(store) == [6]
    kept = store.list_failed()
    assert [(one.entry.sequence, one.reason, one.text) for one in kept] == [
        (3, 0x87, "no 3"),
        (4, 0x87, "no 4"),
        (5, 0x87, "no 5"),
    ]
    assert store.forget_failed() == 3
    assert store.list_failed() == []
    store.close()


OPEN_AND_WAIT = """
import sys
from holdfast.client.pubqueue.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.open("sequence", 1.0)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has the file q.db open."""
    environment = dict(os.environ, PYTHONPATH=str(Path(holdfast.__file__).parents[1]))
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT, str(tmp_path / "q.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    yield process
    process.kill()
    process.communicate()


def test_one_process_at_a_time(tmp_path: Path, other_process: "subprocess.Popen[bytes]") -> None:
    path = tmp_path / "q.db"
    with pytest.raises(StoreError, match="in use by another"):
        SqliteStore(path).open("sequence", CLOCK)
    other_process.kill()
    other_process.wait()
    store = SqliteStore(path)
    store.open("sequence", CLOCK)
    with pytest.raises(StoreError, match="in use by another"):
        SqliteStore(path).open("sequence", CLOCK)
    with pytest.raises(StoreError, match="open in this process"):
        store.open("sequence", CLOCK)
    store.close()
    SqliteStore(path).open("sequence", CLOCK)


def test_files_that_are_no_queue(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to be asked for a header" * 100)
    with pytest.raises(StoreError, match="no publish queue"):
        SqliteStore(text).open("sequence", CLOCK)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    before = foreign.read_bytes()
    with pytest.raises(StoreError, match="another SQLite database"):
        SqliteStore(foreign).open("sequence", CLOCK)
    assert foreign.read_bytes() == before
    newer = tmp_path / "newer.db"
    filled(newer, 1)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(StoreError, match="format 2, this version reads 1"):
        SqliteStore(newer).open("sequence", CLOCK)
    with pytest.raises(StoreError, match="does its directory exist"):
        SqliteStore(tmp_path / "missing" / "q.db").open("sequence", CLOCK)
    with pytest.raises(StoreError, match="not open"):
        SqliteStore(tmp_path / "q.db").read(0, 1, 1)


def test_damaged_file(tmp_path: Path) -> None:
    """Said clearly, on opening or on reading; never an unexplained error or a wrong message."""
    path = tmp_path / "q.db"
    filled(path, 2000)
    whole = path.read_bytes()
    found: list[str] = []
    for position in range(0, len(whole), len(whole) // 40):
        damaged = bytearray(whole)
        damaged[position : position + 64] = bytes(64)
        path.write_bytes(damaged)
        try:
            store = SqliteStore(path)
            store.open("sequence", CLOCK)
            for one in store.read(0, 10_000, 1 << 30):
                assert one.payload in (str(one.sequence).encode(), bytes(len(one.payload)))
            store.close()
        except StoreError as error:
            found.append(str(error))
            store.close()
    assert len(found) > 3
    assert all(str(path) in text for text in found)


def test_power_cut_in_the_write_ahead_log(tmp_path: Path) -> None:
    """However much of the log's tail is missing, what is read is a prefix of the transactions."""
    path = tmp_path / "q.db"
    wal = Path(f"{path}-wal")
    store = SqliteStore(path)
    store.open("sequence", CLOCK)
    sizes = []
    for number in range(1, 40):
        store.apply(QueueChange([entry(number, bytes([number]) * 200)]))
        sizes.append(wal.stat().st_size)
    base, tail = path.read_bytes(), wal.read_bytes()
    store.close()
    for cut in range(0, len(tail), 1777):
        cut_path = tmp_path / "cut.db"
        cut_path.write_bytes(base)
        Path(f"{cut_path}-wal").write_bytes(tail[:cut])
        cut_store = SqliteStore(cut_path)
        cut_store.open("sequence", CLOCK)
        got = sequences(cut_store)
        assert got == list(range(1, 1 + sum(size <= cut for size in sizes)))
        cut_store.close()


def test_full_disk(tmp_path: Path) -> None:
    """A refused transaction changes nothing, and what was stored before can be read and removed
    once there is a little room."""
    with small_disk(tmp_path) as disk:
        fill(disk)


def fill(disk: Path) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    store = SqliteStore(disk / "q.db")
    store.open("sequence", CLOCK)
    stored = 0
    with suppress(StoreFull):
        for number in range(1, 1000):
            store.apply(QueueChange([entry(number, bytes(10_000))]))
            stored = number
    assert 10 < stored < 900
    with pytest.raises(StoreFull, match="disk is full"):
        store.apply(QueueChange([entry(stored + 1, bytes(100_000))]))
    assert sequences(store) == list(range(1, stored + 1))
    ballast.unlink()
    store.apply(QueueChange([entry(stored + 1)], [1, 2]))
    assert sequences(store) == list(range(3, stored + 2))
    store.close()
    again = SqliteStore(disk / "q.db")
    assert again.open("sequence", CLOCK).last_sequence == stored + 1
    assert sequences(again) == list(range(3, stored + 2))
    again.close()


def test_an_empty_queue_gives_its_space_back(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    store = SqliteStore(path)
    store.open("sequence", CLOCK)
    store.apply(QueueChange([entry(n, bytes(10_000)) for n in range(1, 1001)]))
    store.apply(QueueChange(removed=list(range(1, 1001))))
    store.close()
    assert path.stat().st_size > 8 << 20
    store = SqliteStore(path)
    assert store.open("sequence", CLOCK).last_sequence == 1000
    store.close()
    assert path.stat().st_size < 1 << 20
