"""SUBSCRIBE. A durable session's change is in the log before its SUBACK."""

from functools import partial
from typing import Final

from holdfast.log.reading.starts import FoundStart
from holdfast.node.admission.throttle import recording_refusal
from holdfast.node.connections.client_notes import note_filter_denied
from holdfast.node.connections.close import handle_violation
from holdfast.node.delivery.log_replay import continue_reading, feed_group
from holdfast.node.delivery.outbox import end_drains
from holdfast.node.delivery.replay import (
    StartPlan,
    asks_for_past,
    begin_replay,
    plan_starts,
    search_starts,
    take_found,
)
from holdfast.node.delivery.replay_start import plain_filter, wishes
from holdfast.node.delivery.retained import continue_scans, may_match, start_scan
from holdfast.node.delivery.subscriptions import add_subscription
from holdfast.node.effects import FindStarts, ResumeInput
from holdfast.node.groups.queue_changes import QueueRoom, begin_queues, needs_history
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.rights import may_replay, may_subscribe
from holdfast.node.session.connection import CLOSED, OPEN, Connection
from holdfast.node.session.session import GroupMember, Session, Subscription, new_subscription
from holdfast.node.state.recorded_state import filter_bytes, filter_memory, filter_owner
from holdfast.node.state.session_records import SubscribeRecord, subscription_row
from holdfast.node.state.state_records import append_change
from holdfast.node.topic_rights.questions import asks_to_subscribe, is_filter_unanswered
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_within
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import (
    Disconnect,
    Properties,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
)
from holdfast.protocol.mqtt.properties import REASON_STRING, SUBSCRIPTION_IDENTIFIER
from holdfast.protocol.topics.names import (
    InvalidFilter,
    check_filter,
    is_queue,
    is_shared,
    split_shared,
)


class FilterRoom:
    """The filters that a SUBSCRIBE may add, within `limits.subscriptions_per_session`,
    `limits.filter_bytes_per_session` and the share of `limits.filter_bytes`.

    A SUBSCRIBE that is on its way to the log does not count, so the table may exceed its limit by
    `limits.pending_bytes_max`.
    """

    def __init__(self, state: NodeState, session: Session) -> None:
        self._state = state
        self._session = session
        self._count = len(session.subscriptions)
        self._filter_bytes = session.filter_bytes
        self._memory_bytes = 0
        # Why a filter was refused; "": none was.
        self.error = ""

    def has(self, filter: str) -> bool:
        """Whether there is room for one more filter, which is counted then."""
        session = self._session
        config = self._state.config
        size_bytes = self._filter_bytes + filter_bytes(filter)
        if session.is_internal:
            return True
        if (
            self._count >= config.subscriptions_per_session
            or size_bytes > config.filter_bytes_per_session
        ):
            self.error = "this session has as many filters as it may have"
            return False
        memory_bytes = self._memory_bytes + filter_memory(filter)
        if not self._has_share(memory_bytes):
            self.error = "this user or address has as many filters as there is room for all others"
            return False
        self._count += 1
        self._filter_bytes = size_bytes
        self._memory_bytes = memory_bytes
        return True

    def _has_share(self, size_bytes: int) -> bool:
        state = self._state
        session = self._session
        most = state.config.filter_bytes_max
        if not state.filters.has_room(filter_owner(session), size_bytes, most):
            return False
        if not session.is_durable():
            return True
        # Every node of a cluster has the durable sessions of all.
        return state.recorded.filters.has_room(session.username or "", size_bytes, most)


