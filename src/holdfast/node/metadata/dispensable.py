"""Decides when a node may lose its disk, because the others have everything.

Its votes and entries are lost with the disk, so the others must be a majority without it, whatever
the leader has decided meanwhile. It is not enough to count the voters that the node knows. Smallest
counter-example: of the voters A, B and C, C has a new disk, so its new peer D is a learner. D finds
damage and counts two of three voters without itself. In the same moment the leader A makes D a
voter, to replace C. Of A, B, C and D three must agree now, and two remain for ever.

So the others must have agreed that the node is not up: the leader makes no such node a voter
(`metadata.voters`). A membership that was appended before this was agreed may still be on its way
here. So a metadata read that begins afterwards must pass too (`ClusterNode.is_dispensable`).

Of two damaged nodes neither may count on the other. The changes of their states are ordered, so at
least one of the two sees the other one down.
"""

from holdfast.node.failure.health import Health
from holdfast.node.metadata.model import ClusterMetadata, NodePhase
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.raft.log import Membership


def is_dispensable(
    own: str, metadata: ClusterMetadata, membership: Membership, health: Health
) -> bool:
    """True if the node `own` is in sync nowhere, agreed not to be up, and the voters that it hears
    are a majority without it and without damaged nodes."""
    info = metadata.nodes.get(own)
    if (
        info is None
        or info.state == NodePhase.UP
        or info.incarnation != health.present[own].incarnation
        or any(own in partition.in_sync for partition in metadata.partitions)
    ):
        return False
    others = {
        peer_id(node, health.present[node].incarnation)
        for node, other in metadata.nodes.items()
        if node != own
        and node in health.present
        and node not in health.damaged
        and other.state != NodePhase.DOWN
    }
    return len(others.intersection(membership.voters)) >= membership.majority
