"""The cluster operations of the admin port, and their HTTP form.

- `GET /cluster`: this node's view of the cluster, see `ClusterAdmin.status`.
- `POST /cluster/init`, `/cluster/rebalance`, and with `?node=N` `/cluster/drain`,
  `/cluster/undrain`, `/cluster/remove`, `/cluster/unsafe-recover`. Every node accepts them,
  whichever node leads the metadata.

`/cluster/unsafe-recover` also needs `accept_loss=true`. The response is 404 without a cluster, and
409 with `{"error": text}` for a refusal.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class ClusterError(Exception):
    """The cluster refuses the operation. The text says why and what to do."""


@dataclass(frozen=True)
class ClusterFigures:
    """Frequently changing figures of a node's cluster, for metrics and readiness."""

    node: str
    initialised: bool = False
    has_majority: bool = False
    is_witness: bool = False
    is_metadata_leader: bool = False
    metadata_version: int = 0
    under_replicated: int = 0
    below_min_insync: int = 0
    """Partitions with too few replicas in sync: QoS 1 and 2 are not acknowledged there."""
    leaderless: int = 0
    moving: int = 0
    sessions_here: int = 0
    """Sessions connected to this node."""
    peers: Mapping[str, bool] = field(default_factory=dict)
    """Other nodes of the cluster, and whether there is a link to each."""
    lag_records: Mapping[str, int] = field(default_factory=dict)
    """Followers, and the records of partitions led here that each has not stored durably yet."""
    failovers: int = 0
    """Partitions that this node took over from a lost leader since its start."""
    refused_min_insync: int = 0
    """Publishes refused because fewer than `min_insync` replicas are in sync."""
    forwarded_publishes: int = 0
    """Publishes of this node's clients that were forwarded to the leader of their partition."""
    lacking: int = 0
    """Partitions whose sessions and retained messages this node must first fetch from others."""
    is_disk_stalled: bool = False
    """Whether a write takes too long. The node then gives up its leaderships and clients."""
    is_removed: bool = False
    """Whether other nodes have reported that this node was removed from the cluster."""
    is_damaged: bool = False
    """Whether the disk has lost or changed data. The node then serves no client and starts
    again."""
    is_older_copy: bool = False
    """Whether the disk is an older copy. The node then waits until it may start as a new peer."""
    clock_skews_s: Mapping[str, float] = field(default_factory=dict)
    """Nodes, including this one, and how far each clock is ahead of the cluster clock in
    seconds."""
    lacks_voters: bool = False
    """Whether some future voters do not vote yet, so that one failure may cost the majority."""


class ClusterAdmin(Protocol):
    """The operations of a cluster. `ClusterError` becomes 409.

    An accepted operation may continue after the response; `status` shows its progress.
    """

    def status(self) -> dict[str, object]:
        """Return the cluster as this node sees it. Unknown node ids are empty.

        The keys are {"cluster_id", "node", "initialised", "metadata_leader", "has_majority",
        "version", "replication_factor", "min_insync", "nodes": [{"node", "state", "role", "voter",
        "connected", "peer_address", "client_address", "admin_address", "leaders", "replicas",
        "in_sync"}], "partitions": [{"partition", "leader", "epoch", "replicas", "in_sync",
        "adding", "high_watermark", "version"}], "under_replicated", "below_min_insync",
        "leaderless", "moving", "sessions_here", "waits_s"}, and more.
        """

    def figures(self) -> ClusterFigures: ...

    async def init(self) -> dict[str, object]:
        """Initialise a cluster with this node, and return the status.

        Nodes that name this one in `--join` join it. Refused if the cluster exists already.
        """

    async def drain(self, node: str) -> None:
        """Move the leaderships away from a node, then its replicas."""

    async def undrain(self, node: str) -> None: ...

    async def remove(self, node: str) -> None:
        """Remove a node for good. Refused unless it is drained, or down and replaced."""

    async def rebalance(self) -> None:
        """Give every partition its preferred leader."""

    async def unsafe_recover(self, node: str) -> None:
        """Make a node leader of leaderless partitions. Acknowledged records may be lost."""


class Clustered(Protocol):
    """A process that may be a node of a cluster."""

    cluster: ClusterAdmin | None
    """The cluster's operations, or None without a cluster."""


OF_NODE: Final[Mapping[str, Callable[[ClusterAdmin, str], Awaitable[object]]]] = {
    "drain": lambda cluster, node: cluster.drain(node),
    "undrain": lambda cluster, node: cluster.undrain(node),
    "remove": lambda cluster, node: cluster.remove(node),
    "unsafe-recover": lambda cluster, node: cluster.unsafe_recover(node),
}
"""The operations on a node, by the last part of their path."""
UNSAFE: Final = "unsafe-recover"


class ClusterRoutes:
    """The routes of a node's cluster operations."""

    def __init__(self, server: Clustered) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        return [
            Route("/cluster", self._status),
            Route("/cluster/init", self._init, methods=["POST"]),
            Route("/cluster/rebalance", self._rebalance, methods=["POST"]),
            Route("/cluster/{action:str}", self._of_node, methods=["POST"]),
        ]

    async def _status(self, request: Request) -> Response:
        cluster = self._server.cluster
        return _no_cluster() if cluster is None else JSONResponse(cluster.status())

    async def _init(self, request: Request) -> Response:
        return await self._change(request, lambda cluster: cluster.init())

    async def _rebalance(self, request: Request) -> Response:
        return await self._change(request, lambda cluster: cluster.rebalance())

    async def _of_node(self, request: Request) -> Response:
        action = request.path_params["action"]
        if action not in OF_NODE:
            return JSONResponse({"error": f"there is no /cluster/{action}"}, 404)
        node = request.query_params.get("node", "")
        if not node:
            return JSONResponse({"error": "parameter node is missing"}, 400)
        if action == UNSAFE and request.query_params.get("accept_loss") != "true":
            text = "acknowledged messages that the node does not have are lost: accept_loss=true"
            return JSONResponse({"error": text}, 400)
        return await self._change(request, lambda cluster: OF_NODE[action](cluster, node))

    async def _change(
        self, request: Request, carry_out: Callable[[ClusterAdmin], Awaitable[object]]
    ) -> Response:
        cluster = self._server.cluster
        if cluster is None:
            return _no_cluster()
        try:
            answer = await carry_out(cluster)
        except ClusterError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse(answer if answer is not None else {})


def _no_cluster() -> Response:
    text = "this node belongs to no cluster: start it with --peer-bind"
    return JSONResponse({"error": text}, 404)
