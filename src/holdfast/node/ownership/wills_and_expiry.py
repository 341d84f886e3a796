"""Sends wills and ends sessions without a connection, at the leader of their home partition.

The timers of the replicated state fire on every node. Only the node that decides for the home
partition acts on them; the others note that the session is overdue.

Invariant: a session has at most one timer of each kind that has not fired, and the session refers
to it. Counter-example: a session is due while another node decides, and its node closes it again,
which arms a timer. This node decides now, finds the session overdue and arms a second timer in
place of the first. The client connects and disconnects again, which cancels the second timer only.
The first timer ends the session before its interval has passed.

Wills: messages that clients leave for the case that their connection ends without DISCONNECT.

A will is published once, by the session's epoch: its record, or a WILL record, says that the will
of this epoch is done. Counter-example without the epoch: the client is back and ends again,
recovery reads the first will's record, and takes the second one for done.

The rights are those of the moment of publication, because rules may have changed since CONNECT.
"""

from collections.abc import Callable
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.connections.close import log_end
from holdfast.node.delivery.delivery import deliver
from holdfast.node.node_state import NodeState, Route
from holdfast.node.publish.completion import follow_qos0, name_user, retaining_user
from holdfast.node.publish.delayed import publish_due
from holdfast.node.publish.inbound import log_qos0
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.rights import may_publish_will
from holdfast.node.routing.routing import find_route
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Will
from holdfast.node.state.recorded_state import DELAYED, SESSION_EXPIRY, WILL_DUE, Timer
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.sweep import Sweep
from holdfast.protocol.topics.names import InvalidTopic


def publish_will(state: NodeState, session: Session, will: Will) -> None:
    """Publishes a session's will and records that it is done, in one record. [MQTT-3.1.2-8] With
    two records a crash between them would publish it again."""
    try:
        route = find_route(state, will.topic)
    except InvalidTopic:
        return
    if not may_publish_will(state, session, route.topic):
        # The rules have changed since the client connected.
        state.stats.wills_denied += 1
        fields: dict[str, object] = {
            "client": session.client_id,
            "user": session.username or "",
            "topic": route.topic,
        }
        state.note("warning", "will_denied", fields)
        _log_done(state, session)
        return
    state.stats.wills_published += 1
    qos = min(will.qos, state.config.qos_max)
    retain = will.retain and state.config.retain_available
    if qos == 0:
        _publish_qos0(state, session, will, retain, route)
        return
    record = Record(
        route.partition,
        log_record.MESSAGE,
        flags=qos | log_record.FLAG_WILL | (log_record.FLAG_RETAIN if retain else 0),
        timestamp_us=state.wall_us,
        topic=will.topic,
        client_id=session.key,
        sequence=session.epoch,
        properties=will.properties,
        payload=will.payload,
    )
    name_user(record, retaining_user(state, retain, session.username))
    # The message is delivered when it comes back committed, on every node.
    state.append(record)


def _publish_qos0(
    state: NodeState, session: Session, will: Will, retain: bool, route: Route
) -> None:
    """Publishes a will at QoS 0. Its WILL record follows, because the message itself may be in no
    log."""
    message = Message(
        will.topic,
        will.payload,
        0,
        retain,
        will.properties,
        will.expiry_s,
        state.wall_us,
        session.key,
    )
    message.user = retaining_user(state, retain, session.username)
    if route.newest is not None:
        follow_qos0(state, route, message, route.newest)
        _log_done(state, session)
        return
    if route.logged:
        # It is appended below, even on a full disk.
        message.partition = route.partition
    deliver(state, route, message)
    message.partition = -1
    state.cluster.spread(message, route.topic, route.behind)
    if route.logged or message.retain:
        log_qos0(state, message, route)
    _log_done(state, session)


def _log_done(state: NodeState, session: Session) -> None:
    """Appends that the will is done, so that a restart does not publish it again."""
    if session.recorded:
        state.append(
            Record(
                partition_of(session.key, state.config.partitions),
                log_record.WILL,
                timestamp_us=state.wall_us,
                client_id=session.key,
                sequence=session.epoch,
            )
        )


DUE_STEPS: Final = 5
"""The steps of one session whose will or end is due: it may cost an appended record."""


