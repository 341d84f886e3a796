"""Shows and operates the cluster, at every node."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from msgspec import Struct, field

from holdfast.config.schema import Config
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.agreement import AccessAgreement
from holdfast.io.peers.questions import PeerQuestions
from holdfast.log.files.layout import GENERATION_BITS
from holdfast.node.failure.health import Health, Presence
from holdfast.node.features import AGREED_PLACEMENT, AGREED_REPLICATION, GIVES_UP_RECORDS
from holdfast.node.metadata import operations, status
from holdfast.node.metadata.commands import Command, PutPlacement, Resize
from holdfast.node.metadata.history import MetadataChange
from holdfast.node.metadata.model import (
    DATA,
    WITNESS,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
)
from holdfast.node.metadata.requests import Accepted, Outcome, RequestRefused
from holdfast.node.placement.forecast import PartitionForecast, Situation, forecast
from holdfast.node.placement.planning import last_copies
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.session.session import Session

Make = Callable[[ClusterMetadata], Command | None]
"""The command of an operation; None if nothing is to be done. Raises `OperationError`."""
Change = Callable[[Situation], Situation]


def _unchanged(situation: Situation) -> Situation:
    return situation


PLANNED: Final[Mapping[str, Callable[[ClusterMetadata, str], Command | None]]] = {
    "drain": operations.drain,
    "undrain": operations.undrain,
    "remove": operations.remove,
    "rebalance": lambda metadata, node: operations.rebalance(metadata),
    "pause": lambda metadata, node: operations.pause(metadata, True),
    "resume": lambda metadata, node: operations.pause(metadata, False),
}
"""The commands of the operations that can be planned, by name."""


def planned(action: str, node: str) -> Make:
    """One of the operations of `PLANNED`."""
    return partial(_planned, action, node)


def _planned(action: str, node: str, metadata: ClusterMetadata) -> Command | None:
    return PLANNED[action](metadata, node)


class PlacementFigures(Struct, frozen=True):
    """The figures of the placement, for metrics. They cost more than `ClusterFigures`."""

    zone: str
    under_zoned: int
    uneven: int
    is_paused: bool
    leaders: int
    """Partitions that this node leads; `replicas`: of which it is a replica."""
    replicas: int


class ClusterError(Exception):
    """The cluster refuses the operation. The text says why and what to do."""


class ClusterFigures(Struct, frozen=True):
    """Frequently changing figures of a node's cluster, for metrics and readiness."""

    node: str
    initialised: bool = False
    has_majority: bool = False
    is_witness: bool = False
    is_metadata_leader: bool = False
    metadata_version: int = 0
    under_replicated: int = 0
    below_min_insync: int = 0
    """Partitions with too few replicas in sync: QoS 1 and 2 are not acknowledged there."""
    leaderless: int = 0
    moving: int = 0
    sessions_here: int = 0
    """Sessions connected to this node."""
    peers: Mapping[str, bool] = field(default_factory=dict)
    """Other nodes of the cluster, and whether there is a link to each."""
    relayed: Collection[str] = ()
    """Those whose link goes through another node."""
    relayed_bytes: int = 0
    """The bytes that this node has relayed between two others since its start."""
    sent_frames: int = 0
    """The frames that this node has sent to others since its start."""
    sent_bytes: int = 0
    lag_records: Mapping[str, int] = field(default_factory=dict)
    """Followers, and the records of partitions led here that each has not stored durably yet."""
    failovers: int = 0
    """Partitions that this node took over from a lost leader since its start."""
    refused_min_insync: int = 0
    """Publishes refused because fewer than `min_insync` replicas are in sync."""
    forwarded_publishes: int = 0
    """Publishes of this node's clients that were forwarded to the leader of their partition."""
    lacking: int = 0
    """Partitions whose sessions and retained messages this node must first fetch from others."""
    is_disk_stalled: bool = False
    """Whether a write takes too long. The node then gives up its leaderships and clients."""
    is_removed: bool = False
    """Whether other nodes have reported that this node was removed from the cluster."""
    is_damaged: bool = False
    """Whether the disk has lost or changed data. The node then serves no client and starts
    again."""
    is_older_copy: bool = False
    """Whether the disk is an older copy. The node then waits until it may start as a new peer."""
    clock_skews_s: Mapping[str, float] = field(default_factory=dict)
    """Per node, this one included, the seconds by which its clock is ahead of the cluster's."""
    lacks_voters: bool = False
    """Whether some future voters do not vote yet, so that one failure may cost the majority."""
    stop: status.StopEffect = field(default_factory=status.StopEffect)
    """The effect that a stop of this node would have."""
    unsure_s: float = 0.0
    """The seconds for which the node has been unable to begin recorded sessions."""
    lags: bool = False
    """Whether the node cannot resume sessions that others can, because it lags behind them."""
    awaited: Sequence[str] = ()
    """The nodes that this one has not met since its start, and waits for."""
    set_aside: Sequence[str] = ()
    """The directories with records that the others went on without."""
    unread: Sequence[int] = ()
    """The partitions that are stored elsewhere and whose readers here wait for a replica."""


