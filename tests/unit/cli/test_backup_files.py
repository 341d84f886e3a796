"""Backups without processes: databases, hostile manifests, retention and takeovers in between."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cli.backup import backup as making
from holdfast.cli.backup.backup import make_backup
from holdfast.cli.backup.manifest import NAME, BackupError, read_manifest
from holdfast.cli.backup.restoration import PARTIAL, cut_at, restore
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import snapshot_name
from holdfast.log.journal.recovery import open_journal, replay
from holdfast.log.snapshot import SnapshotEncoder
from tests.support.journal_files import TIME_US, Journal
from tests.support.replica_bench import ReplicaBench, build_batch

SECOND_US = 1_000_000


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return two_hundred_messages(tmp_path)


def two_hundred_messages(path: Path) -> Journal:
    """Two hundred messages, one a second, in segments of some ten."""
    made = Journal(path / "data", partitions=2, segment_bytes=2000)
    for number in range(200):
        made.publish(f"t/{number % 3}", b"%d" % number, timestamp_us=TIME_US + number * SECOND_US)
    return made


def save(journal: Journal) -> None:
    """Write a snapshot for all records."""
    encoder = SnapshotEncoder(journal.sequence, journal.next_offset, TIME_US)
    journal.files.replace_file(snapshot_name(journal.sequence), encoder.finish())


def payloads(directory: Path, partitions: int = 2) -> list[int]:
    opened = open_journal(open_to_read(directory), writes=False)
    assert not opened.damage
    return [int(record.payload) for record in replay(opened, state_only=False)]


@pytest.mark.parametrize("count", [1, 57, 199])
def test_a_cut_at_each_place(journal: Journal, tmp_path: Path, count: int) -> None:
    make_backup(journal.directory, tmp_path / "backup")
    until_us = TIME_US + count * SECOND_US
    restore(tmp_path / "backup", tmp_path / "restored", until_us)
    assert payloads(tmp_path / "restored") == list(range(count))
    # The backup shares files with the restored directory, and is whole.
    restore(tmp_path / "backup", tmp_path / "whole", None)
    assert payloads(tmp_path / "whole") == list(range(200))


def test_a_cut_reports_older_records_that_it_leaves_out(journal: Journal, tmp_path: Path) -> None:
    """A replica that was behind in one partition has its records behind newer ones of others."""
    for number in range(20):
        journal.publish("t/0", b"%d" % number, timestamp_us=TIME_US + number * SECOND_US)
    make_backup(journal.directory, tmp_path / "backup")
    _, (line,) = restore(tmp_path / "backup", tmp_path / "restored", TIME_US + 150 * SECOND_US)
    assert "70 of 220 records left out; 20 of them are from before that time" in line
    _, (line,) = restore(tmp_path / "backup", tmp_path / "later", TIME_US + 10 * SECOND_US)
    # Clocks of two nodes differ, so the last two seconds before the time count for nothing.
    assert "210 of 220 records left out; 8 of them are from before that time" in line


def test_a_time_before_what_retention_has_left(journal: Journal, tmp_path: Path) -> None:
    save(journal)
    journal.remove_first_segment()
    make_backup(journal.directory, tmp_path / "backup")
    with pytest.raises(BackupError, match="give a later --until, or an older backup"):
        restore(tmp_path / "backup", tmp_path / "restored", TIME_US + 60 * SECOND_US)
    assert not (tmp_path / "restored").exists()


def test_a_snapshot_that_retention_has_overtaken(journal: Journal, tmp_path: Path) -> None:
    """The only snapshot from before the cut ends before the log begins: records are missing."""
    older = journal.segments()[1]
    encoder = SnapshotEncoder(1, [0, 1], TIME_US)
    journal.files.replace_file(snapshot_name(1), encoder.finish())
    os.utime(journal.directory / snapshot_name(1), (TIME_US // 1_000_000 + 2,) * 2)
    save(journal)
    journal.remove_first_segment()
    assert journal.segments()[0] == older
    make_backup(journal.directory, tmp_path / "backup")
    with pytest.raises(BackupError, match="give a later --until, or an older backup"):
        restore(tmp_path / "backup", tmp_path / "restored", TIME_US + 60 * SECOND_US)
    assert not (tmp_path / "restored").exists()


def test_a_directory_that_was_a_backup_once(journal: Journal, tmp_path: Path) -> None:
    """A backup that is served as it is still has its manifest, which is of other files."""
    make_backup(journal.directory, tmp_path / "backup")
    make_backup(tmp_path / "backup", tmp_path / "again")
    restore(tmp_path / "again", tmp_path / "restored", None)
    assert payloads(tmp_path / "restored") == list(range(200))
    assert not (tmp_path / "restored" / NAME).exists()


def test_a_backup_at_the_place_of_an_incomplete_directory(journal: Journal, tmp_path: Path) -> None:
    backup = tmp_path / f"restored{PARTIAL}"
    make_backup(journal.directory, backup)
    with pytest.raises(BackupError, match="move the backup"):
        restore(backup, tmp_path / "restored", None)
    assert read_manifest(backup).files


def test_retention_during_a_backup(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that were listed are gone when they are linked: the backup begins again."""
    save(journal)
    removed: list[int] = []
    link = making.Copied.link

    def remove_first(copied: making.Copied, name: str) -> None:
        if name.endswith(".log") and len(removed) < 2:
            removed.append(len(journal.segments()))
            journal.remove_first_segment()
        link(copied, name)

    monkeypatch.setattr(making.Copied, "link", remove_first)
    make_backup(journal.directory, tmp_path / "backup")
    assert len(removed) == 2
    restore(tmp_path / "backup", tmp_path / "restored", None)
    kept = payloads(tmp_path / "restored")
    assert kept == list(range(200 - len(kept), 200))
    assert 100 < len(kept) < 200


