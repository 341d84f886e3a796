"""State that the nodes of a cluster agree on: its nodes, per partition the leader and replicas, the
users that clients change at run time, and those of the admin port.

The module has values only. `commands.apply` changes them, on every node in the same order. All
values are immutable, and a changed one shares its unchanged parts.

Every node and partition has the `version` of the metadata that changed it last. It grows with every
change, by any amount, and is never reused, even after a node was removed and added again. So a
change that names the version it has seen cannot overwrite one that it has not seen.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

NODE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
INCARNATION: Final = re.compile(r"[A-Za-z0-9]{1,64}")
EPOCH_MAX: Final = (1 << 32) - 1
PARTITIONS_MAX: Final = 65_536
NODES_MAX: Final = 1024
REPLICAS_MAX: Final = 16
"""The most replicas of one partition, including those being added."""
REPLICATION_FACTOR_MAX: Final = 7
VOTERS_MAX: Final = 5
REMOVED_MAX: Final = 256
"""The number of removed nodes that the metadata remembers."""
USERS_BYTES_MAX: Final = 1 << 20
"""The most bytes of the users. Each change of them is one entry of the log, with all of them."""

Text = Annotated[str, Meta(max_length=512, pattern=r"^[\x00-\x7f]*$")]
"""ASCII, so that the length is also the number of bytes."""
Version = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
PartitionNumber = Annotated[int, Meta(ge=0, le=PARTITIONS_MAX)]
ReplicaCount = Annotated[int, Meta(ge=0, le=REPLICAS_MAX)]
Names = Annotated[tuple[Text, ...], Meta(max_length=REPLICAS_MAX)]

DATA: Final = "data"
WITNESS: Final = "witness"
"""The role of a node without data, which votes on the metadata."""
GATEWAY: Final = "gateway"
"""The role of a node that serves clients, stores no partition and never votes."""
ROLES: Final = (DATA, WITNESS, GATEWAY)


class NodePhase:
    """The phases of a node in the metadata. A removed node is absent."""

    UP: Final = "up"
    DOWN: Final = "down"
    DRAINING: Final = "draining"
    """Alive, but it must lead and store nothing."""


AUTOMATIC: Final = ((1, 1), (2, 1), (3, 2))
"""The replication factor and `min_insync` of an automatic cluster by its number of data nodes, or
of their zones, from one on. With two nodes and `min_insync` 2, each would stop the publishes when
it is down."""

STATES: Final = (NodePhase.UP, NodePhase.DOWN, NodePhase.DRAINING)


class NodeInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The entry of one node."""

    node_id: Text
    incarnation: Text
    """The random name made with the data directory. Another name means another, empty disk."""
    peer_address: Text
    """A host:port, like the two addresses below; those may be empty."""
    client_address: Text
    admin_address: Text
    role: Text = DATA
    state: Text = NodePhase.UP
    version: Version = 0
    """Set by `apply`, which ignores the value in a command."""

    @property
    def has_clients(self) -> bool:
        """Whether clients may connect to the node, so that it owns sessions."""
        return self.role != WITNESS


class PartitionInfo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The entry of one partition. The leader is always one of `replicas` and in sync."""

    replicas: Names
    """The replicas in ring order; each may lead if it is in sync."""
    adding: Names = ()
    """Replicas being added. They count for the high watermark once they have reached it, and may
    enter `in_sync`. They may not lead until they are among `replicas`."""
    leader: Text = ""
    """The leader; "" without one, and then nothing can be written."""
    epoch: Annotated[int, Meta(ge=0, le=EPOCH_MAX)] = 0
    in_sync: Names = ()
    """The replicas that have everything below the high watermark. The last ones stay in it when all
    are down, because only they may lead again. Empty: the disks of the last ones were lost."""
    version: Version = 0
    """Set by `apply`, which ignores the value in a command."""

    @property
    def members(self) -> tuple[str, ...]:
        """All replicas, including those being added."""
        return self.replicas + self.adding


class AgreedUsers(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The users of dynamic security, or those of the admin port, as bytes that mean nothing
    here."""

    version: Version
    data: Annotated[bytes, Meta(max_length=USERS_BYTES_MAX)]


