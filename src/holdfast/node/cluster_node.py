"""A node of a cluster as its driver sees it: frames, results and times in; frames, writes and reads
out.

The driver sets the clock of the broker's core (`Node.tick`) before each call. After several calls
it calls `end_turn`. Then it carries out what has gathered: `context.outgoing` (frames, in order),
the effects of the broker's core, and three lists of `effects`: `persists` (writes of the metadata's
log, in order), `reads` (of the journal) and `outcomes`. Nothing here blocks.
"""

from collections.abc import Callable
from typing import Final

from holdfast.log.batch import Batch
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import FLAG_PRODUCER, Record
from holdfast.node import frame_kinds as kinds
from holdfast.node.admission.usage import SharedUsage
from holdfast.node.alone import Alone
from holdfast.node.attendance import Attendance
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.context import NEVER
from holdfast.node.failure.health import Health, Presence
from holdfast.node.features import MEMBER_TABLE
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.frames import CLOSE, OPEN, OPENED, decode_frame
from holdfast.node.leadership_changes import LeadershipChanges
from holdfast.node.metadata.model import WITNESS
from holdfast.node.metadata_proposer import MetadataProposer
from holdfast.node.node_state import PROMISE_BYTES, ClusterPort, Promise
from holdfast.node.part_effects import PartEffects
from holdfast.node.parts import Parts
from holdfast.node.placement.planning import is_dispensable
from holdfast.node.position_reports import PositionReports
from holdfast.node.publish.forward_frames import decode_forward, decode_result
from holdfast.node.publish.forwarding import PENDING_BYTES_MAX
from holdfast.node.publish.producer_dedup import note_refused
from holdfast.node.reads.read_barrier import decode_barrier, is_alignment
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Subscription
from holdfast.node.state.member_values import member_home
from holdfast.node.state.recorded_state import SESSION_EXPIRY

TIDY_S: Final = 0.25
"""The interval in seconds between checks for overdue messages, sessions and nodes."""
SETTLE_SESSIONS: Final = 1000
"""The most sessions that get their timers in one of these checks."""
DUE_MAX: Final = 200
"""The most timers of the replicated state that one turn acts on. The next turn follows at once
while more are due. A session whose end is due and not reached yet can still be opened, as just
before."""


