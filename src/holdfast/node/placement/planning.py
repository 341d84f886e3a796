"""Plans the next entry of a partition, one decision at a time.

A function takes an entry and returns the new one: the same object if nothing is to be done. No
function adds a replica to the in-sync set, because only the partition's leader knows which are.
None makes a node outside that set lead. None takes the last live node out of it.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.node.failure.health import Health
from holdfast.node.metadata.commands import SetReplication
from holdfast.node.metadata.model import (
    DATA,
    REPLICAS_MAX,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
    PartitionInfo,
)
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.placement.ring import Assignment, placement
from holdfast.node.raft.log import Membership


class NodeConditions(Struct, frozen=True):
    """The condition of the nodes, after the node changes that go with the decision. No node is in
    two of the sets `absent`, `willing` and `retiring`."""

    absent: frozenset[str] = frozenset()
    """Nodes that are dead, or whose disk cannot be trusted. They cannot lead, and no commit shall
    wait for them."""
    whole: frozenset[str] = frozenset()
    """The absent nodes whose disks may be whole, and that nobody drains: dead ones, and those whose
    disk is full or does not respond."""
    wiped: frozenset[str] = frozenset()
    """Nodes that returned with an empty disk."""
    willing: frozenset[str] = frozenset()
    """Data nodes that may take more: up, not suspected, neither draining nor leaving nor full."""
    retiring: frozenset[str] = frozenset()
    """Live nodes that are draining or leaving, or whose disk is full. They shall lead nothing that
    another node can lead."""
    incomplete: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The partitions in which a live node may be incomplete (`partitions.incomplete`)."""
    unmet: frozenset[str] = frozenset()
    """Nodes that were not heard since the start of the node that decides, a while ago."""

    def for_partition(self, number: int, info: PartitionInfo) -> "NodeConditions":
        """The conditions as they are for one partition. Its in-sync nodes that may lack records of
        it are absent, unless each of the set may. Then none is better than another."""
        found = frozenset(node for node in info.in_sync if number in self.incomplete.get(node, ()))
        if not found or len(found) == len(info.in_sync):
            return self
        return replace(
            self,
            absent=self.absent | found,
            whole=self.whole - found,
            willing=self.willing - found,
            retiring=self.retiring - found,
        )


def conditions_of(
    metadata: ClusterMetadata, changes: Mapping[str, NodeInfo], health: Health
) -> NodeConditions:
    """The conditions of the nodes. `changes` are the node changes of the same command."""
    absent, whole, wiped, willing, retiring = set(), set(), set(), set(), set()
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
            if node not in health.damaged and becomes.state != NodePhase.DRAINING:
                whole.add(node)
            continue
        if info.role != DATA or becomes.state == NodePhase.DOWN:
            continue
        if becomes.state == NodePhase.DRAINING or node in health.leaving or node in health.full:
            retiring.add(node)
        elif node not in health.suspected:
            willing.add(node)
    return NodeConditions(
        frozenset(absent),
        frozenset(whole),
        frozenset(wiped),
        frozenset(willing),
        frozenset(retiring),
        {node: each for node, each in health.incomplete.items() if each},
        health.unmet,
    )


def useless(metadata: ClusterMetadata, health: Health) -> frozenset[str]:
    """Nodes whose log is damaged. Nodes whose disk does not respond or is full are added only if
    another data node's disk is well. Otherwise no node could take over, and waiting is the only
    option.

    A full disk can still be read, so its node stays as long as a partition has no in-sync replica
    on a disk that is well. Counter-example: all disks are full, and those of A and B get room. Only
    C has all records of a partition. Without C as its leader, A and B never receive them.
    """
    ill = health.unhealthy
    well = healthy(metadata, health) if ill else None
    if not well:
        return health.damaged
    needed: set[str] = set()
    if health.full:
        for info in metadata.partitions:
            if well.isdisjoint(info.in_sync):
                needed.update(info.in_sync)
    return ill - (needed & health.full - health.stalled - health.damaged)


def healthy(metadata: ClusterMetadata, health: Health) -> set[str]:
    """The data nodes that are present and report no problem of their disk."""
    data = {node for node, info in metadata.nodes.items() if info.role == DATA}
    return data & health.present.keys() - health.unhealthy


