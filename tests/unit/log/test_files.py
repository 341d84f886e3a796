"""The data directory on a real file system."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.log.files.data_directory import (
    DataDirectoryError,
    DirectoryLock,
    create_or_open,
    open_to_read,
)
from holdfast.log.files.filesystem import OsFileSystem, TemporaryFile
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.reading.index_file import CorruptIndex

CREATED = "2026-01-01T00:00:00Z"


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    directory, lock = create_or_open(tmp_path / "data", "n1", 4, CREATED)
    lock.release()
    return directory


def test_create_and_open_again(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "data"
    directory, lock = create_or_open(path, "n1", 4, CREATED)
    assert directory.manifest.partitions == 4
    lock.release()
    again, lock = create_or_open(path, "n1", 4, "2027-01-01T00:00:00Z")
    lock.release()
    assert again.manifest == directory.manifest
    assert open_to_read(path).manifest == directory.manifest


def test_other_settings_are_refused(directory: DataDirectory, tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match="belongs to node 'n1'"):
        create_or_open(tmp_path / "data", "n2", 4, CREATED)
    for incarnation in ("", "x1"):
        with pytest.raises(DataDirectoryError, match="created with 4 partitions, not 8"):
            create_or_open(tmp_path / "data", "n1", 8, CREATED, incarnation)
    # The lock was given back both times.
    create_or_open(tmp_path / "data", "n1", 4, CREATED)[1].release()


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(DataDirectoryError, match=r"thesis\.tex"):
        create_or_open(tmp_path, "n1", 4, CREATED)
    assert sorted(os.listdir(tmp_path)) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b'{"format": 1}', "damaged"),
        (b'{"format": 9, "node_id": "n1", "partitions": 4, "created": ""}', "format 9"),
        (b'{"format": 1, "node_id": "n1", "partitions": 0, "created": ""}', "0 partitions"),
    ],
)
def test_manifest_that_cannot_be_read(
    directory: DataDirectory, tmp_path: Path, content: bytes, text: str
) -> None:
    (tmp_path / "data" / "manifest.json").write_bytes(content)
    with pytest.raises(DataDirectoryError, match=text):
        create_or_open(tmp_path / "data", "n1", 4, CREATED)


def test_journal_without_manifest_is_not_started_over(
    directory: DataDirectory, tmp_path: Path
) -> None:
    directory.create_segment(0).close()
    (tmp_path / "data" / "manifest.json").unlink()
    with pytest.raises(DataDirectoryError, match="restore"):
        create_or_open(tmp_path / "data", "n1", 4, CREATED)


def test_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match="no Holdfast data directory"):
        open_to_read(tmp_path)


def test_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirectoryError, match="file"):
        create_or_open(tmp_path / "file", "n1", 4, CREATED)


def test_only_one_process_has_the_lock(directory: DataDirectory, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from holdfast.log.files.data_directory import DirectoryLock;"
        "lock = DirectoryLock(pathlib.Path(sys.argv[1])); print('locked', flush=True);"
        "sys.stdin.read()"
    )
    path = tmp_path / "data" / "lock"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(DataDirectoryError, match=rf"another process \({holder.pid}\)"):
            DirectoryLock(path)
        # Closing another descriptor of the file must not drop a lock.
        with path.open():
            pass
        with pytest.raises(DataDirectoryError):
            DirectoryLock(path)
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.stdout.close()
    DirectoryLock(path).release()


def test_lock_excludes_within_one_process_too(directory: DataDirectory, tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "data" / "lock")
    with pytest.raises(DataDirectoryError):
        DirectoryLock(tmp_path / "data" / "lock")
    lock.release()


def test_segments_are_listed_oldest_first(directory: DataDirectory) -> None:
    for sequence in (10, 0, 200):
        directory.create_segment(sequence).close()
    directory.replace_file("journal/notes.log", [b""])
    assert directory.segments() == [0, 10, 200]
    with pytest.raises(FileExistsError):
        directory.create_segment(10)
    directory.remove_segment(10)
    directory.remove_segment(10)
    assert directory.segments() == [0, 200]


def test_write_and_read_a_segment(directory: DataDirectory) -> None:
    file = directory.create_segment(0)
    pieces = [b"a" * 700_000, b"b" * 700_000, b"c", b"d" * 3_000_000]
    file.write(5, pieces)
    file.sync()
    reader = directory.open_segment(0)
    assert reader.size() == 5 + sum(map(len, pieces))
    assert reader.read(0, 1 << 30) == bytes(5) + b"".join(pieces)
    assert reader.read(5 + 1_400_000, 2) == b"cd"
    assert reader.read(1 << 40, 10) == b""
    file.truncate(8)
    assert reader.read(0, 100) == bytes(5) + b"aaa"
    file.allocate(20)
    assert reader.read(0, 100) == bytes(5) + b"aaa" + bytes(12)
    file.close()
    file.close()


def test_index_heads(directory: DataDirectory) -> None:
    assert directory.read_index_head(0) is None
    assert directory.read_index(0) is None
    data = ActiveIndex(0, [0, 1, 2, 3]).encode()
    directory.write_index(0, data)
    assert directory.read_index(0) == data
    head = directory.read_index_head(0)
    assert head is not None
    assert head.end_offsets == [0, 1, 2, 3]
    for wrong in (data[:-1], data[:20], b"", data + b"x"):
        directory.write_index(0, wrong)
        with pytest.raises(CorruptIndex):
            directory.read_index_head(0)
    directory.write_index(7, data)
    with pytest.raises(CorruptIndex, match="under the name 7"):
        directory.read_index_head(7)


def test_start(directory: DataDirectory, tmp_path: Path) -> None:
    assert directory.read_start() is None
    directory.write_start(9, [1, 2, 3, 4])
    assert directory.read_start() == (9, [1, 2, 3, 4])
    path = tmp_path / "data" / "journal" / "start.json"
    content = json.loads(path.read_bytes())
    content["offsets"][0] = 0
    path.write_text(json.dumps(content))
    assert directory.read_start() is None


def test_failed_replacement_leaves_the_old_file(directory: DataDirectory) -> None:
    directory.replace_file("journal/x", [b"old"])
    file = TemporaryFile(directory.files, "journal/x")
    file.write([b"new"])
    assert directory.read_file("journal/x") == b"old"
    file.discard()
    assert directory.read_file("journal/x") == b"old"
    file = TemporaryFile(directory.files, "journal/x")
    file.write([b"newer"])
    del file
    directory.remove_temporary_files()
    assert directory.files.list("journal") == ["x"]
    # A leftover does not stand in the way either.
    TemporaryFile(directory.files, "journal/x")
    file = TemporaryFile(directory.files, "journal/x")
    file.write([b"new"])
    file.finish()
    assert directory.read_file("journal/x") == b"new"


def test_quarantine_keeps_the_first_copy(directory: DataDirectory) -> None:
    name = directory.quarantine(3, 40, [b"bad"])
    assert directory.quarantine(3, 40, [b"other"]) == name
    assert directory.read_file(name) == b"bad"


def test_snapshots(directory: DataDirectory) -> None:
    directory.replace_file(f"snapshots/{5:020d}.snap", [b"s"])
    assert directory.snapshots() == [5]
    assert directory.open_snapshot(5).read(0, 10) == b"s"
    directory.remove_snapshot(5)
    directory.remove_snapshot(5)
    assert directory.snapshots() == []


def test_errors_keep_their_number(tmp_path: Path) -> None:
    files = OsFileSystem(tmp_path)
    assert files.list("missing") == []
    with pytest.raises(FileNotFoundError):
        files.open_read("missing")
    with pytest.raises(OSError) as caught:
        files.sync_folder("missing")
    assert caught.value.errno == errno.ENOENT
    assert files.free_bytes() > 0
