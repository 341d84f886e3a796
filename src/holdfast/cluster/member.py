"""A node of a cluster as its driver sees it: frames, results and times in; frames, writes and
reads out.

The driver sets the clock of the broker's node (`Node.tick`) before each call and calls `end_turn`
after a batch of them. What is to be carried out has gathered then in `fabric.outgoing` (frames, in
order), `persists` (for the metadata's log, in order), `reads` (from the journal), `outcomes`, and
in the broker's node as ever. Nothing here blocks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from holdfast.cluster.admission import Admission
from holdfast.cluster.alignment import Alignment
from holdfast.cluster.applying import Applier, ApplyingLog
from holdfast.cluster.barriers import NUMBER_MIN
from holdfast.cluster.doubt import Doubt
from holdfast.cluster.fabric import Fabric
from holdfast.cluster.forwarding import (
    PENDING_BYTES_MAX,
    Forwarding,
    decode_forward,
    decode_result,
)
from holdfast.cluster.groups import Groups
from holdfast.cluster.homes import Homes
from holdfast.cluster.images import Images
from holdfast.cluster.interest import Interest
from holdfast.cluster.opening import Opener, barrier_answer, decode_barrier
from holdfast.cluster.promises import Promise, enqueue
from holdfast.cluster.transfer import Transfer
from holdfast.log import record as log_record
from holdfast.log.journal import Journal, WriteGroup
from holdfast.log.record import Record
from holdfast.mqtt import reasons
from holdfast.node.closing import close_connection
from holdfast.node.node import Node
from holdfast.node.state import SESSION_EXPIRY, WILL_DUE, Cluster, Group, Held, NodeState
from holdfast.replication import kinds
from holdfast.replication.commands import CHANGES_NOTHING, ChangePartitions, Command
from holdfast.replication.controller import Controller, ControllerConfig
from holdfast.replication.detector import Beat, Detector, DetectorConfig, HeardAgain, Suspected
from holdfast.replication.health import Health, Presence
from holdfast.replication.kinds import BadFrame
from holdfast.replication.metadata import DATA, ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.replication.metastore import (
    Changed,
    LeaderChanged,
    MetaStore,
    Persist,
    ProposalDone,
    Send,
)
from holdfast.replication.proposals import Outcome, Refused
from holdfast.replication.raft import Write
from holdfast.replication.replica_config import ReplicationConfig
from holdfast.replication.replica_effects import (
    BecameLeader,
    Committed,
    Diverged,
    GivenUp,
    ProposeInSync,
    ReadBatches,
    Restarted,
    StoppedLeading,
)
from holdfast.replication.replica_effects import Send as SendBatches
from holdfast.replication.replication import Replication
from holdfast.session.connection import Connection
from holdfast.session.message import Message
from holdfast.session.session import Session

UNAVAILABLE_S = 2.0
"""Without a majority for so long, a node refuses what it would have to promise."""
CHANGES_MAX = 256
"""Partitions in one command of a leader."""
TIDY_S = 0.25
"""How often what waits too long is looked for."""
SETTLE_SESSIONS = 1000
"""So many sessions get their timers then."""


@dataclass(frozen=True)
class MemberConfig:
    detector: DetectorConfig
    controller: ControllerConfig
    replication: ReplicationConfig
    is_witness: bool = False
    """It votes on the metadata, and follows no partition."""


class Member(Cluster):
    def __init__(
        self,
        node: Node,
        images: Images,
        journal: Journal,
        meta: MetaStore,
        presence: Presence,
        config: MemberConfig,
        random: Callable[[], float],
        now: float,
        lacking: Iterable[int] = (),
    ) -> None:
        """`node`: the broker's, without sessions; `images`: as recovered up to the journal's high
        watermarks, `lacking`: but for these partitions. `random`: from 0 to below 1."""
        self.node = node
        self.state: NodeState = node.state
        self.images = images
        self.meta = meta
        self.presence = presence
        self.config = config
        self.log = ApplyingLog(journal)
        self.fabric = Fabric(meta.node_id, journal)
        self.replication = Replication(
            meta.node_id, self.log, replace(config.replication, holds_restarted=True)
        )
        self.detector = Detector(meta.node_id, presence, config.detector, now)
        self.controller: Controller | None = None
        self.admission = Admission(self.state, self.fabric, images, self.replication.may_append)
        self.forwarding = Forwarding(self.state, self.fabric, self.admission)
        self.admission.forwarding = self.forwarding
        self.alignment = Alignment(self.fabric, self.forwarding, self.replication)
        self.homes = Homes(self.state, self.fabric, images)
        self.opener = Opener(self.state, self.fabric, self.homes)
        self.interest = Interest(self.state, self.fabric)
        self.groups = Groups(self.state, self.fabric, self.forwarding, images)
        self.doubt = Doubt(
            self.state, self.groups.barriers, self._propose_nothing, config.detector.suspect_s, now
        )
        self.applier = Applier(
            self.state,
            images,
            self.log,
            self.forwarding.pending,
            self.forwarding.settle,
            self._session_applied,
        )
        self.transfer = Transfer(self.state, self.fabric, images, self.applier)
        self.persists: list[Write] = []
        self.reads: list[ReadBatches] = []
        # Of proposals that the driver made.
        self.outcomes: list[tuple[int, Outcome]] = []
        # The metadata's nodes have changed: whom to be connected with.
        self.nodes_changed = False
        self.failovers = 0
        self._presences: dict[str, tuple[Presence, str]] = {}
        self._commands: dict[int, Command] = {}
        # Changes of in-sync sets to be proposed, and requests for several of them.
        self._in_sync: list[tuple[int, int, PartitionInfo]] = []
        self._gathered: set[int] = set()
        self._current_request = -1
        self._is_current = False
        self._health_changed = True
        self._majority_at = now
        self._tidy_at = now
        self._applied = False
        self._is_late = False
        node.state.cluster = self
        # The newest messages that are retained and the producers are those of the images.
        node.state.retained = images.state.retained
        node.state.producers = images.state.producers
        images.state.delivered = node.state.delivered
        for partition in lacking:
            self.replication.hold(partition)
            self.transfer.missing.add(partition)
        self.fabric.is_whole = self.transfer.is_whole
        self.forwarding.begin_at(int(random() * (1 << 31)))
        self.opener.begin_at(int(random() * (1 << 52)))
        if meta.metadata is not None:
            self._take_metadata(meta.metadata, tuple(range(len(meta.metadata.partitions))))
        self._run()

    # What the node asks (see node.state.Cluster)

    def append(
        self,
        partition: int,
        kind: int,
        flags: int,
        timestamp_us: int,
        topic: bytes,
        client_id: bytes,
        producer: bytes,
        producer_epoch: int,
        sequence: int,
        properties: bytes,
        payload: bytes,
        state: bool,
    ) -> None:
        self.forwarding.append(
            partition,
            kind,
            flags,
            timestamp_us,
            topic,
            client_id,
            producer,
            producer_epoch,
            sequence,
            properties,
            payload,
            state,
        )

    def hold(self, held: Held) -> None:
        self.forwarding.hold(held)

    def hold_reply(self, held: Held) -> None:
        enqueue(self.state, Promise(held))

    def hold_for_interest(self, held: Held) -> None:
        self.interest.hold(held)

    def refusal(self, partition: int) -> int:
        if self.state.now > self._majority_at + UNAVAILABLE_S:
            return reasons.QUOTA_EXCEEDED
        return 0

    def is_congested(self, part: int) -> bool:
        return (
            self.forwarding.pending_bytes > PENDING_BYTES_MAX // part
            or self.fabric.journal.pending_bytes > self.state.config.pending_bytes_max // part
        )

    def spread(self, message: object, topic: str) -> None:
        assert isinstance(message, Message)
        self.interest.spread(message, topic)

    def open_session(self, connection: Connection, client_id: str, opening: object) -> None:
        self.opener.open_session(connection, client_id, opening)

    def session_detached(self, session: Session) -> None:
        self.opener.detached(session)

    def subscribed(self, filter: str) -> None:
        self.interest.subscribed(filter)

    def unsubscribed(self, filter: str) -> None:
        self.interest.unsubscribed(filter)

    def group_changed(self, group: Group) -> None:
        self.groups.shares.changed(group)

    def group_record(self, group: Group, message: object) -> None:
        assert isinstance(message, Message)
        self.groups.coordinator.record(group, message)

    def group_read(
        self, group: Group, records: list[Record], positions: list[int], done: bool
    ) -> None:
        self.groups.coordinator.handle_read(group, records, positions, done)

    def group_finished(self, group: Group, partition: int, offset: int) -> None:
        self.groups.shares.finished(group.key, (partition, offset))

    def group_kept(self, group: Group, session: Session, partition: int, offset: int) -> None:
        self.groups.shares.kept(group.key, session, (partition, offset))

    # What the driver tells

    def load_uncommitted(self, batches: list[bytes], partition: int) -> None:
        """After a start: what the log has above its high watermark."""
        for data in batches:
            self.log.built(partition, data)

    def tick(self, now: float) -> None:
        """The clock of the broker's node was set, before anything else is told."""
        self.doubt.tick(now)

    def handle_connected(self, node: str, presence: Presence, role: str, now: float) -> None:
        self._presences[node] = (presence, role)
        self.fabric.connected.add(node)
        self.detector.connected(node, presence, now)
        self.alignment.lose_node(node)
        self.replication.handle_connected(node, now)
        self.interest.connected(node)
        if role == DATA:
            self._tell_owned(node)
            self.homes.connected(node)
            self.groups.shares.lose_node(node)
        self._admit(node, now)
        self._run()

    def handle_disconnected(self, node: str, now: float) -> None:
        if node not in self.fabric.connected:
            return
        self.fabric.connected.discard(node)
        del self._presences[node]
        self.detector.closed(node, False, now)
        self.replication.handle_disconnected(node, now)
        self.alignment.lose_node(node)
        self.interest.disconnected(node)
        self.homes.disconnected(node)
        self.groups.disconnected(node)
        self.transfer.disconnected(node)
        self._run()

    def handle_refused(self, node: str, now: float) -> None:
        """Nobody listens at its address."""
        self.detector.closed(node, True, now)
        self.meta.leader_gone(node, now)
        self._run()

    def handle_frame(self, node: str, kind: int, payload: bytes, now: float) -> None:
        """Raises BadFrame: close the link."""
        if kind == kinds.HEARTBEAT:
            self.detector.handle_heartbeat(node, payload, now)
            self._health_changed = True
            self._run()
            return
        self.detector.heard(node, now)
        if kinds.REPLICATE <= kind <= kinds.COMMIT:
            self.replication.handle_frame(node, kind, payload, now)
        elif kinds.RAFT <= kind <= kinds.PROPOSAL_RESULT:
            self.meta.handle_frame(node, kind, payload, now)
        elif kind == kinds.FORWARD:
            for epoch, attempt, batch in decode_forward(payload):
                self.admission.forwarded(node, epoch, attempt, batch)
        elif kind == kinds.FORWARD_RESULT:
            for ticket, reason, text in decode_result(payload):
                self.forwarding.refuse(ticket, reason, text)
        elif kind == kinds.QOS0:
            self.interest.handle_qos0(payload)
        elif kind == kinds.BARRIER:
            self.fabric.send(node, kinds.BARRIER_RESULT, barrier_answer(self.fabric, payload))
        elif kind == kinds.BARRIER_RESULT:
            number, entries = decode_barrier(payload)
            if number >= NUMBER_MIN:
                self.groups.barriers.answered(number, entries)
            elif number:
                self.opener.barrier_answered(number, entries)
            else:
                self.alignment.answered(node, entries)
        else:
            self._handle_session_frame(node, kind, payload)
        self._run()

    def _handle_session_frame(self, node: str, kind: int, payload: bytes) -> None:
        if kind == kinds.SESSION_OPEN:
            self.homes.handle_open(node, payload)
        elif kind == kinds.SESSION_OPENED:
            self.opener.handle_opened(payload)
        elif kind == kinds.SESSION_CLOSE:
            self.opener.handle_close(payload)
        elif kind == kinds.SESSION_CLOSED:
            self.homes.handle_closed(node, payload)
        elif kind == kinds.SESSION_OWNED:
            self.homes.handle_owned(node, payload)
        elif kind == kinds.INTEREST:
            self.interest.handle_interest(node, payload)
        elif kind == kinds.INTEREST_ACK:
            self.interest.handle_ack(node, payload)
        elif kind == kinds.GROUP:
            self.groups.handle_frame(node, payload)
        elif kind == kinds.IMAGE_REQUEST:
            self.transfer.handle_request(node, payload)
        elif kind == kinds.IMAGE:
            self.transfer.handle_image(node, payload)
        else:
            raise BadFrame(f"a frame of kind {kind}, which this version does not know")

    def handle_taken(self, group: WriteGroup, now: float) -> None:
        """The journal's pending records are a group for the disk now."""
        if group.built:
            for partition, _, _, data in group.built:
                self.log.built(partition, data)
            self.replication.handle_taken(group.built, now)
            self._run()

    def handle_durable(self, now: float) -> None:
        """A group is durable, and the journal knows."""
        self.replication.handle_durable(now)
        self._run()

    def handle_batches(self, request: int, batches: list[bytes], now: float) -> None:
        self.replication.handle_batches(request, batches, now)
        self._run()

    def handle_persisted(self, now: float) -> None:
        """The oldest of `persists` that was not reported is done."""
        self.meta.persisted(now)
        self._run()

    def end_turn(self, now: float) -> None:
        """Send what has gathered."""
        if not self.transfer.is_whole or self.transfer.released:
            self._step_transfer(now)
        self.opener.take_local()
        if self._applied:
            self._applied = False
            self.opener.applied()
            self.opener.take_local()
        for partition, leader, epoch in self.alignment.take_aligned():
            self.forwarding.aligned(partition, leader, epoch, self.applier.tickets(partition))
        self.alignment.ask(now)
        self._step(now)
        self.groups.flush()
        self.doubt.advance()
        self.interest.flush()
        self.forwarding.flush()
        self.admission.flush()
        self._run()
        self.state.release_stalled()
        self._is_late = bool(self.state.dirty or self.state.effects)

    def timer(self) -> float:
        times = [self.meta.timer(), self._tidy_at]
        if self._is_late and (self.state.dirty or self.state.effects):
            # The driver may have carried out this turn's before.
            times.append(self.state.now)
        images = self.images.state.timers
        if images:
            times.append(images[0][0])
        for when in (
            self.replication.timer(),
            self.detector.timer(),
            None if self.controller is None else self.controller.timer(),
            self.homes.timer(),
            self.opener.timer(),
            self.interest.timer(),
            self.alignment.timer(),
            self.groups.timer(),
            self.transfer.timer(),
        ):
            if when is not None:
                times.append(when)
        return min(times)

    def handle_timers(self, now: float) -> None:
        self.detector.handle_timers(now)
        self.meta.handle_timers(now)
        self.replication.handle_timers(now)
        self.homes.handle_timers()
        self.opener.handle_timers()
        self.interest.release()
        for kind, subject in self.images.state.take_due(now):
            if kind in (WILL_DUE, SESSION_EXPIRY) and isinstance(subject, Session):
                self.homes.due(subject, kind)
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_S
            if self.meta.has_majority(now):
                self._majority_at = now
            self.fabric.has_majority = self.meta.has_majority(now)
            self.forwarding.refuse_overdue(now)
            self.groups.tidy()
            for session in self.images.settle_some(SETTLE_SESSIONS):
                self.homes.due(session, SESSION_EXPIRY)
            self._ask_current(now)
            self.doubt.ask(now)
            self._admit_all(now)
        self._health_changed = True
        self._run()

    # Inside

    def _run(self) -> None:
        """Carry out what the cores ask of one another, until nothing is left."""
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
                self._propose_in_sync(now)
            if detector:
                self.detector.effects = []
                for seen in detector:
                    self._carry_out_detector(seen)

    def _carry_out_meta(self, effect: object, now: float) -> None:
        if isinstance(effect, Send):
            self.fabric.send(effect.node_id, effect.kind, effect.payload)
        elif isinstance(effect, Persist):
            self.persists.append(effect.write)
        elif isinstance(effect, Changed):
            self._take_metadata(effect.metadata, effect.changed_partitions)
        elif isinstance(effect, LeaderChanged):
            self.controller = None
            if effect.is_leader:
                self.controller = Controller(self.meta.node_id, self.config.controller)
                self._admit_all(now)
            self._health_changed = True
            self.state.note("info", "metadata_leader", {"leader": effect.leader_id})
        elif isinstance(effect, ProposalDone):
            self._proposal_done(effect, now)

    def _proposal_done(self, effect: ProposalDone, now: float) -> None:
        if effect.request == self._current_request:
            self._current_request = -1
            outcome = effect.outcome
            if isinstance(outcome, Refused) and outcome.text == CHANGES_NOTHING:
                self._is_current = True
                self.replication.handle_current(now)
            return
        if self.doubt.proposal_done(effect.request, effect.outcome):
            return
        command = self._commands.pop(effect.request, None)
        if command is None:
            self.outcomes.append((effect.request, effect.outcome))
            return
        if (
            isinstance(effect.outcome, Refused)
            and isinstance(command, ChangePartitions)
            and effect.request in self._gathered
        ):
            # One of them came too late; the others need not wait for the next round.
            for change in command.changes:
                single = ChangePartitions((change,))
                self._commands[self.meta.propose(single, now)] = single
        self._gathered.discard(effect.request)
        if self.controller is not None:
            self.controller.settled(command, now)
            self._health_changed = True

    def _carry_out_replication(self, effect: object, now: float) -> None:
        if isinstance(effect, SendBatches):
            if effect.node in self.fabric.connected:
                self.fabric.outgoing.append((effect.node, effect.kind, effect.payload))
        elif isinstance(effect, Committed):
            self.applier.apply_to(effect.partition, effect.offset)
            self.admission.committed(effect.partition, effect.offset)
            self.homes.committed(effect.partition)
            self._applied = True
        elif isinstance(effect, ReadBatches):
            self.reads.append(effect)
        elif isinstance(effect, ProposeInSync):
            self._in_sync.append((effect.partition, effect.expected_version, effect.info))
        elif isinstance(effect, BecameLeader):
            self._lead(effect.partition, effect.epoch)
        elif isinstance(effect, StoppedLeading):
            self._stop_leading(effect.partition)
        elif isinstance(effect, Diverged):
            self.state.note(
                "error",
                "replica_diverged",
                {
                    "partition": effect.partition,
                    "leader": effect.leader,
                    "error": effect.text,
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
            self.transfer.give_up(effect.partition)

    def _propose_in_sync(self, now: float) -> None:
        """What the partitions led here ask of the metadata, many of them in one command."""
        while self._in_sync:
            changes = tuple(self._in_sync[:CHANGES_MAX])
            del self._in_sync[:CHANGES_MAX]
            command = ChangePartitions(changes)
            request = self.meta.propose(command, now)
            self._commands[request] = command
            if len(changes) > 1:
                self._gathered.add(request)

    def _carry_out_detector(self, effect: object) -> None:
        if isinstance(effect, Beat):
            for node in self.fabric.connected:
                self.fabric.outgoing.append((node, kinds.HEARTBEAT, effect.payload))
            return
        self._health_changed = True
        if isinstance(effect, Suspected):
            self.state.note(
                "warning", "node_suspected", {"node": effect.node, "reason": effect.reason}
            )
        elif isinstance(effect, HeardAgain):
            self.state.note("info", "node_heard_again", {"node": effect.node})

    def _restart(self, partition: int, offset: int) -> None:
        if self.state.delivered[partition] < offset:
            # Who is connected here would never see what lies between; another node may have it.
            for session in list(self.state.sessions.values()):
                if session.connection is not None:
                    text = "this node was away for too long"
                    close_connection(self.state, session.connection, reasons.SERVER_BUSY, text)
            self.forwarding.give_up_doubtful(partition)
        self.transfer.restarted(partition, offset)
        self.fabric.is_whole = False

    def _step_transfer(self, now: float) -> None:
        self.transfer.step(now)
        for partition in self.transfer.take_released():
            self.replication.resume(partition, now)
        self.fabric.is_whole = self.transfer.is_whole

    def _lead(self, partition: int, epoch: int) -> None:
        self.fabric.leading[partition] = epoch
        self.admission.start_leading(partition, list(self.log.uncommitted[partition]))
        self.alignment.lead(partition, epoch, self.applier.tickets(partition))
        self.homes.start_leading(partition)
        self.groups.start_leading(partition, epoch)
        self.opener.tell_owned(self.meta.node_id, [partition])
        self.opener.leader_changed(partition)
        if epoch > 1:
            self.failovers += 1

    def _stop_leading(self, partition: int) -> None:
        self.fabric.leading[partition] = 0
        self.admission.stop_leading(partition)
        self.homes.stop_leading(partition)
        self.groups.stop_leading(partition)
        self.alignment.lose(partition)

    def _take_metadata(self, metadata: ClusterMetadata, changed: tuple[int, ...]) -> None:
        before = self.fabric.metadata
        self.fabric.metadata = metadata
        self._health_changed = True
        now = self.state.now
        moved: list[int] = []
        for partition in changed:
            info = metadata.partitions[partition]
            old = None if before is None else before.partitions[partition]
            if old is None or old.leader != info.leader or old.epoch != info.epoch:
                moved.append(partition)
                self.groups.shares.lose(partition)
                if info.leader != self.meta.node_id and not self.config.is_witness:
                    self.alignment.lose(partition)
        if not self.config.is_witness:
            self.replication.handle_metadata(metadata, changed, now)
        if before is None or before.nodes is not metadata.nodes:
            self.nodes_changed = True
            self.detector.set_members(tuple(metadata.nodes), now)
            for node in metadata.nodes if before is None else before.nodes:
                if self.fabric.is_gone(node):
                    self.homes.node_gone(node)
                    self.groups.coordinator.node_gone(node)
            self._retell_groups(before, metadata)
            self.interest.release()
            if before is None:
                self._admit_all(now)
        led: dict[str, list[int]] = {}
        for partition in moved:
            leader = metadata.partitions[partition].leader
            if leader and leader != self.meta.node_id:
                led.setdefault(leader, []).append(partition)
                self.opener.leader_changed(partition)
        for leader, partitions in led.items():
            self.opener.tell_owned(leader, partitions)

    def _retell_groups(self, before: ClusterMetadata | None, metadata: ClusterMetadata) -> None:
        """Who was taken for down has no part in any group until it tells."""
        own = metadata.nodes.get(self.meta.node_id)
        if before is None or before.nodes.get(self.meta.node_id) != own:
            self.groups.shares.lose_all()

    def _tell_owned(self, node: str) -> None:
        metadata = self.fabric.metadata
        if metadata is None:
            return
        partitions = [
            partition for partition, info in enumerate(metadata.partitions) if info.leader == node
        ]
        if partitions:
            self.opener.tell_owned(node, partitions)

    def _admit(self, node: str, now: float) -> None:
        if not self.meta.is_leader:
            return
        presence, role = self._presences[node]
        metadata = self.fabric.metadata
        if metadata is not None and (node, presence.incarnation) in metadata.removed:
            return
        self.meta.admit(
            NodeInfo(
                node,
                presence.incarnation,
                presence.peer_address,
                presence.client_address,
                presence.admin_address,
                role,
            ),
            now,
        )

    def _admit_all(self, now: float) -> None:
        """Nodes that are here and not known yet."""
        metadata = self.fabric.metadata
        if metadata is not None and self.meta.is_leader:
            for node in self._presences:
                if node not in metadata.nodes:
                    self._admit(node, now)

    def _ask_current(self, now: float) -> None:
        """Once it comes back, everything decided before is known here."""
        if self._is_current or self._current_request >= 0 or not self.meta.leader_id:
            return
        self._current_request = self._propose_nothing(now)

    def _propose_nothing(self, now: float) -> int:
        return self.meta.propose(ChangePartitions(()), now)

    def _step(self, now: float) -> None:
        controller = self.controller
        metadata = self.fabric.metadata
        if controller is None or metadata is None or not self._health_changed:
            return
        self._health_changed = False
        for command in controller.step(metadata, self.health(now), now):
            self._commands[self.meta.propose(command, now)] = command

    def health(self, now: float) -> Health:
        return self.detector.health(now)

    def _session_applied(self, record: Record) -> None:
        """A SESSION record, or a will."""
        if record.kind == log_record.SESSION:
            self.homes.applied(record)
            self.opener.session_changed(record)
        else:
            self.homes.will_applied(record)
