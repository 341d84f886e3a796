"""Closing the connections of clients that may not connect any more."""

from collections.abc import Callable
from typing import Final

from holdfast.node.admission.control import Proof
from holdfast.node.connections.close import close_connection, refuse
from holdfast.node.node_state import NodeState, Work
from holdfast.node.refusal import Rejection
from holdfast.node.rights import may_be_anonymous
from holdfast.node.session.connection import (
    AUTHENTICATING,
    EXCHANGING,
    OPEN,
    OPENING,
    Connection,
)
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import reasons

STEPS_PER_CLOSE: Final = 10
"""The steps that a closed connection counts for: it may publish a will and append records."""

_TEXT: Final = "the user may not connect any more"
USERS_CHANGED: Final = Rejection("the users have changed: connect again", reasons.SERVER_BUSY)


class Reauthorization(Work):
    """The job that closes the connections whose client could not connect now. A step is one client
    that stays.

    An authenticated client stays while its user exists, also if its password is another one now.
    The job covers the clients that had sent a CONNECT when it was made. Later ones are checked by
    the present files.
    """

    def __init__(
        self,
        state: NodeState,
        knows: Callable[[str, ListenerRules], bool],
        done: Callable[[int], None],
    ) -> None:
        """`knows`: whether a user name has a password or other credentials at a listener. `done` is
        called with the number of closed connections."""
        super().__init__()
        self.knows = knows
        self.done = done
        self.count = 0
        self.pending = state.pending_connects.checking()
        self.sessions = state.list_sessions()

    def step(self, state: NodeState, steps: int) -> int:
        spent = 0
        while spent < steps and (self.pending or self.sessions):
            spent += 1
            connection = self.pending.pop() if self.pending else self._next_connection()
            if connection is not None and self._close(state, connection):
                self.count += 1
                spent += STEPS_PER_CLOSE
        self.has_more = bool(self.pending or self.sessions)
        if not self.has_more:
            self.done(self.count)
        return spent

    def _next_connection(self) -> Connection | None:
        session: Session = self.sessions.pop()
        return session.connection

    def _close(self, state: NodeState, connection: Connection) -> bool:
        """Closes the connection if its client has to leave, and returns whether it does."""
        if connection.closing:
            return False
        if connection.state == EXCHANGING:
            # It began with credentials that may not be in force any more.
            refuse(state, connection, USERS_CHANGED)
        elif not _is_proved(connection) or _may_stay(state, connection, self.knows):
            # The result of a password check counts by the present file, so it needs no other one.
            return False
        elif connection.session is None:
            # The rights of an authenticated client may still be asked about. In a cluster its
            # session comes from another node.
            refuse(state, connection, Rejection(_TEXT, reasons.NOT_AUTHORIZED))
        else:
            close_connection(state, connection, reasons.NOT_AUTHORIZED, _TEXT)
        return True


class UserDeparture(Work):
    """The job that closes the connections of some users, because dynamic security has changed their
    password or client id, or disabled or deleted them. A step is one session, or one client whose
    CONNECT is not answered yet: it has proved a name, and its session may be at another node."""

    def __init__(
        self, state: NodeState, usernames: frozenset[str], done: Callable[[], None]
    ) -> None:
        super().__init__()
        self.usernames = usernames
        self.done = done
        self.pending = state.pending_connects.checking()
        self.sessions = state.list_sessions()

    def step(self, state: NodeState, steps: int) -> int:
        spent = 0
        while spent < steps and self.pending:
            spent += 1
            waiting = self.pending.pop()
            if (
                waiting.username in self.usernames
                and waiting.session is None
                and not waiting.closing
            ):
                refuse(state, waiting, Rejection(_CHANGED, reasons.NOT_AUTHORIZED))
                spent += STEPS_PER_CLOSE
        while spent < steps and self.sessions:
            spent += 1
            session: Session = self.sessions.pop()
            connection = session.connection
            if connection is not None and connection.username in self.usernames:
                close_connection(state, connection, reasons.ADMINISTRATIVE_ACTION, _CHANGED)
                spent += STEPS_PER_CLOSE
        self.has_more = bool(self.pending or self.sessions)
        if not self.has_more:
            self.done()
        return spent


_CHANGED: Final = "the user was changed: connect again"


def _is_proved(connection: Connection) -> bool:
    """Whether the client has passed the check of its credentials."""
    is_waiting = connection.state == AUTHENTICATING and connection.username is not None
    return is_waiting or connection.state in (OPEN, OPENING)


def _may_stay(
    state: NodeState, connection: Connection, knows: Callable[[str, ListenerRules], bool]
) -> bool:
    if connection.is_internal:
        return True
    proof = connection.proof
    if isinstance(proof, Proof) and proof.proves_name:
        # A source accepted it, and its proof ends on its own.
        return True
    username = connection.username
    if username is None:
        return may_be_anonymous(state, connection)
    is_certified = username == connection.certificate_name
    listener = connection.listener
    return knows(username, listener) or (is_certified and listener.certifies(username))
