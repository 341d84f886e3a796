"""SUBSCRIBE and UNSUBSCRIBE. A durable session's change is in the log before its SUBACK."""

from collections.abc import Collection
from typing import Final

from holdfast.broker.delivery.delivery import drop_deferred
from holdfast.broker.delivery.log_replay import feed_group
from holdfast.broker.delivery.retained import continue_scans, start_scan
from holdfast.broker.promise import Promise
from holdfast.broker.recorded_state import filter_bytes
from holdfast.broker.recovery.session_records import (
    SubscribeRecord,
    UnsubscribeRecord,
    encode_session,
    subscription_row,
)
from holdfast.broker.recovery.state_records import (
    append_state,
    changed_positions,
    group_positions,
    is_durable_group,
    publish_state,
)
from holdfast.broker.session.connection import CLOSED, OPEN, Connection
from holdfast.broker.session.session import (
    Group,
    GroupMember,
    Inflight,
    Session,
    Subscription,
    new_subscription,
)
from holdfast.broker.session.state import encode_cursor
from holdfast.broker.state import NodeState
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_within
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import (
    Disconnect,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
)
from holdfast.protocol.mqtt.properties import SUBSCRIPTION_IDENTIFIER
from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared
from holdfast.storage import record as log_record


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
        # In NodeState.promise_bytes while it waits.
        self.size_bytes = 0

    def release(self, state: NodeState) -> None:
        state.promise_bytes -= self.size_bytes
        session = self.session
        connection = self.connection
        assert connection is not None
        if session.connection is not connection or connection.state == CLOSED:
            # In a cluster this node has released the session; the subscriptions are in the
            # replicated state. A session that ended meanwhile has no subscriptions: SUBSCRIBE and a
            # DISCONNECT with session expiry 0 may arrive in one segment.
            if state.cluster.is_single and state.sessions.get(session.client_id) is session:
                for subscription in self.accepted:
                    add_subscription(state, subscription)
            return
        scans: list[Subscription] = []
        for subscription in self.accepted:
            old = session.subscriptions.get(subscription.filter)
            existed = old is not None
            if old is not None:
                # [MQTT-3.8.4-4] messages that the replaced one has not delivered yet are not lost
                subscription.start = old.start
            elif not session.tailing:
                subscription.start = list(state.delivered)
            add_subscription(state, subscription)
            # [MQTT-3.3.1-9] [MQTT-3.3.1-10] [MQTT-3.3.1-11]; shared ones never get retained
            handling = subscription.retain_handling
            if subscription.group is None and (handling == 0 or (handling == 1 and not existed)):
                scans.append(subscription)
        suback = SubackPromise(connection, session, self.packet, self.accepted, self.codes, scans)
        state.cluster.promise_interest(suback)


