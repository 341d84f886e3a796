"""The decisions about the subscriptions that a resumed session has, before CONNACK."""

from functools import partial

from holdfast.broker.connections.close import handle_connection_lost, refuse
from holdfast.broker.promise import Promise
from holdfast.broker.session.connection import OPENING, Connection
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState
from holdfast.broker.topic_rights.questions import (
    UNANSWERED,
    asked_rules,
    asks_to_resume,
)
from holdfast.protocol.mqtt import reasons


def waits_for_decisions(
    state: NodeState,
    connection: Connection,
    session: Session,
    promise: Promise,
    earlier_expiry_s: int,
) -> bool:
    """Whether a service must be asked about the session's subscriptions. The promise, that of
    CONNACK, is released after its answers. `earlier_expiry_s`: see `ConnackPromise`.

    Until then the session lasts as long as before. Counter-example: a CONNECT asks for an expiry of
    0, the service fails or the client does not wait for it, and the session ends with its messages.
    """
    expiry_s = session.expiry_s
    proceed = partial(_proceed, promise, session, expiry_s)
    is_asked = asks_to_resume(state, connection, session, proceed)
    if is_asked:
        session.expiry_s = max(expiry_s, earlier_expiry_s)
    return is_asked


def _proceed(
    promise: Promise, session: Session, expiry_s: int, state: object, connection: Connection
) -> None:
    assert isinstance(state, NodeState)
    rules = asked_rules(connection)
    if connection.state != OPENING or rules is None:
        return
    if not rules.unanswered:
        session.expiry_s = expiry_s
        promise.release(state)
        return
    # A client that is refused leaves no will behind.
    session.will = None
    connection.clean_disconnect = True
    state.stats.authentications_shed += 1
    refuse(state, connection, reasons.SERVER_UNAVAILABLE, UNANSWERED)
    handle_connection_lost(state, connection)