def test_a_segment_that_grows_again(journal: Journal, tmp_path: Path) -> None:
    """A deposed holder of a shared directory writes to a segment that the backup has as well."""
    make_backup(journal.directory, tmp_path / "backup")
    first = journal.segments()[0]
    with first.open("ab") as file:
        file.write(b"late")
    assert (tmp_path / "backup" / "journal" / first.name).read_bytes().endswith(b"late")
    restore(tmp_path / "backup", tmp_path / "restored", None)
    assert payloads(tmp_path / "restored") == list(range(200))


def test_a_snapshot_without_the_log_after_it(journal: Journal, tmp_path: Path) -> None:
    journal.remove_first_segment()
    with pytest.raises(BackupError, match="retention has removed what the snapshot needs"):
        make_backup(journal.directory, tmp_path / "backup")


def test_a_database_in_use(journal: Journal, tmp_path: Path) -> None:
    """A transaction that is not committed is not in the backup, and one in the WAL is."""
    path = journal.directory / "federation" / "federation.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE custody (id)")
        db.execute("INSERT INTO custody VALUES (1)")
        db.commit()
        db.execute("INSERT INTO custody VALUES (2)")
        make_backup(journal.directory, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored", None)
    with closing(sqlite3.connect(tmp_path / "restored" / "federation" / "federation.db")) as db:
        assert db.execute("SELECT id FROM custody").fetchall() == [(1,)]


@pytest.mark.parametrize(
    "path", ["../data/manifest.json", "/etc/passwd", "journal/../../x", "../backup/x", ""]
)
def test_a_file_outside(journal: Journal, tmp_path: Path, path: str) -> None:
    make_backup(journal.directory, tmp_path / "backup")
    file = tmp_path / "backup" / NAME
    content = json.loads(file.read_text())
    content["files"].append({"path": path, "bytes": 1})
    file.write_text(json.dumps(content))
    (tmp_path / "backup" / "x").write_text("x")
    with pytest.raises(BackupError, match="is not below the backup"):
        read_manifest(tmp_path / "backup")


@pytest.mark.parametrize("target", ["secret", "link", "none"])
def test_a_restore_follows_no_link(journal: Journal, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (journal.directory / "note").write_text("123456")
    make_backup(journal.directory, tmp_path / "backup")
    link = tmp_path / "backup" / "note"
    link.unlink()
    link.symlink_to(tmp_path / target if target != "link" else link)
    with pytest.raises(BackupError):
        restore(tmp_path / "backup", tmp_path / "restored", None)
    folder = tmp_path / "backup" / "journal"
    link.unlink()
    link.write_text("123456")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackupError, match="is a link"):
        restore(tmp_path / "backup", tmp_path / "restored", None)
    assert not (tmp_path / "restored").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="root reads what the other user may not")
