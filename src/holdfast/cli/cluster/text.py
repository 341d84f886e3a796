"""Tables of a cluster, for people."""

from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.cli.cluster.status import ClusterStatus, NodeStatus, PartitionStatus
from holdfast.cli.text import table

NODE_NUMBERS: Final = ("leaders", "replicas", "in sync")
PARTITION_NUMBERS: Final = ("partition", "epoch", "high watermark")


def summary(status: ClusterStatus) -> str:
    """Returns one line about the cluster, as the requested node sees it."""
    wanted = status.replication
    automatic = " (auto)" if wanted is not None and wanted.automatic else ""
    resizing = f"; {status.resizing}" if status.resizing else ""
    return (
        f"cluster {status.cluster_id}, metadata led by {status.metadata_leader or 'nobody'},"
        f" version {status.version}, replication factor {status.replication_factor},"
        f" at least {status.min_insync} in sync{automatic}, as {status.node} sees it{resizing}"
    )


def node_table(status: ClusterStatus) -> Iterator[str]:
    rows = [_node_row(node, node.node == status.node) for node in status.nodes]
    return table(rows, NODE_NUMBERS)


def partition_table(partitions: Iterable[PartitionStatus]) -> Iterator[str]:
    return table([_partition_row(partition) for partition in partitions], PARTITION_NUMBERS)


def _node_row(node: NodeStatus, is_asked: bool) -> dict[str, str]:
    return {
        "node": node.node,
        "state": node.state,
        "role": node.role,
        "votes": "yes" if node.voter else "no",
        "link": "self" if is_asked else "yes" if node.connected else "no",
        "version": node.program or "-",
        "leaders": str(node.leaders),
        "replicas": str(node.replicas),
        "in sync": str(node.in_sync),
        "clients": node.client_address or "-",
        "peers": node.peer_address or "-",
        "admin": node.admin_address or "-",
    }


def _partition_row(partition: PartitionStatus) -> dict[str, str]:
    return {
        "partition": str(partition.partition),
        "leader": partition.leader or "nobody",
        "epoch": str(partition.epoch),
        "replicas": _names(partition.replicas),
        "in sync": _names(partition.in_sync),
        "adding": _names(partition.adding),
        "high watermark": str(partition.high_watermark),
    }


def _names(nodes: list[str]) -> str:
    return " ".join(nodes) or "-"
