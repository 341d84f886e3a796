"""Closes sessions as their coordinator, in place of an owner that is down or lacks them.

A record of the owner comes first. Counter-example: a client sends DISCONNECT with a longer expiry,
and its node dies before the commit. With the close that follows, the session would end after the
shorter one.

A node that goes down may leave hundreds of thousands of sessions, so they are closed in slices. A
slice closes a session only if it is still open for that node, the node is still down and this node
still decides for the home partition. So a session that was opened or closed between two slices is
not closed by mistake, and no slice follows the loss of the leadership. The next leader begins
again, from the metadata and the sessions that are still open.
"""

from typing import Final

from holdfast.node.connections.close import log_close
from holdfast.node.context import ClusterContext
from holdfast.node.node_state import NodeState, Work
from holdfast.node.ownership.decisions import Decisions
from holdfast.node.session.session import Session
from holdfast.node.state.replicated import ReplicatedState

CLOSE_STEPS: Final = 2
"""The steps of one closed session: it costs an appended record."""


class Closings(Work):
    """The sessions that this coordinator closes. A will follows once the record is applied."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        decisions: Decisions,
    ) -> None:
        super().__init__()
        self._state = state
        self._context = context
        self._replicated = replicated
        self._decisions = decisions
        # Client id -> epoch of the sessions to close once their records are applied.
        self._waiting: dict[str, int] = {}
        # The (node, home partition) pairs with sessions to close, in order, and the rest of the
        # first of them.
        self._due: dict[tuple[str, int], None] = {}
        self._current: tuple[str, int] = ("", -1)
        self._rest: list[Session] = []

    def close(self, session: Session) -> None:
        """Closes a session, once its records are applied."""
        if self._decisions.is_changing(session.client_id):
            self._waiting[session.client_id] = session.epoch
        else:
            log_close(self._state, session, maybe_sent=True)

    def applied(self, client_id: str) -> None:
        """Closes a session that has waited for its records, or whose owner went down between its
        request and the commit of the `open` record."""
        epoch = self._waiting.pop(client_id, -1)
        session = self._replicated.state.sessions.get(client_id)
        if session is None or not session.owner or not self._decisions.decides_for(client_id):
            return
        if session.epoch == epoch or self._context.is_gone(session.owner):
            self.close(session)

    def node_gone(self, node: str) -> None:
        """Begins to close the sessions of a node that is down by the metadata."""
        for home in self._replicated.open_sessions.homes(node):
            if self._decisions.decides(home):
                self._begin(node, home)

    def start_deciding(self, partition: int) -> None:
        """Begins to close the sessions of nodes that went down while another node decided."""
        for node in self._replicated.open_sessions.owners():
            if self._context.is_gone(node):
                self._begin(node, partition)

    def _begin(self, node: str, home: int) -> None:
        self._due[node, home] = None
        self.has_more = True
        self._state.start_work(self)

    def step(self, state: NodeState, steps: int) -> int:
        """Closes some sessions of nodes that are down."""
        open_sessions = self._replicated.open_sessions
        node, home = self._current
        if self._rest and not self._may_close(node, home):
            self._rest = []
        done = 0
        while done < steps and (self._rest or self._due):
            if self._rest:
                session = self._rest.pop()
                if session.owner == node and open_sessions.has(session):
                    self.close(session)
                    done += CLOSE_STEPS
                else:
                    done += 1
                continue
            done += 1
            node, home = self._current = next(iter(self._due))
            del self._due[node, home]
            if self._may_close(node, home):
                self._rest = open_sessions.of(node, home)
        self.has_more = bool(self._rest or self._due)
        return done

    def _may_close(self, node: str, home: int) -> bool:
        return self._context.is_gone(node) and self._decisions.decides(home)

    def released(self, node: str, client_id: str, epoch: int) -> None:
        """Closes a session that its node has released without a record.

        The node writes none for a session that ends with its connection. It does not know that a
        record names it as owner: that of an earlier session had to be replaced.
        """
        session = self._replicated.state.sessions.get(client_id)
        if session is None or session.owner != node or session.epoch > epoch:
            return
        is_recorded = session.is_durable() or session.will is not None
        if not is_recorded and self._decisions.decides_for(client_id):
            self.close(session)

    def stop_leading(self, partition: int) -> None:
        for client_id in list(self._waiting):
            if self._replicated.home(client_id) == partition:
                del self._waiting[client_id]
