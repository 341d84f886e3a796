"""Recorded sessions that their node lacks while a client waits for them there."""

from collections.abc import Callable
from typing import Final

from holdfast.node.node_state import NodeState
from holdfast.node.ownership.replies import HomeAnswers
from holdfast.node.state.replicated import ReplicatedState

ASK_OWNED_AGAIN_S: Final = 1.0
"""The interval in seconds between report requests to a node that lacks an open session for which a
client waits there."""


class UnconfirmedSessions:
    """The open sessions that the coordinator does not close yet, although their node lacks them.

    The node receives the report request again until it has the session or no client waits.
    """

    def __init__(
        self,
        state: NodeState,
        replicated: ReplicatedState,
        answers: HomeAnswers,
        home: Callable[[str], int],
    ) -> None:
        self._state = state
        self._replicated = replicated
        self._answers = answers
        self._home = home
        # Per client id: the node and the epoch.
        self._sessions: dict[str, tuple[str, int]] = {}
        # The time of the next report request to those nodes.
        self._ask_at = 0.0

    def add(self, client_id: str, node: str, epoch: int) -> None:
        if not self._sessions:
            self._ask_at = self._state.now + ASK_OWNED_AGAIN_S
        self._sessions[client_id] = (node, epoch)

    def drop(self, client_id: str) -> None:
        self._sessions.pop(client_id, None)

    def stop_leading(self, partition: int) -> None:
        for client_id in list(self._sessions):
            if self._home(client_id) == partition:
                del self._sessions[client_id]

    def handle_timers(self) -> None:
        """Requests the due reports."""
        if not self._sessions or self._ask_at > self._state.now:
            return
        self._ask_at = self._state.now + ASK_OWNED_AGAIN_S
        asked: dict[str, set[int]] = {}
        for client_id, (node, epoch) in list(self._sessions.items()):
            session = self._replicated.state.sessions.get(client_id)
            if session is None or session.owner != node or session.epoch != epoch:
                del self._sessions[client_id]
            else:
                asked.setdefault(node, set()).add(self._home(client_id))
        for node, partitions in asked.items():
            self._answers.ask_owned([node], sorted(partitions))

    def timer(self) -> float:
        """Returns the time of the next report request."""
        return self._ask_at if self._sessions else float("inf")
