"""Shows the cluster to the broker's member of a federation."""

from collections.abc import Callable

from holdfast.node.features import MEMBER_TABLE
from holdfast.node.parts import Parts
from holdfast.node.state.member_values import member_home


class ClusterMember:
    """The cluster side of a federation's member, which one of the nodes runs."""

    def __init__(self, parts: Parts) -> None:
        self._context = parts.context
        self._home = member_home(parts.context.journal.partitions)
        self._decisions = parts.session_coordinator.decisions
        self._interest = parts.interest

    def node(self, now: float) -> str:
        """The node that runs the member: the leader of the member's home. This one does so only
        once it has applied what earlier leaders have appended, and as long as it reaches a
        majority. "": none."""
        context = self._context
        if context.leader(self._home) != context.node_id:
            return context.leader(self._home)
        is_ready = self._decisions.decides(self._home) and context.is_available(now)
        return context.node_id if is_ready else ""

    def has_other_nodes(self) -> bool:
        """Whether the cluster has other nodes, connected or not."""
        metadata = self._context.metadata
        return metadata is not None and len(metadata.nodes) > 1

    def others_with_table(self) -> list[str] | None:
        """The other nodes that are configured as members. None: that of one is not known."""
        context, metadata = self._context, self._context.metadata
        if metadata is None:
            return None
        nodes = sorted(metadata.nodes.items())
        others = [name for name, info in nodes if info.has_clients and name != context.node_id]
        if any(name not in context.features for name in others):
            return None
        return [name for name in others if context.understands(name, MEMBER_TABLE)]

    def watch_filters(self, watch: Callable[[str, bool], None] | None) -> list[str]:
        """The filters that other nodes have announced, once for each node. Each that begins (True)
        or ends is reported from now on."""
        return self._interest.watch_peers(watch)
