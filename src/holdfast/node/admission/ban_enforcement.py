"""Disconnects banned clients."""

from holdfast.node.admission.checks import find_ban
from holdfast.node.admission.throttle import count_sessions
from holdfast.node.connections.close import close_connection
from holdfast.node.node_state import NodeState, Work
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import reasons


def begin_admission(state: NodeState) -> None:
    """Counts the recovered sessions, and ends connections when a ban is added from now on."""
    count_sessions(state)
    state.bans.watch = BanSweep(state).start


def expel_if_banned(state: NodeState, connection: Connection) -> None:
    """Closes a client's connection if the client was banned after the check of its CONNECT."""
    if not len(state.bans) or connection.is_internal:
        return
    ban = find_ban(state, connection, connection.client_id, connection.username)
    if ban is not None:
        state.stats.refused_banned += 1
        # DISCONNECT has no reason for bans. [MQTT-3.14.2-1]
        text = ban.text(state.wall_us)
        close_connection(state, connection, reasons.ADMINISTRATIVE_ACTION, text)


class BanSweep(Work):
    """The job that closes the connections of banned clients. A step is one session.

    One pass is for all bans that were added before it. A ban that is added during a pass causes one
    more. Without that, a script that bans 1,000 clients would look at all sessions 1,000 times.
    """

    def __init__(self, state: NodeState) -> None:
        super().__init__()
        self.state = state
        self.sessions: list[Session] = []
        self.is_due = False

    def start(self) -> None:
        """Looks at all sessions, or once more."""
        self.is_due = True
        self.state.start_work(self)

    def step(self, state: NodeState, steps: int) -> int:
        if not self.sessions and self.is_due:
            self.is_due = False
            self.sessions = state.list_sessions()
        sessions = self.sessions
        done = 0
        while sessions and done < steps:
            done += 1
            connection = sessions.pop().connection
            if connection is not None:
                expel_if_banned(state, connection)
        self.has_more = len(sessions) > 0 or self.is_due
        return done
