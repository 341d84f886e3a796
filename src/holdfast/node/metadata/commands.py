"""Changes of the cluster metadata, and the one function that makes them.

Every change names the version it was decided on, and is refused if another change came first
(compare-and-set). `apply` refuses the following from every sender, however late the command
arrives:

- a leader that is not in sync, or still being added;
- an epoch that falls; a new leader without a higher epoch;
- a new leader that was not in sync before (it might lack committed records);
- a replica added to the in-sync set by a node other than the leader under its epoch: only the
  leader knows which are in sync;
- an in-sync set that loses its last replica, unless that one's disk is gone;
- a node with a new incarnation (an empty disk) that stays in an in-sync set;
- a node that was removed, with the disk it had then;
- a `min_insync` above the replicas in sync of a partition.

An operator who gives up records sets `accept_loss`, which lifts the third, fourth and fifth, or
sends `GiveUpRecords`, which does the same.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.node.metadata.model import (
    DATA,
    EPOCH_MAX,
    INCARNATION,
    NODE_ID,
    NODES_MAX,
    NOT_PLACED,
    NOT_RESTORED,
    PARTITIONS_MAX,
    REMOVED_MAX,
    REPLICAS_MAX,
    ROLES,
    STATES,
    USERS_BYTES_MAX,
    AgreedGeneration,
    AgreedPlacement,
    AgreedReplication,
    AgreedUsers,
    ClusterMetadata,
    NodeInfo,
    NodeTraits,
    Number,
    PartitionInfo,
    PartitionNumber,
    ReplicaCount,
    Text,
    Version,
)

PartitionChanges = Annotated[
    tuple[tuple[PartitionNumber, Version, PartitionInfo], ...], Meta(max_length=PARTITIONS_MAX)
]
"""(partition, expected version, its new entry)"""
CHANGES_NOTHING: Final = "the command changes nothing"
"""The reason for which `apply` refuses an empty command."""


class _Command(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A JSON array: the name of the command, then its fields."""


class InitCluster(_Command, frozen=True, tag="init"):
    """The first entry of a new cluster: `node` stores and leads every partition."""

    cluster_id: Text
    partitions: PartitionNumber
    replication_factor: ReplicaCount
    min_insync: ReplicaCount
    node: NodeInfo


class PutNode(_Command, frozen=True, tag="put"):
    """A node to add or to change. With `expected_version` 0 it must not exist yet."""

    info: NodeInfo
    expected_version: Version


class RemoveNode(_Command, frozen=True, tag="remove"):
    """A node to remove. It must store nothing and not be a voter."""

    node_id: Text
    expected_version: Version


class ChangePartitions(_Command, frozen=True, tag="change"):
    """Changes of partitions and nodes, applied completely or not at all."""

    changes: PartitionChanges
    nodes: Annotated[tuple[tuple[Version, NodeInfo], ...], Meta(max_length=NODES_MAX)] = ()
    """(expected version, its new entry) of existing nodes."""
    accept_loss: bool = False
    """An operator's decision to give up records that no node has any more."""


class GiveUpRecords(_Command, frozen=True, tag="give_up"):
    """`ChangePartitions` with `accept_loss`, and the new generation of the log: offsets of records
    that are given up are assigned again. Older versions do not know it."""

    changes: PartitionChanges
    number: Number


class PutUsers(_Command, frozen=True, tag="users"):
    """The users of dynamic security, made from those of `expected_version`; 0: from a file."""

    expected_version: Version
    data: Annotated[bytes, Meta(max_length=USERS_BYTES_MAX)]


class PutAccess(_Command, frozen=True, tag="access"):
    """The users and tokens of the admin port, made from those of `expected_version`; 0: the
    first."""

    expected_version: Version
    data: Annotated[bytes, Meta(max_length=USERS_BYTES_MAX)]


