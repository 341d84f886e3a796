"""A broker in the event loop of the test, with real storage and sockets, and without admin port."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from holdfast.config import schema
from holdfast.config.listener import Listener
from holdfast.config.schema import Config
from holdfast.io.settings.node_settings import of_one
from holdfast.io.sockets.listener_files import ListenerFiles
from holdfast.io.sockets.listeners import OpenListener, reserve
from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.node import Node
from holdfast.process.cluster import ClusterMembership

SEGMENT_BYTES = 1 << 20


class LoopBroker:
    """`crash` leaves the directory as a kill does: what was written stays, nothing is said."""

    def __init__(self, directory: Path, config: NodeConfig | None = None) -> None:
        self.directory = directory
        self.config = config or NodeConfig(partitions=4, sys_interval_s=0)
        self.failures: list[BaseException] = []
        self.port = 0

    async def start(self) -> None:
        durability = "memory" if self.config.memory_durability else "fsync"
        log = schema.Log(
            partitions=self.config.partitions, segment_bytes=SEGMENT_BYTES, durability=durability
        )
        node = schema.Node(id="n1", data=str(self.directory))
        config = of_one(schema.Config(node=node, log=log))
        self.membership = ClusterMembership(
            config, self._node, None, self.failures.append, lambda: None
        )
        self.broker = self.membership.broker
        await self.membership.start()
        await self.membership.wait_until_ready()
        self.broker.touch()
        self.broker.node.start()
        listener = Listener(port=0)
        self._listener = OpenListener(listener, ListenerFiles(), reserve(listener, Config()))
        await self._listener.open(self.broker)
        self.port = self._listener.port

    def _node(self, journal: Journal) -> Node:
        node = Node(replace(self.config, node_id="n1"), journal)
        node.tick(asyncio.get_running_loop().time(), time.time_ns() // 1000)
        return node

    async def crash(self) -> None:
        self._listener.close()
        await self.membership.links.stop()
        await asyncio.to_thread(self.broker.close)
        self.membership.storage.close()
        assert self.failures == []

    async def stop(self) -> None:
        self._listener.close()
        self.broker.touch()
        self.broker.node.shut_down()
        self.broker.turn()
        await self.broker.drain_journal()
        await self.membership.stop()
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
