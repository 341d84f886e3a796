"""Agrees, through the metadata, on a cluster's users of dynamic security and of the admin ports."""

from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.node.cluster_node import ClusterNode
from holdfast.node.context import ClusterContext
from holdfast.node.features import AGREED_ACCESS, AGREED_USERS
from holdfast.node.metadata.commands import Command, PutAccess, PutUsers
from holdfast.node.metadata.model import AgreedUsers
from holdfast.node.metadata.requests import Outcome
from holdfast.security.peer_identity import PeerIdentity


class UserAgreement(Protocol):
    """The agreement of the cluster's nodes on their users."""

    def current(self) -> AgreedUsers | None:
        """The users that are agreed on; None: no node has changed those of its file."""

    def refusal(self) -> str:
        """The reason why the users cannot be changed now, or ""."""

    def propose(self, expected_version: int, data: bytes, done: Callable[[Outcome], None]) -> None:
        """Proposes the users that follow those of a version. `done` is called in bounded time."""


class MetadataAgreement:
    """The agreement by the metadata of the cluster: a `UserAgreement`."""

    def __init__(
        self,
        cluster_node: ClusterNode,
        propose: Callable[[Command, Callable[[Outcome], None]], None],
    ) -> None:
        self._context = cluster_node.context
        self._propose = propose

    def current(self) -> AgreedUsers | None:
        """The users that are agreed on; None: no node has changed those of its file."""
        metadata = self._context.metadata
        return None if metadata is None else metadata.users

    def refusal(self) -> str:
        """The nodes whose version does not know such a change, or ""."""
        return _older(self._context, AGREED_USERS)

    def propose(self, expected_version: int, data: bytes, done: Callable[[Outcome], None]) -> None:
        """Proposes the users that follow those of a version. `done` is called within
        `requests.TIMEOUT_S`."""
        self._propose(PutUsers(expected_version, data), done)


class AccessAgreement:
    """The agreement on the users and tokens of the admin port."""

    def __init__(
        self,
        cluster_node: ClusterNode,
        identity: PeerIdentity,
        join: Sequence[str],
        propose: Callable[[Command, Callable[[Outcome], None]], None],
        now: Callable[[], float],
    ) -> None:
        """`identity`: of this node as the process begins. `join`: the nodes that it is to join."""
        self.was_told_to_join = bool(join) and not identity.cluster_id
        """Whether the process has begun with an empty disk, and with nodes to join."""
        self.is_ready = False
        """Whether this node has followed the leaders of all partitions, so that its metadata are no
        older than its disk."""
        self.on_change: Callable[[], None] = _nothing
        """Called when the metadata may have other users."""
        self._node = cluster_node
        self._context = cluster_node.context
        self._incarnation = identity.incarnation
        self._propose = propose
        self._now = now

    def cluster_id(self) -> str:
        """The cluster of this node, or ""."""
        metadata = self._context.metadata
        return "" if metadata is None else metadata.cluster_id

    def current(self) -> AgreedUsers | None:
        """The agreed users; None: there are none yet, so each node has its own file."""
        metadata = self._context.metadata
        return None if metadata is None else metadata.access

    def is_entered(self) -> bool:
        """Whether the metadata here have this node with its disk. They are then no older than its
        entry into the cluster."""
        metadata = self._context.metadata
        own = None if metadata is None else metadata.nodes.get(self._context.node_id)
        return own is not None and own.incarnation == self._incarnation

    def older_nodes(self) -> str:
        """The nodes whose version does not know such a change, or ""."""
        return _older(self._context, AGREED_ACCESS)

    def has_met_all(self) -> bool:
        """Whether the version of each node is known."""
        metadata = self._context.metadata
        others = () if metadata is None else metadata.nodes
        known = {self._context.node_id, *self._context.features}
        return all(name in known for name in others)

    def refusal(self) -> str:
        """The reason why nothing can be agreed now, or ""."""
        if not self.is_entered():
            return (
                "this node belongs to no cluster yet: initialise it or join it first, or use"
                " `holdfast access` with --data on its machine"
            )
        if not self._node.meta.has_majority(self._now()):
            return "this node reaches no majority of its cluster, so the users stay as they are"
        return ""

    def propose(self, expected_version: int, data: bytes, done: Callable[[Outcome], None]) -> None:
        """Proposes what follows a version. `done` is called within `requests.TIMEOUT_S`."""
        self._propose(PutAccess(expected_version, data), done)


def _older(context: ClusterContext, feature: str) -> str:
    names = ", ".join(context.nodes_without(feature, witnesses=True))
    return f"the version of {names} has no agreed users: upgrade all nodes first" * bool(names)


def _nothing() -> None:
    """Nothing has to follow the metadata."""
