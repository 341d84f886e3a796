"""A broker in the test's own event loop: real storage, real sockets, no admin port."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.broker.config import NodeConfig
from holdfast.broker.node import Node
from holdfast.config.listener import Listener
from holdfast.server.disk.storage import Storage
from holdfast.server.event_loop.broker import Broker
from holdfast.server.sockets.listener_files import ListenerFiles
from holdfast.server.sockets.listeners import OpenListener, reserve
from holdfast.storage.journal.commit_pace import JournalWaits

SEGMENT_BYTES = 1 << 20


class LoopBroker:
    """`crash` leaves the directory as a kill does: what was written stays, nothing is said."""

    def __init__(self, directory: Path, config: NodeConfig | None = None) -> None:
        self.directory = directory
        self.config = config or NodeConfig(partitions=4, sys_interval_s=0)
        self.failures: list[BaseException] = []
        self.port = 0

    async def start(self) -> None:
        storage = self._storage = Storage.open(
            self.directory, "n1", self.config.partitions, SEGMENT_BYTES
        )
        loop = asyncio.get_running_loop()
        node = Node(self.config, storage.journal)
        node.tick(loop.time(), time.time_ns() // 1000)
        storage.recover_into(node.state)
        self.broker = Broker(node, loop, storage, None, JournalWaits(0.005), self.failures.append)
        self.broker.touch()
        node.start()
        listener = Listener(port=0)
        self._listener = OpenListener(listener, ListenerFiles(), reserve(listener))
        await self._listener.open(self.broker)
        self.port = self._listener.port

    async def crash(self) -> None:
        self._listener.close()
        await asyncio.to_thread(self.broker.close)
        self._storage.close()
        assert self.failures == []

    async def stop(self) -> None:
        self._listener.close()
        self.broker.touch()
        self.broker.node.shut_down()
        self.broker.turn()
        await self.broker.drain_journal()
        await self.crash()


@contextlib.asynccontextmanager
async def loop_broker(
    directory: Path, config: NodeConfig | None = None
) -> AsyncIterator[LoopBroker]:
    broker = LoopBroker(directory, config)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()
