"""Shows the state of the cluster to people and programs, as JSON values."""

from collections import Counter
from collections.abc import Collection, Mapping

from msgspec import Struct

from holdfast.addresses import plain_address
from holdfast.node.failure.health import Health
from holdfast.node.metadata.model import (
    CAPACITY_DEFAULT,
    DATA,
    GATEWAY,
    VOTERS_MAX,
    ClusterMetadata,
    NodePhase,
    NodeTraits,
    PartitionInfo,
)
from holdfast.node.metadata.operations import lost_partitions
from holdfast.node.placement.planning import is_led_by_another
from holdfast.node.placement.shares import NodeShares


def cluster_status(
    metadata: ClusterMetadata, health: Health, refused: Mapping[str, str] | None = None
) -> dict[str, object]:
    """The status document. `connected` of a node is what the replying node sees; everything else is
    agreed. `refused` has, by node, why its other disk was not admitted."""
    partitions = metadata.partitions
    refused = refused or {}
    traits, even = metadata.traits, evenness(metadata)
    replaced = {
        node
        for node, info in metadata.nodes.items()
        if node in health.present and health.present[node].incarnation != info.incarnation
    }
    return {
        "cluster_id": metadata.cluster_id,
        "version": metadata.version,
        "replication_factor": metadata.replication_factor,
        "min_insync": metadata.min_insync,
        "replication": _replication(metadata),
        "nodes": _nodes(metadata, health, refused, traits),
        "partitions": [_partition(number, info) for number, info in enumerate(partitions)],
        "under_replicated": under_replicated(metadata),
        "below_min_insync": below_min_insync(metadata),
        "leaderless": sum(not info.leader for info in partitions),
        "lost": len(lost_partitions(metadata, replaced.union(refused))),
        "moving": sum(bool(info.adding) for info in partitions),
        "under_zoned": even.under_zoned,
        "uneven": even.uneven,
        "paused": metadata.is_paused,
        "not_preferred": sum(is_led_by_another(info) for info in partitions),
    }


def _replication(metadata: ClusterMetadata) -> dict[str, object]:
    """The wanted replication, and the obstacle to it. The settings in force follow it step by
    step."""
    factor, least = metadata.wanted_replication
    count = len(metadata.partitions)
    copied = sum(len(info.in_sync) >= factor for info in metadata.partitions)
    surplus = sum(len(info.members) > factor for info in metadata.partitions)
    waits_for = ""
    if copied < count:
        waits_for = f"{copied} of {count} partitions have {factor} replicas in sync"
    elif surplus:
        waits_for = f"{surplus} of {count} partitions have more than {factor} replicas"
    return {
        "automatic": metadata.replication is not None and metadata.replication.is_automatic,
        "replication_factor": factor,
        "min_insync": least,
        "waits_for": waits_for,
    }


def under_replicated(metadata: ClusterMetadata) -> int:
    """The number of partitions with fewer in-sync replicas on live nodes than the replication
    factor."""
    return _with_fewer(metadata, metadata.replication_factor)


def below_min_insync(metadata: ClusterMetadata) -> int:
    """The number of partitions with so few that their QoS 1 and 2 messages are not acknowledged."""
    return _with_fewer(metadata, metadata.min_insync)


class Evenness(Struct, frozen=True):
    """The distance of a cluster from its placement."""

    under_zoned: int = 0
    """Partitions with more replicas in one zone than there must be."""
    uneven: int = 0
    """Replicas above the shares of their nodes."""


def _shares(metadata: ClusterMetadata) -> NodeShares:
    nodes = [
        node
        for node, info in metadata.nodes.items()
        if info.role == DATA and info.state != NodePhase.DRAINING
    ]
    copies = min(metadata.replication_factor, len(nodes))
    return NodeShares(nodes, len(metadata.partitions), copies, metadata.traits)


def evenness(metadata: ClusterMetadata) -> Evenness:
    """Compares the replicas with the zones and shares of the data nodes that may have some."""
    shares = _shares(metadata)
    # Thousands of partitions share a few lists of replicas.
    lists = Counter(info.replicas for info in metadata.partitions)
    held: Counter[str] = Counter()
    for replicas, count in lists.items():
        held.update(dict.fromkeys(replicas, count))
    return Evenness(
        sum(count for replicas, count in lists.items() if shares.is_crowded(replicas)),
        sum(max(0, held[node] - most) for node, most in shares.most.items()),
    )


def under_zoned(metadata: ClusterMetadata, ends: Mapping[int, tuple[str, ...]]) -> int:
    """The partitions that would have too many replicas in one zone with these other replicas of
    some of them."""
    shares = _shares(metadata)
    return sum(
        shares.is_crowded(ends.get(number, info.replicas))
        for number, info in enumerate(metadata.partitions)
    )


class LossEffect(Struct, frozen=True):
    """The effect that the loss of some nodes would have at once."""

    leaders: int
    """Partitions that would get another leader, or none."""
    below_min_insync: int
    """Partitions that would refuse messages of QoS 1 and 2."""
    leaderless: int
    """Partitions that no node could lead until one of the lost ones is back."""