class ClusterNode(Parts):
    """The core of one cluster node: it passes the driver's events to its parts."""

    def _start(self, now: float) -> None:
        self.proposer = MetadataProposer(self)
        self.leadership = LeadershipChanges(self)
        self.positions = PositionReports(self)
        self.attendance = Attendance(
            self.state,
            self.context,
            self.meta,
            self.presence.incarnation,
            self.config.detector.first_contact_s,
            self.config.detector.start_alone_after_s,
            now,
        )
        self.alone = Alone(self)
        self.effects = PartEffects(self, self.proposer, self.leadership, self.positions, self.alone)
        # A read of the metadata as of the start. Once it is passed, everything committed before the
        # start is applied here.
        self._first_read = self.metadata_reads.begin()
        # A read that began when this node seemed dispensable; None: it does not.
        self._dispensable_read: int | None = None
        # Whether the disk was put back, and the nodes have not agreed on the generation of the log.
        # The driver sets it. Until then this node leads nothing, and then only under a later epoch:
        # a node that follows it knows the generation. Counter-example: this node takes the QoS 2
        # messages of clients whose packet ids are still those of the copy.
        self.awaits_generation = False
        self.usage: SharedUsage | None = None
        """Shares the use of limits with the other processes of the machine, if there are any."""
        self._tidy_at = now
        self._is_late = False
        self._is_resting = False
        self.state.cluster = BrokerPort(self)
        self.member = ClusterMember(self)
        if (metadata := self.meta.metadata) is not None:
            self.effects.take_metadata(metadata, tuple(range(len(metadata.partitions))), now)
        self.effects.run()

    @property
    def failovers(self) -> int:
        return self.leadership.failovers

    # Events from the driver

    def load_uncommitted(self, batches: list[bytes]) -> None:
        """Loads the batches above the high watermark of the log, after a start."""
        for data in batches:
            self.log.built(Batch(data, check=False))

    def tick(self, now: float) -> None:
        """Checks the ownership lease, after the driver has set the clock and before any other call.

        Within one turn `now` may be later than that clock.
        """
        self.ownership.tick(now)

    def handle_connected(self, node: str, presence: Presence, role: str, now: float) -> None:
        self.alone.end()
        self._drop_frames(node)
        self.context.connected.add(node)
        self.positions.connected(node, presence, now)
        self.attendance.connected(node)
        self.detector.connected(node, presence, now)
        self.alignment.lose_node(node)
        self.replication.handle_connected(node, now)
        self.interest.connected(node)
        self.remote_reads.disconnected(node)
        self.remote_reads.nodes_changed()
        self.feeds.connected(node)
        if role != WITNESS:
            self.leadership.tell_owned(node)
            self.session_coordinator.connected(node)
            self.groups.agent.lose_node(node)
        self.proposer.connected(node, presence, role, now)
        self.effects.run()

    def handle_disconnected(self, node: str, now: float) -> None:
        if node not in self.context.connected:
            return
        self._drop_frames(node)
        self.context.connected.discard(node)
        self.positions.disconnected(node)
        self.attendance.disconnected(node)
        self.proposer.disconnected(node)
        self.detector.closed(node, False, now)
        self.replication.handle_disconnected(node, now)
        self.alignment.lose_node(node)
        self.feeds.disconnected(node)
        self.interest.disconnected(node)
        self.remote_reads.disconnected(node)
        self.groups.disconnected(node)
        self.session_coordinator.disconnected(node)
        self.acquisition.reports.disconnected(node)
        self.transfer.disconnected(node)
        self.effects.run()

    def _drop_frames(self, node: str) -> None:
        self.context.drop_frames(node)
        self.admission.drop_results(node)

    def handle_refused(self, node: str, now: float) -> None:
        """Handles a refused connection: nothing listens at the address of `node`. A crash is then
        seen without waiting for `suspect_s`."""
        self.detector.closed(node, True, now)
        self.attendance.refused(node)
        self.meta.leader_down(node, now)
        self.effects.run()

    def handle_frame(self, node: str, kind: int, payload: bytes, now: float) -> None:
        """Handles a frame. Raises BadFrame when it is malformed: the driver then closes the
        link."""
        if kind == kinds.HEARTBEAT:
            self.detector.handle_heartbeat(node, payload, now)
            if self.detector.timer() <= now:
                self.meta.handle_timers(now, beats=self.detector.handle_timers(now))
            self.effects.check_own_health(now)
            self.ownership.renew()
            self.effects.run()
            return
        self.detector.note_frame(node, now)
        if kind == kinds.POSITION:
            self.positions.handle(node, payload, now)
            return
        if kind == kinds.LOG_END:
            self.attendance.handle(node, payload)
            return
        if kinds.REPLICATE <= kind <= kinds.COMMIT:
            self.replication.handle_frame(node, kind, payload, now)
        elif kinds.RAFT <= kind <= kinds.PROPOSAL_RESULT:
            self.meta.handle_frame(node, kind, payload, now)
        elif kind == kinds.FORWARD:
            for epoch, attempt, batch in decode_forward(payload):
                begin = self.admission.forwarded(node, epoch, attempt, batch)
                self.feeds.forwarded(node, batch.partition, begin)
        elif kind == kinds.FORWARD_RESULT:
            for answer in decode_result(payload):
                self.forwarding.answered(node, answer)
        elif kind == kinds.QOS0:
            self.interest.handle_qos0(payload)
        elif kind == kinds.BARRIER:
            self.alignment.tell(node, payload)
            self.feeds.hurry(node)
        elif kind == kinds.BARRIER_RESULT:
            question, entries = decode_barrier(payload)
            if is_alignment(question):
                self.alignment.answered(node, question, entries)
            else:
                self.barriers.handle_reply(question, entries)
        else:
            self._handle_session_frame(node, kind, payload)
        self.effects.run()

    def _handle_session_frame(self, node: str, kind: int, payload: bytes) -> None:
        if kind == kinds.SESSION_OPEN:
            self.session_coordinator.open(node, decode_frame(OPEN, payload))
        elif kind == kinds.SESSION_OPENED:
            self.acquisition.opened(node, decode_frame(OPENED, payload))
        elif kind == kinds.SESSION_CLOSE:
            self.acquisition.close(decode_frame(CLOSE, payload))
        elif kind == kinds.SESSION_CLOSED:
            self.session_coordinator.handle_closed(node, payload)
        elif kind == kinds.SESSION_OWNED:
            self.session_coordinator.reports.handle_owned(node, payload)
        elif kind == kinds.INTEREST:
            self.interest.handle_interest(node, payload)
        elif kind == kinds.GROUP:
            self.groups.handle_frame(node, payload)
        elif kind == kinds.IMAGE_REQUEST:
            self.transfer.handle_request(node, payload)
        elif kind == kinds.IMAGE:
            self.transfer.handle_state(node, payload)
        elif kind == kinds.FETCH:
            self.fetch_server.handle(node, payload)
        elif kind == kinds.FETCHED:
            self.remote_reads.handle(node, payload)
        elif kind == kinds.USAGE and self.usage is not None:
            self.usage.handle(node, payload)
        elif not self.feeds.handle_frame(node, kind, payload):
            raise BadFrame(f"a frame of kind {kind}, which this version does not know")

    def handle_taken(self, group: WriteGroup, now: float) -> None:
        """Replicates the records that the journal has just taken as a write group."""
        if self.context.is_alone:
            self.alone.taken(group)
        elif group.built:
            for batch in group.built:
                try:
                    self.log.built(batch)
                except AssertionError as error:
                    self.replication.break_off(batch.partition, error)
            self.replication.handle_taken(
                [
                    (batch.partition, batch.base_offset, batch.end_offset, batch.data)
                    for batch in group.built
                ],
                now,
            )
            self.effects.run()

    def handle_durable(self, now: float) -> None:
        """Acknowledges or commits the records of a write group that is durable. The journal was
        informed before."""
        if self.context.is_alone:
            self.alone.written()
            self.effects.has_applied = True
        else:
            self.replication.handle_durable(now)
            self.effects.run()

    def handle_batches(self, request: int, batches: list[bytes], now: float) -> None:
        if request < 0:
            self.feeds.server.handle_batches(request, batches)
        else:
            self.replication.handle_batches(request, batches, now)
        self.effects.run()

    def handle_persisted(self, now: float) -> None:
        """Handles the completion of the oldest write of `persists` that was not reported yet."""
        self.meta.persisted(now)
        self.effects.run()

    def handle_disk(self, is_stalled: bool, now: float) -> None:
        """Handles a write of the disk that takes too long, or the end of such a stall."""
        # Processes of one machine do not report their common disk: see `Fitness.shares_disk`.
        self.detector.set_stalled(is_stalled and self.usage is None, now)
        self.effects.check_own_health(now)
        self.effects.run()

    def handle_space(self, is_full: bool, now: float) -> None:
        """Handles a disk that has only its reserve left, or has space again."""
        self.detector.set_full(is_full and self.usage is None, now)
        self.effects.check_own_health(now)
        self.space.set_full(is_full, now)
        self.effects.run()

    def handle_damage(self, now: float) -> None:
        """Handles lost or changed records in the log here. The node leads nothing and counts for
        nothing from now on. The driver calls it once."""
        self.alone.end()
        self.transfer.may_serve = False
        self.replication.set_unfit()
        self.detector.set_damaged(now)
        self.effects.check_own_health(now)
        self.effects.run()

    def is_dispensable(self) -> bool:
        """True if the other nodes have everything that is committed, so that this one may lose its
        disk (`placement.planning`). The caller repeats the question until then."""
        metadata = self.context.metadata
        if (
            not self.history.is_current
            or metadata is None
            or not is_dispensable(
                self.meta.node_id,
                metadata,
                self.meta.membership,
                self.detector.health(self.state.now),
            )
        ):
            self._dispensable_read = None
            return False
        if self._dispensable_read is None:
            self._dispensable_read = self.metadata_reads.begin()
        return self.metadata_reads.has_passed(self._dispensable_read)

    def end_turn(self, now: float) -> None:
        """Lets each part finish the turn, and gathers the frames to send.

        The order matters. The barriers advance before sessions begin, and the frames of forwarding
        are built last, so that they contain what the steps before have appended.
        """
        self._is_resting = self._rests()
        if not self._is_resting:
            self._end_turn(now)
        self.state.resume_inputs()
        self._is_late = bool(self.state.dirty or self.state.effects)

    def _rests(self) -> bool:
        """True if this node is alone and no part has anything to do at the end of a turn, as while
        messages are its only work."""
        sessions = self.session_coordinator
        return self.context.is_alone and not (
            self.acquisition.asking
            or sessions.answers.local
            or sessions.reports.requested
            or sessions.releases.confirming
            or self.barriers.waiting
            or self.proposer.is_changed
            or self.meta.effects
            or self.replication.effects
            or self.detector.effects
            or self.interest.followers
            or self.interest.changes
            or self.groups.timer() <= self.state.now
            or self.groups.coordinator.homes.opening
            or self.remote_reads.is_busy()
            or self.replicated.groups.applied_ends
            or self.ownership.is_cut_off
            or self.state.is_ownership_expired
        )

    def _end_turn(self, now: float) -> None:
        if self.attendance.is_held or self.attendance.is_recovering:
            self.attendance.step(now)
        if not self.transfer.is_whole or self.transfer.released:
            self._step_transfer(now)
        self.space.advance()
        self.positions.review(now)
        self.session_coordinator.releases.advance()
        self.leadership.report_won()
        self.acquisition.take_local()
        if (
            not self.history.is_current
            and self.metadata_reads.has_passed(self._first_read)
            and not self.positions.is_awaited()
        ):
            self.history.is_current = True
            self.clock.has_agreed = True
        if self.history.is_current and not self.awaits_generation:
            self.replication.handle_current(now)
        self.ownership.ask()
        is_passed = self.barriers.advance()
        if is_passed:
            self.session_coordinator.endings.advance()
        if is_passed or self.effects.has_applied:
            self.effects.has_applied = False
            self.acquisition.applied()
            self.acquisition.take_local()
        is_alone = self.context.is_alone
        if not is_alone:
            for partition, leader, epoch in self.alignment.take_aligned():
                self.forwarding.aligned(partition, leader, epoch, self.applier.tickets(partition))
            self.alignment.ask(now)
        self.proposer.step(now)
        self.groups.flush()
        self.metadata_reads.advance(now)
        if self.ownership.advance():
            self.acquisition.confirm_ownership()
        self.interest.flush()
        self.stored_partitions.step(now, is_current=self.history.is_current)
        self.feeds.flush()
        if not is_alone or self.remote_reads.is_busy():
            self.remote_reads.advance(now)
        if not is_alone:
            self.fetch_server.advance(now)
            self.forwarding.flush()
            self.admission.flush()
        self.effects.run()
        self.feeds.server.flush()
        self.effects.reads += self.feeds.server.pop_reads()
        if self.usage is not None:
            self.usage.step()
        if not is_alone:
            self.interest.frames.flush(now)
            self.effects.send_held(now)
        self.applier.end_turn()
        if not (self.attendance.is_held or self.attendance.is_recovering):
            self.alone.review()

    def timer(self) -> float:
        """Returns the time at which to call `handle_timers` next."""
        is_alone = self.context.is_alone
        due = self._tidy_at if not is_alone or self._is_untidy() else NEVER
        if not is_alone:
            due = min(due, self.meta.timer(), self.detector.timer())
        if self._is_late and (self.state.dirty or self.state.effects):
            # The driver may have carried out the effects of this turn already.
            due = min(due, self.state.now)
        images = self.replicated.state.timers
        if images and images[0].when < due:
            due = images[0].when
        due = min(due, self.groups.timer())
        reads_at = self.remote_reads.timer()
        if reads_at is not None:
            due = min(due, reads_at)
        if is_alone and self._is_resting:
            # No client waits for a session, so none of the parts below waits either.
            return due
        timers = [
            self.session_coordinator.timer(),
            self.acquisition.timer(),
            self.barriers.timer(),
            self.ownership.timer(),
        ]
        if not is_alone:
            timers += [
                self.replication.timer(),
                self.proposer.timer(),
                self.interest.timer(),
                self.alignment.timer(),
                self.metadata_reads.timer(),
                self.transfer.timer(),
                self.fetch_server.timer(),
                self.feeds.timer(),
            ]
        for when in timers:
            if when is not None and when < due:
                due = when
        return due

    def end_timer(self) -> float:
        """Returns the time of the next `end_turn` for which no timer of the cluster is due."""
        due = self.interest.frames.timer()
        return due if self.usage is None else min(due, self.usage.timer())

    def handle_timers(self, now: float) -> None:
        if not self.context.is_alone:
            beats = self.detector.handle_timers(now)
            health = self.detector.health(now)
            unhealthy = health.suspected | health.unhealthy
            self.replication.handle_unhealthy(unhealthy, now, health.unmet)
            self.meta.handle_timers(now, beats=beats)
        self.replication.handle_timers(now)
        self.session_coordinator.handle_timers()
        self.acquisition.handle_timers()
        self.interest.release()
        for kind, subject in self.replicated.state.pop_due(now, DUE_MAX):
            self.session_coordinator.endings.timer_due(kind, subject)
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_S
            self.context.has_majority(now)
            self.forwarding.refuse_overdue(now)
            self.groups.tidy()
            self.retained_updates.forget_overdue()
            self.feeds.holds.tidy()
            if self.history.is_current:
                # The metadata says how many clocks there are.
                for session in self.replicated.arm_some_timers(SETTLE_SESSIONS):
                    self.session_coordinator.endings.due(session, SESSION_EXPIRY)
            self.proposer.admit_all(now)
            self._note_clocks()
            self.state.effects.extend(self.replicated.state.pop_effects())
        self.proposer.is_changed = True
        self.effects.run()

    def _is_untidy(self) -> bool:
        """Whether a node that is alone has anything for the checks of every TIDY_S."""
        recorded = self.replicated.state
        return bool(
            self.replicated.touched
            or recorded.effects
            or len(self.retained_updates)
            or self.groups.is_used()
            or self.clock.stepped_s
        )

    def _note_clocks(self) -> None:
        for node, skew_s, begins in self.clock.pop_changes():
            event = "clock_skewed" if begins else "clock_agrees"
            self.state.note("warning", event, {"node": node, "skew_s": round(skew_s, 1)})
        if self.clock.stepped_s:
            self.state.note("warning", "clock_stepped", {"seconds": round(self.clock.stepped_s, 1)})
            self.clock.stepped_s = 0.0

    def _step_transfer(self, now: float) -> None:
        self.transfer.step(now)
        for partition in self.transfer.pop_released():
            if not self.context.is_stored(partition) and partition not in self.transfer.copies:
                self.feeds.restored(partition)
            if self.context.may_follow(partition):
                self.replication.resume(partition, now)
        self.context.is_whole = self.transfer.is_whole

    def health(self, now: float) -> Health:
        return self.detector.health(now)


