"""What a partition's entry should become, one decision at a time.

Functions on an entry take it as it is and return what it should be: the same object if there is
nothing to do. None of them ever adds a member to the in-sync set (only the partition's
leader knows who is), makes anybody lead who is not in it, or takes the last live one out of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.cluster.failure.health import Health
from holdfast.cluster.metadata.model import (
    DATA,
    REPLICAS_MAX,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
    PartitionInfo,
)
from holdfast.cluster.placement.ring import Assignment, placement


@dataclass(frozen=True)
class NodeConditions:
    """How the nodes stand, once the changes of nodes that go with the decision are made."""

    absent: frozenset[str] = frozenset()
    """Dead, or without a disk to be trusted: they cannot lead, and nobody shall wait for them."""
    wiped: frozenset[str] = frozenset()
    """Back with an empty disk."""
    willing: frozenset[str] = frozenset()
    """Data nodes that may take more: up, not suspected, neither draining nor leaving."""
    retiring: frozenset[str] = frozenset()
    """Alive, draining or leaving: they shall lead nothing if anybody else can."""


def standing_of(
    metadata: ClusterMetadata, changes: Mapping[str, NodeInfo], health: Health
) -> NodeConditions:
    """`changes`: of nodes, to be made together with what is decided on this standing."""
    absent, wiped, willing, retiring = set(), set(), set(), set()
    ill = useless(metadata, health)
    for node, info in metadata.nodes.items():
        becomes = changes.get(node, info)
        presence = health.present.get(node)
        if presence is not None and presence.incarnation != info.incarnation:
            if node not in changes:
                absent.add(node)
                continue
            wiped.add(node)
        elif (
            node in health.dead
            or node in ill
            or (becomes.state == NodePhase.DOWN and presence is None)
        ):
            absent.add(node)
            continue
        if info.role != DATA or becomes.state == NodePhase.DOWN:
            continue
        if becomes.state == NodePhase.DRAINING or node in health.leaving:
            retiring.add(node)
        elif node not in health.suspected:
            willing.add(node)
    return NodeConditions(
        frozenset(absent), frozenset(wiped), frozenset(willing), frozenset(retiring)
    )


def useless(metadata: ClusterMetadata, health: Health) -> frozenset[str]:
    """Nodes whose log is damaged; and those whose disk does not answer or is full, as long as that
    of another data node is well: with nobody who could take over, to wait is all there is to do."""
    ill = health.ill
    for node, info in metadata.nodes.items():
        if info.role == DATA and node in health.present and node not in ill:
            return ill
    return health.damaged


def wanted_replicas(
    metadata: ClusterMetadata, usable: Collection[str], given_up: Collection[str]
) -> Assignment:
    """By partition: on the usable nodes. Where they are fewer than the replication factor, nodes
    that were given up keep what nobody else can take, in case they come back."""
    partitions = metadata.partitions
    factor = metadata.replication_factor
    placed = placement(usable, len(partitions), factor, [info.members for info in partitions])
    if len(usable) >= factor:
        return placed
    padded = []
    for replicas, info in zip(placed, partitions, strict=True):
        kept = [node for node in info.replicas if node in given_up]
        padded.append((*replicas, *kept[: factor - len(replicas)]))
    return tuple(padded)


def last_copies(metadata: ClusterMetadata, nodes: Collection[str]) -> list[int]:
    """Partitions of which only the disks of these nodes had everything that was acknowledged."""
    return [
        number
        for number, info in enumerate(metadata.partitions)
        if info.in_sync and all(node in nodes for node in info.in_sync)
    ]


def is_led_by_another(info: PartitionInfo) -> bool:
    """Than the preferred leader, who could."""
    preferred = info.replicas[0]
    return info.leader not in ("", preferred) and preferred in info.in_sync


def settled(info: PartitionInfo, standing: NodeConditions) -> PartitionInfo:
    """After a failure or a return: who is still in sync, and who leads.

    If all who are in sync are dead they all stay, and there is no leader until the first of them is
    back: each of them has every committed record.
    """
    in_sync = info.in_sync
    if not standing.wiped.isdisjoint(in_sync):
        in_sync = tuple(node for node in in_sync if node not in standing.wiped)
    if not standing.absent.isdisjoint(in_sync):
        survivors = tuple(node for node in in_sync if node not in standing.absent)
        in_sync = survivors or in_sync
    leader = info.leader
    if leader in in_sync and leader not in standing.absent:
        return info if in_sync is info.in_sync else replace(info, in_sync=in_sync)
    changed = replace(info, in_sync=in_sync)
    successor = next_leader(changed, standing)
    if not successor and (changed := _with_arrived(changed, standing)) is not info:
        successor = next_leader(changed, standing)
    if successor:
        return led_by(changed, successor)
    if not leader and in_sync is info.in_sync:
        return info
    return replace(info, in_sync=in_sync, leader="")


def _with_arrived(info: PartitionInfo, standing: NodeConditions) -> PartitionInfo:
    """Where only replicas being added are left, in sync and alive: they are replicas from now on,
    so that one may lead."""
    arrived = tuple(
        node for node in info.adding if node in info.in_sync and node not in standing.absent
    )
    if not arrived:
        return info
    waiting = tuple(node for node in info.adding if node not in arrived)
    return replace(info, replicas=info.replicas + arrived, adding=waiting)


def next_leader(info: PartitionInfo, standing: NodeConditions) -> str:
    """The next on the ring after the leader, of those in sync and alive; the willing before the
    others. Empty: there is nobody."""
    replicas = info.replicas
    first = replicas.index(info.leader) + 1 if info.leader in replicas else 0
    able = [
        node
        for node in (*replicas[first:], *replicas[:first])
        if node in info.in_sync and node not in standing.absent and node != info.leader
    ]
    return next((node for node in able if node in standing.willing), able[0] if able else "")


def led_by(info: PartitionInfo, node: str) -> PartitionInfo:
    return replace(info, leader=node, epoch=info.epoch + 1)


def relieved(info: PartitionInfo, standing: NodeConditions) -> PartitionInfo:
    """Led by somebody who is willing, if its leader shall lead nothing any more."""
    if info.leader not in standing.retiring:
        return info
    successor = next_leader(info, standing)
    return led_by(info, successor) if successor in standing.willing else info


def lacks_replica(info: PartitionInfo, wanted: Sequence[str], standing: NodeConditions) -> bool:
    """One that could be added. Without a leader nobody could bring it up to date."""
    members = info.members
    return (
        info.leader != ""
        and len(members) < REPLICAS_MAX
        and any(node not in members and node in standing.willing for node in wanted)
    )


def begun(info: PartitionInfo, wanted: Sequence[str], standing: NodeConditions) -> PartitionInfo:
    """With the missing replicas being added."""
    members = info.members
    missing = [node for node in wanted if node not in members and node in standing.willing]
    return replace(info, adding=(*info.adding, *missing[: REPLICAS_MAX - len(members)]))


def advanced(
    info: PartitionInfo, wanted: tuple[str, ...], standing: NodeConditions, min_insync: int
) -> PartitionInfo:
    """A step on the way to `wanted`: replicas that have arrived count, those no longer wanted go
    when all others are in sync."""
    if not info.leader or (info.replicas == wanted and not info.adding):
        return info
    changed = info
    # One that has arrived is a copy, wanted or not: it goes as other replicas do.
    arrived = tuple(node for node in info.adding if node in info.in_sync)
    adding = tuple(node for node in info.adding if node in wanted and node not in arrived)
    if adding != info.adding:
        changed = replace(info, replicas=info.replicas + arrived, adding=adding)
    changed = _without_unwanted_replicas(changed, wanted, standing, min_insync)
    if changed.adding or changed.replicas == wanted or set(changed.replicas) != set(wanted):
        return changed
    return replace(changed, replicas=wanted)


def _without_unwanted_replicas(
    info: PartitionInfo, wanted: tuple[str, ...], standing: NodeConditions, min_insync: int
) -> PartitionInfo:
    """A live one goes only when everybody wanted is in sync; a dead one also if others that are
    dead are still hoped for."""
    if not set(wanted).issubset(info.replicas):
        return info
    lacking = [node for node in wanted if node not in info.in_sync]
    if lacking and not standing.absent.issuperset(lacking):
        return info
    kept = tuple(
        node
        for node in info.replicas
        if node in wanted or (lacking and node not in standing.absent)
    )
    if len(kept) == len(info.replicas):
        return info
    in_sync = tuple(node for node in info.in_sync if node in kept or node in info.adding)
    if not in_sync or len(in_sync) < min(min_insync, len(info.in_sync)):
        return info
    changed = replace(info, replicas=kept, in_sync=in_sync)
    if info.leader in kept:
        return changed
    successor = next_leader(replace(changed, leader=""), standing)
    return led_by(changed, successor) if successor else info