class SubscribePromise(Promise):
    """The promise of a SUBSCRIBE: once it is in the log, its subscriptions enter the routing."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        packet: Subscribe,
        accepted: list[Subscription],
        codes: list[int],
    ) -> None:
        super().__init__(connection)
        self.session = session
        self.packet = packet
        self.accepted = accepted
        self.codes = codes
        # The filters whose retained sets are owed, as the record says.
        self.owed: set[str] = set()
        # In NodeState.promise_bytes while it waits.
        self.size_bytes = 0
        # 1: a subscription begins in the past, see Session.replays_awaited.
        self.replays = 0
        # Why a start was refused; "": none was.
        self.error = ""

    def release(self, state: NodeState) -> None:
        state.promise_bytes -= self.size_bytes
        assert state.promise_bytes >= 0, "a promise is kept twice"
        session = self.session
        session.replays_awaited -= self.replays
        if self.size_bytes:
            session.subscribes_awaited -= 1
        connection = self.connection
        assert connection is not None
        if session.connection is not connection or connection.state == CLOSED:
            # This node has released the session. The subscriptions are in the replicated state,
            # unless the session has ended: SUBSCRIBE and a DISCONNECT with session expiry 0 may
            # arrive in one segment.
            return
        scans: list[Subscription] = []
        for subscription in self.accepted:
            old = session.subscriptions.get(subscription.filter)
            existed = old is not None
            if subscription.replay is not None:
                add_subscription(state, subscription)
                continue
            if old is not None:
                # [MQTT-3.8.4-4] messages that the replaced one has not delivered yet are not lost
                subscription.start = old.start
                subscription.replay = old.replay
            elif not session.tailing or session.reading or session.outbox:
                subscription.start = list(state.delivered)
            add_subscription(state, subscription)
            # [MQTT-3.3.1-9] [MQTT-3.3.1-10] [MQTT-3.3.1-11]; shared ones never get retained
            handling = subscription.retain_handling
            if subscription.group is None and (handling == 0 or (handling == 1 and not existed)):
                scans.append(subscription)
        end_drains(state, session)
        suback = SubackPromise(self, scans, list(state.delivered) if scans else [])
        state.cluster.promise_interest(suback)


class QueuesPromise(Promise):
    """The promise to continue a SUBSCRIBE once its queues are in the replicated state.

    Their records decide who may be a member: the first one in the home partition says whether the
    queue began in the past. Counter-example: the record of another client, who has the right
    `history`, is appended before this client's and not applied. A check before the append finds no
    queue, and this client, without the right, is sent messages of the past.
    """

    def __init__(self, connection: Connection, plan: StartPlan) -> None:
        super().__init__(connection)
        self.plan = plan

    def release(self, state: NodeState) -> None:
        connection = self.connection
        assert connection is not None
        # The client's packets waited in the socket, so it could not show that it lives.
        connection.last_received = state.now
        _continue(state, connection, self.plan.packet, self.plan)


class SubackPromise(Promise):
    """The promise of a SUBACK for routed subscriptions. `scans` get retained messages; `seam` is
    the offset per partition from which they get messages live."""

    def __init__(
        self, request: SubscribePromise, scans: list[Subscription], seam: list[int]
    ) -> None:
        super().__init__(request.connection)
        self.request = request
        self.scans = scans
        self.seam = seam

    def release(self, state: NodeState) -> None:
        request = self.request
        session = request.session
        connection = self.connection
        assert connection is not None
        if session.connection is not connection or connection.state == CLOSED:
            return
        # [MQTT-3.8.4-1] [MQTT-3.8.4-2]
        properties: Properties = {}
        if request.error and connection.version >= 5 and connection.problem_information:
            properties[REASON_STRING] = request.error
        suback = Suback(request.packet.packet_id, request.codes, properties)
        if not send_reply(state, connection, suback):
            return
        for subscription in self.scans:
            is_logged = subscription.filter in request.owed
            if is_logged or may_match(state, subscription.filter):
                start_scan(state, session, subscription, self.seam, is_logged=is_logged)
        if self.scans:
            continue_scans(state, session)
            state.cluster.request_retained(self.scans)
        for subscription in request.accepted:
            group = subscription.group
            if group is not None and isinstance(subscription, GroupMember):
                feed_group(state, group, subscription if subscription.slot >= 0 else None)
        if not session.tailing:
            continue_reading(state, session)


def send_reply(state: NodeState, connection: Connection, packet: Suback | Unsuback) -> bool:
    """Sends the packet. If it is larger than the client takes [MQTT-3.1.2-24], closes the
    connection, because the client cannot go on without it, and returns False."""
    data = encode_within(packet, connection.version, connection.packet_bytes_max)
    if data:
        connection.send(data, state.dirty)
        return True
    state.note(
        "info",
        "answer_too_large",
        {"client": connection.client_id[:200], "packet_bytes_max": connection.packet_bytes_max},
    )
    last = Disconnect(reasons.PACKET_TOO_LARGE)
    connection.send(
        encode_within(last, connection.version, connection.packet_bytes_max), state.dirty
    )
    connection.close(state.dirty)
    return False


def handle_subscribe(
    state: NodeState, connection: Connection, session: Session, packet: Subscribe
) -> None:
    """Checks and logs a SUBSCRIBE; SubscribePromise does the rest. The starts of subscriptions that
    begin in the past may have to be searched for first, and a service asked about the filters."""
    filters = [each.filter for each in packet.subscriptions]
    if session.is_durable() or any(map(is_queue, filters)):
        is_known = all(filter in session.subscriptions for filter in filters)
        refusal = recording_refusal(state, connection, is_known=is_known)
        if refusal is not None:
            codes = [refusal.reason] * len(filters)
            promise = SubscribePromise(connection, session, packet, [], codes)
            promise.error = refusal.text
            promise.release(state)
            return
    if not asks_to_subscribe(state, connection, packet, partial(_decided, packet)):
        _plan_and_subscribe(state, connection, session, packet)


def _decided(packet: Subscribe, state: object, connection: Connection) -> None:
    """Continues a SUBSCRIBE whose filters are decided."""
    session = connection.session
    if isinstance(state, NodeState) and connection.state == OPEN and session is not None:
        try:
            _plan_and_subscribe(state, connection, session, packet)
        except ProtocolViolation as error:
            handle_violation(state, connection, error)


def _plan_and_subscribe(
    state: NodeState, connection: Connection, session: Session, packet: Subscribe
) -> None:
    filters = [plain_filter(each.filter) for each in packet.subscriptions]
    then = partial(_continue, state, connection, packet, None)
    if state.cluster.hold_filters(connection, filters, then):
        connection.pause_behind_subscribe()
    else:
        _plan(state, connection, session, packet)


def _plan(state: NodeState, connection: Connection, session: Session, packet: Subscribe) -> None:
    plan: StartPlan | None = None
    if asks_for_past(packet):
        plan = plan_starts(state, session, packet)
        if plan.wanted:
            search_starts(state, connection, plan)
            return
    _subscribe(state, connection, session, packet, plan)


def handle_starts(state: NodeState, effect: FindStarts, found: list[FoundStart]) -> None:
    """Continues a SUBSCRIBE whose starts were searched for, and reads the client's next packets."""
    connection = effect.connection
    assert connection is not None, "the search of another node"
    session = connection.session
    plan = effect.plan
    assert isinstance(plan, StartPlan)
    if session is not None:
        take_found(state, session, plan, found)
    _continue(state, connection, plan.packet, plan)


