"""Limits the new filters of one SUBSCRIBE: by its session, and by its owner."""

from holdfast.node.node_state import NodeState
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import filter_bytes, filter_memory, filter_owner


class FilterRoom:
    """The filters that a SUBSCRIBE may add, within `limits.subscriptions_per_session`,
    `limits.filter_bytes_per_session` and the share of `limits.filter_bytes`.

    A SUBSCRIBE that is on its way to the log does not count, so the table may exceed its limit by
    `limits.pending_bytes_max`.
    """

    def __init__(self, state: NodeState, session: Session) -> None:
        self._state = state
        self._session = session
        self._count = len(session.subscriptions)
        self._filter_bytes = session.filter_bytes
        self._memory_bytes = 0
        # Why a filter was refused; "": none was.
        self.error = ""

    def has(self, filter: str) -> bool:
        """Whether there is room for one more filter, which is counted then."""
        session = self._session
        config = self._state.config
        size_bytes = self._filter_bytes + filter_bytes(filter)
        if session.is_internal:
            return True
        if (
            self._count >= config.subscriptions_per_session
            or size_bytes > config.filter_bytes_per_session
        ):
            self.error = "this session has as many filters as it may have"
            return False
        memory_bytes = self._memory_bytes + filter_memory(filter)
        if not self._has_share(memory_bytes):
            self.error = "this user or address has as many filters as there is room for all others"
            return False
        self._count += 1
        self._filter_bytes = size_bytes
        self._memory_bytes = memory_bytes
        return True

    def _has_share(self, size_bytes: int) -> bool:
        state = self._state
        session = self._session
        most = state.config.filter_bytes_max
        if not state.filters.has_room(filter_owner(session), size_bytes, most):
            return False
        if not session.is_durable():
            return True
        # Every node of a cluster has the durable sessions of all.
        return state.cluster.recorded().filters.has_room(session.username or "", size_bytes, most)
