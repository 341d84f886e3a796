"""Delivery of a committed message to the sockets of its receivers.

A QoS > 0 delivery is sent at once while the receiver's window is open and its socket takes data.
Otherwise it is queued in the receiver's outbox; an outbox that overflows is dropped, and the
receiver reads the log instead. A QoS 0 delivery is sent or, if the socket is full, dropped and
counted. A subscription that reads the log gets what the log has like QoS > 0.
"""

from collections import OrderedDict
from typing import Final

from holdfast.node.delivery.live_lane import deliver_qos0, overtake
from holdfast.node.delivery.transmission import (
    READ_BYTES_MAX,
    can_send,
    fall_behind,
    has_room,
    send_inflight,
    send_log_qos0,
    send_qos0,
)
from holdfast.node.effects import FetchInflight
from holdfast.node.node_state import NodeState, Route
from holdfast.node.rights import has_rules, may_any_read, may_read
from holdfast.node.session.connection import OPEN
from holdfast.node.session.cursor import Delivery
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, GroupMember, Inflight, Session, Subscription

FETCH_RECORDS_MAX: Final = 100
"""The most records of one fetch of unfinished messages."""
PASSED_MAX: Final = 16
"""The number of members that a group tries for a message before it looks up, and remembers by
topic, whether any member may read it."""


def deliver(state: NodeState, route: Route, message: Message) -> int:
    """Delivers a message to the subscribers in its audience. Returns their number."""
    targets, groups = route.targets, route.groups
    if route.denied:
        state.stats.reads_denied += route.denied
    audience = message.audience
    if audience is not None:
        targets = targets if audience.is_plain else []
        groups = [group for group in groups if group.key in audience.groups]
    receivers = len(targets) + len(groups)
    state.spent += receivers
    if message.qos == 0:
        if route.reads_log:
            deliver_qos0(state, route, targets, message)
        else:
            for target in targets:
                if target.session.connection is not None:
                    send_qos0(state, target, message)
    else:
        for target in targets:
            session = target.session
            if session.connection is None:
                continue
            try:
                if target.qos == 0 and not target.reads_log:
                    send_qos0(state, target, message)
                elif session.tailing:
                    _deliver_to_session(state, session, target, message)
                elif session.lane is not None:
                    overtake(state, session, target, message)
            except AssertionError as error:
                state.stop_session(session, error)
    for group in groups:
        _deliver_to_group(state, group, message)
    return receivers


def deliver_committed_qos0(state: NodeState, route: Route, message: Message) -> None:
    """Delivers a committed QoS 0 message to the targets that read the log. The others have it."""
    audience = message.audience
    if not route.reads_log or (audience is not None and not audience.is_plain):
        return
    for target in route.targets:
        session = target.session
        if not target.reads_log or session.connection is None:
            continue
        if session.tailing:
            _deliver_to_session(state, session, target, message)
        elif session.lane is not None:
            overtake(state, session, target, message)


def _deliver_to_session(
    state: NodeState, session: Session, target: Subscription, message: Message
) -> None:
    if target.no_local and session.key == message.publisher:
        return
    qos = message.qos if message.qos < target.qos else target.qos
    retain = message.retain and target.retain_as_published
    if (
        can_send(state, session)
        and not session.outbox
        and not session.reading
        and session.waiting_qos0 is None
    ):
        if state.stats.durations.takes_delivery:
            state.stats.durations.deliver(state.wall_us - message.timestamp_us)
        if qos:
            send_inflight(state, session, message, qos, retain, target.additions, False, None)
        else:
            send_log_qos0(state, session, message, retain, target.additions)
        return
    if session.lane is not None and overtake(state, session, target, message):
        return
    if not has_room(state, session.outbox_count(), session.outbox_bytes):
        fall_behind(state, session, message)
        return
    session.push(Delivery(message, qos, retain, target.additions))


def ready_member(state: NodeState, group: Group, topic: bytes) -> GroupMember | None:
    """The next member, round robin, that takes a message of this topic now. [MQTT-4.8.2-1] Members
    found without room wait in their session's `blocked`, so each is checked once."""
    passed = 0
    while passed < group.ready:
        if group.turn >= group.ready:
            group.turn = 0
        member = group.connected[group.turn]
        session = member.session
        if not can_send(state, session):
            note_blocked(state, group, member)
            continue
        group.turn += 1
        if may_read(session, topic):
            return member
        passed += 1
        if passed == PASSED_MAX and not may_any_read(state, group, topic):
            return None
    return None


def _has_ready_member(state: NodeState, group: Group) -> bool:
    """Whether a member has room for a message now, if it may read it."""
    while group.ready:
        member = group.connected[group.turn % group.ready]
        if can_send(state, member.session):
            return True
        note_blocked(state, group, member)
    return False


