"""The effects of a cluster node's parts, carried out on the other parts or left for the driver."""

from collections.abc import Callable, Iterable

from holdfast.broker.connections.close import close_connection
from holdfast.broker.node import Node
from holdfast.cluster import frame_kinds as kinds
from holdfast.cluster.failure.detector import Beat, HeardAgain, Suspected
from holdfast.cluster.failure.health import Presence
from holdfast.cluster.leadership_changes import LeadershipChanges
from holdfast.cluster.metadata.effects import (
    LeaderChanged,
    MetadataChanged,
    Persist,
    ProposalDone,
    Send,
)
from holdfast.cluster.metadata.model import ClusterMetadata
from holdfast.cluster.metadata.requests import Outcome
from holdfast.cluster.metadata.store import MetaStore
from holdfast.cluster.metadata_proposer import MetadataProposer
from holdfast.cluster.partitions.effects import (
    BecameLeader,
    Committed,
    Diverged,
    GivenUp,
    LeadershipEnded,
    ProposeInSync,
    ReadBatches,
    Restarted,
)
from holdfast.cluster.partitions.effects import Send as SendBatches
from holdfast.cluster.parts import ClusterNodeConfig, Parts
from holdfast.cluster.placement.planning import useless
from holdfast.cluster.position_reports import PositionReports
from holdfast.cluster.raft.node import Write
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.protocol.mqtt import reasons