class PutGeneration(_Command, frozen=True, tag="generation"):
    """A new generation of the log, after the cluster was restored."""

    expected: Number
    """The generation that it follows."""
    number: Number
    restored: Annotated[tuple[Number, ...], Meta(max_length=NODES_MAX)]
    """The marks of the restored disks that it answers."""


class Resize(_Command, frozen=True, tag="resize"):
    """The replication that an operator wants. Older versions do not know it."""

    expected_version: Version
    """The version of the present `AgreedReplication`; 0: there is none."""
    is_automatic: bool
    replication_factor: ReplicaCount
    min_insync: ReplicaCount


class SetReplication(_Command, frozen=True, tag="replication"):
    """A step of the settings in force, (replication factor, min_insync), towards the wanted
    ones."""

    expected: tuple[ReplicaCount, ReplicaCount]
    settings: tuple[ReplicaCount, ReplicaCount]


class PutPlacement(_Command, frozen=True, tag="placement"):
    """The zones and capacities of nodes, and whether replicas are moved. Older versions do not know
    it."""

    expected_version: Version
    """The version of the present `AgreedPlacement`; 0: there is none."""
    traits: Annotated[tuple[NodeTraits, ...], Meta(max_length=NODES_MAX)]
    is_paused: bool


Change = ChangePartitions | GiveUpRecords
Command = (
    InitCluster
    | PutNode
    | RemoveNode
    | Change
    | PutUsers
    | PutAccess
    | PutGeneration
    | Resize
    | SetReplication
    | PutPlacement
)


class Applied(Struct, frozen=True):
    """The result of a command."""

    metadata: ClusterMetadata | None
    """The new metadata; the old one after an error. None only before InitCluster."""
    changed_partitions: tuple[int, ...] = ()
    """The partitions with a new version, ascending."""
    error: str = ""


class _Refusal(Exception):
    """A refusal inside this module; its text becomes Applied.error."""


def apply(metadata: ClusterMetadata | None, command: Command) -> Applied:
    """Applies a command. The function is pure and never raises, so every node gets the same
    result."""
    try:
        if isinstance(command, InitCluster):
            return _init_cluster(metadata, command)
        if metadata is None:
            raise _Refusal("the cluster is not initialised")
        if isinstance(command, PutNode):
            return _put_node(metadata, command)
        if isinstance(command, RemoveNode):
            return _remove_node(metadata, command)
        if isinstance(command, PutUsers):
            users = _successor(metadata, metadata.users, command)
            return Applied(replace(metadata, users=users, version=users.version))
        if isinstance(command, PutGeneration):
            return _put_generation(metadata, command)
        if isinstance(command, PutAccess):
            users = _successor(metadata, metadata.access, command)
            return Applied(replace(metadata, access=users, version=users.version))
        if isinstance(command, GiveUpRecords):
            return _give_up(metadata, command)
        if isinstance(command, Resize):
            return _resize(metadata, command)
        if isinstance(command, SetReplication):
            return _set_replication(metadata, command)
        if isinstance(command, PutPlacement):
            return _put_placement(metadata, command)
        return _change_partitions(metadata, command)
    except _Refusal as error:
        return Applied(metadata, (), str(error))


def _put_generation(metadata: ClusterMetadata, command: PutGeneration) -> Applied:
    present = NOT_RESTORED if metadata.generation is None else metadata.generation
    _require(
        present.number == command.expected,
        f"the log has generation {present.number}, not {command.expected}",
    )
    generation = AgreedGeneration(command.number, command.restored)
    return Applied(replace(metadata, generation=generation, version=metadata.version + 1))


def _give_up(metadata: ClusterMetadata, command: GiveUpRecords) -> Applied:
    _require(bool(command.changes), CHANGES_NOTHING)
    present = metadata.generation or NOT_RESTORED
    begun = replace(metadata, generation=AgreedGeneration(command.number, present.restored))
    return _change(begun, command.changes, (), accept_loss=True)


