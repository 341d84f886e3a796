"""The writer thread: order, durability, a full disk, a failing one."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import pytest

from holdfast.io.disk.journal_writer import (
    ALLOCATE_BYTES,
    MEASURE_BYTES,
    DiskFullError,
    GroupWriter,
    JournalWriter,
    Worker,
)
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import FileSystem, OsFileSystem, OsWriteFile
from holdfast.log.files.layout import Manifest
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import open_journal, replay
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import MESSAGE, Record
from tests.sim.disk import SimDisk

WAIT_S = 10


class Loop:
    """Collects what would run on the event loop."""

    def __init__(self) -> None:
        self.calls: Queue[tuple[Callable[..., object], tuple[object, ...]]] = Queue()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self.calls.put((callback, args))

    def run_one(self) -> None:
        callback, args = self.calls.get(timeout=WAIT_S)
        callback(*args)


class Bench:
    def __init__(self, files: FileSystem, *, durable: bool = True, segment_bytes: int = 3000):
        self.directory = create(files, Manifest("n1", 1, ""))
        self.journal = Journal(1, segment_bytes)
        self.loop = Loop()
        self.events: list[str] = []
        self.error: BaseException | None = None
        self.writer = JournalWriter(
            self.directory,
            self.loop.call_soon,
            durable=durable,
            on_written=self.on_written,
            on_failed=self.on_failed,
            on_full=lambda: self.events.append("full"),
            on_space=lambda: self.events.append("space"),
        )

    def on_written(self, group: WriteGroup) -> None:
        self.events.append("written")
        self.journal.wrote(group)
        self.journal.commit(group)

    def on_failed(self, error: BaseException) -> None:
        self.events.append("failed")
        self.error = error

    def submit(self, payload: bytes = b"p") -> None:
        self.writer.submit(self.group(payload))

    def group(self, payload: bytes = b"p") -> WriteGroup:
        self.journal.append(
            Record(0, MESSAGE, flags=1, timestamp_us=1, topic=b"t", client_id=b"c", payload=payload)
        )
        group = self.journal.close_write_group()
        assert group is not None
        return group

    def payloads(self) -> list[bytes]:
        return [each.payload for each in replay(open_journal(self.directory), state_only=False)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(OsFileSystem(tmp_path))
    yield bench
    bench.writer.close()


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


def test_groups_are_written_in_order_and_reported(bench: Bench) -> None:
    for number in range(20):
        bench.submit(b"%d" % number)
        bench.loop.run_one()
    assert bench.events == ["written"] * 20
    assert bench.journal.committed_sequence == 20
    bench.writer.close()
    assert bench.payloads() == [b"%d" % number for number in range(20)]


def test_a_group_comes_after_the_one_before_was_taken(bench: Bench) -> None:
    """The second would take the place of the first, whose records were never reported."""
    bench.submit()
    callback, _ = bench.loop.calls.get(timeout=WAIT_S)
    with pytest.raises(AssertionError, match="was not taken"):
        bench.submit()
    callback()
    assert bench.events == ["written"]


def test_index_of_a_sealed_segment_is_written_and_dropped_from_memory(bench: Bench) -> None:
    for _ in range(8):
        bench.submit(bytes(1000))
        bench.loop.run_one()
    bench.writer.close()
    sealed = bench.journal.segments[:-1]
    assert len(sealed) > 1
    assert [segment.index for segment in sealed] == [None] * len(sealed)
    assert bench.journal.segments[-1].index is not None
    opened = open_journal(bench.directory)
    assert opened.rebuilt == []
    assert opened.journal.next_offset == [8]


def test_space_allocated_in_advance_is_given_back(tmp_path: Path, bench: Bench) -> None:
    bench.submit(bytes(1000))
    bench.loop.run_one()
    name = tmp_path / "journal" / f"{0:020d}.log"
    size_bytes = bench.journal.segments[0].size_bytes
    assert name.stat().st_size == size_bytes + ALLOCATE_BYTES
    for _ in range(4):
        bench.submit(bytes(1000))
        bench.loop.run_one()
    bench.writer.close()
    for segment in bench.journal.segments:
        path = tmp_path / "journal" / f"{segment.sequence:020d}.log"
        assert path.stat().st_size == segment.size_bytes


def test_full_disk_keeps_the_group_until_there_is_space(disk: SimDisk) -> None:
    bench = Bench(disk)
    bench.submit(b"first")
    bench.loop.run_one()
    disk.capacity_bytes = disk.capacity_bytes - disk.free_bytes() + 50
    second = bytes(ALLOCATE_BYTES)
    bench.submit(second)
    bench.loop.run_one()
    assert bench.events == ["written", "full"]
    assert bench.writer.is_full
    disk.capacity_bytes = 1 << 40
    bench.loop.run_one()
    bench.loop.run_one()
    assert bench.events == ["written", "full", "space", "written"]
    assert not bench.writer.is_full
    bench.writer.close()
    assert bench.payloads() == [b"first", second]


def test_nothing_of_a_refused_group_stays_in_the_file(disk: SimDisk) -> None:
    directory = create(disk, Manifest("n1", 1, ""))
    journal = Journal(1)
    writer = GroupWriter(directory, durable=True)
    disk.capacity_bytes = disk.capacity_bytes - disk.free_bytes() + 100
    journal.append(
        Record(0, MESSAGE, flags=1, timestamp_us=1, topic=b"t", client_id=b"c", payload=bytes(500))
    )
    group = journal.close_write_group()
    assert group is not None
    for _ in range(2):
        with pytest.raises(DiskFullError):
            writer.write(group)
        assert len(disk.files[f"journal/{0:020d}.log"].now) == 0
    disk.capacity_bytes = 1 << 40
    writer.write(group)
    writer.close()
    assert len(disk.files[f"journal/{0:020d}.log"].now) == group.size_bytes


def test_closing_gives_up_what_waits_for_space(disk: SimDisk) -> None:
    bench = Bench(disk)
    disk.capacity_bytes = 0
    bench.submit()
    bench.loop.run_one()
    bench.writer.close()
    assert bench.events == ["full"]


def test_a_failed_sync_is_final(disk: SimDisk) -> None:
    bench = Bench(disk)
    bench.submit()
    bench.loop.run_one()
    disk.fail_sync = True
    bench.submit()
    bench.loop.run_one()
    disk.fail_sync = False
    bench.submit()
    bench.writer.close()
    assert bench.events == ["written", "failed"]
    assert isinstance(bench.error, OSError)
    assert bench.error.errno == errno.EIO
    assert bench.loop.calls.empty()


def test_memory_durability_does_not_sync_groups(disk: SimDisk) -> None:
    bench = Bench(disk, durable=False)
    disk.fail_sync = True
    bench.submit()
    bench.loop.run_one()
    assert bench.events == ["written"]
    disk.fail_sync = False
    bench.writer.close()
    assert disk.files[f"journal/{0:020d}.log"].unsynced == []


def test_free_bytes_are_known_before_much_more_is_written(disk: SimDisk) -> None:
    disk.capacity_bytes = 1 << 30
    bench = Bench(disk)
    assert bench.writer.free_bytes == disk.free_bytes()
    for _ in range(4):
        bench.submit(bytes(MEASURE_BYTES // 4))
        bench.loop.run_one()
    assert bench.writer.free_bytes == bench.writer.space()
    assert 0 <= bench.writer.free_bytes - disk.free_bytes() < MEASURE_BYTES
    assert bench.writer.free_bytes <= (1 << 30) - ALLOCATE_BYTES
    bench.writer.close()


def test_worker_reports_results_and_errors_in_order() -> None:
    loop = Loop()
    worker = Worker("test", loop.call_soon)
    results: list[tuple[object, BaseException | None]] = []
    caller = threading.get_ident()

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def done(result: object, error: BaseException | None) -> None:
        results.append((result, error))

    worker.submit(threading.get_ident, done)
    worker.submit(fail, done)
    worker.submit(lambda: 3, done)
    for _ in range(3):
        loop.run_one()
    assert results[0][0] != caller
    assert isinstance(results[1][1], OSError)
    assert results[2] == (3, None)
    worker.close()


def test_worker_without_anyone_to_tell_logs_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def closed(*args: object) -> None:
        raise RuntimeError("Event loop is closed")

    def fail() -> None:
        raise ValueError("broken")

    logger = logging.getLogger("holdfast")
    logger.addHandler(caplog.handler)
    try:
        worker = Worker("test", closed)
        worker.submit(lambda: 1, lambda result, error: None)
        worker.submit(fail)
        worker.close()
    finally:
        logger.removeHandler(caplog.handler)
    assert "broken" in caplog.text


def test_a_file_of_the_system_is_synced_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated disks know only their own syncs, so this one would be missed by no other fast
    test. `tests/e2e/test_synced_calls.py` traces whole processes."""
    synced: list[bytes] = []
    path = tmp_path / "file"

    def fdatasync(descriptor: int) -> None:
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    file = OsWriteFile(path, create=True)
    file.write(0, [b"durable"])
    assert synced == []
    file.sync()
    file.close()
    assert synced == [b"durable"]