class SubackPromise(Promise):
    """The promise of a SUBACK for routed subscriptions. `scans` get retained messages."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        packet: Subscribe,
        accepted: list[Subscription],
        codes: list[int],
        scans: list[Subscription],
    ) -> None:
        super().__init__(connection)
        self.session = session
        self.packet = packet
        self.accepted = accepted
        self.codes = codes
        self.scans = scans

    def release(self, state: NodeState) -> None:
        session = self.session
        connection = self.connection
        assert connection is not None
        if session.connection is not connection or connection.state == CLOSED:
            return
        # [MQTT-3.8.4-1] [MQTT-3.8.4-2]
        suback = Suback(self.packet.packet_id, self.codes, {})
        if not _reply(state, connection, suback):
            return
        for subscription in self.scans:
            start_scan(state, session, subscription)
        if self.scans:
            continue_scans(state, session)
            state.cluster.request_retained(self.scans)
        for subscription in self.accepted:
            group = subscription.group
            if group is not None and isinstance(subscription, GroupMember):
                feed_group(state, group, subscription if subscription.slot >= 0 else None)


def _reply(state: NodeState, connection: Connection, packet: Suback | Unsuback) -> bool:
    """Send the packet. If it is larger than the client takes [MQTT-3.1.2-24], close the connection,
    because the client cannot go on without it, and return False."""
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
    """Check and log a SUBSCRIBE; SubscribePromise does the rest."""
    identifiers = packet.properties.get(SUBSCRIPTION_IDENTIFIER)
    subscription_id = 0
    if isinstance(identifiers, list) and identifiers and isinstance(identifiers[0], int):
        subscription_id = identifiers[0]
    accepted: list[Subscription] = []
    codes: list[int] = []
    invalid: list[str] = []
    added: dict[str, None] = {}
    size_bytes = session.filter_bytes
    for request in packet.subscriptions:
        filter = request.filter
        reason = _check(state, session, connection, request, invalid)
        if reason < 0x80 and filter not in session.subscriptions and filter not in added:
            if _has_room_for(state, session, len(added), size_bytes + filter_bytes(filter)):
                added[filter] = None
                size_bytes += filter_bytes(filter)
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
                subscription_id,
            )
            accepted.append(subscription)
        codes.append(reason)
    if invalid:
        # One line for each packet, however many filters it has.
        state.note(
            "info",
            "invalid_filter",
            {
                "client": session.client_id,
                "filters": codes.count(reasons.TOPIC_FILTER_INVALID),
                "error": invalid[0],
            },
        )
    promise = SubscribePromise(connection, session, packet, accepted, codes)
    if not accepted or not session.is_durable():
        # It appends no record, so it does not wait for a disk that may be full.
        promise.release(state)
        return
    for subscription in accepted:
        # In a cluster the group's coordinator logs the group's positions.
        if is_shared(subscription.filter) and state.cluster.is_single:
            _record_group(state, subscription.filter)
    promise.size_bytes = _size_of([each.filter for each in accepted])
    state.promise_bytes += promise.size_bytes
    rows = [subscription_row(each) for each in accepted]
    payload = encode_session(SubscribeRecord(session.client_id, rows, state.delivered))
    publish_state(state, log_record.SESSION, session.key, payload, session.epoch, promise)


FILTER_BYTES: Final = 700
"""The memory in bytes of one filter of a packet that waits for the log, beside its text."""


def _size_of(filters: list[str]) -> int:
    size_bytes = 0
    for filter in filters:
        size_bytes += FILTER_BYTES + len(filter)
    return size_bytes


def _record_group(state: NodeState, key: str) -> None:
    """Log the positions of a group that gets its first durable member. They must be in the log
    before SUBACK, or after a crash the group would begin at the log's end."""
    group = _find_group(state, key)
    if group is None:
        positions = state.delivered
    elif not is_durable_group(group):
        positions = group_positions(state, group)
    else:
        return
    changed = changed_positions(None, positions)
    append_state(state, log_record.CURSOR, key.encode(), encode_cursor(changed, {}, []))


def _find_group(state: NodeState, key: str) -> Group | None:
    """The group, unless only sessions that have ended are left in it. Such a group has ended too: a
    client that joins now does not get the messages it had left."""
    for session in list(state.ended):
        remove_subscription(state, session, key)
    return state.groups.get(key)


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
    if not config.wildcard_available and ("#" in request.filter or "+" in request.filter):
        return reasons.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED
    return min(request.qos, config.qos_max)


def _has_room_for(state: NodeState, session: Session, added: int, size_bytes: int) -> bool:
    config = state.config
    return session.is_internal or (
        len(session.subscriptions) + added < config.subscriptions_per_session
        and size_bytes <= config.filter_bytes_per_session
    )


def add_subscription(state: NodeState, subscription: Subscription) -> None:
    """Add a subscription to the state and to the routing, and announce a new filter."""
    session = subscription.session
    filter = subscription.filter
    if filter not in session.subscriptions:
        if not session.is_internal:
            state.subscription_count += 1
            if state.watch_interest is not None:
                state.watch_interest(filter, True)
        state.cluster.subscribed(filter)
    state.interests.pop(session, None)
    is_new_group = is_shared(filter) and _find_group(state, filter) is None
    state.set_subscription(subscription)
    group = subscription.group
    if group is None:
        state.subscriptions.add(filter, session, subscription)
        state.change_routes(filter)
        return
    if is_new_group:
        state.subscriptions.add(group.filter, group, group)
        state.change_routes(group.filter)
    state.cluster.groups.moved(group)