def _resize(metadata: ClusterMetadata, command: Resize) -> Applied:
    present = 0 if metadata.replication is None else metadata.replication.version
    _require(
        present == command.expected_version,
        f"the wanted replication is at version {present}, not {command.expected_version}",
    )
    factor, least = command.replication_factor, command.min_insync
    if command.is_automatic:
        factor = least = 0
    else:
        _check_replication(factor, least)
        _require(
            factor <= metadata.takers,
            f"replication factor {factor} needs as many data nodes, and the cluster has"
            f" {metadata.takers} that are not drained",
        )
    version = metadata.version + 1
    wanted = AgreedReplication(version, command.is_automatic, factor, least)
    return Applied(replace(metadata, replication=wanted, version=version))


def _set_replication(metadata: ClusterMetadata, command: SetReplication) -> Applied:
    """A `min_insync` that rises must be met everywhere, or publishes that are accepted now would be
    refused. A lower one needs no check: a commit waits for every replica in sync, however few must
    be."""
    present = (metadata.replication_factor, metadata.min_insync)
    _require(present == command.expected, f"the replication is {present}, not {command.expected}")
    factor, least = command.settings
    _check_replication(factor, least)
    if least > metadata.min_insync:
        short = sum(len(info.in_sync) < least for info in metadata.partitions)
        _require(short == 0, f"{short} partitions have fewer than {least} replicas in sync")
    return Applied(
        replace(metadata, replication_factor=factor, min_insync=least, version=metadata.version + 1)
    )


def _put_placement(metadata: ClusterMetadata, command: PutPlacement) -> Applied:
    present = (metadata.placement or NOT_PLACED).version
    _require(
        present == command.expected_version,
        f"the placement is at version {present}, not {command.expected_version}",
    )
    names = [each.node for each in command.traits]
    _require(len(set(names)) == len(names), "a node is named twice")
    for name in names:
        _require(name in metadata.nodes, f"there is no node {name}")
    version = metadata.version + 1
    placement = AgreedPlacement(version, command.traits, command.is_paused)
    return Applied(replace(metadata, placement=placement, version=version))


def _check_replication(factor: int, least: int) -> None:
    _require(
        0 < factor <= REPLICAS_MAX, f"replication factor {factor}: 1 to {REPLICAS_MAX} are possible"
    )
    _require(
        0 < least <= factor,
        f"min_insync {least}: 1 to the replication factor, {factor}, are possible",
    )


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise _Refusal(text)


def _init_cluster(metadata: ClusterMetadata | None, command: InitCluster) -> Applied:
    if metadata is not None:
        raise _Refusal(f"the cluster is initialised already, with id {metadata.cluster_id}")
    _require(command.cluster_id != "", "the cluster id is empty")
    count = command.partitions
    _require(0 < count <= PARTITIONS_MAX, f"{count} partitions: 1 to {PARTITIONS_MAX} are possible")
    _check_replication(command.replication_factor, command.min_insync)
    node = replace(command.node, version=1)
    _check_node(node)
    _require(node.role == DATA, "the first node of a cluster must hold data")
    only = (node.node_id,)
    partition = PartitionInfo(only, (), node.node_id, 1, only, 1)
    made = ClusterMetadata(
        command.cluster_id,
        command.replication_factor,
        command.min_insync,
        {node.node_id: node},
        (partition,) * count,
        1,
    )
    return Applied(made, tuple(range(count)))


def _put_node(metadata: ClusterMetadata, command: PutNode) -> Applied:
    old = metadata.nodes.get(command.info.node_id)
    if old is not None or command.expected_version:
        return _change(metadata, (), ((command.expected_version, command.info),), False)
    _require(
        len(metadata.nodes) < NODES_MAX, f"a cluster has at most {NODES_MAX} nodes, it has them"
    )
    _check_node(command.info)
    _check_not_removed(metadata, command.info)
    version = metadata.version + 1
    nodes = dict(metadata.nodes)
    nodes[command.info.node_id] = replace(command.info, version=version)
    return Applied(replace(metadata, nodes=nodes, version=version))


