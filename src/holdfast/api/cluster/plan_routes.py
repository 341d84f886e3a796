"""Reports partitions with the lag of each replica, and the plan of an operation."""

import asyncio
from typing import Final

from msgspec import Struct

from holdfast.api.cluster_operations import PLANNED, ClusterError, ClusterOperations, planned
from holdfast.api.cluster_routes import REPLICATION, resize_of
from holdfast.api.endpoints import Call, Endpoint, Text, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode, cluster_of
from holdfast.api.views.pages import AbsentNode
from holdfast.node.placement.forecast import PartitionForecast
from holdfast.security.access.scopes import Scope

RESIZE: Final = "resize"
OF_CLUSTER: Final = ("rebalance", RESIZE)
"""The operations without a node."""
ACTIONS: Final = (*PLANNED, RESIZE)
ACTION: Final = Text("action", "the operation", choices=ACTIONS, required=True)
NODE: Final = Text("node", "the id of the node; not for `rebalance` and `resize`")


class ReplicaLag(Struct):
    """A partition as its leader sees it."""

    partition: int
    start_offset: int
    """The first record that the leader still has."""
    end_offset: int
    high_watermark: int
    """The first offset that is not committed."""
    lags: dict[str, int]
    """The records that each follower does not have durably."""


class LedPartitions(Struct):
    """The partitions that one node leads."""

    node: str
    partitions: list[ReplicaLag]


class ReplicasReply(Struct):
    """All partitions that have a leader, by number."""

    partitions: list[ReplicaLag]
    missing: list[AbsentNode] = []


class ReplicaQuestion(Struct):
    """The partitions that another node leads."""


class PlannedPartition(Struct):
    """A partition that the operation changes."""

    partition: int
    leader: str
    next_leader: str
    replicas: list[str]
    next_replicas: list[str]
    records: int
    """The records that each new replica copies, as far as this node has them."""


class PlanReply(Struct):
    """The changes that follow from an operation, unless nodes fail or join meanwhile."""

    action: str
    node: str
    possible: bool
    reason: str
    """The reason why the operation is refused; empty if it is possible."""
    partitions: list[PlannedPartition]
    leaders_moved: int
    copies: int
    """The replicas that are made."""
    records: int
    """The records that are copied for them, as far as this node has them."""
    leaders: dict[str, int]
    """The partitions that each node leads at the end."""
    records_to: dict[str, int]
    """The records that each node receives."""


class PlanRoutes:
    """The routes of plans, and of the lag of replicas."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        everywhere.offer("replicas", ReplicaQuestion, self._replicas_here)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/cluster/replicas", Scope.VIEWER,
                     "the offsets of all partitions and the lag of their replicas", self._replicas,
                     ReplicasReply, refusals=(503,)),
            Endpoint("GET", "/api/v1/cluster/plan", Scope.VIEWER,
                     "the leaders and replicas that an operation would move", self._plan,
                     PlanReply, (ACTION, NODE, *REPLICATION), refusals=(404, 409, 503)),
        ]  # fmt: skip

    @property
    def _cluster(self) -> ClusterOperations:
        """The operations. Raises `ApiRefusal` (503) on a standby."""
        return cluster_of(self._node.server)

    async def _replicas(self, call: Call) -> ReplicasReply:
        _ = self._cluster
        question = ReplicaQuestion()
        own = await self._replicas_here(question)
        others, missing = await self._everywhere.ask_others("replicas", question, LedPartitions)
        # While a leadership moves, two nodes may report a partition: the later one has more.
        found: dict[int, ReplicaLag] = {}
        for each in (own, *others):
            for led in each.partitions:
                known = found.get(led.partition)
                if known is None or led.end_offset > known.end_offset:
                    found[led.partition] = led
        return ReplicasReply([found[number] for number in sorted(found)], missing)

    async def _replicas_here(self, question: ReplicaQuestion) -> LedPartitions:
        journal = self._node.state.journal
        return LedPartitions(
            self._node.node_id,
            [
                ReplicaLag(
                    number,
                    journal.start_offsets[number],
                    journal.next_offset[number],
                    journal.high_watermark[number],
                    lags,
                )
                for number, lags in self._cluster.lags().items()
            ],
        )

    async def _plan(self, call: Call) -> PlanReply:
        action, node = call[ACTION], call.get(NODE) or ""
        if (action in OF_CLUSTER) == bool(node):
            raise bad_request(f"node={node}: {action} needs {'no' if node else 'a'} node")
        operation = resize_of(call) if action == RESIZE else planned(action, node)
        try:
            make = self._cluster.plan(operation)
            # The pure forecast of many partitions takes longer than a turn of the loop may.
            found = await asyncio.to_thread(make)
        except ClusterError as error:
            return PlanReply(action, node, False, str(error), [], 0, 0, 0, {}, {})
        return self._reply(action, node, found)

    def _reply(self, action: str, node: str, found: list[PartitionForecast]) -> PlanReply:
        journal = self._node.state.journal
        rows: list[PlannedPartition] = []
        reply = PlanReply(action, node, True, "", rows, 0, 0, 0, self._cluster.leaders(), {})
        for each in found:
            number, old, new = each.partition, each.before, each.after
            records = journal.high_watermark[number] - journal.start_offsets[number]
            rows.append(
                PlannedPartition(
                    number,
                    old.leader,
                    new.leader,
                    list(old.replicas),
                    list(new.replicas),
                    records if each.copies_to else 0,
                )
            )
            reply.copies += len(each.copies_to)
            reply.records += records * len(each.copies_to)
            for name in each.copies_to:
                reply.records_to[name] = reply.records_to.get(name, 0) + records
            if old.leader != new.leader:
                reply.leaders_moved += 1
                for name, change in ((old.leader, -1), (new.leader, 1)):
                    if name:
                        reply.leaders[name] = reply.leaders.get(name, 0) + change
        return reply
