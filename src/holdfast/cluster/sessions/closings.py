"""The closing of sessions by the coordinator, in place of an owner that is down or lacks them.

A record of the owner comes first. Counter-example: a client sends DISCONNECT with a longer expiry,
and its node dies before the commit. With the close that follows, the session would end after the
shorter one.
"""

from holdfast.broker.connections.close import log_close
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState
from holdfast.cluster.context import ClusterContext
from holdfast.cluster.sessions.decisions import Decisions
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.storage.partition import partition_of


class Closings:
    """The sessions that this coordinator closes. A will follows once the record is applied."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        replicated: ReplicatedState,
        decisions: Decisions,
    ) -> None:
        self._state = state
        self._context = context
        self._replicated = replicated
        self._decisions = decisions
        # Client id -> epoch of the sessions to close once their records are applied.
        self._waiting: dict[str, int] = {}

    def _home(self, client_id: str) -> int:
        return partition_of(client_id.encode(), self._state.config.partitions)

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
        if session is None or not session.owner or not self._decides_for(client_id):
            return
        if session.epoch == epoch or self._context.is_gone(session.owner):
            self.close(session)

    def _decides_for(self, client_id: str) -> bool:
        return self._decisions.decides(self._home(client_id))

    def node_gone(self, node: str) -> None:
        """Closes the sessions of a node that is down by the metadata."""
        for session in list(self._replicated.open):
            if session.owner == node and self._decides_for(session.client_id):
                self.close(session)

    def start_deciding(self, partition: int) -> None:
        """Closes the sessions of nodes that went down while another node decided."""
        for session in list(self._replicated.open):
            if self._context.is_gone(session.owner) and self._home(session.client_id) == partition:
                self.close(session)

    def released(self, node: str, client_id: str, epoch: int) -> None:
        """Closes a session that its node has released without a record.

        The node writes none for a session that ends with its connection. It does not know that a
        record names it as owner: that of an earlier session had to be replaced.
        """
        session = self._replicated.state.sessions.get(client_id)
        if session is None or session.owner != node or session.epoch > epoch:
            return
        if not session.is_durable() and session.will is None and self._decides_for(client_id):
            self.close(session)

    def stop_leading(self, partition: int) -> None:
        for client_id in list(self._waiting):
            if self._home(client_id) == partition:
                del self._waiting[client_id]