def _remove_node(metadata: ClusterMetadata, command: RemoveNode) -> Applied:
    node_id = command.node_id
    node = _expect_node(metadata.nodes, node_id, command.expected_version)
    _require(node_id not in metadata.voters, f"{node_id} still votes on the metadata")
    held = sum(1 for partition in metadata.partitions if node_id in partition.members)
    _require(held == 0, f"{node_id} still holds {held} partitions")
    nodes = {name: info for name, info in metadata.nodes.items() if name != node_id}
    removed = (*metadata.removed, (node_id, node.incarnation))[-REMOVED_MAX:]
    made = replace(metadata, nodes=nodes, removed=removed, version=metadata.version + 1)
    return Applied(made)


def _successor(
    metadata: ClusterMetadata, users: AgreedUsers | None, command: PutUsers | PutAccess
) -> AgreedUsers:
    present = 0 if users is None else users.version
    expected = command.expected_version
    _require(present == expected, f"the users are at version {present}, not {expected}")
    return AgreedUsers(metadata.version + 1, command.data)


def _change_partitions(metadata: ClusterMetadata, command: ChangePartitions) -> Applied:
    _require(bool(command.changes or command.nodes), CHANGES_NOTHING)
    return _change(metadata, command.changes, command.nodes, command.accept_loss)


def _change(
    metadata: ClusterMetadata,
    changes: tuple[tuple[int, int, PartitionInfo], ...],
    node_changes: tuple[tuple[int, NodeInfo], ...],
    accept_loss: bool,
) -> Applied:
    version = metadata.version + 1
    nodes = metadata.nodes
    wiped: set[str] = set()
    if node_changes:
        for _, info in node_changes:
            _check_not_removed(metadata, info)
        nodes, wiped = _changed_nodes(metadata.nodes, node_changes, version)
    partitions = list(metadata.partitions)
    changed: set[int] = set()
    checked: set[tuple[str, ...]] = set()
    for number, expected, new in changes:
        if not 0 <= number < len(partitions):
            raise _Refusal(f"there is no partition {number}, the last one is {len(partitions) - 1}")
        if number in changed:
            raise _Refusal(f"partition {number} is changed twice")
        old = partitions[number]
        if old.version != expected:
            raise _Refusal(f"partition {number} is at version {old.version}, not {expected}")
        try:
            # Many partitions have the same replicas, so each combination is checked once.
            if new.members not in checked:
                _check_members(new, nodes)
                checked.add(new.members)
            _check_subset(new)
            _check_leader(old, new)
            if not accept_loss:
                _check_in_sync(old, new, wiped)
        except _Refusal as error:
            raise _Refusal(f"partition {number}: {error}") from None
        partitions[number] = PartitionInfo(
            new.replicas, new.adding, new.leader, new.epoch, new.in_sync, version
        )
        changed.add(number)
    if wiped:
        changed.update(_after_wipe(partitions, wiped, version))
    made = replace(metadata, nodes=nodes, partitions=tuple(partitions), version=version)
    return Applied(made, tuple(sorted(changed)))


def _expect_node(nodes: Mapping[str, NodeInfo], node_id: str, expected: int) -> NodeInfo:
    node = nodes.get(node_id)
    if node is None:
        raise _Refusal(f"there is no node {node_id}")
    if node.version != expected:
        raise _Refusal(f"node {node_id} is at version {node.version}, not {expected}")
    return node


def _changed_nodes(
    nodes: Mapping[str, NodeInfo], changes: tuple[tuple[int, NodeInfo], ...], version: int
) -> tuple[Mapping[str, NodeInfo], set[str]]:
    """The nodes after the changes, and the changed nodes with a new incarnation."""
    made = dict(nodes)
    wiped = set()
    seen = set()
    for expected, info in changes:
        node_id = info.node_id
        _require(node_id not in seen, f"node {node_id} is changed twice")
        seen.add(node_id)
        old = _expect_node(nodes, node_id, expected)
        _check_node(info)
        _require(
            info.role == old.role,
            f"{node_id} is a {old.role} node: remove it and join it again to change its role",
        )
        if info.incarnation != old.incarnation:
            wiped.add(node_id)
        made[node_id] = replace(info, version=version)
    return made, wiped