class PartEffects(Parts):
    """The parts of a cluster node, each with its effects carried out.

    Effects are carried out until none is left (`_run`), because one may cause others. New metadata
    can end a leadership, for example.
    """

    def __init__(
        self,
        node: Node,
        replicated: ReplicatedState,
        meta: MetaStore,
        presence: Presence,
        config: ClusterNodeConfig,
        random: Callable[[], float],
        now: float,
        *,
        lacking: Iterable[int] = (),
    ) -> None:
        """The arguments are those of Parts."""
        super().__init__(node, replicated, meta, presence, config, random, now, lacking=lacking)
        self.proposer = MetadataProposer(self)
        self.leadership = LeadershipChanges(self)
        self.positions = PositionReports(self)
        self.persists: list[Write] = []
        self.reads: list[ReadBatches] = []
        # The outcomes of proposals that the driver made.
        self.outcomes: list[tuple[int, Outcome]] = []
        # True if the metadata's nodes have changed, so that the driver adjusts the links.
        self.nodes_changed = False
        self.has_diverged = False
        """True if records committed here are not those that the other nodes continued with."""
        self._applied = False
        # True unless this node must not lead Raft, because of its disk.
        self._may_lead = True

    def _look_at_itself(self, now: float) -> None:
        """Checks whether the other nodes count this one as unhealthy, and adapts its ownership and
        its vote."""
        metadata = self.context.metadata
        if metadata is not None:
            health = self.detector.health(now)
            own = self.meta.node_id
            is_unhealthy = own in useless(metadata, health)
            self.ownership.set_unhealthy(is_unhealthy, now)
            # A node with a full disk does not lead Raft either, if another node can.
            may_lead = own not in health.stalled and not (is_unhealthy and own in health.full)
            if may_lead != self._may_lead:
                self._may_lead = may_lead
                self.meta.set_stalled(not may_lead, now)

    def _run(self) -> None:
        """Carries out the effects of the parts until none is left."""
        now = self.state.now
        while True:
            meta = self.meta.effects
            replication = self.replication.effects
            detector = self.detector.effects
            if not meta and not replication and not detector:
                return
            if meta:
                self.meta.effects = []
                for effect in meta:
                    self._carry_out_meta(effect, now)
            if replication:
                self.replication.effects = []
                for asked in replication:
                    self._carry_out_replication(asked, now)
                self.proposer.propose_in_sync(now)
            if detector:
                self.detector.effects = []
                for seen in detector:
                    self._carry_out_detector(seen)

    def _carry_out_meta(self, effect: object, now: float) -> None:
        if isinstance(effect, Send):
            self.context.send(effect.node_id, effect.kind, effect.payload)
        elif isinstance(effect, Persist):
            self.persists.append(effect.write)
        elif isinstance(effect, MetadataChanged):
            self._take_metadata(effect.metadata, effect.changed_partitions, now)
        elif isinstance(effect, LeaderChanged):
            self.proposer.leader_changed(effect.is_leader, now)
            self.state.note("info", "metadata_leader", {"leader": effect.leader_id})
        elif isinstance(effect, ProposalDone):
            done = self.metadata_reads.proposal_done(effect.request, effect.outcome, now)
            if not done and not self.proposer.proposal_done(effect, now):
                self.outcomes.append((effect.request, effect.outcome))

    def _take_metadata(
        self, metadata: ClusterMetadata, changed: tuple[int, ...], now: float
    ) -> None:
        is_first = self.context.metadata is None
        if self.leadership.take_metadata(metadata, changed, now):
            self.nodes_changed = True
        self._look_at_itself(now)
        self.ownership.renew()
        self.proposer.is_changed = True
        if is_first:
            self.proposer.admit_all(now)

    def _carry_out_replication(self, effect: object, now: float) -> None:
        if isinstance(effect, SendBatches):
            if effect.node in self.context.connected:
                self.context.outgoing.append((effect.node, effect.kind, effect.payload))
        elif isinstance(effect, Committed):
            self.applier.apply_to(effect.partition, effect.offset)
            self.admission.committed(effect.partition, effect.offset)
            self.session_coordinator.committed(effect.partition)
            self._applied = True
        elif isinstance(effect, ReadBatches):
            self.reads.append(effect)
        elif isinstance(effect, ProposeInSync):
            self.proposer.note_in_sync(effect)
        elif isinstance(effect, BecameLeader):
            self.leadership.lead(effect.partition, effect.epoch)
        elif isinstance(effect, LeadershipEnded):
            self.leadership.stop_leading(effect.partition)
        elif isinstance(effect, Diverged):
            self.has_diverged = self.has_diverged or not effect.takes_over
            self.state.note(
                "error",
                "replica_diverged",
                {
                    "partition": effect.partition,
                    "leader": effect.leader,
                    "error": effect.text,
                    "text": "this node takes over"
                    if effect.takes_over
                    else "the others have gone on without this node",
                },
            )
        elif isinstance(effect, Restarted):
            self.state.note(
                "warning",
                "replica_restarted",
                {"partition": effect.partition, "offset": effect.offset},
            )
            self._restart(effect.partition, effect.offset)
        elif isinstance(effect, GivenUp):
            self.state.note("error", "images_given_up", {"partition": effect.partition})
            self.transfer.abandon(effect.partition)

    def _carry_out_detector(self, effect: object) -> None:
        if isinstance(effect, Beat):
            for node in self.context.connected:
                self.context.outgoing.append((node, kinds.HEARTBEAT, effect.payload))
            self.positions.send(self.state.now)
            return
        self.proposer.is_changed = True
        if isinstance(effect, Suspected):
            self.state.note(
                "warning", "node_suspected", {"node": effect.node, "reason": effect.reason}
            )
        elif isinstance(effect, HeardAgain):
            self.state.note("info", "node_heard_again", {"node": effect.node})

    def _restart(self, partition: int, offset: int) -> None:
        if self.state.delivered[partition] < offset:
            # The clients connected here would never receive the records that were skipped. Another
            # node may have them.
            for session in list(self.state.sessions.values()):
                if session.connection is not None:
                    text = "this node was away for too long"
                    close_connection(self.state, session.connection, reasons.SERVER_BUSY, text)
            self.forwarding.refuse_unresolved(partition)
        self.transfer.restarted(partition, offset)
        self.context.is_whole = False
