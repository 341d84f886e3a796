"""Decides whether a cluster node is fit to serve clients, and acts on it."""

from typing import Final

from holdfast.node.cluster_node import ClusterNode
from holdfast.node.failure.disk_watch import DiskWatch
from holdfast.node.metadata.model import DATA, WITNESS, NodePhase

DRAINED: Final = "this node is being drained"
LEADERLESS_START_S: Final = 5.0
"""The longest time in seconds for which a node that starts waits for leaders, if it waits for
nothing else. Then it serves, as the nodes do that run already.

Counter-example with a longer wait: the only disk of one partition is lost. A node that is restarted
then has no listener for the clients of all other partitions, and after a restart of each node the
cluster serves nobody. Without a wait: all nodes start, and clients that connect before the first
leaders are chosen wait for them, or are refused.
"""


class Fitness:
    """The reasons for which this node does not serve, or sends its clients to other nodes."""

    def __init__(self, cluster_node: ClusterNode, disk: DiskWatch) -> None:
        self._cluster_node = cluster_node
        self._disk = disk
        self.is_ready = False
        """Whether the node once led each partition of its cluster or followed its leader, but for
        those without one."""
        self.is_damaged = False
        """Whether the log has lost or changed records. It never becomes False again."""
        self.is_undecided = False
        """Whether damage was found before the metadata said whether there are other replicas."""
        self.is_removed = False
        """Whether the other nodes have reported that this node was removed for good."""
        self.older_copy = ""
        """The report of another node that this disk has lost something that it had once."""
        self.may_begin_anew = False
        """Whether the other nodes form a majority without this node, so that it may start again."""
        # Since when this node waits for leaders and for nothing else; None: it does not.
        self._leaderless_since: float | None = None

    def unready_reason(self, now: float) -> str:
        """The reason why this node may not begin to serve, or "" if it may."""
        leaderless = self._leaderless_reason()
        reason = self._other_reason(now)
        if reason or not leaderless:
            self._leaderless_since = None
            return reason
        if self._leaderless_since is None:
            self._leaderless_since = now
        return leaderless if now < self._leaderless_since + LEADERLESS_START_S else ""

    def _leaderless_reason(self) -> str:
        metadata = self._cluster_node.context.metadata
        for partition, info in enumerate(() if metadata is None else metadata.partitions):
            if not info.leader:
                lacks = partition in self._cluster_node.positions.own_incomplete
                waits = ": its replicas may lack records, and wait for all that are in sync" * lacks
                return f"partition {partition} has no leader{waits}"
        return ""

    def _other_reason(self, now: float) -> str:
        cluster_node = self._cluster_node
        context = cluster_node.context
        metadata = context.metadata
        if metadata is None or context.node_id not in metadata.nodes:
            return "it belongs to no cluster"
        if cluster_node.config.role == WITNESS:
            return ""
        if cluster_node.awaits_generation:
            return "its log was restored, and the nodes have not agreed on the generation yet"
        for partition, info in enumerate(metadata.partitions):
            if context.leads(partition) or not info.leader:
                continue
            if not context.is_stored(partition):
                if not cluster_node.feeds.receiver.is_live(partition):
                    return f"{info.leader} does not feed it partition {partition}"
            elif cluster_node.replication.followed_epoch(partition) != info.epoch:
                return f"it does not follow {info.leader} in partition {partition}"
        if not context.is_whole:
            return "it lacks replicated state"
        if self.is_damaged:
            return "its disk is damaged"
        return "" if cluster_node.meta.has_majority(now) else "it is in contact with no majority"

    @property
    def shares_disk(self) -> bool:
        """Whether the nodes are processes of one machine, with one disk and each record once.

        Another one cannot take over if the disk is full or hangs. Counter-example: process 1
        reports the full disk a moment before process 0 does. The controller takes it for down,
        closes its sessions and sends its clients away, and they have nowhere to go.
        """
        return self._cluster_node.usage is not None

    def redirect_reason(self) -> str:
        """The reason why clients should use other nodes, or "" if there is none."""
        metadata = self._cluster_node.context.metadata
        info = None if metadata is None else metadata.nodes.get(self._cluster_node.meta.node_id)
        phase = None if info is None else info.state
        if self.is_removed:
            return "this node was removed from the cluster"
        if self.older_copy:
            return "the disk of this node is an older copy"
        if self.is_damaged:
            return "the disk of this node is damaged"
        if self._cluster_node.effects.has_diverged and self.has_other_replicas():
            return "the others have gone on without records of this node"
        if self._cluster_node.state.has_stopped_partition and self.has_other_replicas():
            return "an invariant of a partition does not hold at this node"
        if self._disk.is_stalled and not self.shares_disk:
            return "the disk of this node does not answer"
        is_full = self._cluster_node.state.disk_full and not self.shares_disk
        if phase == NodePhase.DOWN and is_full:
            return "the disk of this node is full"
        if phase == NodePhase.DRAINING:
            return DRAINED
        return ""

    def other_servers(self, is_stopping: bool = False) -> str:
        """Returns other nodes' client addresses, in the form of `holdfast.addresses`.

        `is_stopping`: the other processes of this machine stop with this one, so they are left out.
        """
        context = self._cluster_node.context
        metadata = context.metadata
        if self.is_removed and metadata is not None:
            # It has no links, so the metadata alone decides.
            return context.servers(sorted(metadata.nodes))
        usage = self._cluster_node.usage if is_stopping else None
        siblings = frozenset() if usage is None else usage.siblings
        return context.servers(sorted(context.connected - siblings))

    def has_last_copy(self) -> bool:
        """Whether all other replicas in sync of a partition are down."""
        metadata = self._cluster_node.context.metadata
        own = self._cluster_node.meta.node_id
        return metadata is not None and any(
            own in info.in_sync
            and all(
                node == own or metadata.nodes[node].state == NodePhase.DOWN for node in info.in_sync
            )
            for info in metadata.partitions
        )

    def has_other_replicas(self) -> bool:
        """Whether another data node exists, so that this node's log is not the only copy."""
        metadata = self._cluster_node.context.metadata
        own = self._cluster_node.meta.node_id
        return metadata is not None and any(
            node != own and info.role == DATA for node, info in metadata.nodes.items()
        )