def _check_node(info: NodeInfo) -> None:
    _require(
        NODE_ID.fullmatch(info.node_id) is not None,
        f"node id {info.node_id!r}: 1 to 32 letters, digits, - and _ are possible",
    )
    _require(
        INCARNATION.fullmatch(info.incarnation) is not None,
        f"node {info.node_id}: incarnation {info.incarnation!r:.100} is not 1 to 64 letters and "
        "digits",
    )
    _require(info.role in ROLES, f"node {info.node_id}: unknown role {info.role!r}")
    _require(info.state in STATES, f"node {info.node_id}: unknown state {info.state!r}")


def _check_not_removed(metadata: ClusterMetadata, info: NodeInfo) -> None:
    _require(
        (info.node_id, info.incarnation) not in metadata.removed,
        f"{info.node_id} was removed: it may join again with an empty data directory",
    )


def _check_members(new: PartitionInfo, nodes: Mapping[str, NodeInfo]) -> None:
    members = new.members
    _require(len(members) <= REPLICAS_MAX, f"more than {REPLICAS_MAX} replicas")
    _require(len(set(members)) == len(members), "a node is named twice among the replicas")
    for node_id in members:
        node = nodes.get(node_id)
        if node is None:
            raise _Refusal(f"replica {node_id} is no node of the cluster")
        _require(node.role == DATA, f"replica {node_id} is a {node.role} node")


def _check_subset(new: PartitionInfo) -> None:
    if not new.replicas:
        raise _Refusal("no replicas")
    in_sync = set(new.in_sync)
    if not in_sync.issubset(new.members) or len(in_sync) != len(new.in_sync):
        raise _Refusal("a node in sync is no replica, or is named twice")


def _check_leader(old: PartitionInfo, new: PartitionInfo) -> None:
    if not old.epoch <= new.epoch <= EPOCH_MAX:
        raise _Refusal(f"the epoch cannot become {new.epoch}")
    leader = new.leader
    if not leader:
        return
    if leader not in new.in_sync:
        raise _Refusal(f"leader {leader} is not in sync")
    if leader not in new.replicas:
        raise _Refusal(f"leader {leader} is still being added")
    if leader != old.leader and new.epoch == old.epoch:
        raise _Refusal(f"a new leader needs an epoch above {old.epoch}")


def _check_in_sync(old: PartitionInfo, new: PartitionInfo, wiped: set[str]) -> None:
    grown = set(new.in_sync).difference(old.in_sync)
    if grown and not (new.leader == old.leader != "" and new.epoch == old.epoch):
        raise _Refusal(f"only the leader under its epoch can say that {min(grown)} is in sync")
    if not new.in_sync and not wiped.issuperset(old.in_sync):
        raise _Refusal(f"{', '.join(old.in_sync)} may have records that no other node has")


def _after_wipe(partitions: list[PartitionInfo], wiped: set[str], version: int) -> list[int]:
    """Gives each partition of the wiped nodes a new version, in place, and returns those
    partitions. A proposal of their leaders may rest on the progress of the old disk. Smallest
    counter-example: A has proposed B as in sync, B returns with an empty disk, and the proposal
    arrives after that."""
    touched = []
    for number, partition in enumerate(partitions):
        if wiped.isdisjoint(partition.members):
            continue
        stale = wiped.intersection(partition.in_sync)
        if stale:
            raise _Refusal(
                f"{min(stale)} has a new disk and must leave the in-sync set of partition {number}"
            )
        if partition.version != version:
            partitions[number] = replace(partition, version=version)
            touched.append(number)
    return touched
