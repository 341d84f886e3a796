"""Adds sessions' subscriptions to the routing, and makes their shared groups."""

from collections.abc import Collection

from holdfast.node.delivery.delivery import drop_deferred
from holdfast.node.delivery.log_replay import feed_group
from holdfast.node.node_state import NodeState, Work
from holdfast.node.session.session import (
    Group,
    Inflight,
    Session,
    Subscription,
)
from holdfast.protocol.topics.names import is_shared


def find_group(state: NodeState, key: str) -> Group | None:
    """The group, unless only sessions that have ended are left in it. Such a group has ended too: a
    client that joins now does not get the messages it had left."""
    for session in list(state.ended):
        remove_subscription(state, session, key)
    return state.groups.get(key)


def add_subscription(state: NodeState, subscription: Subscription) -> None:
    """Adds a subscription to the state and to the routing, and announces a new filter."""
    session = subscription.session
    filter = subscription.filter
    if filter not in session.subscriptions:
        if not session.is_internal:
            state.subscription_count += 1
        state.cluster.count_filter(filter, 1)
    state.interests.pop(session, None)
    is_new_group = is_shared(filter) and find_group(state, filter) is None
    state.set_subscription(subscription)
    group = subscription.group
    if group is None:
        state.subscriptions.add(filter, session, subscription)
        state.change_routes(filter)
        return
    if is_new_group:
        state.subscriptions.add(group.filter, group, group)
        state.change_routes(group.filter)
    state.cluster.groups.changed(group)


def remove_subscription(state: NodeState, session: Session, filter: str) -> bool:
    """Removes a subscription. False: there is none. [MQTT-3.10.4-1] [MQTT-3.10.4-2]"""
    subscription = state.pop_subscription(session, filter)
    if subscription is None:
        return False
    state.interests.pop(session, None)
    if not session.is_internal:
        state.subscription_count -= 1
    state.cluster.count_filter(filter, -1)
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
    """Detaches a session from these groups of its own, because it unsubscribes or disconnects.

    Its unacknowledged QoS 1 records return to their groups, ahead of the queue. QoS 2 ones must
    stay with the session. [MQTT-4.8.2-4] [MQTT-4.8.2-5] Inflight is walked once, however many
    groups there are.
    """
    own = session.groups
    if own is None or not groups:
        return
    blocked = session.blocked
    for each in groups:
        member = own[each]
        each.detach(member)
        if blocked is not None:
            blocked.pop(member, None)
    returned: dict[Group, list[Inflight]] = {}
    for packet_id, entry in list(session.inflight.items()):
        group = entry.group
        if group is None or group not in groups:
            continue
        if entry.qos == 1:
            del session.inflight[packet_id]
            if session.unsent is not None and packet_id in session.unsent:
                session.unsent.remove(packet_id)
            if session.is_durable():
                session.note_change(packet_id, None)
            returned.setdefault(group, []).append(entry)
        else:
            state.cluster.groups.move_record(group, session, entry)
    for group, entries in returned.items():
        # In the order they were sent.
        group.returned.extendleft(reversed(entries))
        state.cluster.groups.changed(group)
        feed_group(state, group, None)


class DeferredReview(Work):
    """The job that asks again, after rights have changed, about the messages that groups keep for
    members that may read them. A step is one group, or one member of it. Coordinators keep messages
    too, and try them again for a node whose groups have changed."""

    def __init__(self, state: NodeState) -> None:
        super().__init__()
        self.groups = list(state.groups.values())

    def step(self, state: NodeState, steps: int) -> int:
        done = 0
        while self.groups and done < steps:
            group = self.groups.pop()
            drop_deferred(state, group)
            group.changes += 1
            state.cluster.groups.changed(group)
            members = group.connected[: group.ready]
            for member in members:
                feed_group(state, group, member)
            done += 1 + len(members)
        self.has_more = bool(self.groups)
        return done
