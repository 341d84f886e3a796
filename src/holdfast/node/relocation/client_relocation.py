"""Sends clients to other nodes at a pace.

All at once would be a storm of TLS handshakes and password checks at the other nodes. The clients
that lose least leave first: those with a session that outlives the connection, and among them those
without unacknowledged messages. Each names the other nodes in another order, so that clients that
follow the reference are spread over all of them.

A drain ends with no client left. A balance leaves `keep` clients, and sends no client away twice in
AGAIN_S. A client that knows one address only would otherwise be disconnected again and again.
"""

from collections.abc import Callable
from typing import Final

from holdfast.addresses import server_reference
from holdfast.node.connections.close import CLOSE_STEPS, close_connection
from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import OPEN
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RELOCATION
from holdfast.node.state.state_records import log_progress
from holdfast.node.sweep import Sweep
from holdfast.protocol.mqtt import reasons

STEP_S: Final = 0.1
"""The seconds between two groups of clients."""
BURST_S: Final = 0.5
"""A group has at most the clients of this time, also after a pause of the event loop."""
LATE_S: Final = 1.0
"""The seconds after which a drain looks for clients whose CONNECT it was late for."""
AGAIN_S: Final = 3600.0
SENT_MAX: Final = 65_536
"""The most clients that are remembered as sent away."""


HARM_MAX: Final = 5
"""The greatest harm."""


def harm(session: Session) -> int:
    """The order in which clients leave: the loss of each, least first."""
    connection = session.connection
    follows_reference = connection is not None and connection.version >= 5
    if session.expiry_s == 0:
        # Its subscriptions end, and it misses what is published until it has subscribed again.
        return 4 + (not follows_reference)
    return 2 * bool(session.inflight) + (not follows_reference)


class ClientRelocation:
    """Sends clients of this node away, at most `per_s` a second."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.per_s = 0.0
        self.is_balance = False
        self._keep = 0
        self._text = ""
        self._nodes: list[str] = []
        # The clients of this run, the next one at the end.
        self._queue: list[Session] = []
        self._sent: dict[str, float] = {}
        self._turn = 0
        self._allowance = 0.0
        self._stepped_at = 0.0
        self._timer: object | None = None
        self._looks: Sweep[Session] = Sweep(state)
        self._leavers: Sweep[Session] = Sweep(state)

    @property
    def left(self) -> int:
        """The clients that are still to be sent away."""
        if self._timer is None:
            return 0
        surplus = max(0, self._state.client_sessions() - self._keep)
        return min(surplus, len(self._queue)) if self.is_balance else surplus

    def send_all(self, others: str, text: str) -> None:
        """Disconnects all clients, in slices without a pause. `others`: the addresses of other
        nodes, see `holdfast.addresses`, or ""."""
        self.stop()
        state = self._state
        reason = reasons.USE_ANOTHER_SERVER if others else reasons.SERVER_SHUTTING_DOWN

        def leave(session: Session) -> int:
            connection = session.connection
            if connection is None:
                return 1
            servers = server_reference(others, connection.listener.kind)
            close_connection(state, connection, reason, text, servers)
            return CLOSE_STEPS

        sessions = state.list_sessions()
        self._leavers.begin(sessions, leave, lambda: log_progress(state))

    def finish(self) -> None:
        """Disconnects the rest of them now, because the node ends."""
        while self._leavers.has_more:
            self._leavers.step(self._state, self._state.steps_per_turn)

    def drain(self, others: str, text: str, per_s: float) -> None:
        """Sends all clients to other nodes, see `holdfast.addresses`. A repeated call only changes
        the nodes and the pace."""
        is_new = self._timer is None or self.is_balance
        self._nodes, self._text, self.per_s = others.split(","), text, per_s
        self._keep = 0
        if is_new:
            self.is_balance = False
            self._begin()

    def balance(self, others: str, text: str, per_s: float, keep: int) -> None:
        """Sends clients to other nodes until `keep` are left."""
        self._nodes, self._text, self.per_s = others.split(","), text, per_s
        self._keep = keep
        self.is_balance = True
        self._forget(self._state.now)
        self._begin()

    def stop(self) -> None:
        """Sends no more clients away."""
        self._state.cancel(self._timer)
        self._timer = None
        self._queue = []

    def step(self) -> None:
        """Sends the clients away that are due. Called by the timer."""
        state = self._state
        now = state.now
        self._timer = None
        gained = self.per_s * (now - self._stepped_at)
        self._allowance = min(self._allowance + gained, max(1.0, self.per_s * BURST_S))
        self._stepped_at = now
        # Each disconnect may append records.
        while self._allowance >= 1 and self._queue and not state.is_congested():
            if state.client_sessions() <= self._keep:
                self._queue = []
                break
            session = self._queue.pop()
            if self._send_away(session):
                self._allowance -= 1
        if self._queue:
            self._timer = state.arm(now + STEP_S, RELOCATION, self)
        elif not self.is_balance:
            self._look(self._go_on)

    def _begin(self) -> None:
        self._state.cancel(self._timer)
        self._allowance = max(1.0, self.per_s * STEP_S)
        self._stepped_at = self._state.now
        self._look(self.step)

    def _go_on(self) -> None:
        wait_s = STEP_S if self._queue else LATE_S
        self._timer = self._state.arm(self._state.now + wait_s, RELOCATION, self)

    def _look(self, done: Callable[[], None]) -> None:
        """Looks for the clients to send away, in slices. A client that connects meanwhile is found
        by the next look. Until the end `_timer` is one that is not due."""
        self._queue = []
        timer = self._timer = self._state.arm(self._state.now + AGAIN_S, RELOCATION, self)
        found: list[list[Session]] = [[] for _ in range(HARM_MAX + 1)]

        def visit(session: Session) -> int:
            connection = session.connection
            if (
                connection is not None
                and connection.state == OPEN
                and not session.is_internal
                and not (self.is_balance and session.client_id in self._sent)
            ):
                found[harm(session)].append(session)
            return 1

        def finish() -> None:
            if self._timer is timer:
                for sessions in reversed(found):
                    self._queue += sessions
                self._state.cancel(timer)
                done()

        self._looks.begin(self._state.list_sessions(), visit, finish)

    def _send_away(self, session: Session) -> bool:
        connection = session.connection
        if connection is None or connection.state != OPEN:
            return False
        if self.is_balance:
            self._sent[session.client_id] = self._state.now
        self._turn += 1
        start = self._turn % len(self._nodes)
        others = ",".join(self._nodes[start:] + self._nodes[:start])
        servers = server_reference(others, connection.listener.kind)
        reason = reasons.USE_ANOTHER_SERVER
        close_connection(self._state, connection, reason, self._text, servers)
        return True

    def _forget(self, now: float) -> None:
        """Forgets the clients whose time is over, and the oldest beyond the bound."""
        sent = self._sent
        first = len(sent) - SENT_MAX
        self._sent = {
            client: at
            for number, (client, at) in enumerate(sent.items())
            if at + AGAIN_S > now and number >= first
        }
