"""Makes commands for an operator's operations on the cluster, which any node may propose.

Each function checks the request against the metadata. It raises `OperationError` with a sentence
for the operator if the request cannot be met. The controller does the rest.
"""

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from holdfast.node.metadata.commands import (
    ChangePartitions,
    Command,
    GiveUpRecords,
    PutPlacement,
    RemoveNode,
    Resize,
)
from holdfast.node.metadata.model import (
    DATA,
    NOT_PLACED,
    REPLICATION_FACTOR_MAX,
    ClusterMetadata,
    NodeInfo,
    NodePhase,
    PartitionInfo,
)
from holdfast.node.placement.planning import is_led_by_another, last_copies, with_leader


class OperationError(Exception):
    """An operation that cannot be done. The text says why, and what can be done."""


def node_of(metadata: ClusterMetadata, node: str) -> NodeInfo:
    """The entry of the node.

    Raises `OperationError` if there is none.
    """
    info = metadata.nodes.get(node)
    if info is None:
        known = ", ".join(sorted(metadata.nodes))
        raise OperationError(f"there is no node {node} in the cluster; its nodes are {known}")
    return info


def partitions_held(metadata: ClusterMetadata, node: str) -> int:
    """The number of partitions of which the node is a replica."""
    return sum(1 for info in metadata.partitions if node in info.members)


def drain(metadata: ClusterMetadata, node: str) -> Command | None:
    """Takes everything from the node, leaderships first; a dead node is given up. Returns None if
    it is draining already.

    Raises `OperationError` if too few data nodes would remain.
    """
    info = node_of(metadata, node)
    if info.state == NodePhase.DRAINING:
        return None
    remaining = _up_without(metadata, node)
    if info.role == DATA and len(remaining) < metadata.min_insync:
        left = f"only {', '.join(remaining)}" if remaining else "no data node"
        raise OperationError(
            f"without {node} {left} would be left, and min_insync is {metadata.min_insync}: "
            "add a node first"
        )
    return _with_state(info, NodePhase.DRAINING)


def undrain(metadata: ClusterMetadata, node: str) -> Command | None:
    """Gives the node its share again. Returns None if it is not draining.

    Raises `OperationError` if there is no such node.
    """
    info = node_of(metadata, node)
    if info.state != NodePhase.DRAINING:
        return None
    return _with_state(info, NodePhase.UP)


def _with_state(info: NodeInfo, state: str) -> Command:
    return ChangePartitions((), ((info.version, replace(info, state=state)),))


def remove(metadata: ClusterMetadata, node: str) -> Command:
    """Removes a node that stores nothing, whatever its phase. It must not be a voter when the
    command is applied.

    Raises `OperationError` if the node still stores partitions or is up, or if no data node that is
    up would remain. Counter-example: n1 is draining, n2 has died, and without n2 no node may ever
    take a partition.
    """
    info = node_of(metadata, node)
    held = partitions_held(metadata, node)
    if held:
        raise OperationError(
            f"{node} is {info.state} and still holds {held} partitions: drain it first, and wait "
            "until it holds none"
        )
    if info.role == DATA and info.state == NodePhase.UP:
        raise OperationError(f"{node} is up and would be given partitions again: drain it first")
    if info.role == DATA and not _up_without(metadata, node):
        raise OperationError(
            f"without {node} no data node would be up: undrain one, or wait until one is up"
        )
    return RemoveNode(node, info.version)


def _up_without(metadata: ClusterMetadata, node: str) -> list[str]:
    """The other data nodes that are up."""
    return sorted(
        other.node_id
        for other in metadata.nodes.values()
        if other.node_id != node and other.role == DATA and other.state == NodePhase.UP
    )


def rebalance(metadata: ClusterMetadata) -> Command | None:
    """Gives every partition to its preferred leader at once, if that is up and in sync. Returns
    None if all of those lead already."""
    up = {node for node, info in metadata.nodes.items() if info.state == NodePhase.UP}
    changes = tuple(
        (number, info.version, with_leader(info, info.replicas[0]))
        for number, info in enumerate(metadata.partitions)
        if is_led_by_another(info) and info.replicas[0] in up
    )
    return ChangePartitions(changes) if changes else None


