"""Effects of the metadata's store, which its caller carries out in order."""

from dataclasses import dataclass

from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.requests import Outcome
from holdfast.node.raft.node import Write


@dataclass(frozen=True)
class Send:
    node_id: str
    kind: int
    payload: bytes


@dataclass(frozen=True)
class Persist:
    """A write for the disk; the driver calls `persisted` when it is done."""

    write: Write


@dataclass(frozen=True)
class MetadataChanged:
    metadata: ClusterMetadata
    changed_partitions: tuple[int, ...]
    """The partitions that changed since the last such effect."""


@dataclass(frozen=True)
class LeaderChanged:
    leader_id: str
    """The leader's node id; "" if it is not known."""
    is_leader: bool
    """True if this node leads."""


@dataclass(frozen=True)
class ProposalDone:
    request: int
    outcome: Outcome


MetaEffect = Send | Persist | MetadataChanged | LeaderChanged | ProposalDone
"""A frame to send, a write, new metadata, a new leader, or the outcome of a request."""