def _continue(
    state: NodeState, connection: Connection, packet: Subscribe, plan: StartPlan | None
) -> None:
    """Continues a SUBSCRIBE behind which the input was paused, unless its client has left."""
    connection.is_subscribing = False
    session = connection.session
    if connection.state != OPEN or connection.closing or session is None:
        return
    try:
        if plan is None:
            _plan(state, connection, session, packet)
        else:
            _subscribe(state, connection, session, packet, plan)
    except ProtocolViolation as error:
        handle_violation(state, connection, error)
    if not connection.is_subscribing:
        state.effects.append(ResumeInput(connection))


def _subscribe(
    state: NodeState,
    connection: Connection,
    session: Session,
    packet: Subscribe,
    plan: StartPlan | None,
) -> None:
    room = FilterRoom(state, session)
    accepted, codes = _check_all(state, connection, session, packet, plan, room)
    if any(is_queue(each.filter) for each in accepted) and (plan is None or not plan.has_queues):
        if plan is None:
            plan = StartPlan(packet)
        plan.has_queues = True
        plan.refused = [code if code >= 0x80 else 0 for code in codes]
        plan.error = plan.error or room.error
        begin_queues(state, connection, session, accepted, plan)
        connection.pause_behind_subscribe()
        state.promise(QueuesPromise(connection, plan))
        return
    promise = SubscribePromise(connection, session, packet, accepted, codes)
    promise.error = room.error
    record = SubscribeRecord(session.client_id, [], state.delivered)
    if plan is not None:
        promise.error = plan.error or promise.error
        if any(each.replay is not None for each in accepted):
            begin_replay(state, session, accepted, record)
            promise.replays = 1
    if not accepted or not session.is_durable():
        # It appends no record, so it does not wait for a disk that may be full.
        promise.release(state)
        return
    for filter in [each.filter for each in accepted if is_shared(each.filter)]:
        state.cluster.groups.joining(connection, session, filter)
    promise.size_bytes = size_of([each.filter for each in accepted])
    session.subscribes_awaited += 1
    state.promise_bytes += promise.size_bytes
    record.subscriptions = [subscription_row(each) for each in accepted]
    promise.owed = {
        each.filter
        for each in accepted
        if each.replay is None
        and each.retain_handling < 2
        and not is_shared(each.filter)
        and may_match(state, each.filter)
    }
    if promise.owed:
        record.owed = sorted(promise.owed)
    append_change(state, session.key, record, session.epoch, promise)


