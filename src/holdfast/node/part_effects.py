"""Carries out the effects of a cluster node's parts, or leaves them for the driver."""

from holdfast.node import frame_kinds as kinds
from holdfast.node.alone import Alone
from holdfast.node.connections.close import CLOSE_STEPS, close_connection
from holdfast.node.failure.detector import Beat, HeardAgain, Suspected
from holdfast.node.failure.health import Health
from holdfast.node.leadership_changes import LeadershipChanges
from holdfast.node.metadata.effects import (
    LeaderChanged,
    MetadataChanged,
    Persist,
    ProposalDone,
    Send,
)
from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.requests import Outcome
from holdfast.node.metadata_proposer import MetadataProposer
from holdfast.node.parts import Parts
from holdfast.node.placement.planning import healthy, useless
from holdfast.node.position_reports import PositionReports
from holdfast.node.publish.producer_dedup import forget_some
from holdfast.node.raft.node import Write
from holdfast.node.replicate.effects import (
    BecameLeader,
    Broken,
    Committed,
    Diverged,
    GivenUp,
    LeadershipEnded,
    ProposeInSync,
    ReadBatches,
    Restarted,
)
from holdfast.node.replicate.effects import Send as SendBatches
from holdfast.node.session.session import Session
from holdfast.node.state.transfer import ANEW
from holdfast.node.sweep import Sweep
from holdfast.protocol.mqtt import reasons


