"""Commands and metadata as JSON. The decoder checks the type and range of every field;
`commands.apply` decides whether a command is allowed.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from holdfast.cluster.frame_kinds import BadFrame
from holdfast.cluster.metadata.commands import (
    ChangePartitions,
    Command,
    InitCluster,
    PutNode,
    RemoveNode,
)
from holdfast.cluster.metadata.model import (
    EPOCH_MAX,
    NODES_MAX,
    PARTITIONS_MAX,
    REMOVED_MAX,
    REPLICAS_MAX,
    ClusterMetadata,
    NodeInfo,
    PartitionInfo,
)

TEXT_MAX: Final = 512
VERSION_MAX: Final = (1 << 63) - 1

T = TypeVar("T")


def encode_command(command: Command) -> bytes:
    content: list[object]
    if isinstance(command, InitCluster):
        content = [
            "init",
            command.cluster_id,
            command.partitions,
            command.replication_factor,
            command.min_insync,
            _node_row(command.node),
        ]
    elif isinstance(command, PutNode):
        content = ["put", _node_row(command.info), command.expected_version]
    elif isinstance(command, RemoveNode):
        content = ["remove", command.node_id, command.expected_version]
    else:
        content = [
            "change",
            [[number, version, _partition_row(info)] for number, version, info in command.changes],
            [[version, _node_row(info)] for version, info in command.nodes],
            command.accept_loss,
        ]
    return _dump(content)


def decode_command(data: bytes) -> Command:
    """The command in an entry.

    Raises `BadFrame` if a field is invalid.
    """
    content = _load(data, "command")
    name, *fields = _list(content, "command", 16) or [""]
    if name == "init":
        cluster_id, partitions, factor, min_insync, node = _row(fields, "init", 5)
        return InitCluster(
            _text(cluster_id, "cluster id"),
            _number(partitions, "partitions", PARTITIONS_MAX),
            _number(factor, "replication factor", REPLICAS_MAX),
            _number(min_insync, "min_insync", REPLICAS_MAX),
            _node(node),
        )
    if name == "put":
        node, version = _row(fields, "put", 2)
        return PutNode(_node(node), _version(version))
    if name == "remove":
        node_id, version = _row(fields, "remove", 2)
        return RemoveNode(_text(node_id, "node id"), _version(version))
    if name == "change":
        changes, nodes, accept_loss = _row(fields, "change", 3)
        names = _NameLists()
        if not isinstance(accept_loss, bool):
            raise BadFrame("accept_loss is neither true nor false")
        return ChangePartitions(
            _each(changes, "changes", PARTITIONS_MAX, partial(_partition_change, names)),
            _each(nodes, "nodes", NODES_MAX, _node_change),
            accept_loss,
        )
    raise BadFrame(f"an unknown command {name!r:.100}")


def _partition_change(names: "_NameLists", content: object) -> tuple[int, int, PartitionInfo]:
    number, version, info = _row(content, "change of a partition", 3)
    return (
        _number(number, "partition", PARTITIONS_MAX),
        _number(version, "version", VERSION_MAX),
        _partition(names, info),
    )


def _node_change(content: object) -> tuple[int, NodeInfo]:
    version, info = _row(content, "change of a node", 2)
    return _version(version), _node(info)


def encode_metadata(metadata: ClusterMetadata) -> bytes:
    return _dump(
        [
            metadata.cluster_id,
            metadata.replication_factor,
            metadata.min_insync,
            [_node_row(metadata.nodes[node_id]) for node_id in sorted(metadata.nodes)],
            [_partition_row(partition) for partition in metadata.partitions],
            metadata.version,
            metadata.voters,
            metadata.removed,
        ]
    )


def decode_metadata(data: bytes) -> ClusterMetadata:
    """The metadata in a snapshot.

    Raises `BadFrame` if a field is invalid.
    """
    row = _row(_load(data, "metadata"), "metadata", 8)
    cluster_id, factor, min_insync, nodes, partitions, version, voters, removed = row
    infos = _each(nodes, "nodes", NODES_MAX, _node)
    return ClusterMetadata(
        _text(cluster_id, "cluster id"),
        _number(factor, "replication factor", REPLICAS_MAX),
        _number(min_insync, "min_insync", REPLICAS_MAX),
        {info.node_id: info for info in infos},
        _each(partitions, "partitions", PARTITIONS_MAX, partial(_partition, _NameLists())),
        _version(version),
        _NameLists().decode(voters, "voters"),
        _each(removed, "removed nodes", REMOVED_MAX, _removed),
    )


def _removed(content: object) -> tuple[str, str]:
    node_id, incarnation = _row(content, "removed node", 2)
    return _text(node_id, "node id"), _text(incarnation, "incarnation")


def _node_row(info: NodeInfo) -> list[object]:
    return [
        info.node_id,
        info.incarnation,
        info.peer_address,
        info.client_address,
        info.admin_address,
        info.role,
        info.state,
        info.version,
    ]


def _node(content: object) -> NodeInfo:
    *texts, version = _row(content, "node", 8)
    node_id, incarnation, peer, client, admin, role, state = [
        _text(text, "field of a node") for text in texts
    ]
    return NodeInfo(node_id, incarnation, peer, client, admin, role, state, _version(version))


def _partition_row(info: PartitionInfo) -> list[object]:
    return [info.replicas, info.adding, info.leader, info.epoch, info.in_sync, info.version]


def _partition(names: "_NameLists", content: object) -> PartitionInfo:
    replicas, adding, leader, epoch, in_sync, version = _row(content, "partition", 6)
    return PartitionInfo(
        names.decode(replicas, "replicas"),
        names.decode(adding, "adding"),
        _text(leader, "leader"),
        _number(epoch, "epoch", EPOCH_MAX),
        names.decode(in_sync, "in-sync set"),
        _number(version, "version", VERSION_MAX),
    )


class _NameLists:
    """The decoded lists of names. Thousands of partitions share a few lists, so each is checked and
    kept once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def decode(self, content: object, what: str) -> tuple[str, ...]:
        names = tuple(_list(content, what, REPLICAS_MAX))
        try:
            known = self._known.get(names)  # type: ignore[arg-type]
        except TypeError:
            raise BadFrame(f"{what}: not a list of names") from None
        if known is None:
            known = tuple([_text(name, what) for name in names])
            self._known[known] = known
        return known


def _dump(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _load(data: bytes, what: str) -> object:
    try:
        content: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a {what} that is no JSON: {error}") from None
    return content


def _list(content: object, what: str, length_max: int) -> list[object]:
    if not isinstance(content, list) or len(content) > length_max:
        raise BadFrame(f"{what}: not a list of at most {length_max}")
    return content


def _row(content: object, what: str, length: int) -> list[object]:
    if not isinstance(content, list) or len(content) != length:
        raise BadFrame(f"{what}: not a list of {length}")
    return content


def _each(
    content: object, what: str, length_max: int, decode: Callable[[object], T]
) -> tuple[T, ...]:
    return tuple([decode(item) for item in _list(content, what, length_max)])


def _text(content: object, what: str) -> str:
    if not isinstance(content, str) or len(content) > TEXT_MAX or not content.isascii():
        raise BadFrame(f"{what}: not an ASCII text of at most {TEXT_MAX} characters")
    return content


def _number(content: object, what: str, number_max: int) -> int:
    if type(content) is not int or not 0 <= content <= number_max:
        raise BadFrame(f"{what}: {content!r:.100} is no number from 0 to {number_max}")
    return content


def _version(content: object) -> int:
    return _number(content, "version", VERSION_MAX)
