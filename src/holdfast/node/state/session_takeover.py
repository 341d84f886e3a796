"""Begins the live session of a connection from the recorded one."""

from operator import ge

from holdfast.node.delivery.subscriptions import add_subscription
from holdfast.node.node_state import NodeState
from holdfast.node.session.rare_fields import OwedRetained
from holdfast.node.session.session import Inflight, Replay, Session, Subscription, new_subscription
from holdfast.node.session.state import complete_inflight
from holdfast.node.state.session_records import subscription_row
from holdfast.node.state.snapshot_entries import first_starts


def live_session(state: NodeState, recorded: Session) -> Session:
    """The session of this node's replicated state as a live one, ready to be resumed here. The two
    share no object that either changes: only records change the recorded one."""
    rare = recorded.rare
    session = Session(recorded.client_id)
    state.sessions[session.client_id] = session
    session.epoch = recorded.epoch
    session.life = recorded.life
    session.recorded = True
    session.tailing = False
    session.expiry_s = recorded.expiry_s
    if rare.disconnected_us:
        session.own_rare().disconnected_us = rare.disconnected_us
    session.username = recorded.username
    session.is_owned = recorded.is_owned
    session.will = recorded.will
    session.owner = recorded.owner
    for each in recorded.subscriptions.values():
        _subscribe(state, session, each, is_replayed=not rare.replays_over)
    for filter, owed in (rare.owed or {}).items():
        known = OwedRetained(owed.after, owed.seam)
        known.is_logged = True
        known.is_seam_logged = owed.seam is not None
        session.owe(filter, known)
    if rare.owed_inflight:
        session.own_rare().owed_inflight = set(rare.owed_inflight)
    for packet_id, entry in recorded.inflight.items():
        session.add_inflight(packet_id, _same(entry))
    if recorded.done:
        session.add_done(sorted(recorded.done))
    if recorded.positions is None:
        # The first record must name all positions, because the replicated state has none.
        session.positions = first_starts(state, session)
    else:
        session.positions = list(recorded.positions)
        session.logged_positions = list(recorded.positions)
    if session.has_starts:
        _forget_passed_starts(session, session.positions)
    complete_inflight(session)
    for packet_id in session.inflight:
        session.next_packet_id = packet_id % 65535 + 1
    if rare.lacks_sent:
        session.own_rare().maybe_sent = list(state.delivered)
    return session


def _subscribe(
    state: NodeState, session: Session, recorded: Subscription, *, is_replayed: bool
) -> None:
    subscription = new_subscription(session, *subscription_row(recorded))
    start, replay = recorded.start, recorded.replay
    subscription.start = None if start is None else list(start)
    if is_replayed and start is not None and replay is not None:
        again = set(replay.again or ()) or None
        subscription.replay = Replay(list(replay.seam), dict(replay.floors), again)
        # Records of older versions do not say it.
        subscription.reads_log = True
    add_subscription(state, subscription)


def _same(entry: Inflight) -> Inflight:
    """The entry without what only a connection has."""
    known = Inflight(entry.partition, entry.offset, entry.qos, entry.is_retained)
    known.group_tag = entry.group_tag
    known.state = entry.state
    known.logged = True
    return known


def _forget_passed_starts(session: Session, positions: list[int]) -> None:
    """Forgets the starts that the session has passed, as it does when it catches up."""
    session.has_starts = False
    for subscription in session.subscriptions.values():
        start = subscription.start
        if start is not None and subscription.replay is None and all(map(ge, positions, start)):
            subscription.start = None
        session.has_starts = session.has_starts or subscription.start is not None
