"""Checks another node's disk and this one's, in the handshake of two nodes."""

from holdfast.node.attendance import RECOVERS
from holdfast.node.features import AGREED_PLACEMENT, AGREED_REPLICATION, FEEDS
from holdfast.node.metadata.operations import empty_disk_text
from holdfast.node.placement.planning import last_copies
from holdfast.node.replicate.disk_position import Known, find_loss
from holdfast.node.runtime.runtime import Runtime
from holdfast.security.peer_handshake import LAST_COPY, OLDER_COPY, OLDER_COPY_WAITS
from holdfast.security.peer_identity import PeerIdentity, Refusal, features_in


def older_text(node: str, used: str) -> str:
    """The reason why a node of an older version is refused. `used`: the feature that it lacks."""
    return f"the version of {node} does not know {used}, which this cluster uses: upgrade it"


def role_text(node: str, role: str, other: str) -> str:
    """The reason why a node of one role is refused as one of another role."""
    return (
        f"{node} is a {role} node of the cluster, not a {other} node: remove it, and join it again"
        " with an empty data directory"
    )


class PeerCheck:
    """The decision whether a node with its disk may be linked with this one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._cluster_node = runtime.cluster_node
        self.refused: dict[str, str] = {}
        """Nodes that came back without their disk and were refused, each with the reason."""
        relayed = runtime.links.relayed
        relayed.objection, relayed.own_disk = self.objection, self.own_disk

    def own_disk(self) -> str:
        """Describes this node's disk for the handshake. A damaged disk describes nothing: what
        damage has removed would look like an older copy."""
        if self._runtime.fitness.is_damaged or self._cluster_node.context.journal.damaged:
            return ""
        return self._cluster_node.positions.claim().text()

    def objection(self, peer: PeerIdentity, known: Known) -> Refusal | None:
        """Returns the reason why a node must not be linked. `known`: the positions of disks that
        this node knew when the connection began."""
        metadata = self._cluster_node.context.metadata
        info = metadata.nodes.get(peer.node_id) if metadata is not None else None
        if metadata is None:
            return None
        known_features = features_in(peer.features)
        for is_used, feature, name in (
            (metadata.replication is not None, AGREED_REPLICATION, "`cluster resize`"),
            (metadata.has_gateways, FEEDS, "gateways"),
            (metadata.placement is not None, AGREED_PLACEMENT, "zones"),
        ):
            if is_used and feature not in known_features:
                return Refusal("older", older_text(peer.node_id, name))
        if info is None:
            return None
        if info.role != peer.role:
            return Refusal("role", role_text(peer.node_id, info.role, peer.role))
        lost = ""
        if RECOVERS not in features_in(peer.features):
            generations = self._cluster_node.disk_memory.generations
            lost = find_loss(known, peer.node_id, peer.incarnation, peer.disk, generations)
        if lost or peer.stands_apart:
            self._runtime.clients.touch()
            self._cluster_node.attendance.lacks_disk(peer.node_id)
            may_begin_anew = self._cluster_node.older_copies.may_restart(
                peer.node_id, peer.process, peer.stands_apart
            )
            text = f"the disk of {peer.node_id} is an older copy"
            text += f": it lacks {lost}" * bool(lost)
            text += "; it waits until the others are a majority without it" * (not may_begin_anew)
            return Refusal(OLDER_COPY if may_begin_anew else OLDER_COPY_WAITS, text)
        if info.incarnation != peer.incarnation:
            partitions = last_copies(metadata, (peer.node_id,))
            if partitions:
                text = empty_disk_text(peer.node_id, partitions)
                self.refused[peer.node_id] = text
                self._cluster_node.attendance.lacks_disk(peer.node_id)
                return Refusal(LAST_COPY, text)
        self.refused.pop(peer.node_id, None)
        return None