def remove_subscription(state: NodeState, session: Session, filter: str) -> bool:
    """Remove a subscription. False: there is none. [MQTT-3.10.4-1] [MQTT-3.10.4-2]"""
    subscription = state.pop_subscription(session, filter)
    if subscription is None:
        return False
    state.interests.pop(session, None)
    if not session.is_internal:
        state.subscription_count -= 1
        if state.watch_interest is not None:
            state.watch_interest(filter, False)
    state.cluster.unsubscribed(filter)
    group = subscription.group
    if group is None:
        state.subscriptions.remove(filter, session)
        state.change_routes(filter)
        return True
    if group.deferred:
        drop_deferred(state, group)
    if not group.members:
        state.subscriptions.remove(group.filter, group)
        state.change_routes(group.filter)
    state.cluster.groups.changed(group)
    return True


def leave_groups(state: NodeState, session: Session, groups: Collection[Group]) -> None:
    """Detach a session from these groups of its own, because it unsubscribes or disconnects.

    Its unacknowledged QoS 1 records return to their groups, ahead of the queue. QoS 2 ones must
    stay with the session. [MQTT-4.8.2-4] [MQTT-4.8.2-5] Inflight is walked once, however many
    groups there are.
    """
    own = session.groups
    if own is None or not groups:
        return
    blocked = session.blocked
    idle: list[Group] = []
    for each in groups:
        member = own[each]
        each.detach(member)
        if blocked is not None:
            blocked.pop(member, None)
        if each.outbox and not each.connected and each.tailing and not each.reading:
            idle.append(each)
    returned: dict[Group, list[Inflight]] = {}
    for packet_id, entry in list(session.inflight.items()):
        group = entry.group
        if group is None or group not in groups:
            continue
        if entry.qos == 1:
            del session.inflight[packet_id]
            if session.is_durable():
                session.note_change(packet_id, None)
            returned.setdefault(group, []).append(entry)
        else:
            state.cluster.groups.move_record(group, session, entry)
    for group, entries in returned.items():
        # In the order they were sent.
        group.returned.extendleft(reversed(entries))
        state.cluster.groups.moved(group)
        feed_group(state, group, None)
    for group in idle:
        # No member is connected: the memory is freed, and the log keeps the records.
        group.fall_behind(state.delivered)


class UnsubscribePromise(Promise):
    """The promise of an UNSUBACK: once it is in the log, the subscriptions leave the routing."""

    def __init__(self, connection: Connection, session: Session, packet: Unsubscribe) -> None:
        super().__init__(connection)
        self.session = session
        self.packet = packet
        # In NodeState.promise_bytes while it waits.
        self.size_bytes = 0

    def release(self, state: NodeState) -> None:
        state.promise_bytes -= self.size_bytes
        codes: list[int] = []
        session = self.session
        left: dict[Group, None] = {}
        for filter in self.packet.filters:
            subscription = session.subscriptions.get(filter)
            if subscription is not None and subscription.group is not None:
                left[subscription.group] = None
        leave_groups(state, session, left)
        for filter in self.packet.filters:
            removed = remove_subscription(state, session, filter)
            codes.append(reasons.SUCCESS if removed else reasons.NO_SUBSCRIPTION_EXISTED)
        connection = self.connection
        assert connection is not None
        if connection.state == OPEN:
            # [MQTT-3.10.4-4] [MQTT-3.10.4-5] [MQTT-3.11.3-1]
            _reply(state, connection, Unsuback(self.packet.packet_id, codes, {}))


def handle_unsubscribe(
    state: NodeState, connection: Connection, session: Session, packet: Unsubscribe
) -> None:
    """Log an UNSUBSCRIBE; UnsubscribePromise does the rest."""
    promise = UnsubscribePromise(connection, session, packet)
    if not session.is_durable():
        promise.release(state)
        return
    promise.size_bytes = _size_of(packet.filters)
    state.promise_bytes += promise.size_bytes
    payload = encode_session(UnsubscribeRecord(session.client_id, packet.filters))
    publish_state(state, log_record.SESSION, session.key, payload, session.epoch, promise)
