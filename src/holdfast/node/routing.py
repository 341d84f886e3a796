"""Topic -> receivers, remembered until a subscription changes."""

from holdfast.log.partition import partition_of
from holdfast.node.rights import is_reserved, may_read
from holdfast.node.state import Group, NodeState, Route
from holdfast.session.session import Session, Subscription
from holdfast.topics.names import decode_topic, matches


def find_route(state: NodeState, raw: bytes) -> Route:
    """The route of a topic name. Raises InvalidTopic for bytes that are no topic name."""
    route = state.routes.get(raw)
    if route is None:
        topic = decode_topic(raw)
        route = Route(topic, raw, partition_of(raw, state.config.partitions))
        route.reserved = is_reserved(topic)
        for filter in state.config.qos0_logged:
            if matches(filter, topic):
                route.logged = True
        if len(state.routes) >= state.config.routes_max:
            state.routes.clear()
        state.routes[raw] = route
    if route.version != state.route_version:
        _resolve(state, route)
    return route


def _resolve(state: NodeState, route: Route) -> None:
    targets: list[Subscription] = []
    groups: list[Group] = []
    merged: dict[Session, int] = {}
    denied: set[Session] = set()
    raw = route.raw
    for value in state.subscriptions.match(route.topic):
        if isinstance(value, Group):
            groups.append(value)
            continue
        assert isinstance(value, Subscription)
        session = value.session
        if not may_read(session, raw):
            denied.add(session)
            continue
        index = merged.get(session, -1)
        if index < 0:
            merged[session] = len(targets)
            targets.append(value)
        else:
            targets[index] = _merge(targets[index], value)
    route.targets = targets
    route.groups = groups
    route.denied = len(denied)
    route.version = state.route_version


def _merge(first: Subscription, second: Subscription) -> Subscription:
    """Overlapping subscriptions of one session: one copy, at the highest QoS, with every
    subscription id. [MQTT-3.3.4-2] [MQTT-3.3.4-3] [MQTT-3.3.4-4]"""
    both = Subscription(
        first.session,
        first.filter,
        max(first.qos, second.qos),
        first.no_local and second.no_local,
        first.retain_as_published or second.retain_as_published,
        0,
        0,
    )
    both.subscription_ids = first.subscription_ids + second.subscription_ids
    return both


def subscription_for(
    session: Session, topic: str, partition: int, offset: int
) -> Subscription | None:
    """What the session's own (not shared) subscriptions say about a record read from the log;
    None: no longer, or not yet at that offset, subscribed with QoS > 0."""
    found: Subscription | None = None
    for subscription in session.subscriptions.values():
        if subscription.group is not None or not matches(subscription.filter, topic):
            continue
        start = subscription.start
        if start is not None and offset < start[partition]:
            continue
        found = subscription if found is None else _merge(found, subscription)
    return found
