"""What an operator wants of the cluster, as commands that any node may propose.

Each function checks the wish against the metadata and raises OperationError with a sentence for
the operator. The controller does the rest.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from holdfast.cluster.metadata.commands import ChangePartitions, Command, RemoveNode
from holdfast.cluster.metadata.model import DATA, ClusterMetadata, NodeInfo, NodePhase
from holdfast.cluster.placement.planning import is_led_by_another, last_copies, led_by


class OperationError(Exception):
    """It cannot be done; the text says why and what can be."""


def node_of(metadata: ClusterMetadata, node: str) -> NodeInfo:
    """Raises OperationError."""
    info = metadata.nodes.get(node)
    if info is None:
        known = ", ".join(sorted(metadata.nodes))
        raise OperationError(f"there is no node {node} in the cluster; its nodes are {known}")
    return info


def partitions_held(metadata: ClusterMetadata, node: str) -> int:
    return sum(1 for info in metadata.partitions if node in info.members)


def drain(metadata: ClusterMetadata, node: str) -> Command | None:
    """Takes everything from the node, leaderships first; a dead node is given up. None: it is
    draining already. Raises OperationError."""
    info = node_of(metadata, node)
    if info.state == NodePhase.DRAINING:
        return None
    remaining = sorted(
        other.node_id
        for other in metadata.nodes.values()
        if other.node_id != node and other.role == DATA and other.state == NodePhase.UP
    )
    if info.role == DATA and len(remaining) < metadata.min_insync:
        left = f"only {', '.join(remaining)}" if remaining else "no data node"
        raise OperationError(
            f"without {node} {left} would be left, and min_insync is {metadata.min_insync}: "
            "add a node first"
        )
    return _with_state(info, NodePhase.DRAINING)


def undrain(metadata: ClusterMetadata, node: str) -> Command | None:
    """Gives the node its share again. None: it is not draining. Raises OperationError."""
    info = node_of(metadata, node)
    if info.state != NodePhase.DRAINING:
        return None
    return _with_state(info, NodePhase.UP)


def _with_state(info: NodeInfo, state: str) -> Command:
    return ChangePartitions((), ((info.version, replace(info, state=state)),))


def remove(metadata: ClusterMetadata, node: str) -> Command:
    """For a node that holds nothing, whatever its state. It must not vote any more when the
    command is applied. Raises OperationError."""
    info = node_of(metadata, node)
    held = partitions_held(metadata, node)
    if held:
        raise OperationError(
            f"{node} is {info.state} and still holds {held} partitions: drain it first, and wait "
            "until it holds none"
        )
    if info.role == DATA and info.state == NodePhase.UP:
        raise OperationError(f"{node} is up and would be given partitions again: drain it first")
    return RemoveNode(node, info.version)


def rebalance(metadata: ClusterMetadata) -> Command | None:
    """Gives every partition to its preferred leader, where that is up and in sync, at once. None:
    they lead already."""
    up = {node for node, info in metadata.nodes.items() if info.state == NodePhase.UP}
    changes = tuple(
        (number, info.version, led_by(info, info.replicas[0]))
        for number, info in enumerate(metadata.partitions)
        if is_led_by_another(info) and info.replicas[0] in up
    )
    return ChangePartitions(changes) if changes else None


def lost_partitions(metadata: ClusterMetadata, replaced: Collection[str] = ()) -> list[int]:
    """The disks of all who were in sync are gone: only `unsafe_recover` brings them back, and the
    records that nobody else had are lost. `replaced`: nodes that are here with another disk, and
    were not admitted, because the one before was the last in sync."""
    gone = [number for number, info in enumerate(metadata.partitions) if not info.in_sync]
    return sorted((*gone, *last_copies(metadata, replaced)))


def empty_disk_text(node: str, partitions: list[int]) -> str:
    """To who starts a node without the disk that it had."""
    named = ", ".join(map(str, partitions[:3])) + ", ..." * (len(partitions) > 3)
    # A text of the handshake has 256 characters at most.
    return (
        f"{node} has another data directory than the last one in sync for {len(partitions)}"
        f" partitions ({named}): start it with that one, or give that one up: holdfast cluster"
        " unsafe-recover NODE --accept-loss"
    )


def unsafe_recover(
    metadata: ClusterMetadata,
    node: str,
    partitions: Iterable[int] | None = None,
    replaced: Collection[str] = (),
) -> Command:
    """Makes the node lead partitions with what it has, whatever others had: acknowledged records
    may be lost. By default all without a leader that it is a replica of, or that are lost. A node
    that is one of `replaced` (see lost_partitions) only gives up the disk that it had, and is let
    in with the new one. Raises OperationError."""
    info = node_of(metadata, node)
    if node in replaced:
        given_up = last_copies(metadata, (node,))
        return ChangePartitions(
            tuple(
                (number, one.version, replace(one, leader="", in_sync=()))
                for number in given_up
                for one in (metadata.partitions[number],)
            ),
            accept_loss=True,
        )
    if info.role != DATA or info.state == NodePhase.DOWN:
        raise OperationError(f"{node} is a {info.role} node and {info.state}: it cannot lead")
    if partitions is None:
        lost = set(lost_partitions(metadata, replaced))
        chosen = [
            number
            for number, partition in enumerate(metadata.partitions)
            if not partition.leader and (node in partition.members or number in lost)
        ]
    else:
        chosen = sorted(set(partitions))
    changes = []
    for number in chosen:
        if not 0 <= number < len(metadata.partitions):
            raise OperationError(f"there is no partition {number}")
        partition = metadata.partitions[number]
        if partition.leader:
            raise OperationError(
                f"partition {number} is led by {partition.leader}: nothing is to be recovered"
            )
        adding = tuple(name for name in partition.adding if name != node)
        replicas = partition.replicas
        if node not in replicas:
            replicas = (*replicas, node)
        made = replace(partition, replicas=replicas, adding=adding, in_sync=(node,))
        changes.append((number, partition.version, led_by(made, node)))
    if not changes:
        raise OperationError(f"{node} holds no partition that has no leader")
    return ChangePartitions(tuple(changes), accept_loss=True)
