"""Snapshots of a node whose records are on their way to the disk."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.broker.config import NodeConfig
from holdfast.broker.node import Node
from holdfast.broker.runtime import Runtime
from holdfast.config.schema import Config, Log
from holdfast.server.disk.journal_writer import GroupWriter
from holdfast.server.disk.storage import Storage
from holdfast.server.maintenance import Maintenance
from holdfast.storage.files.filesystem import TEMPORARY, OsFileSystem, OsWriteFile
from holdfast.storage.record import FLAG_RETAIN, MESSAGE, Record


def open_node(path: Path) -> tuple[Storage, Node]:
    storage = Storage.open(path, "n1", 1, 1 << 20)
    node = Node(NodeConfig(partitions=1, sys_interval_s=0), storage.journal)
    node.tick(0.0, 1)
    storage.recover_into(node.state)
    return storage, node


def test_a_snapshot_lacks_nothing_that_was_appended_and_not_committed(tmp_path: Path) -> None:
    """Its effect on the state waits for the disk, so recovery must begin before it."""
    storage, node = open_node(tmp_path)
    journal = storage.journal
    journal.append(
        Record(
            0,
            MESSAGE,
            flags=1 | FLAG_RETAIN,
            timestamp_us=1,
            topic=b"t",
            client_id=b"c",
            payload=b"acknowledged later",
        )
    )

    async def drain_journal() -> None:
        group = journal.close_write_group()
        assert group is not None
        writer = GroupWriter(storage.directory, durable=True, allocate_bytes=0)
        writer.write(group)
        writer.close()
        journal.commit(group)

    runtime = Runtime(node, None, None, None)  # type: ignore[arg-type]
    broker = SimpleNamespace(node=node, runtime=runtime, drain_journal=drain_journal)
    config = Config(log=Log(reserve_bytes=1))
    work = Maintenance(broker, storage, config)  # type: ignore[arg-type]
    asyncio.run(work.take_snapshot())
    assert storage.directory.snapshots()
    storage.close()

    storage, node = open_node(tmp_path)
    assert node.state.retained.get("t") is not None
    storage.close()


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


@pytest.mark.parametrize("operation", ["open", "statvfs"])
def test_a_directory_that_hangs_does_not_hold_the_loop(tmp_path: Path, operation: str) -> None:
    storage, node = open_node(tmp_path)
    files = HangingFiles(tmp_path, operation)
    storage.directory.files = files
    checked: list[int] = []

    async def drain_journal() -> None:
        pass

    async def hang_and_go_on() -> None:
        runtime = Runtime(node, None, None, None)  # type: ignore[arg-type]
        runtime.check_space = checked.append  # type: ignore[method-assign]
        writer = SimpleNamespace(measure_space=files.free_bytes)
        broker = SimpleNamespace(
            node=node, runtime=runtime, drain_journal=drain_journal, writer=writer
        )
        config = Config(log=Log(reserve_bytes=1))
        work = Maintenance(broker, storage, config)  # type: ignore[arg-type]
        if operation == "open":
            job = asyncio.create_task(work.take_snapshot())
        else:
            job = asyncio.create_task(work._watch_space())
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, files.entered.wait, 30)
        # This runs only while the loop is free.
        assert not job.done()
        files.goes_on.set()
        await job
        await work.stop()

    asyncio.run(hang_and_go_on())
    assert bool(checked) == (operation == "statvfs")
    assert bool(storage.directory.snapshots()) == (operation == "open")
    storage.close()


def test_a_snapshot_that_is_cancelled_leaves_no_file(tmp_path: Path) -> None:
    """Its file is closed only after the write that was under way."""
    storage, node = open_node(tmp_path)
    files = HangingFiles(tmp_path, "open")
    storage.directory.files = files
    drains = asyncio.Event()

    async def drain_journal() -> None:
        drains.set()
        await asyncio.Event().wait()

    async def cancel() -> None:
        files.goes_on.set()
        runtime = Runtime(node, None, None, None)  # type: ignore[arg-type]
        broker = SimpleNamespace(node=node, runtime=runtime, drain_journal=drain_journal)
        work = Maintenance(broker, storage, Config(log=Log(reserve_bytes=1)))  # type: ignore[arg-type]
        job = asyncio.create_task(work.take_snapshot())
        await drains.wait()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await work.stop()

    asyncio.run(cancel())
    assert not [name for name in files.list("snapshots") if name.endswith(TEMPORARY)]
    assert not storage.directory.snapshots()
    storage.close()
