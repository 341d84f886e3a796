"""Adds the nodes of one machine's processes to their cluster, and removes surplus ones.

Node 0 compares the metadata with the number of processes, and carries out one operation of the
cluster at a time: the ordinary drain and removal. Nothing follows from time: a node is removed when
the metadata says that it stores nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.api.cluster_operations import ClusterError, ClusterOperations, planned
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import Command
from holdfast.node.metadata.model import ClusterMetadata, NodePhase
from holdfast.process.place import ProcessPlace, index_of

logger = logging.getLogger("holdfast")

AGAIN_S: Final = 1.0
"""The seconds until another attempt, if the metadata does not change before."""


def next_step(metadata: ClusterMetadata, first: str, count: int) -> tuple[str, str] | None:
    """The next operation and its node, or None. `first`: the name of node 0.

    `single` and `automatic` set the replication. Several nodes of one machine have one replica of
    each partition: a second one would be lost with the same machine. The only process of a machine
    leaves that to the number of nodes, as every cluster that began as one.
    """
    places = {node: index_of(first, node) for node in metadata.nodes}
    # Without an entry, the replication is that of the foundation: one replica.
    is_automatic = metadata.replication is not None and metadata.replication.is_automatic
    if len(places) == 1 and count == 1:
        if not is_automatic:
            return "automatic", first
    elif is_automatic and None not in places.values():
        return "single", first
    for node, index in sorted(places.items()):
        if index is None or index < count:
            continue
        info = metadata.nodes[node]
        if info.state == NodePhase.UP:
            return "drain", node
        if info.state == NodePhase.DRAINING and not operations.partitions_held(metadata, node):
            return "remove", node
    return None


def _single(metadata: ClusterMetadata) -> Command | None:
    return operations.resize(metadata, 1, 1)


def _automatic(metadata: ClusterMetadata) -> Command | None:
    return operations.resize(metadata, is_automatic=True)


class SiblingNodes:
    """Adds and removes the other processes of a machine, and notices that this one was removed."""

    def __init__(
        self,
        place: ProcessPlace,
        cluster_node: ClusterNode,
        cluster: ClusterOperations,
        on_removed: Callable[[], None],
    ) -> None:
        """`on_removed`: called once this node was removed, so that others have all that it had."""
        self._place = place
        self._cluster_node = cluster_node
        self._cluster = cluster
        self._on_removed = on_removed
        self._refused = ""
        self._is_first = True
        self.changed = asyncio.Event()
        """Set when the metadata has changed, or this node was removed."""

    async def run(self) -> None:
        """Looks at each change of the metadata, until cancelled or removed."""
        again = True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if again else None):
                    await self.changed.wait()
            self.changed.clear()
            figures = self._cluster.figures()
            if figures.is_removed and not figures.set_aside:
                self._on_removed()
                return
            metadata = self._cluster_node.context.metadata
            again = self._place.index == 0
            if again and metadata is not None and figures.has_majority:
                again = await self._advance(metadata, figures.node)

    async def _advance(self, metadata: ClusterMetadata, own: str) -> bool:
        """Carries out the next operation. True: another attempt is needed."""
        try:
            if self._is_first:
                await self._undrain(metadata)
                self._is_first = False
            step = next_step(metadata, own, self._place.count)
            if step is not None:
                await self._carry_out(*step)
        except ClusterError as error:
            # The metadata has changed meanwhile, or a node is not met yet.
            if str(error) != self._refused:
                logger.info("processes_wait reason=%r", str(error))
            self._refused = str(error)
            return True
        return False

    async def _carry_out(self, action: str, node: str) -> None:
        logger.info("processes_change action=%s node=%s", action, node)
        if action == "remove":
            await self._cluster.remove(node)
        elif action in ("single", "automatic"):
            await self._cluster.change(_single if action == "single" else _automatic)
        else:
            await self._cluster.change(planned(action, node))

    async def _undrain(self, metadata: ClusterMetadata) -> None:
        """Keeps the nodes that an earlier start, with fewer processes, began to empty."""
        own = self._cluster.figures().node
        for node, info in metadata.nodes.items():
            index = index_of(own, node)
            if index and index < self._place.count and info.state == NodePhase.DRAINING:
                await self._carry_out("undrain", node)