def note_blocked(state: NodeState, group: Group, member: GroupMember) -> None:
    """Records that the session has no room for the group; `proceed` unblocks it."""
    group.block(member)
    session = member.session
    if session.blocked is None:
        session.blocked = OrderedDict()
    session.blocked[member] = None


def note_room(group: Group, member: GroupMember) -> None:
    """Records that the member has room again."""
    group.unblock(member)
    if member.session.blocked is not None:
        member.session.blocked.pop(member, None)


def _deliver_to_group(state: NodeState, group: Group, message: Message) -> None:
    # At QoS 0 the publisher's node selects the node that delivers.
    if message.qos and group.coordination is not None:
        state.cluster.groups.record(group, message)


def send_group_qos0(state: NodeState, group: Group, message: Message) -> bool:
    """Sends a QoS 0 message to one member. False: no connected member may read it."""
    connected = group.connected
    for passed in range(len(connected)):
        if passed == PASSED_MAX and not may_any_read(state, group, message.topic):
            return False
        if group.turn >= len(connected):
            group.turn = 0
        member = connected[group.turn]
        group.turn += 1
        connection = member.session.connection
        if connection is None or connection.state != OPEN:
            continue
        if may_read(member.session, message.topic):
            send_qos0(state, member, message)
            return True
    return False


def send_to_member(state: NodeState, group: Group, member: GroupMember, message: Message) -> None:
    """Sends a record of the group to one of its members."""
    state.cluster.groups.sent(group, message)
    send_unlisted(state, group, member, message)


def send_unlisted(state: NodeState, group: Group, member: GroupMember, message: Message) -> None:
    """`send_to_member` for a record that the group's coordinator has not assigned."""
    qos = min(message.qos, member.qos)
    if qos == 0:
        send_qos0(state, member, message)
        state.cluster.groups.finished(group, message.partition, message.offset)
        return
    session = member.session
    retain = message.retain and member.retain_as_published
    if not send_inflight(state, session, message, qos, retain, member.additions, False, group):
        state.cluster.groups.finished(group, message.partition, message.offset)


def pump_group(state: NodeState, group: Group) -> None:
    """Sends the records that wait for a member, in their order, unless members leave."""
    state.cluster.groups.changed(group)
    while group.returned:
        head = group.returned[0]
        if isinstance(head, Inflight):
            if head.message is None:
                _fetch_returned(state, group)
                return
            message = head.message
        else:
            message = head
        member = ready_member(state, group, message.topic)
        if member is None and not _pass_over(state, group, message):
            return
        group.returned.popleft()
        if member is None:
            continue
        if message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
            state.cluster.groups.finished(group, message.partition, message.offset)
            continue
        send_to_member(state, group, member, message)


def _pass_over(state: NodeState, group: Group, message: Message) -> bool:
    """Skips a message for which no member is ready. False: the group has to wait.

    The group continues only if a member is ready for the next message. This one stays aside for a
    member that may read it. It is finished if no member may.
    """
    if not has_rules(state) or not group.ready:
        return False
    if not may_any_read(state, group, message.topic):
        state.cluster.groups.denied(group, message.partition, message.offset)
    elif has_room(state, group.deferred_count, group.deferred_bytes):
        group.defer_message(message)
    else:
        return False
    state.cluster.groups.changed(group)
    return True


def send_deferred(state: NodeState, group: Group, member: GroupMember) -> None:
    """Sends to this member the messages aside that it may read. They are kept by topic, so a member
    that may read none of them costs one check per topic."""
    session = member.session
    for topic in list(group.deferred):
        if not may_read(session, topic):
            continue
        while topic in group.deferred:
            if not can_send(state, session):
                note_blocked(state, group, member)
                return
            message = group.pop_deferred(topic)
            if message.is_expired(state.wall_us):
                state.stats.dropped_expired += 1
                state.cluster.groups.finished(group, message.partition, message.offset)
            else:
                send_to_member(state, group, member, message)


def drop_deferred(state: NodeState, group: Group) -> None:
    """Finishes the messages aside that no member may read, now that a member has left."""
    for topic in list(group.deferred):
        if may_any_read(state, group, topic):
            continue
        while topic in group.deferred:
            message = group.pop_deferred(topic)
            state.cluster.groups.denied(group, message.partition, message.offset)
        state.cluster.groups.changed(group)


def _fetch_returned(state: NodeState, group: Group) -> None:
    """Fetches returned records from the log again, once a member can take them."""
    if group.fetching or not _has_ready_member(state, group):
        return
    entries: list[Inflight] = []
    for each in group.returned:
        if not isinstance(each, Inflight) or each.message is not None:
            break
        entries.append(each)
        if len(entries) == FETCH_RECORDS_MAX:
            break
    group.fetching = True
    wanted = [(number, each.partition, each.offset) for number, each in enumerate(entries)]
    state.effects.append(FetchInflight(group, None, wanted, READ_BYTES_MAX, entries))