class ClusterMember:
    """The cluster side of a federation's member, which one of the nodes runs."""

    def __init__(self, parts: Parts) -> None:
        self._context = parts.context
        self._home = member_home(parts.context.journal.partitions)
        self._decisions = parts.session_coordinator.decisions
        self._interest = parts.interest

    def node(self, now: float) -> str:
        """The node that runs the member: the leader of the member's home. This one does so only
        once it has applied what earlier leaders have appended, and as long as it reaches a
        majority. "": none."""
        context = self._context
        if context.leader(self._home) != context.node_id:
            return context.leader(self._home)
        is_ready = self._decisions.decides(self._home) and context.is_available(now)
        return context.node_id if is_ready else ""

    def has_other_nodes(self) -> bool:
        """Whether the cluster has other nodes, connected or not."""
        metadata = self._context.metadata
        return metadata is not None and len(metadata.nodes) > 1

    def others_with_table(self) -> list[str] | None:
        """The other nodes that are configured as members. None: that of one is not known."""
        context, metadata = self._context, self._context.metadata
        if metadata is None:
            return None
        nodes = sorted(metadata.nodes.items())
        others = [name for name, info in nodes if info.has_clients and name != context.node_id]
        if any(name not in context.features for name in others):
            return None
        return [name for name in others if context.understands(name, MEMBER_TABLE)]

    def watch_filters(self, watch: Callable[[str, bool], None] | None) -> list[str]:
        """The filters that other nodes have announced, once for each node. Each that begins (True)
        or ends is reported from now on."""
        return self._interest.watch_peers(watch)


