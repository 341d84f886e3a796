"""Effects of the metadata's store, which its caller carries out in order."""

from msgspec import Struct

from holdfast.node.metadata.model import ClusterMetadata
from holdfast.node.metadata.requests import Outcome
from holdfast.node.raft.node import Write


class Send(Struct, frozen=True):
    node_id: str
    kind: int
    payload: bytes


class Persist(Struct, frozen=True):
    """A write for the disk; the driver calls `persisted` when it is done."""

    write: Write


class MetadataChanged(Struct, frozen=True):
    metadata: ClusterMetadata
    changed_partitions: tuple[int, ...]
    """The partitions that changed since the last such effect."""


class LeaderChanged(Struct, frozen=True):
    leader_id: str
    """The leader's node id; "" if it is not known."""
    is_leader: bool
    """True if this node leads."""


class ProposalDone(Struct, frozen=True):
    request: int
    outcome: Outcome


MetaEffect = Send | Persist | MetadataChanged | LeaderChanged | ProposalDone
"""A frame to send, a write, new metadata, a new leader, or the outcome of a request."""
