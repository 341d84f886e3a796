"""Counts the clients of each node, paces their drain, and balances them.

The node that is asked counts the clients of all nodes, decides on the shares, and gives every node
its own. Without a command the node that leads the metadata does the same, if
`cluster.rebalance_connections_per_s` is set.
"""

import asyncio
import logging
import time
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Number, Text
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import AbsentNode
from holdfast.node.placement.client_shares import (
    AutomaticBalance,
    ClientShare,
    even_shares,
    obstacle,
)
from holdfast.node.runtime.runtime import Runtime
from holdfast.security.access.scopes import Scope

logger = logging.getLogger("holdfast")

CHECK_S: Final = 5.0
"""The seconds between two counts for the balance without a command."""
PACE_MAX: Final = 1_000_000.0
NODE: Final = Text("node", "the id of the node", required=True)
PACE: Final = Number(
    "clients_per_s", "the clients that leave a node in a second; 0: all at once", most=PACE_MAX,
    required=True,
)  # fmt: skip
BALANCE_PACE: Final = Number(
    "clients_per_s",
    "the clients that leave a node in a second; unset: cluster.drain_clients_per_s; 0: stop",
    most=PACE_MAX,
)


class NodeClients(Struct):
    """The clients of one node."""

    node: str
    clients: int
    share: int = 0
    """The clients of the node if all nodes had about as many."""
    leaving: int = 0
    """The clients that the node is about to send to other nodes."""
    clients_per_s: float = 0.0
    """The clients that a drain or a balance of this node sends away in a second; 0: all at once."""


class ClientsReply(Struct):
    """The clients of all nodes that store data."""

    nodes: list[NodeClients]
    obstacle: str = ""
    """The reason why no client is sent away for balance; empty: there is none."""
    missing: list[AbsentNode] = []


class ClientsQuestion(Struct):
    """The clients of another node."""


class PaceQuestion(Struct):
    """The pace of a drain of another node."""

    clients_per_s: float


class BalanceQuestion(Struct):
    """The clients that a node is to keep, and the nodes for the others. `clients_per_s` 0: stop."""

    keep: int
    below: list[str]
    clients_per_s: float


class ClientRoutes:
    """The routes of the clients of each node."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        self._automatic = AutomaticBalance()
        everywhere.offer("clients", ClientsQuestion, self._clients_here)
        everywhere.offer("drain_pace", PaceQuestion, self._pace_here)
        everywhere.offer("balance_clients", BalanceQuestion, self._balance_here)

    def endpoints(self) -> list[Endpoint]:
        path = "/api/v1/cluster/clients"
        return [
            Endpoint("GET", path, Scope.VIEWER, "the clients of each node and its even share",
                     self._clients, ClientsReply, refusals=(404, 503)),
            Endpoint("POST", f"{path}/balance", Scope.OPERATOR,
                     "send the clients above each node's share to the other nodes", self._balance,
                     ClientsReply, (BALANCE_PACE,), refusals=(404, 409, 503)),
            Endpoint("POST", f"{path}/pace", Scope.OPERATOR,
                     "set the pace at which the next or present drain of a node moves its clients",
                     self._pace, NodeClients, (NODE, PACE), refusals=(404, 503)),
        ]  # fmt: skip

    async def run(self) -> None:
        """Balances the clients without a command, if the setting says so."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self._check()
            except ApiRefusal as error:
                logger.warning("clients_not_balanced error=%r", str(error))

    async def _check(self) -> None:
        server = self._node.server
        per_s = server.config.cluster.rebalance_connections_per_s
        cluster = server.cluster
        if not per_s or cluster is None or not cluster.figures().is_metadata_leader:
            self._automatic = AutomaticBalance()
            return
        reply = await self._count()
        counts = {each.node: each.clients for each in reply.nodes}
        is_obstructed = bool(reply.obstacle or reply.missing)
        if self._automatic.is_due(None if is_obstructed else counts, time.monotonic()):
            await self._carry_out(even_shares(counts), per_s)

    async def _clients(self, call: Call) -> ClientsReply:
        return await self._count()

    async def _pace(self, call: Call) -> NodeClients:
        node, question = call[NODE], PaceQuestion(call[PACE])
        if node == self._node.node_id:
            return await self._pace_here(question)
        return await self._everywhere.ask(node, "drain_pace", question, NodeClients)

    async def _balance(self, call: Call) -> ClientsReply:
        given = call.get(BALANCE_PACE)
        found = call.before = await self._count()
        per_s = self._runtime.redirection.drain_per_s or PACE_MAX if given is None else given
        reason = found.obstacle
        if found.missing and not reason:
            reason = f"{found.missing[0].node} did not reply: {found.missing[0].reason}"
        if reason and per_s:
            raise ApiRefusal(409, f"{reason}: clients are sent away only while all nodes are up")
        shares = even_shares({each.node: each.clients for each in found.nodes})
        await self._carry_out(shares, per_s)
        call.after = found = await self._count()
        return found

    async def _carry_out(self, shares: list[ClientShare], per_s: float) -> None:
        """Tells each node above its share how many clients it keeps; with 0 clients a second every
        node to stop."""
        ranked = sorted(shares, key=lambda each: each.clients - each.share)
        below = [each.node for each in ranked if each.clients < each.share]
        for each in shares:
            if per_s and not (each.surplus and below):
                continue
            question = BalanceQuestion(each.share, below, per_s)
            if each.node == self._node.node_id:
                await self._balance_here(question)
            else:
                await self._everywhere.ask(each.node, "balance_clients", question, NodeClients)
            logger.info("clients_balanced node=%s clients=%d share=%d clients_per_s=%g",
                        each.node, each.clients, each.share, per_s)  # fmt: skip

    async def _count(self) -> ClientsReply:
        question = ClientsQuestion()
        metadata = self._runtime.cluster_node.context.metadata
        if metadata is None:
            raise ApiRefusal(503, "the cluster is not initialised")
        own = await self._clients_here(question)
        others, missing = await self._everywhere.ask_others("clients", question, NodeClients)
        nodes = sorted([own, *others], key=lambda each: each.node)
        shares = even_shares({each.node: each.clients for each in nodes})
        for node, share in zip(nodes, shares, strict=True):
            node.share = share.share
        return ClientsReply(nodes, obstacle(metadata), missing)

    # This node

    @property
    def _runtime(self) -> Runtime:
        """The cluster's part of this node. Raises `ApiRefusal` (503)."""
        return self._node.broker.runtime

    async def _clients_here(self, question: ClientsQuestion) -> NodeClients:
        runtime = self._runtime
        relocation = runtime.node.relocation
        return NodeClients(
            self._node.node_id,
            self._node.state.client_sessions(),
            leaving=relocation.left,
            clients_per_s=relocation.per_s if relocation.left else runtime.redirection.drain_per_s,
        )

    async def _pace_here(self, question: PaceQuestion) -> NodeClients:
        self._runtime.redirection.set_drain_pace(question.clients_per_s)
        return await self._clients_here(ClientsQuestion())

    async def _balance_here(self, question: BalanceQuestion) -> NodeClients:
        redirection = self._runtime.redirection
        if not question.clients_per_s:
            redirection.stop_balance()
        elif not redirection.balance(question.below, question.clients_per_s, question.keep):
            raise ApiRefusal(503, "a node is not up, or this one takes no clients")
        return await self._clients_here(ClientsQuestion())
