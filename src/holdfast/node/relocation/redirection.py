"""Selects the clients that this node sends away: because it is unfit to serve them, is drained,
stops, or has more than its share.
"""

from collections.abc import Callable
from typing import Final

from holdfast.node.cluster_node import ClusterNode
from holdfast.node.placement.client_shares import obstacle
from holdfast.node.runtime.fitness import DRAINED, Fitness

LEAVE_CLIENTS_S: Final = 10.0
"""The most seconds over which the clients of a node that stops are sent to other nodes."""
BALANCED: Final = "another node has fewer clients"


class Redirection:
    """Decides where the clients of a cluster node are sent, and at which pace."""

    def __init__(
        self, cluster_node: ClusterNode, fitness: Fitness, touch: Callable[[], None]
    ) -> None:
        """`touch`: called before something is handed to the broker's core."""
        self._cluster_node = cluster_node
        self._fitness = fitness
        self._touch = touch
        self._has_handed_over = False
        # The nodes that clients are sent to, and why, as the broker's core has it.
        self._sent = "", ""
        self.drain_per_s = cluster_node.config.drain_clients_per_s
        """The clients a second that a drain sends to other nodes; 0: all at once."""

    def review(self) -> None:
        """Sends clients to other nodes while this node should not serve them."""
        fitness = self._fitness
        cluster_node = self._cluster_node
        if cluster_node.context.metadata is None or not fitness.is_ready:
            return
        reason = fitness.redirect_reason()
        # An unfit node serves its clients no more, so these leave at once.
        per_s = self.drain_per_s if reason in ("", DRAINED) else 0.0
        if self._has_handed_over and not reason and per_s:
            reason = "shutting down"
            per_s = max(per_s, cluster_node.state.client_sessions() / LEAVE_CLIENTS_S)
        servers = fitness.other_servers(self._has_handed_over) if reason else ""
        if (servers, reason) == self._sent:
            return
        if self._sent[1] == DRAINED and not reason:
            # The pace of an operator was for one drain.
            self.drain_per_s = cluster_node.config.drain_clients_per_s
        self._sent = servers, reason
        self._touch()
        cluster_node.node.redirect(servers, reason, per_s)

    def hand_over(self) -> None:
        """Begins to send clients away, because the node stops."""
        self._has_handed_over = True
        self.review()

    def set_drain_pace(self, per_s: float) -> None:
        """Sets the clients a second that a drain sends away, also one that is under way."""
        self.drain_per_s = per_s
        if self._sent[1] == DRAINED:
            self._sent = "", ""
            self.review()

    def balance(self, below: list[str], per_s: float, keep: int) -> bool:
        """Sends clients to the nodes `below`, until `keep` are left. False: some node is not up, or
        this one takes no clients."""
        self._touch()
        context = self._cluster_node.context
        metadata = context.metadata
        if metadata is None or obstacle(metadata) or self._cluster_node.state.redirect:
            return False
        relocation = self._cluster_node.node.relocation
        relocation.balance(context.servers(below), BALANCED, per_s, keep)
        return True

    def stop_balance(self) -> None:
        """Sends no more clients away for balance."""
        relocation = self._cluster_node.node.relocation
        if relocation.is_balance:
            relocation.stop()