def _check_all(
    state: NodeState,
    connection: Connection,
    session: Session,
    packet: Subscribe,
    plan: StartPlan | None,
    room: FilterRoom,
) -> tuple[list[Subscription], list[int]]:
    """The accepted subscriptions, and the reason for each requested one."""
    identifiers = packet.properties.get(SUBSCRIPTION_IDENTIFIER)
    additions_code = 0
    if isinstance(identifiers, list) and identifiers and isinstance(identifiers[0], int):
        additions_code = identifiers[0]
    additions_code |= wishes(packet.properties)
    accepted: list[Subscription] = []
    codes: list[int] = []
    invalid: list[str] = []
    added: dict[str, None] = {}
    queues = QueueRoom(state, session)
    for index, request in enumerate(packet.subscriptions):
        filter = request.filter
        reason = 0 if plan is None else plan.refused[index]
        reason = reason or _check(state, session, connection, request, invalid)
        if reason < 0x80 and filter not in session.subscriptions and filter not in added:
            if room.has(filter) and queues.has(filter, plan):
                added[filter] = None
            else:
                state.stats.refused_quota += 1
                reason = reasons.QUOTA_EXCEEDED
        if reason < 0x80:
            subscription = new_subscription(
                session,
                request.filter,
                reason,
                request.no_local or connection.is_bridge,
                # MQTT 3 clients get RETAIN 0 on live messages [MQTT3-3.3.1-9]
                request.retain_as_published or connection.is_bridge,
                request.retain_handling,
                additions_code,
            )
            old = session.subscriptions.get(filter)
            if old is not None and not is_shared(filter):
                subscription.drains = reason == 0 and (
                    old.drains or (old.qos > 0 and not old.reads_log)
                )
                subscription.reads_log = subscription.drains or (old.reads_log and not old.drains)
            granted = None if plan is None else plan.granted[index]
            if granted is not None and not is_queue(filter):
                subscription.start = granted.start
                subscription.replay = granted.replay
                subscription.reads_log = True
            accepted.append(subscription)
        codes.append(reason)
    if invalid:
        # One line for each packet, however many filters it has.
        count = codes.count(reasons.TOPIC_FILTER_INVALID)
        fields = {"client": session.client_id, "filters": count, "error": invalid[0]}
        state.note("info", "invalid_filter", fields)
    return accepted, codes


FILTER_BYTES: Final = 700
"""The memory in bytes of one filter of a packet that waits for the log, beside its text."""


def size_of(filters: list[str]) -> int:
    size_bytes = 0
    for filter in filters:
        size_bytes += FILTER_BYTES + len(filter)
    return size_bytes


def _check(
    state: NodeState,
    session: Session,
    connection: Connection,
    request: SubscriptionRequest,
    invalid: list[str],
) -> int:
    """The granted QoS, or the reason of refusal. [MQTT-3.8.4-6] [MQTT-3.8.4-7] `invalid`: receives
    the error of the first invalid filter."""
    config = state.config
    try:
        check_filter(request.filter)
    except InvalidFilter as error:
        # [MQTT-4.7.1-1] [MQTT-4.7.1-2] [MQTT-4.8.2-1] [MQTT-4.8.2-2]
        if not invalid:
            invalid.append(str(error))
        return reasons.TOPIC_FILTER_INVALID
    if is_shared(request.filter):
        if not config.shared_available:
            return reasons.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        if request.no_local:
            # [MQTT-3.8.3-4]
            raise ProtocolViolation(reasons.PROTOCOL_ERROR, "no local on a shared subscription")
    if session.is_internal:
        # The limits for clients do not apply to the federation.
        return min(request.qos, config.qos_max)
    if not may_subscribe(session, request.filter):
        if is_filter_unanswered(connection, request.filter):
            return reasons.QUOTA_EXCEEDED
        note_filter_denied(state, session, "subscribe_denied", request.filter)
        return reasons.NOT_AUTHORIZED
    if needs_history(state, request.filter) and not may_replay(
        session, split_shared(request.filter)[1]
    ):
        note_filter_denied(state, session, "subscribe_denied", request.filter)
        return reasons.NOT_AUTHORIZED
    if not config.wildcard_available and ("#" in request.filter or "+" in request.filter):
        return reasons.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED
    return min(request.qos, config.qos_max)
