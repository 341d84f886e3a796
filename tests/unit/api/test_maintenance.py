"""Snapshots and checks of space on a directory that hangs."""

import asyncio
import threading
from pathlib import Path

import pytest

from holdfast.io.disk.maintenance import Maintenance
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem, OsWriteFile
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
