"""The node behind an admin port, as the routes read it."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.api.cluster_operations import ClusterOperations
from holdfast.api.endpoints import ApiRefusal
from holdfast.api.nodes.whole_log import Ask, WholeLog, ask_nobody
from holdfast.api.process import ServedProcess
from holdfast.api.views.slices import Slices
from holdfast.io.event_loop.broker import Broker
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.metadata.model import DATA, NodePhase
from holdfast.node.node_state import NodeState
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RecordedState

LOG_SERVERS: Final = "Holdfast-Log-Servers"
"""The header of a 421 with the admin ports of nodes that store the log."""
COMMIT_S: Final = 10.0
"""The most seconds that a request waits for the commit of its change."""
STANDS_BY: Final = "this node stands by: ask the holder of the lease"


def cluster_of(server: ServedProcess) -> ClusterOperations:
    """The cluster's operations. Raises `ApiRefusal` (503) on a standby."""
    if server.cluster is None:
        raise ApiRefusal(503, STANDS_BY)
    return server.cluster


def check_log(broker: Broker) -> None:
    """Raises `ApiRefusal` (503) if the log of this node is damaged."""
    if not broker.runtime.believes_disk:
        raise ApiRefusal(503, "the log of this node is damaged: ask another node")


def not_stored(broker: Broker, partition: int) -> ApiRefusal:
    """The refusal (421) of a partition that is not stored here. Its header has the admin ports to
    ask."""
    return elsewhere(f"partition {partition}", log_servers(broker, partition))


def elsewhere(what: str, servers: list[tuple[str, str]]) -> ApiRefusal:
    """The refusal (421) of what other nodes store."""
    listing = ", ".join(f"{name} ({address})" for name, address in servers) or "another node"
    text = f"this node does not store {what}: ask {listing}"
    return ApiRefusal(421, text, {LOG_SERVERS: " ".join(address for _, address in servers)})


def log_servers(broker: Broker, partition: int | None = None) -> list[tuple[str, str]]:
    """The other data nodes that are up, with their admin ports; with a partition those that are in
    sync for it. Those that lead fewer partitions come first."""
    metadata = broker.runtime.cluster_node.context.metadata
    if metadata is None:
        return []
    chosen = set(metadata.nodes)
    if partition is not None:
        chosen = set(metadata.partitions[partition].in_sync)
    leaders = [each.leader for each in metadata.partitions]
    found = [
        (leaders.count(name), name, info.admin_address)
        for name, info in metadata.nodes.items()
        if name in chosen
        and info.role == DATA
        and info.state == NodePhase.UP
        and info.admin_address
        and name != broker.node.state.config.node_id
    ]
    return [(name, address) for _, name, address in sorted(found)]


class OwnNode:
    """The broker of a node, and what it knows of the whole cluster."""

    def __init__(self, server: ServedProcess) -> None:
        self.server = server
        self.slices = Slices()
        self.ask: Ask = ask_nobody
        """Asks another node. LogAnswers sets it."""

    @property
    def node_id(self) -> str:
        """The id of the node. The nodes of a shared directory serve as one, with another id."""
        server = self.server
        if server.broker is None:
            return server.config.node.id
        return server.broker.node.state.config.node_id

    @property
    def broker(self) -> Broker:
        """The broker. Raises `ApiRefusal` (503) while this node serves no clients."""
        broker = self.server.broker
        if broker is None:
            if self.server.sharing is not None:
                raise ApiRefusal(503, STANDS_BY)
            raise ApiRefusal(503, "this node serves no clients: ask another node")
        return broker

    @property
    def readable_broker(self) -> Broker:
        """The broker, whose log is not damaged. Raises `ApiRefusal` (503)."""
        broker = self.broker
        check_log(broker)
        return broker

    async def log(self, partitions: Iterable[int] | None = None) -> WholeLog:
        """The log of all nodes; only these partitions of it are read. Raises `ApiRefusal` (503)."""
        found = WholeLog(self.readable_broker, self.ask)
        await found.open(partitions)
        return found

    async def log_and_lake(self, partitions: Iterable[int] | None = None) -> WholeLog:
        """The log like `log`, and before it what the lake has. Raises `ApiRefusal` (503)."""
        found = await self.log(partitions)
        await found.open_lake()
        return found

    @property
    def state(self) -> NodeState:
        """The state of this node: the clients connected here."""
        broker = self.broker
        # An idle node's clock stands still until the next turn.
        broker.touch()
        return broker.node.state

    def committed(self) -> list[int]:
        """Per partition, the first offset that is not both committed and readable here."""
        journal = self.broker.node.state.journal
        return list(map(min, journal.high_watermark, journal.written))

    @property
    def recorded(self) -> RecordedState:
        """The state that the log defines: the sessions of all nodes that outlive their connections,
        with their owners."""
        return self.cluster_node.replicated.state

    @property
    def cluster_node(self) -> ClusterNode:
        """The cluster's part of the broker. Raises `ApiRefusal` (503)."""
        return self.broker.runtime.cluster_node

    async def commit(
        self, begin: Callable[[Callable[[str], None]], None], what: str, wait_s: float = COMMIT_S
    ) -> None:
        """Begins a change, which reports its commit ("") or its failure, and waits for that. Raises
        `ApiRefusal` (503)."""
        done: asyncio.Future[str] = self.broker.loop.create_future()
        self.broker.touch()
        begin(into(done))
        try:
            async with asyncio.timeout(wait_s):
                failure = await done
        except TimeoutError:
            failure = f"not committed within {wait_s:g} s, and may still be"
        if failure:
            raise ApiRefusal(503, f"{what}: {failure}")

    def find_session(self, client: str) -> Session | None:
        """The session of a client as this node has it, or None."""
        session = self.state.sessions.get(client)
        return session if session is not None else self.recorded.sessions.get(client)


def into(future: "asyncio.Future[str]") -> Callable[[str], None]:
    """The function that resolves the future, once."""

    def done(text: str) -> None:
        if not future.done():
            future.set_result(text)

    return done
