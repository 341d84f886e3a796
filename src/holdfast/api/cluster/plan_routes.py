"""Reports partitions with the lag of each replica, and the plan of an operation."""

import asyncio
from collections.abc import Callable
from re import fullmatch
from typing import Final

from msgspec import Struct

from holdfast.api.cluster_operations import PLANNED, ClusterError, ClusterOperations, planned
from holdfast.api.cluster_routes import REPLICATION, resize_of
from holdfast.api.endpoints import Call, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode, cluster_of
from holdfast.api.views.pages import AbsentNode
from holdfast.log.journal.segment_list import partition_bytes
from holdfast.node.metadata.model import CAPACITY_DEFAULT, DATA, NodeTraits
from holdfast.node.metadata.status import loss_effect, under_zoned
from holdfast.node.placement.forecast import PartitionForecast
from holdfast.security import peer_identity
from holdfast.security.access.scopes import Scope

RESIZE: Final = "resize"
JOIN: Final = "join"
LEAVE: Final = "leave"
NOTHING: Final = "nothing"
UNNAMED: Final = "new"
"""The node that joins, if the request does not name it."""
ACTIONS: Final = (*PLANNED, RESIZE, JOIN, LEAVE, NOTHING)
ACTION: Final = Text(
    "action",
    "the operation; `join`: a node with data more; `leave`: a node lost for good; `nothing`: the"
    " moves that are left",
    choices=ACTIONS,
    required=True,
)
NODE: Final = Text("node", "the id of the node, for an operation on one")
OF_NODE: Final = ("drain", "undrain", "remove", LEAVE)
ZONE: Final = Text("zone", "the zone of the node that joins")
CAPACITY: Final = Whole("capacity", "the capacity of the node that joins", least=1, most=10_000)


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
    bytes: int = 0
    """The bytes of the partition at its leader, by its share of the records of each segment."""


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
    bytes: int
    """The bytes that each new replica copies, as its leader estimates them."""


class LossReply(Struct):
    """The effect that the loss of a node, or of a whole zone, would have at once."""

    node: str
    """The node, or "" for a zone."""
    zone: str
    leaders: int
    """The partitions that would get another leader, or none."""
    below_min_insync: int
    """The partitions that would refuse messages of QoS 1 and 2."""
    leaderless: int
    """The partitions that no node could lead."""


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
    leaders: dict[str, int]
    """The partitions that each node leads at the end."""
    copies_under_way: int = 0
    """The replicas that are being made now; `bytes` has what is left of them."""
    bytes_to: dict[str, int] = {}
    """The bytes that each node receives."""
    bytes: int = 0
    seconds: float = 0.0
    """The time that the copies take at `catch_up_bytes_per_s` from each leader; 0: no limit."""
    paused: bool = False
    """Whether moves are paused: then they begin after `resume`."""
    under_zoned: int = 0
    """The partitions that would have more replicas in one zone than the zones of now demand."""
    losses: list[LossReply] = []
    """For `leave` that of the node, for `nothing` those of each data node and each zone."""


