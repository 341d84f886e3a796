"""The HTTP application and server of the admin port.

- /healthz: the process runs.
- /readyz: the node serves clients. It returns 503 from a standby, with its role, and from a cluster
  node before the cluster is initialised or without a majority.
- /metrics: Prometheus.
- /api/v1/log...: committed records as raw batches, for Spark and other readers. See
  `holdfast.api.log_routes` and `holdfast.api.log_sender`.
- /cluster...: the cluster, see `holdfast.api.cluster_routes`.
- POST /api/v1/reload: applies the settings and files as they are now, like SIGHUP. The reply names
  the changed settings; 409 means that a file cannot be used, and nothing has changed.
- /api/v1/federation: see `holdfast.api.federation_routes`.

Requests from web pages and for other host names receive 403, see `holdfast.security.http.requests`.
"""

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from holdfast.api.cluster_routes import ClusterRoutes
from holdfast.api.federation_routes import FederationRoutes
from holdfast.api.log_routes import BadRequest, Busy, LogRoutes, StandbyRefusal
from holdfast.api.log_sender import LogConnections, LogSender
from holdfast.api.metrics.node import registry_for, render
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import obstacles
from holdfast.security.http.connections import bounded
from holdfast.security.http.guard import Guard
from holdfast.security.http.requests import Hosts
from holdfast.security.http.server import HttpServer, listen
from holdfast.server.event_loop import descriptors
from holdfast.server.event_loop.failures import watched
from holdfast.server.reload import ReloadError

CONNECTIONS_MAX: Final = 64
"""The most connections of the admin port. Readers of the log have a limit of their own."""


class AdminRoutes:
    """The routes of a broker's admin port."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._registry = registry_for(server)

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
                Route("/metrics", self.metrics),
                Route("/api/v1/reload", self.reload, methods=["POST"]),
                *LogRoutes(self._server).routes(),
                *ClusterRoutes(self._server).routes(),
                *FederationRoutes(self._server).routes(),
            ],
            exception_handlers={
                BadRequest: _bad_request,
                StandbyRefusal: _not_serving,
                Busy: _busy,
            },
        )

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        """Report the obstacles, and the figures that explain them."""
        found = obstacles(self._server)
        body: dict[str, object] = {
            "ready": not found,
            "reasons": {each.name: each.text for each in found},
        }
        sharing = self._server.sharing
        if sharing is not None:
            body["node"] = sharing.node_id
            body["role"] = sharing.role()
            body["epoch"] = sharing.mastership.epoch
            body["loaded"] = sharing.mastership.standby.is_loaded
        broker = self._server.broker
        if broker is not None:
            state = broker.node.state
            body["node"] = state.config.node_id
            body["disk_full"] = state.disk_full
            body["connections"] = state.connections
        cluster = self._server.cluster
        if cluster is not None:
            figures = cluster.figures()
            body["node"] = figures.node
            body["initialised"] = figures.initialised
            body["majority"] = figures.has_majority
            body["lacking"] = figures.lacking
            body["disk_stalled"] = figures.is_disk_stalled
            body["disk_damaged"] = figures.is_damaged
            body["removed"] = figures.is_removed
            body["older_copy"] = figures.is_older_copy
        if self._server.maintenance is not None:
            body["maintenance_failing"] = self._server.maintenance.failing
        return JSONResponse(body, 503 if found else 200)

    async def reload(self, request: Request) -> Response:
        """Apply the configuration and the files as they are now."""
        try:
            done = await self._server.reload()
        except ReloadError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse(asdict(done))

    async def metrics(self, request: Request) -> Response:
        return Response(
            render(self._registry),
            media_type="application/openmetrics-text; version=1.0.0; charset=utf-8",
        )


async def _bad_request(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def _not_serving(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 503)


async def _busy(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})


class AdminServer:
    """The HTTP server inside the broker's loop."""

    def __init__(
        self, server: ServedProcess, bind: str, port: int, hosts: Iterable[str] = ()
    ) -> None:
        """Bind the port at once. Raises `OSError` if the address cannot be used.

        `hosts`: names that requests may use for this port, besides those that need no setting.
        """
        self._socket = listen(bind, port)
        self.port: int = self._socket.getsockname()[1]
        known = Hosts([bind, socket.gethostname(), *hosts], "admin.hosts")
        self._sender = LogSender(lambda: server.broker, known)
        connections_max = descriptors.share(CONNECTIONS_MAX)
        self._server = HttpServer(
            Guard(AdminRoutes(server).application(), known),
            bounded(LogConnections, connections_max, sender=self._sender),
            shutdown_s=1,
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = watched(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._sender.close)
        self._socket.close()