Number = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""A generation of the log, or the mark of a restored disk."""


class AgreedGeneration(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The generation of the log, since the cluster was restored."""

    number: Number
    restored: Annotated[tuple[Number, ...], Meta(max_length=NODES_MAX)]
    """The marks of the restored disks that it answers; see `node.metadata.generation`."""


NOT_RESTORED: Final = AgreedGeneration(0, ())


class AgreedReplication(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The replication that the cluster is to have. The controller takes the settings in force there
    step by step."""

    version: Version
    is_automatic: bool
    """Whether both numbers follow the number of data nodes. They are 0 then."""
    replication_factor: ReplicaCount
    min_insync: ReplicaCount


CAPACITY_DEFAULT: Final = 100
"""The capacity of a node that announces none."""


class NodeTraits(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The zone of a node, "" if it has none, and its capacity in proportion to other nodes."""

    node: Text
    zone: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    capacity: Annotated[int, Meta(ge=1, le=10_000)] = CAPACITY_DEFAULT


class AgreedPlacement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The facts that decide where replicas belong, besides the nodes themselves."""

    version: Version
    traits: Annotated[tuple[NodeTraits, ...], Meta(max_length=NODES_MAX)]
    """Those of the nodes that have announced any, by name."""
    is_paused: bool
    """Whether no replica is made or moved until an operator resumes it."""


NOT_PLACED: Final = AgreedPlacement(0, (), False)


class ClusterMetadata(Struct, frozen=True):
    """The agreed state of the cluster at one version."""

    cluster_id: str
    replication_factor: int
    """The setting in force, like `min_insync`. `replication` has the wanted ones."""
    min_insync: int
    nodes: Mapping[str, NodeInfo]
    """The nodes by id; never changed in place."""
    partitions: tuple[PartitionInfo, ...]
    version: int
    """The number of changes; each adds one."""
    voters: tuple[str, ...] = ()
    """The nodes that vote on the metadata, sorted. They follow the membership entries of the Raft
    log."""
    removed: tuple[tuple[str, str], ...] = ()
    """Removed nodes, each with the incarnation that may not come back: the newest REMOVED_MAX of
    them, the oldest first."""
    users: AgreedUsers | None = None
    """None until the first change: each node then has those of its own file."""
    access: AgreedUsers | None = None
    """The users and tokens of the admin port, with hashes for their secrets."""
    generation: AgreedGeneration | None = None
    """None: the log was never restored."""
    replication: AgreedReplication | None = None
    """None: the settings in force are those of the foundation, and wanted."""
    placement: AgreedPlacement | None = None
    """None: no node has a zone or a capacity, and nothing is paused."""

    @property
    def traits(self) -> dict[str, NodeTraits]:
        """The zones and capacities of the nodes that have any."""
        return {each.node: each for each in (self.placement or NOT_PLACED).traits}

    @property
    def is_paused(self) -> bool:
        """Whether no replica is made or moved."""
        return (self.placement or NOT_PLACED).is_paused

    @property
    def has_gateways(self) -> bool:
        """Whether the cluster has gateways, whose entries older versions do not know."""
        return any(info.role == GATEWAY for info in self.nodes.values())

    @property
    def takers(self) -> int:
        """The number of data nodes that may have replicas, also those that are down."""
        return sum(
            info.role == DATA and info.state != NodePhase.DRAINING for info in self.nodes.values()
        )

    @property
    def spread(self) -> int:
        """The number of places that may fail on their own: the zones of the data nodes that may
        have replicas, or these nodes if all are in one zone."""
        traits = self.traits
        zones = {
            traits[node].zone if node in traits and traits[node].zone else f"node {node}"
            for node, info in self.nodes.items()
            if info.role == DATA and info.state != NodePhase.DRAINING
        }
        return len(zones) if len(zones) > 1 else self.takers

    @property
    def wanted_replication(self) -> tuple[int, int]:
        """The replication factor and `min_insync` that the cluster is to have."""
        wanted = self.replication
        if wanted is None:
            return self.replication_factor, self.min_insync
        if wanted.is_automatic:
            return AUTOMATIC[max(1, min(self.spread, len(AUTOMATIC))) - 1]
        return wanted.replication_factor, wanted.min_insync

    def with_voters(self, voters: tuple[str, ...]) -> "ClusterMetadata":
        """The metadata with these voters."""
        if voters == self.voters:
            return self
        return replace(self, voters=voters, version=self.version + 1)
