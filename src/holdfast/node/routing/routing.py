"""Finds each topic's receivers, and remembers them until a subscription changes.

Invariant: a remembered route is used only while its version is the newest, or while none of the
filters that changed since then matches its topic.
"""

from typing import Final

from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_QOS_MASK, Record
from holdfast.node.connections.client_notes import note_read_denied
from holdfast.node.node_state import NodeState, Route
from holdfast.node.rights import is_reserved, may_read
from holdfast.node.session.additions import Additions, merged
from holdfast.node.session.session import Group, Replay, Session, Subscription
from holdfast.protocol.topics.names import decode_topic, matches

ROUTES_BYTES_MAX: Final = 128 << 20
"""The most bytes of memory for remembered routes. Above it all are forgotten."""
ROUTE_BYTES: Final = 700
"""The memory in bytes of one route without its name and receivers, approximately."""
RECEIVER_BYTES: Final = 8
"""The memory in bytes of one receiver in a route."""


def find_route(state: NodeState, raw: bytes) -> Route:
    """The route of a topic name, with its receivers. Raises `InvalidTopic` for bytes that are no
    topic name."""
    return resolved(state, look_up(state, raw))


def look_up(state: NodeState, raw: bytes) -> Route:
    """The route of a topic name, with or without receivers. A new one is not remembered, so unused
    names cost no memory. Raises `InvalidTopic` for bytes that are no topic name."""
    route = state.routes.get(raw)
    if route is None:
        topic = decode_topic(raw)
        route = Route(topic, raw, partition_of(raw, state.config.partitions))
        route.reserved = is_reserved(topic)
        for filter in state.config.qos0_logged:
            if matches(filter, topic):
                route.logged = True
    return route


def resolved(state: NodeState, route: Route) -> Route:
    """The same route with its current receivers. It is remembered."""
    if route.version != state.route_version and not _is_untouched(state, route):
        _resolve(state, route)
        _remember(state, route)
    return route


def _remember(state: NodeState, route: Route) -> None:
    """Stores the route and counts all its memory, that of the receivers too: with 1,000 of them to
    a topic, 100,000 topics have a list of 8 kB each."""
    routes = state.routes
    size_bytes = ROUTE_BYTES + 2 * len(route.raw)
    size_bytes += RECEIVER_BYTES * (len(route.targets) + len(route.groups))
    if routes.get(route.raw) is route:
        state.routes_bytes -= route.size_bytes
    if state.routes_bytes + size_bytes > ROUTES_BYTES_MAX:
        routes.clear()
        state.routes_bytes = 0
    route.size_bytes = size_bytes
    routes[route.raw] = route
    state.routes_bytes += size_bytes


def _is_untouched(state: NodeState, route: Route) -> bool:
    """Whether none of the filters that changed since the route was resolved matches its topic. The
    check pays only while these are few compared with the receivers."""
    changes = state.route_changes
    behind = state.route_version - route.version
    count = len(changes)
    if route.version < 0 or behind > count or behind > 4 + len(route.targets) // 4:
        return False
    for index in range(count - behind, count):
        if matches(changes[index], route.topic):
            return False
    route.version = state.route_version
    return True


def _resolve(state: NodeState, route: Route) -> None:
    targets: list[Subscription] = []
    groups: list[Group] = []
    merged: dict[Session, int] = {}
    denied: set[Session] = set()
    overlapping: dict[int, list[Subscription]] = {}
    raw = route.raw
    ended = state.ended
    matching = state.subscriptions.match(route.topic)
    state.spent += len(matching)
    for value in matching:
        if isinstance(value, Group):
            groups.append(value)
            continue
        assert isinstance(value, Subscription)
        session = value.session
        if session in ended:
            continue
        if not may_read(session, raw):
            denied.add(session)
            note_read_denied(state, session, route.topic)
            continue
        index = merged.get(session, -1)
        if index < 0:
            merged[session] = len(targets)
            targets.append(value)
            continue
        same = overlapping.get(index)
        if same is None:
            overlapping[index] = [targets[index], value]
        else:
            same.append(value)
    for index, same in overlapping.items():
        targets[index] = merge(same)
    route.reads_log = False
    for target in targets:
        if target.reads_log:
            route.reads_log = True
    route.targets = targets
    route.groups = groups
    route.denied = len(denied)
    route.version = state.route_version


def merge(subscriptions: list[Subscription]) -> Subscription:
    """The subscription that stands for overlapping ones of one session: one copy, at the highest
    QoS, with every subscription id. [MQTT-3.3.4-2] [MQTT-3.3.4-3] [MQTT-3.3.4-4]"""
    first = subscriptions[0]
    if len(subscriptions) == 1:
        return first
    qos = 0
    no_local = True
    retain_as_published = False
    additions: list[Additions] = []
    replay: Replay | None = None
    reads_log = False
    for each in subscriptions:
        replay = replay or each.replay
        reads_log = reads_log or each.reads_log
        qos = max(qos, each.qos)
        no_local = no_local and each.no_local
        retain_as_published = retain_as_published or each.retain_as_published
        if each.additions is not None:
            additions.append(each.additions)
    both = Subscription(first.session, first.filter, qos, no_local, retain_as_published, 0, 0)
    both.additions = merged(additions)
    both.replay = replay
    both.reads_log = reads_log
    return both


def subscriptions_of(state: NodeState, session: Session, topic: str) -> list[Subscription]:
    """The session's own (not shared) subscriptions that match. The subscription trie finds them,
    because a session may have 100,000 filters."""
    found: list[Subscription] = []
    for value in state.subscriptions.match_of(topic, session):
        assert isinstance(value, Subscription)
        found.append(value)
    return found


def subscription_to(
    matching: list[Subscription], record: Record, done: set[tuple[int, int]] | None
) -> Subscription | None:
    """The subscription through which a session gets a record that it reads from the log. None: it
    does not get it from there. `done`: Session.done.

    Records and subscriptions of QoS 0 count only if the subscription reads the log: otherwise what
    they bring is delivered at once, or not at all.
    """
    is_done = done is not None and (record.partition, record.offset) in done
    if len(matching) == 1:
        # A replay has no other case, as a rule: no list for each record.
        found = matching[0]
        if not _counts_for(found, record, is_done):
            return None
    else:
        counting: list[Subscription] = []
        for subscription in matching:
            if _counts_for(subscription, record, is_done):
                counting.append(subscription)
        if not counting:
            return None
        found = merge(counting)
    return found if found.qos > 0 or found.reads_log else None


def _counts_for(subscription: Subscription, record: Record, is_done: bool) -> bool:
    """Whether a record that is read from the log counts for one matching subscription."""
    start = subscription.start
    if start is not None and record.offset < start[record.partition]:
        return False
    if record.flags & FLAG_QOS_MASK == 0 and not subscription.reads_log:
        return False
    replay = subscription.replay
    if replay is None:
        return not is_done
    if is_done:
        again = replay.again
        if again is None or (record.partition, record.offset) not in again:
            return False
    return not replay.floors or record.offset >= replay.floors.get(record.topic, 0)


def subscription_at(
    matching: list[Subscription], partition: int, offset: int
) -> Subscription | None:
    """The subscription that applies to a record read from the log. None: at that offset the session
    was no longer, or not yet, subscribed with QoS > 0."""
    counting: list[Subscription] = []
    for subscription in matching:
        start = subscription.start
        if start is None or offset >= start[partition]:
            counting.append(subscription)
    return merge(counting) if counting else None