class PartEffects:
    """The effects of the three cores of a node: metadata, replication and failure detector.

    Effects are carried out until none is left (`run`), because one may cause others. New metadata
    can end a leadership, for example.
    """

    def __init__(
        self,
        parts: Parts,
        proposer: MetadataProposer,
        leadership: LeadershipChanges,
        positions: PositionReports,
        alone: Alone,
    ) -> None:
        self._alone = alone
        self._parts = parts
        self._state = parts.state
        self._context = parts.context
        parts.applier.on_applied = parts.feeds.receiver.on_applied = self._applied
        parts.feeds.receiver.on_begins = self.restart
        parts.feeds.await_commits = parts.replication.commits.await_commits
        parts.replication.commits.needing = parts.feeds.needing
        parts.feeds.receiver.on_lacks = self._lacks
        parts.feeds.server.void = parts.admission.voider.reach
        parts.applier.on_broken = parts.replication.break_off
        self._proposer = proposer
        self._leadership = leadership
        self._positions = positions
        self.persists: list[Write] = []
        self.reads: list[ReadBatches] = []
        # The outcomes of proposals that the driver made.
        self.outcomes: list[tuple[int, Outcome]] = []
        # True if the metadata's nodes have changed, so that the driver adjusts the links.
        self.nodes_changed = False
        # True if the users of dynamic security have changed.
        self.users_changed = False
        self.has_diverged = False
        """True if records committed here are not those that the other nodes continued with."""
        # True if records were applied since the last turn.
        self.has_applied = False
        self._leavers: Sweep[Session] = Sweep(parts.state)
        # True unless this node must not lead Raft, because of its disk.
        self._may_lead = True
        # What the last check has seen.
        self._checked: tuple[ClusterMetadata, Health] | None = None

    def send_held(self, now: float) -> None:
        """Sends the commits that have waited for a frame to their nodes, or for too long."""
        commits = self._parts.replication.commits
        if commits.is_holding():
            commits.send_held({node for node, _, _ in self._context.outgoing}, now)
            self.run()

    def check_own_health(self, now: float) -> None:
        """Checks whether the other nodes count this one as unhealthy, and adapts its ownership and
        its vote, and the controller."""
        metadata = self._context.metadata
        health = self._parts.detector.health(now)
        checked = self._checked
        if checked is not None and checked[0] is metadata and checked[1] is health:
            return
        self._proposer.is_changed = True
        if metadata is not None:
            self._checked = metadata, health
            own = self._parts.meta.node_id
            is_unhealthy = own in useless(metadata, health)
            self._parts.ownership.set_unhealthy(is_unhealthy, now)
            # A node with a full disk does not lead Raft either, if another node can.
            is_full = own in health.full and bool(healthy(metadata, health))
            may_lead = own not in health.stalled and not is_full
            if may_lead != self._may_lead:
                self._may_lead = may_lead
                self._parts.meta.set_stalled(not may_lead, now)

    def run(self) -> None:
        """Carries out the effects of the parts until none is left."""
        now = self._state.now
        while True:
            meta = self._parts.meta.effects
            replication = self._parts.replication.effects
            detector = self._parts.detector.effects
            if not meta and not replication and not detector:
                return
            if meta:
                self._parts.meta.effects = []
                for effect in meta:
                    self._carry_out_meta(effect, now)
            if replication:
                self._parts.replication.effects = []
                for asked in replication:
                    self._carry_out_replication(asked, now)
                self._proposer.propose_in_sync(now)
                self._leadership.compare()
            if detector:
                self._parts.detector.effects = []
                for seen in detector:
                    self._carry_out_detector(seen)

    def _carry_out_meta(self, effect: object, now: float) -> None:
        if isinstance(effect, Send):
            self._context.send(effect.node_id, effect.kind, effect.payload)
        elif isinstance(effect, Persist):
            self.persists.append(effect.write)
        elif isinstance(effect, MetadataChanged):
            self.take_metadata(effect.metadata, effect.changed_partitions, now)
        elif isinstance(effect, LeaderChanged):
            self._proposer.leader_changed(effect.is_leader, now)
            self._state.note("info", "metadata_leader", {"leader": effect.leader_id})
        elif isinstance(effect, ProposalDone):
            done = self._parts.metadata_reads.proposal_done(effect.request, effect.outcome, now)
            if not done and not self._proposer.proposal_done(effect, now):
                self.outcomes.append((effect.request, effect.outcome))

    def take_metadata(
        self, metadata: ClusterMetadata, changed: tuple[int, ...], now: float
    ) -> None:
        self._alone.changes(metadata, changed)
        before = self._context.metadata
        is_first = before is None
        known = (None, None) if before is None else (before.users, before.access)
        if metadata.users is not known[0] or metadata.access is not known[1]:
            self.users_changed = True
        if self._leadership.take_metadata(metadata, changed, now):
            self.nodes_changed = True
        self.check_own_health(now)
        self._parts.ownership.renew()
        self._parts.remote_reads.nodes_changed()
        self._proposer.is_changed = True
        if is_first:
            self._proposer.admit_all(now)

    def _carry_out_replication(self, effect: object, now: float) -> None:
        if isinstance(effect, SendBatches):
            if effect.node in self._context.connected:
                self._context.outgoing.append((effect.node, effect.kind, effect.payload))
        elif isinstance(effect, Committed):
            self._parts.applier.apply_to(effect.partition, effect.offset)
            self._applied(effect.partition)
        elif isinstance(effect, Broken):
            self._state.stop_partition(effect.partition, effect.text)
        elif isinstance(effect, ReadBatches):
            self.reads.append(effect)
        elif isinstance(effect, ProposeInSync):
            self._proposer.note_in_sync(effect)
        elif isinstance(effect, BecameLeader):
            self._leadership.lead(effect.partition, effect.epoch)
        elif isinstance(effect, LeadershipEnded):
            self._leadership.stop_leading(effect.partition)
        elif isinstance(effect, Diverged):
            self.has_diverged = self.has_diverged or not effect.takes_over
            self._state.note(
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
            self._state.note(
                "warning",
                "replica_restarted",
                {"partition": effect.partition, "offset": effect.offset},
            )
            if self._parts.applier.log_begins(effect.partition, effect.offset):
                # It is followed once a start finds the state: the old replicas may leave then.
                self._parts.transfer.save(effect.partition)
            else:
                self.restart(effect.partition, effect.offset)
        elif isinstance(effect, GivenUp):
            self._state.note("error", "images_given_up", {"partition": effect.partition})
            self._restarted(effect.partition)
            self._parts.transfer.abandon(effect.partition)

    def _applied(self, partition: int) -> None:
        """Acts on committed records of a partition that are applied now."""
        self._parts.admission.committed(partition, self._state.delivered[partition])
        self._parts.session_coordinator.committed(partition)
        if self._context.leading[0]:
            forget_some(self._state)
        self.has_applied = True

    def _carry_out_detector(self, effect: object) -> None:
        if isinstance(effect, Beat):
            for node in sorted(self._context.connected):
                self._context.outgoing.append((node, kinds.HEARTBEAT, effect.payload))
            self._positions.report(self._state.now)
            return
        self._proposer.is_changed = True
        if isinstance(effect, Suspected):
            self._state.note(
                "warning", "node_suspected", {"node": effect.node, "reason": effect.reason}
            )
        elif isinstance(effect, HeardAgain):
            self._state.note("info", "node_heard_again", {"node": effect.node})

    def restart(self, partition: int, offset: int) -> None:
        """Handles a log that begins at `offset`, behind what this node has applied.

        The clients connected here would never receive the records that were skipped. Another node
        may have them, so the clients are sent away first, in slices. Until all of them are gone the
        offset that is delivered stays: no session logs a position behind the skipped records. The
        partition is suspended meanwhile, so nothing is applied, and no session begins.
        """
        if self._state.delivered[partition] >= offset:
            self._parts.transfer.restarted(partition, offset)
            self._context.is_whole = False
        else:
            self._begin_again(partition, offset)

    def _begin_again(self, partition: int, offset: int) -> None:
        self._parts.forwarding.refuse_unresolved(partition)
        self._parts.transfer.expected[partition] = offset
        if not self._context.is_stored(partition):
            # Its log may be copied. It does not go on without the state.
            self._parts.replication.suspend(partition)
        sessions = self._state.list_sessions()
        self._leavers.begin(sessions, self._send_away, lambda: self._restarted(partition))
        self._context.is_whole = False

    def _lacks(self, partition: int) -> None:
        """Handles a leader that lacks committed records, because an operator has given them up.
        This node has their effects, so the state of the partition is transferred again. Its clients
        are sent away first: they are behind positions of a log that is no more."""
        self._state.note("error", "feed_diverged", {"partition": partition})
        self._begin_again(partition, ANEW)

    def _restarted(self, partition: int) -> None:
        """Lets the transfer continue, once no client here would miss records."""
        offset = self._parts.transfer.expected.pop(partition, None)
        if offset is not None:
            self._parts.transfer.restarted(partition, offset)

    def _send_away(self, session: Session) -> int:
        if session.connection is None:
            return 1
        text = "this node was away for too long"
        close_connection(self._state, session.connection, reasons.SERVER_BUSY, text)
        return CLOSE_STEPS
