"""Sends a session's deliveries that wait for the window or the socket.

Whatever waits for a client is checked against its rights again when it is sent: the rights may have
changed meanwhile.
"""

from holdfast.node.delivery.live_lane import is_backed_up, pump_lane, send_waiting
from holdfast.node.delivery.replay_start import END_TOPIC
from holdfast.node.delivery.transmission import can_send, redeliver, send_inflight, send_log_qos0
from holdfast.node.node_state import NodeState
from holdfast.node.rights import may_read
from holdfast.node.session.connection import OPEN
from holdfast.node.session.cursor import Redelivery
from holdfast.node.session.message import NO_EXPIRY, Message
from holdfast.node.session.session import Session
from holdfast.node.state.session_records import (
    SubscribeRecord,
    subscription_row,
)
from holdfast.node.state.state_records import append_change


def pump(state: NodeState, session: Session) -> None:
    """Sends from the outbox while window and socket allow. Called when either has opened."""
    lane = session.lane
    if lane is not None and not pump_lane(state, session, lane):
        return
    outbox = session.outbox
    while outbox and can_send(state, session):
        if lane is not None and is_backed_up(session):
            return
        if session.waiting_qos0 is not None and not send_waiting(state, session):
            return
        delivery = session.pop()
        message = delivery.message
        if isinstance(delivery, Redelivery):
            redeliver(state, session, message)
        elif not may_read(session, message.topic):
            state.stats.reads_denied += 1
        elif message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
        elif delivery.qos == 0:
            send_log_qos0(state, session, message, delivery.retain, delivery.additions)
        else:
            qos, retain = delivery.qos, delivery.retain
            send_inflight(state, session, message, qos, retain, delivery.additions, False, None)
    if session.waiting_qos0 is not None and not send_waiting(state, session):
        return
    if session.has_drains:
        end_drains(state, session)
    if session.has_starts and not session.outbox and session.tailing and not session.reading:
        _forget_starts(state, session)


def end_drains(state: NodeState, session: Session) -> None:
    """Lets the subscriptions that replaced others be as the client wants them, once nothing waits
    from before.

    A durable session's change is logged, or the session would get what is published while it is
    away. Not while a SUBSCRIBE or UNSUBSCRIBE waits for the log: behind an UNSUBSCRIBE the record
    would bring the subscription back.
    """
    if session.outbox or not session.tailing or session.reading or not session.has_drains:
        return
    if session.subscribes_awaited:
        return
    session.has_drains = False
    state.interests.pop(session, None)
    record = SubscribeRecord(session.client_id, [], state.delivered)
    for subscription in session.subscriptions.values():
        if subscription.drains:
            subscription.drains = subscription.reads_log = False
            state.change_routes(subscription.filter)
            record.subscriptions.append(subscription_row(subscription))
    if session.is_durable() and record.subscriptions:
        append_change(state, session.key, record, session.epoch)


def _forget_starts(state: NodeState, session: Session) -> None:
    """Forgets where subscriptions began, once all earlier records are sent. Not before: a session
    that falls behind begins again with its oldest unsent record, which may be older."""
    session.has_starts = False
    session.lane = None
    for entry in session.inflight.values():
        entry.is_ahead = False
    if session.expiry_s == 0:
        session.done = None
    state.interests.pop(session, None)
    for subscription in session.subscriptions.values():
        additions = subscription.additions
        if subscription.replay is not None and additions is not None and additions.tells_end:
            _tell_end(state, session, subscription.filter)
        subscription.start = None
        subscription.replay = None


def _tell_end(state: NodeState, session: Session, filter: str) -> None:
    """Tells the client that it has everything from before this moment."""
    connection = session.connection
    if connection is None or connection.state != OPEN:
        return
    payload = filter.encode()
    message = Message(END_TOPIC, payload, 0, False, b"", NO_EXPIRY, state.wall_us, b"")
    frame = message.frame_qos0(connection.version, False)
    if 0 < len(frame) <= connection.packet_bytes_max:
        connection.send(frame, state.dirty)
