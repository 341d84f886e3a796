"""The agreement of a cluster's nodes on the users of dynamic security: a part of the metadata."""

from collections.abc import Callable

from holdfast.broker.cluster_port import AGREED_USERS
from holdfast.cluster.metadata.commands import Command, PutUsers
from holdfast.cluster.metadata.model import AgreedUsers
from holdfast.cluster.metadata.requests import Outcome
from holdfast.cluster.node import ClusterNode


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
        older = self._context.nodes_without(AGREED_USERS, witnesses=True)
        names = ", ".join(older)
        return f"the version of {names} has no agreed users: upgrade all nodes first" * bool(older)

    def propose(self, expected_version: int, data: bytes, done: Callable[[Outcome], None]) -> None:
        """Propose the users that follow those of a version. `done` is called within
        `requests.TIMEOUT_S`."""
        self._propose(PutUsers(expected_version, data), done)
