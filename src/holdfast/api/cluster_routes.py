"""Routes of the admin port for cluster operations.

- `GET /cluster`: this node's view of the cluster, see `ClusterOperations.status`.
- `POST /cluster/init`, `/cluster/rebalance`, `/cluster/pause`, `/cluster/resume`,
  `/cluster/resize` (see `REPLICATION`), and with `?node=N` `/cluster/drain`, `/cluster/undrain`,
  `/cluster/remove`, `/cluster/unsafe-recover`. Every node accepts them, whichever node leads the
  metadata.

`/cluster/unsafe-recover` also needs `accept_loss=true`. The response is 503 on a standby, and
409 with `{"error": text}` for a refusal.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from holdfast.api.cluster_operations import ClusterError, ClusterOperations, Make, planned
from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Flag, Text, Whole, bad_request
from holdfast.api.nodes.own_node import cluster_of
from holdfast.api.process import ServedProcess
from holdfast.node.metadata import operations
from holdfast.node.metadata.model import REPLICATION_FACTOR_MAX
from holdfast.security.access.scopes import Scope

OF_NODE: Final[Mapping[str, Callable[[ClusterOperations, str], Awaitable[object]]]] = {
    "drain": lambda cluster, node: cluster.change(planned("drain", node)),
    "undrain": lambda cluster, node: cluster.change(planned("undrain", node)),
    "remove": lambda cluster, node: cluster.remove(node),
    "unsafe-recover": lambda cluster, node: cluster.unsafe_recover(node),
}
"""The operations on a node, by the last part of their path."""
UNSAFE: Final = "unsafe-recover"
NODE: Final = Text("node", "the id of the node", required=True)
ACCEPT_LOSS: Final = Flag("accept_loss", "acknowledged messages may be lost", default=False)
SUMMARIES: Final = {
    "drain": "move the leaderships and replicas away from a node",
    "undrain": "let a node have leaderships and replicas again",
    "remove": "remove a node for good",
    "unsafe-recover": "make a node leader of leaderless partitions, with loss of messages",
}
OF_CLUSTER: Final = {
    "rebalance": "give every partition its preferred leader",
    "pause": "make and move no replicas until `resume`",
    "resume": "make and move replicas again",
}


REPLICATION_FACTOR: Final = Whole(
    "replication_factor", "the replicas of each partition", least=1, most=REPLICATION_FACTOR_MAX
)
MIN_INSYNC: Final = Whole(
    "min_insync", "the replicas that must be in sync", least=1, most=REPLICATION_FACTOR_MAX
)
AUTOMATIC: Final = Flag(
    "automatic", "both follow the number of data nodes, up to 3 and 2", default=False
)
REPLICATION: Final = (REPLICATION_FACTOR, MIN_INSYNC, AUTOMATIC)
"""The parameters of a resize. A number that is not given stays."""


def resize_of(call: Call) -> Make:
    """The resize that a request asks for."""
    return partial(
        operations.resize,
        replication_factor=call.get(REPLICATION_FACTOR) or 0,
        min_insync=call.get(MIN_INSYNC) or 0,
        is_automatic=call[AUTOMATIC],
    )


class ClusterRoutes:
    """The routes of a node's cluster operations."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def endpoints(self) -> list[Endpoint]:
        found = [
            Endpoint("GET", "/cluster", Scope.VIEWER, "the cluster as this node sees it",
                     self._status, dict, refusals=(503,), before_users=True),
            Endpoint("POST", "/cluster/init", Scope.OPERATOR, "make a cluster of this node",
                     self._init, dict, refusals=(409, 503), before_users=True),
            *(
                Endpoint("POST", f"/cluster/{action}", Scope.OPERATOR, summary,
                         partial(self._of_cluster, action), refusals=(409, 503))
                for action, summary in OF_CLUSTER.items()
            ),
        ]  # fmt: skip
        found.append(
            Endpoint("POST", "/cluster/resize", Scope.ADMIN,
                     "change the replication factor and min_insync while the cluster serves",
                     self._resize, None, REPLICATION, refusals=(409, 503))
        )  # fmt: skip
        for action, summary in SUMMARIES.items():
            scope = Scope.OPERATOR if action in ("drain", "undrain") else Scope.ADMIN
            parameters = (NODE, ACCEPT_LOSS) if action == UNSAFE else (NODE,)
            handler = partial(self._of_node, action)
            path = f"/cluster/{action}"
            found.append(
                Endpoint("POST", path, scope, summary, handler, None, parameters,
                         refusals=(404, 409, 503))
            )  # fmt: skip
        return found

    @property
    def _cluster(self) -> ClusterOperations:
        """The operations. Raises `ApiRefusal` (503) on a standby."""
        return cluster_of(self._server)

    async def _status(self, call: Call) -> object:
        return self._cluster.status()

    async def _init(self, call: Call) -> object:
        return await self._change(call, self._cluster.init())

    async def _of_cluster(self, action: str, call: Call) -> object:
        part = "nodes" if action == "rebalance" else "paused"
        return await self._change(call, self._cluster.change(planned(action, "")), part)

    async def _resize(self, call: Call) -> object:
        return await self._change(call, self._cluster.change(resize_of(call)), "replication")

    async def _of_node(self, action: str, call: Call) -> object:
        if action == UNSAFE and not call[ACCEPT_LOSS]:
            text = "acknowledged messages that the node does not have are lost: accept_loss=true"
            raise bad_request(text)
        return await self._change(call, OF_NODE[action](self._cluster, call[NODE]))

    async def _change(
        self, call: Call, carried_out: Awaitable[object], part: str = "nodes"
    ) -> object:
        """The result of a change. A refusal of the cluster becomes `ApiRefusal` (409). `part`: that
        of the status for the audit."""
        call.before = self._cluster.status()[part]
        try:
            result = await carried_out
        except ClusterError as error:
            raise ApiRefusal(409, str(error)) from None
        call.after = self._cluster.status()[part]
        return result
