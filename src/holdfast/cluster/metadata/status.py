"""The state of the cluster for people and programs: values that JSON has."""

from collections import Counter
from collections.abc import Mapping

from holdfast.cluster.failure.health import Health
from holdfast.cluster.metadata.model import VOTERS_MAX, ClusterMetadata, NodePhase, PartitionInfo
from holdfast.cluster.metadata.operations import lost_partitions
from holdfast.cluster.placement.planning import is_led_by_another


def cluster_status(
    metadata: ClusterMetadata, health: Health, refused: Mapping[str, str] | None = None
) -> dict[str, object]:
    """`connected` of a node is what the answering node sees; all else is agreed. `refused`: nodes
    that came with another disk than the metadata has, and why they were not let in."""
    partitions = metadata.partitions
    refused = refused or {}
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
        "nodes": _nodes(metadata, health, refused),
        "partitions": [_partition(number, info) for number, info in enumerate(partitions)],
        "under_replicated": under_replicated(metadata),
        "below_min_insync": below_min_insync(metadata),
        "leaderless": sum(not info.leader for info in partitions),
        "lost": len(lost_partitions(metadata, replaced.union(refused))),
        "moving": sum(bool(info.adding) for info in partitions),
        "not_preferred": sum(is_led_by_another(info) for info in partitions),
    }


def under_replicated(metadata: ClusterMetadata) -> int:
    """Partitions with fewer replicas in sync, on nodes that are not down, than there should be."""
    return _with_fewer(metadata, metadata.replication_factor)


def below_min_insync(metadata: ClusterMetadata) -> int:
    """Those with so few that their QoS 1 and 2 messages are not acknowledged."""
    return _with_fewer(metadata, metadata.min_insync)


def lacks_voters(metadata: ClusterMetadata) -> bool:
    """Do fewer nodes vote than could? So it is for a moment after nodes have joined. Two nodes that
    are up and one voter are as they should be; of three, a voter alone is lost with its node."""
    up = sum(info.state == NodePhase.UP for info in metadata.nodes.values())
    wanted = min(up, VOTERS_MAX)
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
    metadata: ClusterMetadata, health: Health, refused: Mapping[str, str]
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
            "voter": node in metadata.voters,
            "connected": node in health.present,
            "suspected": node in health.suspected,
            "leaving": node in health.leaving,
            "disk_stalled": node in health.stalled,
            "disk_damaged": node in health.damaged,
            "disk_full": node in health.full,
            "refused": refused.get(node, ""),
            "peer_address": info.peer_address,
            "client_address": info.client_address,
            "admin_address": info.admin_address,
            "leaders": leaders[node],
            "replicas": replicas[node],
            "adding": adding[node],
            "in_sync": in_sync[node],
        }
        for node, info in sorted(metadata.nodes.items())
    ]