class BrokerPort(ClusterPort):
    """The cluster side of `ClusterPort`. It has no state of its own."""

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._context = parts.context
        self._forwarding = parts.forwarding
        self._admission = parts.admission
        self._promises = parts.forwarding.promises
        self._local = parts.local
        self._interest = parts.interest
        self._feeds = parts.feeds
        self._replicated = parts.replicated
        self._retained_updates = parts.retained_updates
        self._acquisition = parts.acquisition
        self.groups = parts.groups
        self._homes = parts.groups.coordinator.homes

    def append(self, record: Record) -> None:
        if self._context.is_alone:
            self._local.append(record)
        else:
            self._forwarding.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        if self._context.is_alone:
            self._local.publish(record, promise)
        else:
            self._forwarding.publish(record, promise)

    def promise(self, promise: Promise) -> None:
        if self._context.is_alone:
            self._local.promise(promise)
        else:
            self._promises.add(promise)

    def promise_interest(self, promise: Promise) -> None:
        self._interest.promise(promise)

    def older_nodes(self, feature: str) -> str:
        older = self._context.nodes_without(feature)
        if not older:
            return ""
        names = ", ".join(older)
        return f"the version of {names} has no {feature.replace('-', ' ')}: upgrade all nodes first"

    def ends_delayed(self, place: tuple[int, int]) -> bool:
        return self._admission.ends_delayed(place)

    def refusal(self, connection: Connection, record: Record) -> Rejection | None:
        now = self._state.now
        if connection.refusals_due:
            # An earlier message was refused and may be sent again. Storing this one first would
            # change the order.
            text = "an earlier message was refused: send that first"
        elif not self._context.is_available(now):
            text = "this node reaches no majority of the cluster"
        else:
            return self._retained_refusal(connection, record)
        self._state.stats.refused_unavailable += 1
        note_refused(self._state, connection, record)
        return Rejection(text)

    def _retained_refusal(self, connection: Connection, record: Record) -> Rejection | None:
        """The reason why a message finds no room in the retained store. Clients of MQTT 3 and
        numbered producers would send a refused message again, for ever. Theirs are delivered and
        not retained."""
        if connection.version < 5 or record.flags & FLAG_PRODUCER:
            return None
        text = self._admission.retained_refusal(record)
        if not text:
            return None
        self._replicated.state.note_retained_limit(record.topic.decode())
        return Rejection(text, may_pass=True)

    def is_congested(self, part: int) -> bool:
        limit = self._state.config.pending_bytes_max // part
        return (
            self._state.promise_bytes + self._local.waiting() * PROMISE_BYTES > limit
            or self._forwarding.pending_bytes > PENDING_BYTES_MAX // part
            or self._context.journal.pending_bytes > limit
        )

    def waiting(self) -> int:
        return self._local.waiting() + len(self._forwarding.pending)

    def has_groups(self) -> bool:
        return not self._homes.opening

    def has_room(self, client_id: str) -> bool:
        recorded = self._replicated.state
        here = self._replicated.open_sessions.counts.get(self._context.node_id, 0)
        count = recorded.client_sessions() + max(0, self._state.client_sessions() - here)
        return client_id in recorded.sessions or count < self._state.config.sessions_max

    def away(self) -> tuple[int, int, int]:
        recorded = self._replicated.state
        counts = self._replicated.open_sessions.counts
        sessions = recorded.client_sessions() - sum(counts.values())
        # Those of an earlier process of this node are open until its end is known.
        own = counts.get(self._context.node_id, 0)
        sessions += max(0, own - self._state.client_sessions())
        groups = len(recorded.groups.keys() - self._state.groups.keys())
        return sessions, self._replicated.subscriptions_away, groups

    def spread(self, message: Message, topic: str, behind: int) -> None:
        if self._context.connected or self._interest.has_groups():
            self._interest.spread(message, topic, behind)
        if message.retain:
            self._retained_updates.delivered(topic, message)

    def request_retained(self, subscriptions: list[Subscription]) -> None:
        self._retained_updates.wanted(subscriptions)

    def is_retained_behind(self, topic: str, subscription: Subscription) -> bool:
        return self._retained_updates.is_behind(topic, subscription)

    def open_session(
        self, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> None:
        self._acquisition.open_session(connection, client_id, opening)

    def session_detached(self, session: Session) -> None:
        self._acquisition.live.detached(session)

    def hold_filters(
        self, connection: Connection, filters: list[str], then: Callable[[], None]
    ) -> bool:
        return self._feeds.hold_filters(connection, filters, then)

    def count_filter(self, filter: str, more: int) -> None:
        if more > 0:
            self._interest.subscribed(filter)
        else:
            self._interest.unsubscribed(filter)