def left_bytes(lag: ReplicaLag, node: str) -> int:
    """The bytes that a replica which is being made has yet to receive."""
    records = max(1, lag.end_offset - lag.start_offset)
    return lag.bytes * min(lag.lags.get(node, records), records) // records


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
                     PlanReply, (ACTION, NODE, ZONE, CAPACITY, *REPLICATION),
                     refusals=(404, 409, 503)),
        ]  # fmt: skip

    @property
    def _cluster(self) -> ClusterOperations:
        """The operations. Raises `ApiRefusal` (503) on a standby."""
        return cluster_of(self._node.server)

    async def _replicas(self, call: Call) -> ReplicasReply:
        _ = self._cluster
        partitions, missing = await self._led_partitions()
        return ReplicasReply(partitions, missing)

    async def _led_partitions(self) -> tuple[list[ReplicaLag], list[AbsentNode]]:
        """The partitions that have a leader, by number, and the nodes that did not reply."""
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
        return [found[number] for number in sorted(found)], missing

    async def _replicas_here(self, question: ReplicaQuestion) -> LedPartitions:
        journal = self._node.state.journal
        # A log of some TB has ten thousands of segments.
        sizes = await asyncio.to_thread(partition_bytes, [*journal.segments], journal.partitions)
        return LedPartitions(
            self._node.node_id,
            [
                ReplicaLag(
                    number,
                    journal.start_offsets[number],
                    journal.next_offset[number],
                    journal.high_watermark[number],
                    lags,
                    sizes[number],
                )
                for number, lags in self._cluster.lags().items()
            ],
        )

    async def _plan(self, call: Call) -> PlanReply:
        action, node = call[ACTION], call.get(NODE) or ""
        if (action in OF_NODE) != bool(node) and action != JOIN:
            raise bad_request(f"node={node}: {action} needs {'no' if node else 'a'} node")
        try:
            make = self._forecast(call, action, node)
            # The pure forecast of many partitions takes longer than a turn of the loop may.
            found = await asyncio.to_thread(make)
        except ClusterError as error:
            return PlanReply(action, node, False, str(error), [], 0, 0, {})
        led, _ = await self._led_partitions()
        return self._reply(action, node, found, {each.partition: each for each in led})

    def _forecast(
        self, call: Call, action: str, node: str
    ) -> Callable[[], list[PartitionForecast]]:
        cluster = self._cluster
        if action == JOIN:
            capacity = call.get(CAPACITY) or CAPACITY_DEFAULT
            zone = call.get(ZONE) or ""
            if not fullmatch(peer_identity.ZONE, zone):
                raise bad_request(f"zone={zone}: up to 64 letters, digits, . _ and - are possible")
            traits = NodeTraits(node or UNNAMED, zone, capacity)
            if traits.node in cluster.metadata.nodes:
                raise ClusterError(f"{traits.node} is a node of the cluster already")
            return cluster.plan(lambda metadata: None, lambda now: now.with_node(traits))
        if action == LEAVE:
            if node not in cluster.metadata.nodes:
                raise ClusterError(f"there is no node {node} in the cluster")
            return cluster.plan(lambda metadata: None, lambda now: now.without_node(node))
        if action == NOTHING:
            return cluster.plan(lambda metadata: None)
        return cluster.plan(resize_of(call) if action == RESIZE else planned(action, node))

    def _losses(self, action: str, node: str) -> list[LossReply]:
        metadata = self._cluster.metadata
        traits = metadata.traits
        zones = {
            name: traits[name].zone if name in traits else ""
            for name, info in sorted(metadata.nodes.items())
            if info.role == DATA and (action == NOTHING or name == node)
        }
        lost = [(name, zone, [name]) for name, zone in zones.items()]
        if action == NOTHING:
            for zone in sorted({*zones.values()} - {""}):
                lost.append(("", zone, [name for name in zones if zones[name] == zone]))
        found = []
        for name, zone, nodes in lost:
            effect = loss_effect(metadata, nodes)
            found.append(
                LossReply(name, zone, effect.leaders, effect.below_min_insync, effect.leaderless)
            )
        return found

    def _reply(
        self, action: str, node: str, found: list[PartitionForecast], led: dict[int, ReplicaLag]
    ) -> PlanReply:
        """`led`: the partitions that have a leader."""
        metadata, rows = self._cluster.metadata, list[PlannedPartition]()
        leaders = {name: 0 for name, info in metadata.nodes.items() if info.role == DATA}
        for info in metadata.partitions:
            if info.leader:
                leaders[info.leader] = leaders.get(info.leader, 0) + 1
        reply = PlanReply(action, node, True, "", rows, 0, 0, leaders)
        reply.paused = metadata.is_paused
        sent: dict[str, int] = {}
        if action in (LEAVE, NOTHING):
            reply.losses = self._losses(action, node)
        ends = {each.partition: each.after.replicas for each in found}
        reply.under_zoned = under_zoned(metadata, ends)
        for each in found:
            number, old, new = each.partition, each.before, each.after
            size = led[number].bytes if number in led else 0
            source = each.copied_from
            sent[source] = sent.get(source, 0) + size * len(each.copies_to)
            rows.append(
                PlannedPartition(
                    number,
                    old.leader,
                    new.leader,
                    list(old.replicas),
                    list(new.replicas),
                    size if each.copies_to else 0,
                )
            )
            reply.copies += len(each.copies_to)
            for name in each.copies_to:
                reply.bytes_to[name] = reply.bytes_to.get(name, 0) + size
            if old.leader != new.leader:
                reply.leaders_moved += 1
                for name, change in ((old.leader, -1), (new.leader, 1)):
                    if name:
                        reply.leaders[name] = reply.leaders.get(name, 0) + change
        for number, lag in led.items():
            info = metadata.partitions[number]
            for name in info.adding:
                left = left_bytes(lag, name)
                reply.copies_under_way += 1
                reply.bytes_to[name] = reply.bytes_to.get(name, 0) + left
                sent[info.leader] = sent.get(info.leader, 0) + left
        reply.bytes = sum(reply.bytes_to.values())
        rate = self._node.server.config.cluster.catch_up_bytes_per_s
        reply.seconds = round(max(sent.values(), default=0) / rate, 1) if rate else 0.0
        return reply
