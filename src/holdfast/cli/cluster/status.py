"""Reads a cluster's status (`GET /cluster`), gives a verdict on it, and lists changes."""

from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.cli.text import count_text

CLOCK_SKEW_S: Final = 5.0
"""The clock skew in seconds above which the verdict mentions a node."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as the requested node sees it."""

    node: str
    state: str
    """One of up, down and draining."""
    role: str
    """One of data, witness and gateway."""
    voter: bool
    connected: bool
    """Whether the requested node has a link to this node, or is this node."""
    peer_address: str
    client_address: str
    admin_address: str
    leaders: int
    replicas: int
    in_sync: int
    adding: int = 0
    """The replicas that are being created on it."""
    disk_full: bool = False
    """Whether it has reported that it has no room for more of the log."""
    clock_skew_s: float = 0.0
    """The seconds by which its clock is ahead of the cluster clock."""
    through: str = ""
    """The node through which the requested node reaches it; "": directly, or not at all."""
    zone: str = ""
    capacity: int = 100
    program: str = ""
    """The version of its program; "": it is not connected, or does not announce it."""
    refused: str = ""
    """The reason why it was refused: it came without the disk that it had. "" if it was not."""

    @property
    def held(self) -> int:
        """The replicas that the node stores, complete or not."""
        return self.replicas + self.adding


class PartitionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One partition, as the metadata defines it."""

    partition: int
    leader: str
    """The leader, "" if no node may lead now."""
    epoch: int
    replicas: list[str]
    in_sync: list[str]
    adding: list[str]
    high_watermark: int
    """The high watermark at the requested node."""
    version: int


class ReplicationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The replication that the cluster is to have."""

    automatic: bool
    """Whether it follows the number of data nodes."""
    replication_factor: int
    min_insync: int
    waits_for: str
    """The obstacle to it, or ""."""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `GET /cluster`. Fields with a default may be missing in it."""

    cluster_id: str
    node: str
    initialised: bool
    metadata_leader: str
    has_majority: bool
    version: int
    replication_factor: int
    min_insync: int
    nodes: list[NodeStatus]
    partitions: list[PartitionStatus]
    under_replicated: int
    leaderless: int
    moving: int
    sessions_here: int
    replication: ReplicationStatus | None = None
    """None: the version of the node that is asked cannot resize, or there is no cluster yet."""
    below_min_insync: int = 0
    """Partitions whose QoS 1 and 2 messages are refused, with too few replicas in sync."""
    waits_s: float = 0.0
    """The age in seconds of the oldest waiting acknowledgement at the requested node."""
    lost: int = 0
    """Leaderless partitions for which every disk with all records is lost."""
    under_zoned: int = 0
    """Partitions with more replicas in one zone than there must be."""
    uneven: int = 0
    """Replicas above the shares of their nodes."""
    paused: bool = False
    """Whether moves of replicas are paused."""
    older_copy: str = ""
    """The records that this node's disk has lost. The node takes no part in the cluster."""
    removed: bool = False
    """Whether other nodes have reported that this node was removed from the cluster."""
    refused_by: list[str] = []
    """The nodes that refuse a node without a cluster, with their reasons."""
    waits_for: list[str] = []
    """The addresses whose nodes must connect before the cluster is created without a command."""

    @property
    def resizing(self) -> str:
        """The way that is left to the wanted replication, or ""."""
        wanted = self.replication
        if wanted is None:
            return ""
        aim = (wanted.replication_factor, wanted.min_insync)
        if aim == (self.replication_factor, self.min_insync):
            return wanted.waits_for
        text = f"replication factor {aim[0]} and min_insync {aim[1]} are wanted"
        return f"{text}: {wanted.waits_for}" if wanted.waits_for else text

    def node_status(self, node: str) -> NodeStatus | None:
        return next((each for each in self.nodes if each.node == node), None)


WAITS_S: Final = 2.0
"""The age in seconds from which a waiting acknowledgement is a defect."""
HEALTHY: Final = 0
DEGRADED: Final = 1
NO_MAJORITY: Final = 3


