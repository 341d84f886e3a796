"""Carries out what operators change in sessions beside the clients' own packets."""

from collections.abc import Callable

from holdfast.node.connections.close import close_connection
from holdfast.node.node_state import CallbackPromise, NodeState
from holdfast.node.session.connection import CLOSED
from holdfast.node.session.session import Session
from holdfast.node.session.state import MOVED
from holdfast.node.state.state_records import append_cursor
from holdfast.protocol.mqtt import reasons


def disconnect_client(state: NodeState, session: Session, text: str) -> bool:
    """Closes the connection of a session as an administrative action, whose will is then published.
    False: there is none."""
    connection = session.connection
    if connection is None or connection.state == CLOSED:
        return False
    state.note(
        "info",
        "client_disconnected_by_operator",
        {"remote": connection.remote, "client": session.client_id, "reason": text},
    )
    close_connection(state, connection, reasons.ADMINISTRATIVE_ACTION, text)
    return True


def move_session(
    state: NodeState,
    session: Session,
    positions: list[int],
    epoch: int,
    done: Callable[[str], None],
) -> None:
    """Lets a durable session without a connection continue at other positions of the log.

    `session` is that of the replicated state, which changes when the record comes back committed.
    `epoch` is the one that the caller saw: a session that a client has opened meanwhile
    has a higher one, so its readers ignore the record. Messages that are inflight stay inflight,
    because the client may have received them.
    """
    places = list(enumerate(positions))
    append_cursor(state, session.key, places, MOVED, [], epoch, CallbackPromise(done))
