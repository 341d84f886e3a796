"""Creates a cluster without a command, `cluster.wait_for_init = false`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.config.schema import Config
from holdfast.io.peers.links import PeerLinks
from holdfast.node.metadata.model import DATA
from holdfast.node.metadata.store import MetaStore

logger = logging.getLogger("holdfast")

POLL_S: Final = 0.1
"""The time in seconds between two looks at the links."""


async def create_when_connected(
    config: Config,
    links: PeerLinks,
    meta: MetaStore,
    create: Callable[[], Awaitable[object]],
    refusal: type[Exception],
) -> None:
    """Creates the cluster when every node of `cluster.join` is connected and none belongs to one.
    Returns when this node has created or joined one. `create` raises `refusal` if there probably is
    a cluster.

    Counter-example for fewer nodes: n1 returns with an empty disk before n2 and n3 are up. No node
    reports their cluster to n1, and n1 would create a second one.
    """
    told: list[str] = []
    while meta.metadata is None:
        unmet = links.unmet()
        if unmet and unmet != told:
            logger.info("cluster_creation_waits addresses=%s", ",".join(unmet))
        told = unmet
        if not unmet and _is_creator(config, links):
            try:
                await create()
            except refusal as error:
                # Another node belongs to a cluster, or refuses this one; the loop goes on until
                # this node has joined, or may create one.
                logger.debug("cluster_not_created error=%r", str(error))
        await asyncio.sleep(POLL_S)


def _is_creator(config: Config, links: PeerLinks) -> bool:
    """Whether this node creates the cluster: `join` has its address, and no data node of `join` has
    a smaller id. The order of the addresses does not matter, so lists in another order agree."""
    joined = links.joined()
    if config.cluster.node_role() != DATA:
        return False
    if config.cluster.join and set(config.cluster.join) <= set(joined):
        return False
    data = {peer.node_id for peer in links.connected() if peer.role == DATA}
    return all(config.node.id < node for node in data.intersection(joined.values()))
