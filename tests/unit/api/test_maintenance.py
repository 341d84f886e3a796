"""Snapshots and checks of space on a directory that hangs."""

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.io.disk import maintenance
from holdfast.io.disk.maintenance import Maintenance
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem, OsWriteFile
from holdfast.log.snapshot import Snapshot
from tests.support.broker_in_process import LoopBroker, loop_broker


class HangingFiles(OsFileSystem):
    """A directory in which one operation does not end until `hangs` is cleared."""

    def __init__(self, path: Path, operation: str) -> None:
        super().__init__(path)
        self.operation = operation
        self.entered = threading.Event()
        self.goes_on = threading.Event()

    def hang(self, operation: str) -> None:
        if operation == self.operation:
            self.entered.set()
            assert self.goes_on.wait(30)

    def open_write(self, name: str, *, create: bool) -> OsWriteFile:
        self.hang("open")
        return super().open_write(name, create=create)

    def free_bytes(self) -> int:
        self.hang("statvfs")
        return super().free_bytes()


def maintenance_of(broker: LoopBroker) -> Maintenance:
    work = broker.membership.maintenance
    assert work is not None
    return work


@pytest.mark.parametrize("operation", ["open", "statvfs"])
def test_a_directory_that_hangs_does_not_hold_the_loop(tmp_path: Path, operation: str) -> None:
    async def hang_and_go_on() -> None:
        async with loop_broker(tmp_path) as broker:
            files = HangingFiles(tmp_path, operation)
            directory = broker.membership.storage.directory
            directory.files = files
            checked: list[int] = []
            broker.broker.runtime.check_space = checked.append  # type: ignore[method-assign]
            work = maintenance_of(broker)
            if operation == "open":
                job = asyncio.create_task(work.take_snapshot(always=True))
            else:
                job = asyncio.create_task(work._watch_space())
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, files.entered.wait, 30)
            # This runs only while the loop is free.
            assert not job.done()
            files.goes_on.set()
            await job
            await work.stop()
            assert bool(checked) == (operation == "statvfs")
            assert bool(directory.snapshots()) == (operation == "open")

    asyncio.run(hang_and_go_on())


def test_a_snapshot_that_is_cancelled_leaves_no_file(tmp_path: Path) -> None:
    """Its file is closed only after the write that was under way."""

    async def cancel() -> None:
        async with loop_broker(tmp_path) as broker:
            drains, drain = asyncio.Event(), broker.broker.drain_journal

            async def drain_for_ever() -> None:
                drains.set()
                await asyncio.Event().wait()

            broker.broker.drain_journal = drain_for_ever  # type: ignore[method-assign]
            work = maintenance_of(broker)
            job = asyncio.create_task(work.take_snapshot(always=True))
            await drains.wait()
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            await work.stop()
            broker.broker.drain_journal = drain  # type: ignore[method-assign]
            directory = broker.membership.storage.directory
            names = directory.files.list("snapshots")
            assert not [name for name in names if name.endswith(TEMPORARY)]
            assert not directory.snapshots()

    asyncio.run(cancel())


def test_the_state_for_a_reader_is_not_a_snapshot_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention keeps the log behind the oldest snapshot, so readers must not add one."""

    async def read() -> None:
        async with loop_broker(tmp_path) as broker:
            work = maintenance_of(broker)
            first, second = await asyncio.gather(work.open_state(), work.open_state())
            assert first is not None
            assert second is first
            Snapshot(first.read, first.size()).check()
            directory = broker.membership.storage.directory
            assert directory.files.list("snapshots") == []
            monkeypatch.setattr(maintenance, "STATE_AGE_S", -1.0)
            await work._maybe_snapshot()
            assert work._state is None
            assert await work.open_state() not in (None, first)
            transfer = broker.broker.runtime.cluster_node.transfer
            transfer.missing.add(0)
            assert await work.open_state() is None
            transfer.missing.clear()

    asyncio.run(read())