@dataclass(frozen=True)
class ClusterVerdict:
    """The health of a cluster in one line."""

    level: int
    """HEALTHY, DEGRADED or NO_MAJORITY, which are also exit codes."""
    text: str

    @property
    def is_healthy(self) -> bool:
        return self.level == HEALTHY


def verdict(status: ClusterStatus) -> ClusterVerdict:
    """Judges a status. Draining nodes and moving replicas are no defect."""
    if status.older_copy:
        return ClusterVerdict(DEGRADED, f"{status.node} takes part in nothing: {status.older_copy}")
    if status.removed:
        text = f"{status.node} was removed from the cluster: stop it"
        return ClusterVerdict(DEGRADED, f"{text}. With an empty data directory it may join again")
    if status.refused_by:
        text = f"{status.node} is in no cluster: {'; '.join(status.refused_by)}"
        return ClusterVerdict(DEGRADED, text)
    if not status.initialised:
        missing = " and ".join(status.waits_for) or "`holdfast cluster init`"
        text = f"no cluster yet: {status.node} waits for {missing}"
        return ClusterVerdict(DEGRADED, text)
    wrong = []
    if status.has_majority and not status.metadata_leader:
        wrong.append("the metadata has no leader")
    if status.below_min_insync:
        count = count_text(status.below_min_insync, "partition")
        wrong.append(
            f"QoS 1 and 2 publishes to {count} are refused: fewer than {status.min_insync} replicas"
            " in sync"
        )
    if status.waits_s > WAITS_S:
        # Without the seconds, because `watch` prints every changed verdict.
        wrong.append(f"publishes at {status.node} wait for longer than {WAITS_S:g} s")
    for node in status.nodes:
        if node.refused:
            wrong.append(f"{node.node} was not let in: {node.refused}")
        elif node.state == "down":
            wrong.append(f"{node.node} is down" + ": its disk is full" * node.disk_full)
        elif node.disk_full:
            wrong.append(f"the disk of {node.node} is full")
        elif not node.connected and node.node != status.node:
            wrong.append(f"{status.node} has no link to {node.node}")
    if status.leaderless:
        wrong.append(f"{count_text(status.leaderless, 'partition')} without a leader")
    if status.lost:
        wrong.append(f"{status.lost} of them lost: see `holdfast cluster unsafe-recover --help`")
    if status.under_replicated:
        wrong.append(f"{count_text(status.under_replicated, 'partition')} under-replicated")
    if not status.has_majority:
        text = f"no majority: {status.node} acknowledges nothing, and knows no news of the others"
        return ClusterVerdict(NO_MAJORITY, "; ".join([text, *wrong]))
    if wrong:
        # Under-replicated partitions wait for as long as moves are paused.
        wrong += ["moves of replicas are paused"] * status.paused
        return ClusterVerdict(DEGRADED, "degraded: " + "; ".join(wrong))
    nodes, partitions = len(status.nodes), len(status.partitions)
    parts = [count_text(nodes, "node"), count_text(partitions, "partition")]
    if status.partitions:
        fewest = min(len(each.in_sync) for each in status.partitions)
        parts.append(f"all with {fewest} in sync")
    if status.moving:
        parts.append(f"{status.moving} getting new replicas")
    return ClusterVerdict(HEALTHY, "healthy: " + ", ".join(parts + _remarks(status)))


def _remarks(status: ClusterStatus) -> list[str]:
    """The conditions of nodes that are no defect."""
    found = [
        f"{status.node} reaches {node.node} through {node.through}"
        for node in status.nodes
        if node.through
    ]
    if status.paused:
        found.append("moves of replicas are paused")
    if status.under_zoned:
        crowded = count_text(status.under_zoned, "partition")
        found.append(f"{crowded} with too many replicas in one zone")
    found += [f"{node.node} draining" for node in status.nodes if node.state == "draining"]
    return found + [
        f"the clock of {node.node} is off by {node.clock_skew_s:+.0f} s"
        for node in status.nodes
        if abs(node.clock_skew_s) > CLOCK_SKEW_S
    ]


