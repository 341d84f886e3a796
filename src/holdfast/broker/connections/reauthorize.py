"""Closing the connections of clients that may not connect any more."""

from collections.abc import Callable

from holdfast.broker.connections.close import close_connection, refuse
from holdfast.broker.session.connection import EXCHANGING, Connection
from holdfast.broker.state import NodeState
from holdfast.protocol.mqtt import reasons


def close_unauthorized(state: NodeState, knows: Callable[[str], bool]) -> int:
    """Close the connections whose client could not connect now, and return their number.

    `knows`: whether a user name has a password or other credentials. An authenticated client stays
    while its user exists, also if its password is another one now. Connections that have sent no
    CONNECT are checked later by the present files.
    """
    count = 0
    for session in list(state.sessions.values()):
        connection = session.connection
        if connection is not None and not _may_stay(state, connection, knows):
            close_connection(state, connection, reasons.NOT_AUTHORIZED, _TEXT)
            count += 1
    for connection in state.pending_connects.checking():
        if connection.state == EXCHANGING:
            # It began with credentials that may not be in force any more.
            refuse(state, connection, reasons.SERVER_BUSY, "the users have changed: connect again")
        elif connection.username is not None and not _may_stay(state, connection, knows):
            # In a cluster the session of an authenticated client comes from another node.
            refuse(state, connection, reasons.NOT_AUTHORIZED, _TEXT)
        else:
            continue
        count += 1
    return count


_TEXT = "the user may not connect any more"


def _may_stay(state: NodeState, connection: Connection, knows: Callable[[str], bool]) -> bool:
    if connection.is_internal:
        return True
    username = connection.username
    if username is None:
        return state.config.allow_anonymous
    return username == connection.certificate_name or knows(username)
