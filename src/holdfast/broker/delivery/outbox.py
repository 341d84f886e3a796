"""The outbox of a session: deliveries that wait for the window or the socket."""

from holdfast.broker.delivery.delivery import can_send, send_inflight, special_frame
from holdfast.broker.session.cursor import Delivery
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState


def pump(state: NodeState, session: Session) -> None:
    """Send from the outbox while window and socket allow. Called when either has opened."""
    outbox = session.outbox
    while outbox and can_send(state, session):
        delivery = session.pop()
        message = delivery.message
        if message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
        elif delivery.qos == 0:
            _send_past_qos0(state, session, delivery)
        else:
            send_inflight(
                state,
                session,
                message,
                delivery.qos,
                delivery.retain,
                delivery.subscription_ids,
                False,
                None,
            )

    if session.has_starts and not session.outbox and session.tailing and not session.reading:
        _forget_starts(state, session)


def _forget_starts(state: NodeState, session: Session) -> None:
    """Forget where subscriptions began, once all earlier records are sent. Not before: a session
    that falls behind begins again with its oldest unsent record, which may be older."""
    session.has_starts = False
    state.interests.pop(session, None)
    for subscription in session.subscriptions.values():
        subscription.start = None
        subscription.replay = None


def _send_past_qos0(state: NodeState, session: Session, delivery: Delivery) -> None:
    """Send a message of a replay at QoS 0. The caller checked can_send(), so none is dropped for a
    full socket."""
    connection = session.connection
    assert connection is not None
    frame = special_frame(
        state,
        connection,
        delivery.message,
        0,
        delivery.retain,
        False,
        0,
        delivery.subscription_ids,
        True,
    )
    if not 0 < len(frame) <= connection.packet_bytes_max:
        state.stats.dropped_too_large += 1
        return
    state.stats.publish_sent += 1
    connection.send(frame, state.dirty)
