"""What the nodes of a cluster agree on: who belongs to it, and who leads and holds each partition.

Values only; `commands.apply` is what changes them, on every node in the same order. Everything is
immutable, and a change shares what it leaves alone.

Every node and partition carries the `version` of the metadata that changed it last. It grows with
every change, by any amount, and never comes again (not even after a node was removed and added
anew), so whoever names the version it has seen cannot overwrite what it has not seen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

NODE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
INCARNATION: Final = re.compile(r"[A-Za-z0-9]{1,64}")
EPOCH_MAX: Final = (1 << 32) - 1
PARTITIONS_MAX: Final = 65_536
NODES_MAX: Final = 1024
REPLICAS_MAX: Final = 16
"""Of one partition, those being added included."""
VOTERS_MAX: Final = 5
REMOVED_MAX: Final = 256

DATA: Final = "data"
WITNESS: Final = "witness"
"""A node without data: it votes on the metadata."""
ROLES: Final = (DATA, WITNESS)


class NodePhase:
    """As the cluster sees it. A node that was removed is absent."""

    UP: Final = "up"
    DOWN: Final = "down"
    DRAINING: Final = "draining"
    """Alive, but it shall lead and hold nothing."""


STATES: Final = (NodePhase.UP, NodePhase.DOWN, NodePhase.DRAINING)


@dataclass(frozen=True)
class NodeInfo:
    node_id: str
    incarnation: str
    """Made with the data directory: another one means that the disk is another, and empty."""
    peer_address: str
    """host:port, as the two below; those may be empty."""
    client_address: str
    admin_address: str
    role: str = DATA
    state: str = NodePhase.UP
    version: int = 0
    """Set by `apply`; what a command carries here is ignored."""


@dataclass(frozen=True)
class PartitionInfo:
    replicas: tuple[str, ...]
    """In ring order; they may lead."""
    adding: tuple[str, ...] = ()
    """Replicas being brought in: they count for the high watermark once they have reached it, may
    enter `in_sync`, and may not lead until they are among `replicas`."""
    leader: str = ""
    """Empty: there is none, and nothing can be written."""
    epoch: int = 0
    in_sync: tuple[str, ...] = ()
    """They have everything below the high watermark. It keeps the last ones when all are gone:
    only they may lead again. Empty: the disks of the last ones were lost."""
    version: int = 0
    """Set by `apply`; what a command carries here is ignored."""

    @property
    def members(self) -> tuple[str, ...]:
        """Everybody who holds it for good or will."""
        return self.replicas + self.adding


@dataclass(frozen=True)
class ClusterMetadata:
    cluster_id: str
    replication_factor: int
    min_insync: int
    nodes: Mapping[str, NodeInfo]
    """By id. Never changed in place."""
    partitions: tuple[PartitionInfo, ...]
    version: int
    """Grows by one with every change."""
    voters: tuple[str, ...] = ()
    """Who votes on the metadata, sorted; they follow the entries of the Raft log that say so."""
    removed: tuple[tuple[str, str], ...] = ()
    """Nodes that were removed, each with its incarnation: with that it does not come back. The
    newest REMOVED_MAX of them, the oldest first."""

    def with_voters(self, voters: tuple[str, ...]) -> "ClusterMetadata":
        if voters == self.voters:
            return self
        return replace(self, voters=voters, version=self.version + 1)
