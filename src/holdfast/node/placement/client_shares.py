"""Computes each node's even share of clients, and who sends clients away.

A plan is made once, for all nodes, from one set of counts. Nodes that decided on their own would
count the clients that are between two nodes as gone. Counter-example: of 28, 27 and 0 clients the
first node sends 9 away. While they are on their way, the second sees 46 clients, takes 15 for its
share instead of 18, and sends 12.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from holdfast.node.metadata.model import ClusterMetadata, NodePhase

TOLERANCE: Final = 0.1
"""The surplus, as a part of the share, up to which nothing is done without a command."""
STEADY_S: Final = 30.0
"""The seconds for which the clients must be steady before a balance without a command."""


class ClientShare(Struct, frozen=True):
    """The clients of one node, now and after a balance."""

    node: str
    clients: int
    share: int

    @property
    def surplus(self) -> int:
        """The clients that the node sends away."""
        return max(0, self.clients - self.share)


def even_shares(counts: Mapping[str, int]) -> list[ClientShare]:
    """The share of each node. Those with most clients have the remainder, so fewest are moved."""
    if not counts:
        return []
    share, remainder = divmod(sum(counts.values()), len(counts))
    ranked = sorted(counts, key=lambda node: (-counts[node], node))
    shares = {node: share + (rank < remainder) for rank, node in enumerate(ranked)}
    return [ClientShare(node, counts[node], shares[node]) for node in sorted(counts)]


def obstacle(metadata: ClusterMetadata) -> str:
    """The reason why no client may be sent away for balance, or "". A node that comes back, or
    that is emptied, would change every share."""
    for node, info in sorted(metadata.nodes.items()):
        if info.has_clients and info.state != NodePhase.UP:
            return f"{node} is {info.state}"
    return ""


class AutomaticBalance:
    """Decides when a balance begins without a command: the surplus of some node is above TOLERANCE,
    and for STEADY_S no node was down and the clients were about as many. After a failure that is
    the time in which its clients connect again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._total = 0

    def is_due(self, counts: Mapping[str, int] | None, now: float) -> bool:
        """Whether to begin now. `counts` None: some node is down, draining, or did not reply."""
        total = 0 if counts is None else sum(counts.values())
        if counts is None or abs(total - self._total) > TOLERANCE * self._total:
            self._since = None
        if counts is None:
            return False
        if self._since is None:
            self._since, self._total = now, total
        if now < self._since + STEADY_S:
            return False
        if not any(each.surplus > TOLERANCE * each.share for each in even_shares(counts)):
            return False
        # The next one begins after the clients of this one have settled.
        self._since = None
        return True
