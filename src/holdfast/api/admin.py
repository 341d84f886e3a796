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
from typing import Final

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response

from holdfast.api.census import Census
from holdfast.api.cluster_routes import ClusterRoutes
from holdfast.api.dispatch import OpenGate, application
from holdfast.api.endpoints import ApiRefusal, Call, Endpoint
from holdfast.api.federation_routes import FederationRoutes
from holdfast.api.log_routes import LogRoutes
from holdfast.api.log_sender import LogConnections, LogSender
from holdfast.api.metrics.node import registry_for
from holdfast.api.metrics.scrape import render
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import obstacles
from holdfast.security.access.scopes import Scope
from holdfast.security.http.connections import bounded
from holdfast.security.http.guard import Guard
from holdfast.security.http.requests import Hosts
from holdfast.security.http.server import HttpServer, listen
from holdfast.server.event_loop import descriptors
from holdfast.server.event_loop.failures import watched
from holdfast.server.reload import Reloaded, ReloadError

CONNECTIONS_MAX: Final = 64
"""The most connections of the admin port. Readers of the log have a limit of their own."""


class AdminRoutes:
    """The routes of a broker's admin port."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self.census = Census(server)
        self._registry = registry_for(server, self.census)

    def application(self) -> Starlette:
        """The application of all endpoints."""
        return application(self.endpoints(), OpenGate(), "Holdfast admin API")

    def endpoints(self) -> list[Endpoint]:
        """The declarations of all endpoints."""
        return [
            Endpoint("GET", "/healthz", Scope.HEALTH, "the process runs", self.healthz, str,
                     media_type="text/plain", any_parameter=True),
            Endpoint("GET", "/readyz", Scope.HEALTH, "whether the node serves clients",
                     self.readyz, dict, refusals=(503,), any_parameter=True),
            Endpoint("GET", "/metrics", Scope.HEALTH, "the metrics for Prometheus", self.metrics,
                     str, media_type="application/openmetrics-text", any_parameter=True),
            Endpoint("POST", "/api/v1/reload", Scope.OPERATOR,
                     "apply the settings and files as they are now", self.reload, Reloaded,
                     refusals=(409,)),
            *LogRoutes(self._server).endpoints(),
            *ClusterRoutes(self._server).endpoints(),
            *FederationRoutes(self._server).endpoints(),
        ]  # fmt: skip

    async def healthz(self, call: Call) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, call: Call) -> Response:
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

    async def reload(self, call: Call) -> Reloaded:
        """Apply the configuration and the files as they are now."""
        try:
            return await self._server.reload()
        except ReloadError as error:
            raise ApiRefusal(409, str(error)) from None

    async def metrics(self, call: Call) -> Response:
        scrape = render(self._registry, call.request.headers.get("accept", ""))
        return Response(scrape.body, media_type=scrape.media_type)


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
        routes = AdminRoutes(server)
        self._census = routes.census
        self._server = HttpServer(
            Guard(routes.application(), known),
            bounded(LogConnections, connections_max, sender=self._sender),
            shutdown_s=1,
        )
        self._task: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._counting = watched(self._census.run())
        self._task = watched(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._counting is not None:
            self._counting.cancel()
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._sender.close)
        self._socket.close()