def loss_effect(metadata: ClusterMetadata, lost: Collection[str]) -> LossEffect:
    """The effect that the loss of these nodes would have now, before replicas are made elsewhere.
    Partitions that are in such a state already count as well."""
    gone = {node for node, info in metadata.nodes.items() if info.state == NodePhase.DOWN}
    gone.update(lost)
    left = [sum(node not in gone for node in info.in_sync) for info in metadata.partitions]
    return LossEffect(
        sum(info.leader in lost for info in metadata.partitions),
        sum(count < metadata.min_insync for count in left),
        left.count(0),
    )


class StopEffect(Struct, frozen=True):
    """The effect that the stop of one node would have on the other nodes."""

    below_min_insync: int = 0
    """Partitions that would have fewer than `min_insync` replicas in sync."""
    loses_majority: bool = False
    """Whether the voters that remain would be no majority."""
    is_passing: bool = False
    """Whether a connected node is about to close the gap, so that a later stop has no effect."""


def stop_effect(
    metadata: ClusterMetadata, health: Health, node: str, awaited: Collection[str] = ()
) -> StopEffect:
    """The effect of a stop of `node` now. `awaited`: nodes that have left since it asked to stop.

    It counts only what another moment could spare. Two replicas with `min_insync` 2 cannot lose
    one at any time, and one voter of two nodes is right, so neither counts.

    Of nodes that ask at the same time, those with a lower id go first, and are expected back. When
    no other node stays, the whole cluster is being stopped, and none is expected.
    """
    first = {each for each in health.asking if node not in health.asking or each < node}
    going = health.leaving | first
    left = health.present.keys() - going - health.unhealthy - {node}
    soon = (left | going | set(awaited)) - {node} if left - health.asking else left
    below = 0
    is_passing = False
    for info in metadata.partitions:
        kept = left & set(info.in_sync)
        if len(kept) >= metadata.min_insync or node not in info.in_sync:
            continue
        others = {*info.replicas, *info.adding} - {node}
        if len(kept) < len(others):
            below += 1
            is_passing = is_passing or bool((others & soon) - kept)
    voters = set(metadata.voters)
    loses = node in voters and len(voters) > 2 and 2 * len(voters & left) <= len(voters)
    is_passing = is_passing or (loses and bool((metadata.nodes.keys() & soon) - (voters & left)))
    return StopEffect(below, loses, is_passing)


def lacks_voters(metadata: ClusterMetadata) -> bool:
    """True if fewer nodes vote than could. That is normal shortly after nodes have joined. One
    voter is right for two nodes. For three it is too few, because its node may fail. A gateway
    never votes."""
    nodes = metadata.nodes.values()
    able = sum(info.state == NodePhase.UP and info.role != GATEWAY for info in nodes)
    wanted = min(able, VOTERS_MAX)
    return len(metadata.voters) < wanted - (wanted % 2 == 0)


def _with_fewer(metadata: ClusterMetadata, wanted: int) -> int:
    down = {node for node, info in metadata.nodes.items() if info.state == NodePhase.DOWN}
    return sum(
        sum(node not in down for node in info.in_sync) < wanted for info in metadata.partitions
    )


def _partition(number: int, info: PartitionInfo) -> dict[str, object]:
    return {
        "partition": number,
        "leader": info.leader,
        "epoch": info.epoch,
        "replicas": list(info.replicas),
        "adding": list(info.adding),
        "in_sync": list(info.in_sync),
        "version": info.version,
    }


def _nodes(
    metadata: ClusterMetadata,
    health: Health,
    refused: Mapping[str, str],
    traits: Mapping[str, NodeTraits],
) -> list[dict[str, object]]:
    leaders = Counter(info.leader for info in metadata.partitions)
    replicas = Counter(node for info in metadata.partitions for node in info.replicas)
    in_sync = Counter(node for info in metadata.partitions for node in info.in_sync)
    adding = Counter(node for info in metadata.partitions for node in info.adding)
    return [
        {
            "node": node,
            "state": info.state,
            "role": info.role,
            "zone": traits[node].zone if node in traits else "",
            "capacity": traits[node].capacity if node in traits else CAPACITY_DEFAULT,
            "voter": node in metadata.voters,
            "connected": node in health.present,
            "suspected": node in health.suspected,
            "leaving": node in health.leaving,
            "disk_stalled": node in health.stalled,
            "disk_damaged": node in health.damaged,
            "disk_full": node in health.full,
            "refused": refused.get(node, ""),
            "program": health.present[node].version if node in health.present else "",
            "peer_address": info.peer_address,
            "client_address": plain_address(info.client_address),
            "admin_address": info.admin_address,
            "leaders": leaders[node],
            "replicas": replicas[node],
            "adding": adding[node],
            "in_sync": in_sync[node],
        }
        for node, info in sorted(metadata.nodes.items())
    ]