def awaited_in_sync(metadata: ClusterMetadata, health: Health) -> list[str]:
    """The nodes in sync that were not heard since the start of this one, where without them one
    replica would be in sync: that partition waits for them, for `start_alone_after_s`."""
    unmet = health.unmet & health.suspected
    in_sync = (set(info.in_sync) for info in metadata.partitions if unmet)
    return sorted(set().union(*(each & unmet for each in in_sync if len(each - unmet) == 1)))


class Departure:
    """The stop of this node, as it agrees on it with the other nodes."""

    def __init__(self, runtime: Runtime, now: Callable[[], float]) -> None:
        self._runtime = runtime
        self._now = now
        self.awaited: frozenset[str] = frozenset()
        """The nodes that leave while this one waits. They are expected back."""

    def ask(self) -> None:
        """Announces to the other nodes that this one will stop."""
        self._runtime.ask_to_stop(self._now())

    def may_leave(self, figures: ClusterFigures) -> bool:
        """Whether each node knows of the stop, and the others would be spared nothing by a later
        one."""
        cluster_node = self._runtime.cluster_node
        health = cluster_node.health(self._now())
        self.awaited |= health.leaving | health.asking
        # Without a majority the node acknowledges nothing that its stop could end.
        return not figures.has_majority or (
            cluster_node.detector.is_asking_known() and not figures.stop.is_passing
        )

    def leave(self) -> None:
        """Announces that this node stops, and lets other nodes lead its partitions."""
        self._runtime.leave(self._now())


