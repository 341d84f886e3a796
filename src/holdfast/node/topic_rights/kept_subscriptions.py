"""Asks the service about a resumed session's subscriptions, before CONNACK.

The service is asked before the connection that has the session is closed: a client that is refused
takes nothing over. In a cluster the first question is about the subscriptions that are applied
here. The owner of the session keeps it, and names its subscriptions, while it has others
(`checksum_of`). Those of a session without a connection are asked about once this node owns it,
because nobody is disturbed then.
"""

from collections.abc import Iterable
from functools import partial
from hashlib import blake2b

from holdfast.node.connections.close import handle_connection_lost, refuse
from holdfast.node.effects import Proceed
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.refusal import Rejection
from holdfast.node.rights import give_asked_rules, may_open
from holdfast.node.session.connection import AUTHENTICATING, OPENING, Connection
from holdfast.node.session.session import Session
from holdfast.node.topic_rights.questions import (
    UNANSWERED,
    asked_rules,
    asks_about,
    asks_to_resume,
)
from holdfast.protocol.mqtt import reasons


def waits_before_takeover(
    state: NodeState, connection: Connection, session: Session, proceed: Proceed
) -> bool:
    """Whether a service must be asked about the subscriptions of the session that a CONNECT
    resumes. `proceed` continues the CONNECT, and calls this again."""
    give_asked_rules(connection)
    rules = asked_rules(connection)
    if rules is None or not may_open(state, session, connection):
        return False
    was_asked = rules.resuming is not None
    proceed = partial(_proceed_if_decided, AUTHENTICATING, proceed)
    # Another connection may have subscribed to more while the service was asked.
    is_asked = asks_to_resume(state, connection, session, proceed) or (
        was_asked and asks_to_resume(state, connection, session, proceed)
    )
    if is_asked:
        connection.state = AUTHENTICATING
    return is_asked


def checksum_of(filters: Iterable[str]) -> str:
    """A checksum of a set of filters, by which two nodes compare what a session has."""
    return blake2b("\n".join(sorted(filters)).encode(), digest_size=16).hexdigest()


def checksum_asked(connection: Connection, session: Session | None) -> str | None:
    """The checksum of the filters that a service has decided about before a takeover. None: no
    service decides. `session`: as far as it is known here."""
    give_asked_rules(connection)
    if asked_rules(connection) is None:
        return None
    return checksum_of(() if session is None else session.subscriptions)


def waits_for_more(
    state: NodeState, connection: Connection, filters: list[str], proceed: Proceed
) -> bool:
    """Whether a service must be asked about some of these filters, which the session has at its
    owner. `proceed` continues with the CONNECT, unless the service fails."""
    rest = partial(_proceed_with_rest, filters, proceed)
    return asks_about(state, connection, filters, partial(_proceed_if_decided, OPENING, rest))


def _proceed_with_rest(
    filters: list[str], proceed: Proceed, state: NodeState, connection: Connection
) -> None:
    if not waits_for_more(state, connection, filters, proceed):
        proceed(state, connection)


def _proceed_if_decided(
    expected: int, proceed: Proceed, state: object, connection: Connection
) -> None:
    """Proceeds with a connection that is still in the state `expected`, unless the service
    failed."""
    assert isinstance(state, NodeState)
    rules = asked_rules(connection)
    if connection.state != expected or rules is None:
        return
    if rules.unanswered:
        _refuse(state, connection)
    else:
        proceed(state, connection)


def _refuse(state: NodeState, connection: Connection) -> None:
    state.stats.authentications_shed += 1
    refuse(state, connection, Rejection(UNANSWERED, reasons.SERVER_UNAVAILABLE))


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
    _refuse(state, connection)
    handle_connection_lost(state, connection)
