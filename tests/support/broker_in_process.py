"""A broker in the test's own event loop: real storage, real sockets, no admin port."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from holdfast.broker.config import NodeConfig
from holdfast.broker.node import Node
from holdfast.config import schema
from holdfast.config.listener import Listener
from holdfast.server.cluster import ClusterMembership
from holdfast.server.disk.storage import Storage
from holdfast.server.event_loop.broker import Broker
from holdfast.server.node_settings import of_one
from holdfast.server.sockets.listener_files import ListenerFiles
from holdfast.server.sockets.listeners import OpenListener, reserve
from holdfast.storage.journal.commit_pace import JournalWaits
from holdfast.storage.journal.journal import Journal

SEGMENT_BYTES = 1 << 20


class LoopBroker:
    """`crash` leaves the directory as a kill does: what was written stays, nothing is said."""

    def __init__(
        self, directory: Path, config: NodeConfig | None = None, *, is_one: bool = False
    ) -> None:
        """`is_one`: serve as a cluster of one, as a member of a federation does."""
        self.directory = directory
        self.config = config or NodeConfig(partitions=4, sys_interval_s=0)
        self.failures: list[BaseException] = []
        self.port = 0
        self._is_one = is_one
        self._clustering: ClusterMembership | None = None

    async def start(self) -> None:
        if self._is_one:
            await self._start_one()
        else:
            self._start_single()
        self.broker.touch()
        self.broker.node.start()
        listener = Listener(port=0)
        self._listener = OpenListener(listener, ListenerFiles(), reserve(listener))
        await self._listener.open(self.broker)
        self.port = self._listener.port

    def _start_single(self) -> None:
        storage = self._storage = Storage.open(
            self.directory, "n1", self.config.partitions, SEGMENT_BYTES
        )
        loop = asyncio.get_running_loop()
        node = self._node(storage.journal)
        storage.recover_into(node.state)
        self.broker = Broker(node, loop, storage, None, JournalWaits(0.005), self.failures.append)

    async def _start_one(self) -> None:
        durability = "memory" if self.config.memory_durability else "fsync"
        log = schema.Log(
            partitions=self.config.partitions, segment_bytes=SEGMENT_BYTES, durability=durability
        )
        node = schema.Node(id="n1", data=str(self.directory))
        config = of_one(schema.Config(node=node, log=log))
        clustering = ClusterMembership(config, self._node, None, self.failures.append, lambda: None)
        self._clustering, self._storage = clustering, clustering.storage
        self.broker = clustering.broker
        await clustering.start()
        await clustering.wait_until_ready()

    def _node(self, journal: Journal) -> Node:
        node = Node(replace(self.config, node_id="n1"), journal)
        node.tick(asyncio.get_running_loop().time(), time.time_ns() // 1000)
        return node

    async def crash(self) -> None:
        self._listener.close()
        if self._clustering is not None:
            await self._clustering.links.stop()
        await asyncio.to_thread(self.broker.close)
        self._storage.close()
        assert self.failures == []

    async def stop(self) -> None:
        self._listener.close()
        self.broker.touch()
        self.broker.node.shut_down()
        self.broker.turn()
        await self.broker.drain_journal()
        if self._clustering is not None:
            await self._clustering.stop()
        await self.crash()


@contextlib.asynccontextmanager
async def loop_broker(
    directory: Path, config: NodeConfig | None = None, *, is_one: bool = False
) -> AsyncIterator[LoopBroker]:
    broker = LoopBroker(directory, config, is_one=is_one)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()