class ClusterOperations:
    """The cluster of a running node, as an operator sees and changes it.

    An accepted operation may continue after it returns; `status` shows its progress. `ClusterError`
    becomes 409.
    """

    def __init__(
        self,
        config: Config,
        presence: Presence,
        broker: Broker,
        refused: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`refused`: see `PeerCheck`."""
        self._config = config
        self._is_witness = config.cluster.node_role() == WITNESS
        self._presence = presence
        self._broker = broker
        self._runtime = broker.runtime
        self._cluster_node = broker.runtime.cluster_node
        self._links = broker.links
        self._refused = refused
        self._loop = loop
        self._requests: dict[int, asyncio.Future[Outcome]] = {}
        self.departure = Departure(self._runtime, loop.time)
        self.access = AccessAgreement(
            self._cluster_node, self._links.identity, config.cluster.join, self.propose, loop.time
        )

    @property
    def questions(self) -> PeerQuestions:
        """The questions to the other nodes."""
        return self._broker.questions

    def other_nodes(self) -> dict[str, str]:
        """The other nodes with clients, by id, with the reason why one is not to be asked, or
        ""."""
        metadata = self._cluster_node.context.metadata
        if metadata is None:
            return {}
        return {
            node: "it is down" if info.state == NodePhase.DOWN else ""
            for node, info in sorted(metadata.nodes.items())
            if node != self._config.node.id and info.has_clients
        }

    def settle(self, outcomes: Iterable[tuple[int, Outcome]]) -> None:
        """Resolves operations with the outcomes of their metadata requests."""
        for request, outcome in outcomes:
            future = self._requests.pop(request, None)
            if future is not None and not future.done():
                future.set_result(outcome)

    def status(self) -> dict[str, object]:
        """Returns the cluster as this node sees it. Unknown node ids are empty."""
        cluster_node = self._cluster_node
        now = self._loop.time()
        metadata = cluster_node.context.metadata
        found: dict[str, object] = {
            "cluster_id": "",
            "node": self._config.node.id,
            "initialised": metadata is not None,
            "metadata_leader": cluster_node.meta.leader_id,
            "metadata_term": cluster_node.meta.term,
            "has_majority": metadata is not None and cluster_node.context.is_available(now),
            "version": 0,
            "replication_factor": self._config.cluster.replication_factor,
            "min_insync": self._config.cluster.min_insync,
            "replication": None,
            "nodes": [],
            "partitions": [],
            "under_replicated": 0,
            "below_min_insync": 0,
            "leaderless": 0,
            "moving": 0,
            "sessions_here": len(cluster_node.state.sessions),
            "waits_s": round(self._runtime.waits_s(now), 3),
            "older_copy": self._runtime.fitness.older_copy,
            "removed": self._runtime.fitness.is_removed,
            "refused_by": self._refusals() if metadata is None else [],
            "waits_for": []
            if metadata or self._config.cluster.wait_for_init
            else self._links.unmet(),
        }
        if metadata is not None:
            found.update(
                status.cluster_status(metadata, cluster_node.health(now), self._replaced())
            )
            partitions, nodes = found["partitions"], found["nodes"]
            assert isinstance(partitions, list)
            assert isinstance(nodes, list)
            skews_s = cluster_node.clock.skews_s()
            through = self._runtime.links.relayed.through()
            for node in nodes:
                node["clock_skew_s"] = round(skews_s.get(node["node"], 0.0), 3)
                node["through"] = through.get(node["node"], "")
            for number, partition in enumerate(partitions):
                partition["high_watermark"] = cluster_node.context.journal.high_watermark[number]
        return found

    def led_partition(self) -> int:
        """A partition that this node leads; 0 if it leads none."""
        leading = self._cluster_node.context.leading
        return next((number for number, epoch in enumerate(leading) if epoch > 0), 0)

    def figures(self) -> ClusterFigures:
        cluster_node = self._cluster_node
        metadata = cluster_node.context.metadata
        node = self._config.node.id
        if metadata is None:
            return ClusterFigures(node, is_witness=self._is_witness)
        now = self._loop.time()
        return ClusterFigures(
            node,
            True,
            cluster_node.context.is_available(now),
            self._is_witness,
            cluster_node.meta.is_leader,
            metadata.version,
            status.under_replicated(metadata),
            status.below_min_insync(metadata),
            sum(not info.leader for info in metadata.partitions),
            sum(bool(info.adding) for info in metadata.partitions),
            len(cluster_node.state.sessions),
            {
                other: other in cluster_node.context.connected
                for other in metadata.nodes
                if other != node
            },
            self._runtime.links.relayed.links.keys(),
            self._runtime.links.relayed.relayed_bytes,
            self._links.metrics.frames_out,
            self._links.metrics.bytes_out,
            sum_of_lags(cluster_node.replication.leading.lags()),
            cluster_node.failovers,
            cluster_node.admission.refused,
            cluster_node.forwarding.forwarded,
            len(cluster_node.transfer.missing) + len(cluster_node.transfer.unsaved),
            self._runtime.disk.is_stalled,
            self._runtime.fitness.is_removed,
            self._runtime.fitness.is_damaged,
            bool(self._runtime.fitness.older_copy),
            cluster_node.clock.skews_s(),
            status.lacks_voters(metadata),
            status.stop_effect(metadata, cluster_node.health(now), node, self.departure.awaited),
            cluster_node.ownership.unsure_s(),
            bool(cluster_node.barriers.nodes_ahead()),
            cluster_node.attendance.missing(now)
            or awaited_in_sync(metadata, cluster_node.health(now)),
            self._runtime.replacement.kept,
            sorted(cluster_node.remote_reads.unreachable),
        )

    def placement_figures(self) -> PlacementFigures | None:
        """Returns the figures of the placement, or None without a cluster."""
        metadata, node = self._cluster_node.context.metadata, self._config.node.id
        if metadata is None:
            return None
        even = status.evenness(metadata)
        return PlacementFigures(
            self._config.cluster.zone,
            even.under_zoned,
            even.uneven,
            metadata.is_paused,
            sum(info.leader == node for info in metadata.partitions),
            operations.partitions_held(metadata, node),
        )

    def replicated_sessions(self) -> Iterator[Session]:
        """Yields the sessions of all nodes as the log defines them. They may change meanwhile."""
        return self._cluster_node.replicated.all_sessions()

    def _refusals(self) -> list[str]:
        """Returns the addresses of nodes that refused this one, each with its reason."""
        return [
            f"{address} {refusal.text}"
            for address, refusal in sorted(self._links.refused_by.items())
        ]

    def changes(self, since_us: int) -> list[MetadataChange]:
        """Returns the changes of the metadata since a time, oldest first."""
        return self._cluster_node.history.changes(since_us)

    def now_us(self) -> int:
        """Returns the time that the nodes agree on, in microseconds since 1970."""
        return self._cluster_node.clock.agreed_us(self._loop.time())

    def waiting(self) -> tuple[int, float]:
        """Returns the number of records that wait for their commit, and the age in seconds of the
        oldest one with a promise."""
        forwarding = self._cluster_node.forwarding
        return len(forwarding.pending), forwarding.waits_s(self._loop.time())

    def lags(self) -> dict[int, dict[str, int]]:
        """Returns, for each partition led here, the records that each follower does not have."""
        return self._cluster_node.replication.leading.lags()

    def plan(
        self, make: Make, change: Change = _unchanged
    ) -> Callable[[], list[PartitionForecast]]:
        """Returns a pure function that computes the result of an operation. `change`: the nodes
        that join or are lost before. Raises `ClusterError` if the operation is refused."""
        situation = Situation(self.metadata, self._cluster_node.health(self._loop.time()))
        command = self._command(lambda: make(situation.metadata))
        return lambda: forecast(change(situation), command)

    async def init(self) -> dict[str, object]:
        """Initialises a cluster with this node, and returns the status. Nodes that name this one in
        `--join` join it.

        It refuses if another node refused this one or belongs to a cluster: that cluster probably
        is the one to join, and a second one with the same nodes could never merge with it.
        """
        cluster_node = self._cluster_node
        metadata = cluster_node.meta.metadata
        if metadata is not None:
            raise ClusterError(f"the cluster is initialised already, with id {metadata.cluster_id}")
        cluster = self._config.cluster
        role = cluster.node_role()
        if role != DATA:
            raise ClusterError(f"a {role} cannot hold the first partitions: ask a data node")
        for peer in self._links.connected():
            if peer.cluster_id:
                raise ClusterError(
                    f"{peer.node_id} belongs to the cluster {peer.cluster_id} already: this node"
                    " is about to join it"
                )
        refusals = self._refusals()
        if refusals:
            raise ClusterError(
                f"{refusals[0]}. A second cluster would be made: mend that, or take the address out"
                " of cluster.join"
            )
        if self._links.identity.cluster_id:
            raise ClusterError(
                f"this node belongs to the cluster {self._links.identity.cluster_id}, and waits for"
                " its other nodes"
            )
        info = NodeInfo(
            self._config.node.id,
            self._presence.incarnation,
            self._presence.peer_address,
            self._presence.client_address,
            self._presence.admin_address,
        )
        self._broker.touch()
        try:
            request = cluster_node.meta.create_cluster(
                secrets.token_hex(8),
                cluster.partitions,
                cluster.replication_factor,
                cluster.min_insync,
                info,
                self._loop.time(),
            )
        except ValueError as error:
            # It was killed before its metadata were known as committed. A majority commits them.
            raise ClusterError(f"{error}, and waits for its metadata") from error
        await self._outcome(request)
        return self.status()

    async def change(self, make: Make) -> None:
        """Carries out an operation. A drain moves the leaderships away first, then the replicas."""
        await self._operate(lambda: make(self.metadata))

    def _check_knows(self, feature: str, name: str) -> None:
        """Raises `ClusterError` if the nodes cannot agree on a command of this feature now. A node
        that does not know it could not read its own log any more."""
        context = self._cluster_node.context
        if not context.is_available(self._loop.time()):
            raise ClusterError("no majority of the nodes that vote is reached: try again later")
        if unknown := context.nodes_unknown():
            raise ClusterError(
                f"this node has not met {', '.join(unknown)} since its start, and does not know"
                f" whether its version can {name}: start it, or remove it from the cluster"
            )
        if older := context.nodes_without(feature, witnesses=True):
            raise ClusterError(f"the version of {', '.join(older)} cannot {name}: upgrade it first")

    async def unsafe_recover(self, node: str) -> None:
        """Makes a node leader of leaderless partitions. Acknowledged records may be lost."""
        context = self._cluster_node.context
        older = context.nodes_without(GIVES_UP_RECORDS, witnesses=True)
        number = 0 if older else secrets.randbits(GENERATION_BITS) or 1
        await self._operate(
            lambda: operations.unsafe_recover(self.metadata, node, None, self._replaced(), number)
        )

    def _replaced(self) -> dict[str, str]:
        """Returns refused, disconnected nodes whose old disk had the last copy of a partition."""
        metadata = self._cluster_node.context.metadata
        if metadata is None:
            return {}
        return {
            node: text
            for node, text in self._refused.items()
            if node not in self._cluster_node.context.connected and last_copies(metadata, (node,))
        }

    async def remove(self, node: str) -> None:
        """Removes a node for good. Refused unless it is drained, or down and replaced."""
        try:
            operations.remove(self.metadata, node)
        except operations.OperationError as error:
            raise ClusterError(str(error)) from error
        self._broker.touch()
        await self._outcome(self._cluster_node.meta.remove(node, self._loop.time()))

    @property
    def metadata(self) -> ClusterMetadata:
        """The agreed state of the cluster. Raises `ClusterError` if there is no cluster yet."""
        metadata = self._cluster_node.context.metadata
        if metadata is None:
            raise ClusterError("the cluster is not initialised: holdfast cluster init")
        return metadata

    def propose(self, command: Command, done: Callable[[Outcome], None]) -> None:
        """Proposes a command. `done` is called with its outcome."""
        self._broker.touch()
        request = self._cluster_node.meta.propose(command, self._loop.time())
        future: asyncio.Future[Outcome] = self._loop.create_future()
        future.add_done_callback(lambda settled: done(settled.result()))
        self._requests[request] = future

    async def _operate(self, make: Callable[[], Command | None]) -> None:
        command = self._command(make)
        if command is not None:
            self._broker.touch()
            await self._outcome(self._cluster_node.meta.propose(command, self._loop.time()))

    def _command(self, make: Callable[[], Command | None]) -> Command | None:
        """Returns the command of an operation. Raises `ClusterError` if it is refused."""
        try:
            command = make()
        except operations.OperationError as error:
            raise ClusterError(str(error)) from error
        if isinstance(command, Resize):
            self._check_knows(AGREED_REPLICATION, "resize")
        if isinstance(command, PutPlacement):
            self._check_knows(AGREED_PLACEMENT, "pause moves")
        return command

    async def _outcome(self, request: int) -> None:
        """Waits for a metadata request. Raises `ClusterError` unless it was accepted."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._requests[request] = future
        outcome = await future
        if isinstance(outcome, Accepted):
            return
        if isinstance(outcome, RequestRefused):
            raise ClusterError(f"{outcome.text}: somebody else may have changed it, try again")
        raise ClusterError(outcome.text)


def sum_of_lags(lags: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """The records that each follower does not have, of all partitions together."""
    found: dict[str, int] = {}
    for each in lags.values():
        for node, records in each.items():
            found[node] = found.get(node, 0) + records
    return found