def wanted_replicas(
    metadata: ClusterMetadata, usable: Collection[str], given_up: Collection[str]
) -> Assignment:
    """The replicas of each partition on the usable nodes. If those are fewer than the replication
    factor, given-up nodes keep replicas that no other node can take, in case they come back."""
    partitions = metadata.partitions
    factor = metadata.replication_factor
    members = [info.members for info in partitions]
    placed = placement(usable, len(partitions), factor, members, metadata.traits)
    if len(usable) >= factor:
        return placed
    padded = []
    for replicas, info in zip(placed, partitions, strict=True):
        kept = [node for node in info.replicas if node in given_up]
        padded.append((*replicas, *kept[: factor - len(replicas)]))
    return tuple(padded)


def next_replication(metadata: ClusterMetadata) -> SetReplication | None:
    """The next step of the settings in force towards the wanted ones, or None.

    While copies are made, the stricter `min_insync` of both counts: it falls before the replication
    factor falls, but after the copies for a higher one are there. It rises when each partition has
    all its copies in sync. Counter-example: `min_insync` rises with the replication factor, and
    every publish is refused until the copies are there.
    """
    factor, least = present = (metadata.replication_factor, metadata.min_insync)
    wanted_factor, wanted_least = metadata.wanted_replication
    if factor < wanted_factor:
        factor = wanted_factor
    elif least > wanted_least and (factor > wanted_factor or not _lacks_copies(metadata, factor)):
        least = wanted_least
    elif factor > wanted_factor:
        factor = wanted_factor
    elif least < wanted_least and all(len(info.in_sync) >= factor for info in metadata.partitions):
        least = wanted_least
    return SetReplication(present, (factor, least)) if (factor, least) != present else None


def _lacks_copies(metadata: ClusterMetadata, factor: int) -> bool:
    """True if replicas are being added, or are to be. Those that are down do not count, because
    `min_insync` may fall on account of them."""
    copies = min(factor, metadata.takers)
    return any(info.adding or len(info.replicas) < copies for info in metadata.partitions)


def last_copies(metadata: ClusterMetadata, nodes: Collection[str]) -> list[int]:
    """The partitions whose acknowledged records are complete only on the disks of these nodes."""
    return [
        number
        for number, info in enumerate(metadata.partitions)
        if info.in_sync and all(node in nodes for node in info.in_sync)
    ]


def is_led_by_another(info: PartitionInfo) -> bool:
    """True if the preferred leader is in sync and another node leads."""
    preferred = info.replicas[0]
    return info.leader not in ("", preferred) and preferred in info.in_sync


def repaired(info: PartitionInfo, standing: NodeConditions, min_insync: int) -> PartitionInfo:
    """The entry after a failure or a return: the remaining in-sync set, and its leader.

    If all in-sync replicas are dead, they all stay in the set, because each has every committed
    record. The partition has no leader until the first of them is back.

    Absent replicas whose disks may be whole also stay if fewer than `min_insync` would be left.
    Those few could commit nothing, so each absent one has every committed record and may lead
    again. Smallest counter-example: A and B are in sync, `min_insync` is 2. A's machine burns down,
    which nobody has noticed. B's process is killed, or its disk does not respond for a second,
    which is noticed at once. Without B in the set, A's lost disk counts as the last copy when B is
    back, and the partition waits for an operator.

    They stay as well if one replica would be left, and none of the others was heard since the start
    of this node. Smallest counter-example: A and B are in sync, `min_insync` is 1, and both lose
    power. The file of A has lost its end. A starts first, and would go on without B's records.
    """
    in_sync = info.in_sync
    if not standing.wiped.isdisjoint(in_sync):
        in_sync = tuple(node for node in in_sync if node not in standing.wiped)
    if not standing.absent.isdisjoint(in_sync):
        gone = standing.absent
        survivors = tuple(node for node in in_sync if node not in gone)
        is_start = len(survivors) == 1 and standing.unmet.issuperset(gone.intersection(in_sync))
        if len(survivors) < min_insync or is_start:
            gone = gone - standing.whole
            survivors = survivors and tuple(node for node in in_sync if node not in gone)
        if survivors and survivors != in_sync:
            in_sync = survivors
    leader = info.leader
    if leader in in_sync and leader not in standing.absent:
        return info if in_sync is info.in_sync else replace(info, in_sync=in_sync)
    changed = replace(info, in_sync=in_sync)
    successor = next_leader(changed, standing)
    if not successor and (changed := _with_arrived(changed, standing)) is not info:
        successor = next_leader(changed, standing)
    if successor:
        return with_leader(changed, successor)
    if not leader and in_sync is info.in_sync:
        return info
    return replace(info, in_sync=in_sync, leader="")


