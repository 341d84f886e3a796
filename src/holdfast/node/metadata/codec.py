"""Commands and metadata as JSON arrays. The types of the model have the range of every field;
`commands.apply` decides whether a command is allowed.
"""

from collections.abc import Iterable
from typing import Annotated, Final, TypeVar

from msgspec import Meta, Struct, json
from msgspec.structs import replace

from holdfast.node.frame_kinds import BadFrame, decode_json
from holdfast.node.metadata.commands import ChangePartitions, Command, GiveUpRecords
from holdfast.node.metadata.model import (
    NODES_MAX,
    PARTITIONS_MAX,
    REMOVED_MAX,
    AgreedGeneration,
    AgreedPlacement,
    AgreedReplication,
    AgreedUsers,
    ClusterMetadata,
    Names,
    NodeInfo,
    PartitionInfo,
    ReplicaCount,
    Text,
    Version,
)


class _Snapshot(Struct, array_like=True, forbid_unknown_fields=True):
    """The metadata, with its nodes as a list."""

    cluster_id: Text
    replication_factor: ReplicaCount
    min_insync: ReplicaCount
    nodes: Annotated[tuple[NodeInfo, ...], Meta(max_length=NODES_MAX)]
    partitions: Annotated[tuple[PartitionInfo, ...], Meta(max_length=PARTITIONS_MAX)]
    version: Version
    voters: Names
    removed: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=REMOVED_MAX)]


T = TypeVar("T")

_COMMAND: Final[json.Decoder[Command]] = json.Decoder(Command)
_SNAPSHOT: Final = json.Decoder(_Snapshot)
_USERS: Final = json.Decoder(AgreedUsers)
_GENERATION: Final = json.Decoder(AgreedGeneration)
_REPLICATION: Final = json.Decoder(AgreedReplication)
_PLACEMENT: Final = json.Decoder(AgreedPlacement)


def encode_command(command: Command) -> bytes:
    return json.encode(command)


def decode_command(data: bytes) -> Command:
    """The command in an entry.

    Raises `BadFrame` if a field is invalid.
    """
    command = _decode(_COMMAND, data, "a command")
    if isinstance(command, (ChangePartitions, GiveUpRecords)):
        infos = _sharing([info for _, _, info in command.changes])
        changes = [
            (number, version, info)
            for (number, version, _), info in zip(command.changes, infos, strict=True)
        ]
        return replace(command, changes=tuple(changes))
    return command


def encode_metadata(metadata: ClusterMetadata) -> bytes:
    """The metadata as a line of JSON. The users of dynamic security are a second line, those
    of the admin port a third one, the generation of a restored log a fourth one, the wanted
    replication a fifth one, and the placement a sixth one, if there are any: older versions read
    snapshots without them."""
    data = json.encode(
        _Snapshot(
            metadata.cluster_id,
            metadata.replication_factor,
            metadata.min_insync,
            tuple([metadata.nodes[node_id] for node_id in sorted(metadata.nodes)]),
            metadata.partitions,
            metadata.version,
            metadata.voters,
            metadata.removed,
        )
    )
    parts = (
        metadata.users,
        metadata.access,
        metadata.generation,
        metadata.replication,
        metadata.placement,
    )
    lines = [b"" if each is None else json.encode(each) for each in parts]
    return b"\n".join((data, *lines)).rstrip(b"\n")


def decode_metadata(data: bytes) -> ClusterMetadata:
    """The metadata in a snapshot.

    Raises `BadFrame` if a field is invalid.
    """
    data, _, lines = data.partition(b"\n")
    users, _, lines = lines.partition(b"\n")
    access, _, lines = lines.partition(b"\n")
    generation, _, lines = lines.partition(b"\n")
    replication, _, placement = lines.partition(b"\n")
    found = _decode(_SNAPSHOT, data, "metadata")
    return ClusterMetadata(
        found.cluster_id,
        found.replication_factor,
        found.min_insync,
        {info.node_id: info for info in found.nodes},
        _sharing(found.partitions),
        found.version,
        found.voters,
        found.removed,
        _decode(_USERS, users, "users") if users else None,
        _decode(_USERS, access, "users of the admin port") if access else None,
        _decode(_GENERATION, generation, "a generation") if generation else None,
        _decode(_REPLICATION, replication, "a replication") if replication else None,
        _decode(_PLACEMENT, placement, "a placement") if placement else None,
    )


def _decode(decoder: json.Decoder[T], data: bytes, what: str) -> T:
    found = decode_json(decoder, data, what)
    # The decoder gives a row that is too short the defaults of the last fields.
    if len(json.encode(found)) != len(data):
        raise BadFrame(f"{what} in another form than nodes write")
    return found


def _sharing(infos: Iterable[PartitionInfo]) -> tuple[PartitionInfo, ...]:
    """The same entries with one object per list of names, because thousands share a few lists."""
    known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def once(names: tuple[str, ...]) -> tuple[str, ...]:
        return known.setdefault(names, names)

    return tuple(
        [
            PartitionInfo(
                once(info.replicas),
                once(info.adding),
                info.leader,
                info.epoch,
                once(info.in_sync),
                info.version,
            )
            for info in infos
        ]
    )
