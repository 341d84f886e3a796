"""The outbox of a session: deliveries that wait for the window or the socket.

Whatever waits for a client is checked against its rights again when it is sent: the rights may have
changed meanwhile.
"""

from holdfast.broker.delivery.live_lane import is_backed_up, pump_lane, send_waiting
from holdfast.broker.delivery.replay_start import END_TOPIC
from holdfast.broker.delivery.transmission import can_send, send_inflight, send_log_qos0
from holdfast.broker.rights import may_read
from holdfast.broker.session.connection import OPEN
from holdfast.broker.session.message import NO_EXPIRY, Message
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState


def pump(state: NodeState, session: Session) -> None:
    """Send from the outbox while window and socket allow. Called when either has opened."""
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
        if not may_read(session, message.topic):
            state.stats.reads_denied += 1
        elif message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
        elif delivery.qos == 0:
            send_log_qos0(state, session, message, delivery.retain, delivery.additions)
        else:
            send_inflight(
                state,
                session,
                message,
                delivery.qos,
                delivery.retain,
                delivery.additions,
                False,
                None,
            )
    if session.waiting_qos0 is not None and not send_waiting(state, session):
        return
    if session.has_starts and not session.outbox and session.tailing and not session.reading:
        _forget_starts(state, session)


def _forget_starts(state: NodeState, session: Session) -> None:
    """Forget where subscriptions began, once all earlier records are sent. Not before: a session
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
    """Tell the client that it has everything from before this moment."""
    connection = session.connection
    if connection is None or connection.state != OPEN:
        return
    payload = filter.encode()
    message = Message(END_TOPIC, payload, 0, False, b"", NO_EXPIRY, state.wall_us, b"")
    frame = message.frame_qos0(connection.version, False)
    if 0 < len(frame) <= connection.packet_bytes_max:
        connection.send(frame, state.dirty)