def changes(before: ClusterStatus, now: ClusterStatus) -> list[str]:
    """Returns the changes, one per line; equal changes of several partitions share one."""
    lines = []
    if not before.initialised and now.initialised:
        lines.append(f"cluster {now.cluster_id} made")
    if before.has_majority != now.has_majority:
        lines.append(f"{now.node} {'reaches' if now.has_majority else 'has lost'} the majority")
    if before.metadata_leader != now.metadata_leader:
        lines.append(f"metadata leader {_moved(before.metadata_leader, now.metadata_leader)}")
    if before.paused != now.paused:
        lines.append(f"moves of replicas {'paused' if now.paused else 'resumed'}")
    for name in ("replication factor", "min_insync"):
        old, new = (getattr(each, name.replace(" ", "_")) for each in (before, now))
        if old != new:
            lines.append(f"{name} {old} -> {new}")
    return lines + _node_changes(before, now) + _partition_changes(before, now)


def _node_changes(before: ClusterStatus, now: ClusterStatus) -> list[str]:
    lines = []
    old = {node.node: node for node in before.nodes}
    for node in now.nodes:
        was = old.pop(node.node, None)
        if was is None:
            lines.append(f"node {node.node} joined as {node.role}, {node.state}")
            continue
        if was.state != node.state:
            lines.append(f"node {node.node} {node.state}")
        # Links can be compared only if both statuses come from the same node.
        if was.connected != node.connected and before.node == now.node:
            lines.append(f"link to {node.node} {'made' if node.connected else 'lost'}")
        if was.through != node.through and before.node == now.node:
            way = f"through {node.through}" if node.through else "no longer through another node"
            lines.append(f"link to {node.node} {way}")
        if was.voter != node.voter:
            lines.append(f"node {node.node} {'votes' if node.voter else 'votes no more'}")
    return lines + [f"node {node} removed" for node in old]


def _partition_changes(before: ClusterStatus, now: ClusterStatus) -> list[str]:
    lines = _leader_changes(before, now)
    alike: dict[str, list[int]] = {}
    for was, is_now in zip(before.partitions, now.partitions, strict=False):
        number = is_now.partition
        for name, old, new in (
            ("in sync", was.in_sync, is_now.in_sync),
            ("replicas", was.replicas, is_now.replicas),
            ("adding", was.adding, is_now.adding),
        ):
            if set(old) != set(new):
                alike.setdefault(f"{name} {_difference(old, new)}", []).append(number)
    return lines + [f"{_partitions_text(numbers)} {text}" for text, numbers in alike.items()]


def _leader_changes(before: ClusterStatus, now: ClusterStatus) -> list[str]:
    """Returns one line, because the failure of one node moves a third of all partitions."""
    moved: dict[str, list[PartitionStatus]] = {}
    for was, is_now in zip(before.partitions, now.partitions, strict=False):
        if (was.leader, was.epoch) != (is_now.leader, is_now.epoch):
            moved.setdefault(_moved(was.leader, is_now.leader), []).append(is_now)
    changed = sorted(each.partition for moves in moved.values() for each in moves)
    if not changed:
        return []
    if len(moved) > 1:
        counts = ", ".join(f"{move} ({len(moves)})" for move, moves in sorted(moved.items()))
        return [f"{count_text(len(changed), 'partition')} leader {counts}"]
    ((move, moves),) = moved.items()
    epoch = f" epoch {moves[0].epoch}" if len(moves) == 1 else ""
    return [f"{_partitions_text(changed)} leader {move}{epoch}"]


def _moved(before: str, now: str) -> str:
    return f"{before or 'nobody'} -> {now or 'nobody'}"


def _difference(before: list[str], now: list[str]) -> str:
    gone = [f"-{node}" for node in sorted(before) if node not in now]
    return " ".join([f"+{node}" for node in sorted(now) if node not in before] + gone)


def _partitions_text(numbers: list[int]) -> str:
    """Formats partition numbers: `partition 4`, `partitions 0-3 7`."""
    if len(numbers) == 1:
        return f"partition {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "partitions " + " ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in runs
    )