def pause(metadata: ClusterMetadata, is_paused: bool) -> Command | None:
    """Makes and moves no replicas, until they are resumed. Returns None if that is so already."""
    placed = metadata.placement or NOT_PLACED
    if placed.is_paused == is_paused:
        return None
    return PutPlacement(placed.version, placed.traits, is_paused)


def resize(
    metadata: ClusterMetadata,
    replication_factor: int = 0,
    min_insync: int = 0,
    *,
    is_automatic: bool = False,
) -> Command | None:
    """Wants another replication factor, another `min_insync`, or both (0: as now), or lets both
    follow the number of data nodes. Returns None if that is wanted already.

    Raises `OperationError` if the cluster cannot have it.
    """
    present = metadata.replication
    version = 0 if present is None else present.version
    if is_automatic:
        if replication_factor or min_insync:
            raise OperationError("auto takes no numbers: both follow the number of data nodes")
        if present is not None and present.is_automatic:
            return None
        return Resize(version, True, 0, 0)
    if not replication_factor and not min_insync:
        raise OperationError("give a replication factor, a min_insync, or auto")
    wanted_factor, wanted_least = metadata.wanted_replication
    factor, least = replication_factor or wanted_factor, min_insync or wanted_least
    if least > factor:
        other = "min_insync" if replication_factor else "replication factor"
        raise OperationError(
            f"min_insync {least} is above the replication factor {factor}: give another {other} too"
        )
    if factor > REPLICATION_FACTOR_MAX:
        raise OperationError(
            f"replication factor {factor}: at most {REPLICATION_FACTOR_MAX} is possible"
        )
    if factor > metadata.takers:
        raise OperationError(
            f"replication factor {factor} needs as many data nodes, and the cluster has"
            f" {metadata.takers} that are not drained: add nodes first"
        )
    is_explicit = present is None or not present.is_automatic
    if is_explicit and (factor, least) == (wanted_factor, wanted_least):
        return None
    return Resize(version, False, factor, least)


def lost_partitions(metadata: ClusterMetadata, replaced: Collection[str] = ()) -> list[int]:
    """The partitions whose in-sync disks are all gone. Only `unsafe_recover` restores their
    service, and records that no other node had are lost. `replaced` are nodes that returned with
    another disk. They are not admitted, because their old disk was the last in sync."""
    gone = [number for number, info in enumerate(metadata.partitions) if not info.in_sync]
    return sorted((*gone, *last_copies(metadata, replaced)))


def empty_disk_text(node: str, partitions: list[int]) -> str:
    """The text for an operator who starts a node without the disk that it had."""
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
    generation: int = 0,
) -> Command:
    """Makes the node lead partitions with the records it has; acknowledged records of other nodes
    may be lost. By default it takes the leaderless partitions of which it is a replica, and all
    lost ones. A node among `replaced` (see lost_partitions) only gives up its old disk, and is
    admitted with the new one. `generation`: the new one of the log, or 0 if a node is of a version
    that does not agree on it with this command.

    Raises `OperationError` if the node cannot lead, or a partition has a leader.
    """
    info = node_of(metadata, node)
    if node in replaced:
        given_up = last_copies(metadata, (node,))
        return _give_up(
            [
                (number, one.version, replace(one, leader="", in_sync=()))
                for number in given_up
                for one in (metadata.partitions[number],)
            ],
            generation,
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
        changes.append((number, partition.version, with_leader(made, node)))
    if not changes:
        raise OperationError(f"{node} holds no partition that has no leader")
    return _give_up(changes, generation)


def _give_up(changes: list[tuple[int, int, PartitionInfo]], generation: int) -> Command:
    if generation:
        return GiveUpRecords(tuple(changes), generation)
    return ChangePartitions(tuple(changes), accept_loss=True)
