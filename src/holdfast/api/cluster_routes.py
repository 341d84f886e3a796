"""What the admin port asks of the cluster that a node belongs to, and its HTTP form.

- `GET /cluster`: what this node knows of the cluster, see `ClusterAdmin.status`.
- `POST /cluster/init`, `/cluster/rebalance`, and with `?node=N` `/cluster/drain`,
  `/cluster/undrain`, `/cluster/remove`, `/cluster/unsafe-recover`: any node takes them, whoever
  leads the metadata.

`/cluster/unsafe-recover` needs `accept_loss=true` as well. 404 where there is no cluster; 409 with
`{"error": text}` when it refuses.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class ClusterError(Exception):
    """The cluster refuses; the text says why and what to do."""


@dataclass(frozen=True)
class ClusterFigures:
    """What changes all the time and costs little to tell: for metrics and readiness."""

    node: str
    initialised: bool = False
    has_majority: bool = False
    is_witness: bool = False
    is_metadata_leader: bool = False
    metadata_version: int = 0
    under_replicated: int = 0
    below_min_insync: int = 0
    """Partitions whose QoS 1 and 2 messages are not acknowledged: too few replicas are in sync."""
    leaderless: int = 0
    moving: int = 0
    sessions_here: int = 0
    """Connected to this node."""
    peers: Mapping[str, bool] = field(default_factory=dict)
    """Every other node of the cluster -> whether there is a link to it."""
    lag_records: Mapping[str, int] = field(default_factory=dict)
    """Follower -> records of the partitions led here that it does not have durable yet."""
    failovers: int = 0
    """Partitions taken over by this node from a leader that was gone, since it started."""
    refused_min_insync: int = 0
    """Publishes refused because fewer than `min_insync` replicas are in sync."""
    forwarded_publishes: int = 0
    """Publishes of clients of this node that were sent to another node, their leader."""
    lacking: int = 0
    """Partitions whose sessions and retained messages this node must get from others first."""
    is_disk_stalled: bool = False
    """A write has not ended for too long: the node gives up what it leads, and its clients."""
    is_removed: bool = False
    """From the cluster; others have told it so."""
    is_damaged: bool = False
    """What is on its disk is not what was written: it serves nobody, and begins anew."""
    is_older_copy: bool = False
    """The disk is an older copy: the node takes no part in the cluster until it may start empty."""
    clock_skews_s: Mapping[str, float] = field(default_factory=dict)
    """Node, this one included -> how far its clock is ahead of what the cluster goes by."""
    lacks_voters: bool = False
    """Not all nodes vote that will: one that fails now may take the majority along."""


class ClusterAdmin(Protocol):
    """Raised ClusterErrors become 409. What has been accepted may take its time: `status` tells."""

    def status(self) -> dict[str, object]:
        """{"cluster_id", "node", "initialised", "metadata_leader", "has_majority", "version",
        "replication_factor", "min_insync", "nodes": [{"node", "state", "role", "voter",
        "connected", "peer_address", "client_address", "admin_address", "leaders", "replicas",
        "in_sync"}], "partitions": [{"partition", "leader", "epoch", "replicas", "in_sync",
        "adding", "high_watermark", "version"}], "under_replicated", "below_min_insync",
        "leaderless", "moving", "sessions_here", "waits_s"}, and more; node ids that are not known
        are empty."""

    def figures(self) -> ClusterFigures: ...

    async def init(self) -> dict[str, object]:
        """Make a new cluster of this node; those that name it in `--join` come to it. Returns the
        status. Refused if there is one already."""

    async def drain(self, node: str) -> None:
        """Take the leaderships away from a node, then its replicas."""

    async def undrain(self, node: str) -> None: ...

    async def remove(self, node: str) -> None:
        """For good. Refused unless it is drained, or dead and replaced."""

    async def rebalance(self) -> None:
        """Give every partition its preferred leader."""

    async def unsafe_recover(self, node: str) -> None:
        """Let a node lead what nobody leads, with what it has: acknowledged records may be lost."""


class Clustered(Protocol):
    cluster: ClusterAdmin | None
    """None: this node belongs to no cluster."""


OF_NODE: Final[Mapping[str, Callable[[ClusterAdmin, str], Awaitable[object]]]] = {
    "drain": lambda cluster, node: cluster.drain(node),
    "undrain": lambda cluster, node: cluster.undrain(node),
    "remove": lambda cluster, node: cluster.remove(node),
    "unsafe-recover": lambda cluster, node: cluster.unsafe_recover(node),
}
"""Last parts of paths."""
UNSAFE: Final = "unsafe-recover"


class ClusterRoutes:
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