@pytest.mark.parametrize("name", ["note", "damaged/note"])
def test_root_copies_no_file_of_another_user(journal: Journal, tmp_path: Path, name: str) -> None:
    """The owner of the directory has put a link there."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "note").write_text("secret")
    make_backup(journal.directory, tmp_path / "first")
    os.chown(journal.directory, 12_345, 12_345)
    # A process of root may serve the directory: its files are where their names say.
    (journal.directory / "own").write_text("root's own")
    make_backup(journal.directory, tmp_path / "second")
    if "/" in name:
        (journal.directory / "damaged").mkdir()
    link = journal.directory / name
    link.symlink_to(secret / "note")
    with pytest.raises(BackupError, match="of another user"):
        make_backup(journal.directory, tmp_path / "third")
    copies = [each for each in (tmp_path / "third").rglob("*") if each.is_file()]
    assert all(b"secret" not in each.read_bytes() for each in copies)
    os.chown(secret / "note", 12_345, 12_345)
    for each in (tmp_path / "third").iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    make_backup(journal.directory, tmp_path / "third")


def test_a_newer_format(journal: Journal, tmp_path: Path) -> None:
    make_backup(journal.directory, tmp_path / "backup")
    (tmp_path / "backup" / NAME).write_text('{"format": 2, "more": []}')
    with pytest.raises(BackupError, match="format 2, this program reads 1"):
        read_manifest(tmp_path / "backup")


def test_targets_that_are_refused(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="is inside"):
        make_backup(journal.directory, journal.directory / "backup")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(BackupError, match="is not empty"):
        make_backup(journal.directory, tmp_path / "full")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_hostile_manifests(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    good = b'{"format":1,"node_id":"n","kind":"node","cluster_id":"","began":"","version":"",' \
        b'"files":[{"path":"a","bytes":0}]}'  # fmt: skip
    at = data.draw(st.integers(0, len(good)))
    piece = data.draw(
        st.one_of(st.binary(max_size=8), st.sampled_from([b"[" * 100_000, b"\\u0000"]))
    )
    root = tmp_path_factory.mktemp("hostile")
    (root / NAME).write_bytes(good[:at] + piece + good[at + data.draw(st.integers(0, 4)) :])
    try:
        read_manifest(root)
    except BackupError:
        pass


def test_a_database_that_stays_locked(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sqlite's own copy waits for ever."""
    monkeypatch.setattr(making, "DATABASE_WAIT_S", 0.3)
    folder = journal.directory / "federation"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "federation.db")) as database:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (a)")
        database.commit()
        with pytest.raises(BackupError, match=r"was locked for 0.3 s: stop the process"):
            make_backup(journal.directory, tmp_path / "backup")


def test_a_snapshot_ahead_of_a_partition_that_is_not_stored(tmp_path: Path) -> None:
    """Its records were fed, so the state is complete without them."""
    bench = ReplicaBench(OsFileSystem(tmp_path), 2)
    until_us = TIME_US + SECOND_US
    for base in range(3):
        bench.journal.append_batch(build_batch(0, base, 1, [b"%d" % base]))
    bench.journal.place(1, 5000)
    bench.flush()
    for offsets in ([3, 5000], [7, 5000]):
        encoder = SnapshotEncoder(offsets[0], offsets, 0)
        bench.directory.replace_file(snapshot_name(offsets[0]), encoder.finish())
        os.utime(tmp_path / snapshot_name(offsets[0]), (1, 1))
    late = build_batch(0, 3, 1, [b"late"])
    bench.journal.append_batch(later(late, until_us))
    bench.flush()
    assert "1 of 4 records left out" in cut_at(tmp_path, until_us)
    assert bench.directory.snapshots() == [3]


def later(batch: Batch, time_us: int) -> Batch:
    """The batch with another time."""
    builder = BatchBuilder(batch.partition, batch.base_offset)
    for record in batch.records():
        record.timestamp_us = time_us
        builder.add(record)
    return Batch(builder.build(batch.epoch))