class Endings:
    """The delayed wills and the expiry of sessions, for the home partitions that this node decides
    for."""

    def __init__(
        self,
        state: NodeState,
        replicated: ReplicatedState,
        barriers: Barriers,
        decides: Callable[[int], bool],
        is_changing: Callable[[str], bool],
    ) -> None:
        """`decides`: does this node decide for the clients of a home partition? `is_changing`: see
        `Decisions`."""
        self._state = state
        self._replicated = replicated
        self._barriers = barriers
        self._decides = decides
        self._is_changing = is_changing
        partitions = state.config.partitions
        # Per home partition: client ids whose will or end is due and not in the log, with the kind
        # of timer. SESSION_EXPIRY is that of both.
        self._overdue: list[dict[str, int]] = [{} for _ in range(partitions)]
        self._taken: Sweep[str] = Sweep(state)
        # Per home partition: client ids whose will is appended and not yet applied, with the epoch.
        self._published: list[dict[str, int]] = [{} for _ in range(partitions)]
        # Client ids whose delayed will is due: the epoch, and a read barrier. Once the barrier is
        # passed, this node knows whether the client has connected again in time.
        self._confirming: dict[str, tuple[int, int]] = {}
        self._confirmed: Sweep[str] = Sweep(state)
        # Per home partition: client ids whose end follows their will.
        self._ending: list[set[str]] = [set() for _ in range(partitions)]

    def timer_due(self, kind: int, subject: object) -> None:
        """Acts on a timer of the replicated state that has fired, also that of delayed messages.

        The time of a delayed message is compared with the cluster clock, which this node knows once
        it decides for a partition.
        """
        if kind == DELAYED:
            publish_due(self._state, self._decides)
        elif isinstance(subject, Session):
            self.due(subject, kind)

    def due(self, session: Session, kind: int) -> bool:
        """Acts on a timer of the replicated state that has fired: publishes the will or ends the
        session. Returns False if there is nothing to do yet, or not by this node."""
        client_id = session.client_id
        if self._replicated.state.sessions.get(client_id) is not session or session.owner:
            return False
        if not self._decides(self._replicated.home(client_id)) or self._is_changing(client_id):
            self._note_overdue(client_id, kind)
            return False
        if self._is_armed(session, kind):
            # The session was opened and closed again since it became overdue, which armed a new
            # timer.
            return False
        left_s = self._left_s(session, kind)
        if left_s > 0:
            state = self._replicated.state
            timer = state.arm(state.now + left_s, kind, session)
            if kind == WILL_DUE:
                session.own_rare().will_timer = timer
            else:
                session.own_rare().expiry_timer = timer
            return False
        will = session.will
        if will is not None and not self._replicated.has_fired(
            client_id, session.epoch, will.topic
        ):
            # The end is appended only after the will is applied. Counter-example: both are
            # appended, the leader changes between them, the end is committed and the will is lost.
            if kind == SESSION_EXPIRY:
                self._ending[self._replicated.home(client_id)].add(client_id)
            if will.delay_s == 0 or self._is_confirmed(session):
                self._publish(session, will)
        elif kind == SESSION_EXPIRY:
            self._ending[self._replicated.home(client_id)].discard(client_id)
            self._state.stats.sessions_expired += 1
            log_end(self._state, session)
        return True

    def _note_overdue(self, client_id: str, kind: int) -> None:
        overdue = self._overdue[self._replicated.home(client_id)]
        if overdue.get(client_id) != SESSION_EXPIRY:
            overdue[client_id] = kind

    def _is_armed(self, session: Session, kind: int) -> bool:
        timer = session.rare.will_timer if kind == WILL_DUE else session.rare.expiry_timer
        return isinstance(timer, Timer) and timer.when > self._replicated.state.now

    def _left_s(self, session: Session, kind: int) -> float:
        """Returns the remaining time in seconds by the cluster clock.

        The timer may have been armed by a wrong clock: this node had just started and did not know
        the cluster clock yet. So both must be over: the timer waits for the whole interval wherever
        clocks may differ (`replicated.CLOCK_SLACK_S`). The result is 0 also if the session ended in
        the future. The node that wrote that time had a fast clock, so only the timer is left to go
        by.
        """
        if session.expiry_s == 0:
            return 0.0
        will = session.will
        lasts_s = session.expiry_s
        if kind == WILL_DUE and will is not None:
            lasts_s = min(lasts_s, will.delay_s)
        gone_s = (self._state.wall_us - session.rare.disconnected_us) / 1_000_000
        left_s = lasts_s - gone_s
        return left_s if gone_s >= 0 else 0.0

    def _is_confirmed(self, session: Session) -> bool:
        """True if the session still has no owner after a read barrier that began when its will was
        due.

        A node that was stopped for a while finds its timers due. Another node may have led the home
        partition and opened the session meanwhile. [MQTT-3.1.3-9]
        """
        client_id = session.client_id
        epoch, barrier = self._confirming.get(client_id, (-1, 0))
        if epoch == session.epoch and self._barriers.has_passed(barrier):
            del self._confirming[client_id]
            return True
        if epoch != session.epoch:
            barrier = self._barriers.begin()
            self._confirming[client_id] = (session.epoch, barrier)
        return False

    def advance(self) -> None:
        """Begins to act on the delayed wills whose barrier is passed."""
        has_passed = self._barriers.has_passed
        passed = [name for name, each in self._confirming.items() if has_passed(each[1])]
        if passed:
            self._confirmed.begin(passed, self._take_confirmed)

    def _take_confirmed(self, client_id: str) -> int:
        """Acts on a delayed will that is still confirmed. Returns the steps that it took."""
        epoch, barrier = self._confirming.get(client_id, (-1, 0))
        if epoch < 0 or not self._barriers.has_passed(barrier):
            return 1
        session = self._replicated.state.sessions.get(client_id)
        if session is not None and session.epoch == epoch:
            self.due(session, WILL_DUE)
        self._confirming.pop(client_id, None)
        return DUE_STEPS

    def is_ending(self, client_id: str) -> bool:
        """True if the session has expired and its end waits for its will."""
        return client_id in self._ending[self._replicated.home(client_id)]

    def will_comes_first(self, recorded: Session, is_clean: bool) -> bool:
        """Publishes the will that must precede the opening of a session. Returns True if the
        opening must wait for it, or for the end of an expired session.

        An ended session publishes its will, also if a clean start ends it [MQTT-3.1.2-8]. A resumed
        session publishes a will that was not delayed. `will_applied` and `applied` continue with
        the opening.
        """
        if recorded.owner:
            return False
        if recorded.expiry_s == 0:
            return True
        will = recorded.will
        if will is None or not (is_clean or will.delay_s == 0):
            return False
        if self._replicated.has_fired(recorded.client_id, recorded.epoch, will.topic):
            return False
        self._publish(recorded, will)
        return True

    def _publish(self, recorded: Session, will: Will) -> None:
        """Publishes the will, at most once while this node decides."""
        published = self._published[self._replicated.home(recorded.client_id)]
        if published.get(recorded.client_id) != recorded.epoch:
            published[recorded.client_id] = recorded.epoch
            publish_will(self._state, recorded, will)

    def will_applied(self, client_id: str, epoch: int) -> None:
        """Appends the end of a session that has waited for its will."""
        home = self._replicated.home(client_id)
        if self._published[home].get(client_id, -1) <= epoch:
            self._published[home].pop(client_id, None)
        image = self._replicated.state.sessions.get(client_id)
        if image is not None and client_id in self._ending[home]:
            self.due(image, SESSION_EXPIRY)

    def applied(self, client_id: str) -> None:
        """Acts on a session that was due while its records were not applied."""
        self._take_overdue(client_id)

    def _take_overdue(self, client_id: str) -> int:
        """Acts on a session that is still overdue. Returns the steps that it took."""
        home = self._replicated.home(client_id)
        if client_id not in self._overdue[home] or not self._decides(home):
            return 1
        kind = self._overdue[home].pop(client_id)
        session = self._replicated.state.sessions.get(client_id)
        if session is not None:
            self.due(session, kind)
        return DUE_STEPS

    def forget(self, client_id: str) -> None:
        """Drops what is due for a session that has ended or has a connection."""
        home = self._replicated.home(client_id)
        self._overdue[home].pop(client_id, None)
        self._ending[home].discard(client_id)
        self._confirming.pop(client_id, None)

    def start_deciding(self, partition: int) -> None:
        """Begins to act on the sessions of `partition` that became due while another node
        decided."""
        self._taken.begin(list(self._overdue[partition]), self._take_overdue)

    def stop_deciding(self, partition: int) -> None:
        """Marks the sessions of `partition` as overdue again: their records may never be
        committed."""
        overdue = dict.fromkeys(self._published[partition], WILL_DUE)
        overdue.update(self._overdue[partition])
        overdue.update(dict.fromkeys(self._ending[partition], SESSION_EXPIRY))
        self._overdue[partition] = overdue
        self._published[partition] = {}
        self._ending[partition] = set()
