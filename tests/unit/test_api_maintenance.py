"""Snapshots of a node whose records are on their way to the disk."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from holdfast.broker.config import NodeConfig
from holdfast.broker.node import Node
from holdfast.broker.runtime import Runtime
from holdfast.config.schema import Config, Log
from holdfast.server.disk.journal_writer import GroupWriter
from holdfast.server.disk.storage import Storage
from holdfast.server.maintenance import Maintenance
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