def _with_arrived(info: PartitionInfo, standing: NodeConditions) -> PartitionInfo:
    """The entry with its live, in-sync `adding` replicas as full replicas, so that one may lead. It
    is used when no other replica is left."""
    arrived = tuple(
        node for node in info.adding if node in info.in_sync and node not in standing.absent
    )
    if not arrived:
        return info
    waiting = tuple(node for node in info.adding if node not in arrived)
    return replace(info, replicas=info.replicas + arrived, adding=waiting)


def next_leader(info: PartitionInfo, standing: NodeConditions) -> str:
    """The next live in-sync replica on the ring after the leader, willing nodes first; "" without
    one."""
    replicas = info.replicas
    first = replicas.index(info.leader) + 1 if info.leader in replicas else 0
    able = [
        node
        for node in (*replicas[first:], *replicas[:first])
        if node in info.in_sync and node not in standing.absent and node != info.leader
    ]
    return min(able, key=lambda node: node not in standing.willing, default="")


def with_leader(info: PartitionInfo, node: str) -> PartitionInfo:
    """The entry with this leader, under a new epoch."""
    return replace(info, leader=node, epoch=info.epoch + 1)


def relieved(info: PartitionInfo, standing: NodeConditions) -> PartitionInfo:
    """The entry with a willing leader, if the present one is retiring."""
    if info.leader not in standing.retiring:
        return info
    successor = next_leader(info, standing)
    return with_leader(info, successor) if successor in standing.willing else info


def lacks_replica(info: PartitionInfo, wanted: Sequence[str], standing: NodeConditions) -> bool:
    """True if a wanted replica is missing and can be added. Without a leader no node could feed
    it."""
    members = info.members
    return (
        info.leader != ""
        and len(members) < REPLICAS_MAX
        and any(node not in members and node in standing.willing for node in wanted)
    )


def with_new_replicas(
    info: PartitionInfo, wanted: Sequence[str], standing: NodeConditions
) -> PartitionInfo:
    """The entry with the missing replicas being added."""
    members = info.members
    missing = [node for node in wanted if node not in members and node in standing.willing]
    return replace(info, adding=(*info.adding, *missing[: REPLICAS_MAX - len(members)]))


def advanced(
    info: PartitionInfo, wanted: tuple[str, ...], standing: NodeConditions, min_insync: int
) -> PartitionInfo:
    """The entry one step closer to `wanted`. Added replicas that are in sync become full replicas.
    Unwanted ones leave when all others are in sync."""
    if not info.leader or (info.replicas == wanted and not info.adding):
        return info
    changed = info
    # An added replica that is in sync is a copy, wanted or not. It leaves as other replicas do.
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
    """The entry without unwanted replicas. A live one leaves only when every wanted one is in sync.
    A dead one leaves also while other dead ones may still return."""
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
    return with_leader(changed, successor) if successor else info


def is_dispensable(
    own: str, metadata: ClusterMetadata, membership: Membership, health: Health
) -> bool:
    """True if the node `own` may lose its disk: it is in sync nowhere, agreed not to be up, and the
    voters that it hears are a majority without it and without damaged nodes.

    Its votes are lost with the disk, so the others must be a majority whatever the leader decides
    meanwhile. Smallest counter-example: of the voters A, B and C, C has a new disk, so its new peer
    D is a learner. D finds damage and counts two of three voters without itself. In the same moment
    A makes D a voter, to replace C. Of A, B, C and D three must agree now, and two remain for ever.
    The leader makes no node a voter that is agreed not to be up. A membership from before may be on
    its way here, so a metadata read must pass as well (`ClusterNode.is_dispensable`).

    Of two damaged nodes neither may count on the other. The changes of their states are ordered, so
    at least one of the two sees the other one down.
    """
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
