"""The cluster operations of the admin port, and their HTTP form.

- `GET /cluster`: this node's view of the cluster, see `ClusterOperations.status`.
- `POST /cluster/init`, `/cluster/rebalance`, and with `?node=N` `/cluster/drain`,
  `/cluster/undrain`, `/cluster/remove`, `/cluster/unsafe-recover`. Every node accepts them,
  whichever node leads the metadata.

`/cluster/unsafe-recover` also needs `accept_loss=true`. The response is 404 without a cluster, and
409 with `{"error": text}` for a refusal.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.api.cluster_operations import ClusterError, ClusterOperations
from holdfast.api.process import ServedProcess

OF_NODE: Final[Mapping[str, Callable[[ClusterOperations, str], Awaitable[object]]]] = {
    "drain": lambda cluster, node: cluster.drain(node),
    "undrain": lambda cluster, node: cluster.undrain(node),
    "remove": lambda cluster, node: cluster.remove(node),
    "unsafe-recover": lambda cluster, node: cluster.unsafe_recover(node),
}
"""The operations on a node, by the last part of their path."""
UNSAFE: Final = "unsafe-recover"


class ClusterRoutes:
    """The routes of a node's cluster operations."""

    def __init__(self, server: ServedProcess) -> None:
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
        self, request: Request, carry_out: Callable[[ClusterOperations], Awaitable[object]]
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
