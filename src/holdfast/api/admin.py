"""Serves the admin port over HTTP.

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
- /console/: pages for people, see `holdfast.api.console`.

Requests from web pages and for other host names receive 403, see `holdfast.security.http.requests`.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute

from holdfast.api.access.agreed import AgreedAccess
from holdfast.api.access.audit import AuditLog
from holdfast.api.access.gate import CredentialGate
from holdfast.api.access.routes import AccessRoutes
from holdfast.api.census import Census, ended
from holdfast.api.cluster.client_routes import ClientRoutes
from holdfast.api.cluster.figures import FigureRecorder
from holdfast.api.cluster_routes import ClusterRoutes
from holdfast.api.console.pages import PREFIX, console_routes
from holdfast.api.dispatch import AccessGate, application
from holdfast.api.endpoints import ApiRefusal, Call, Endpoint
from holdfast.api.federation_routes import FederationRoutes
from holdfast.api.log_routes import LogRoutes
from holdfast.api.log_sender import LogConnections, LogSender, RequestChecks
from holdfast.api.metrics.node import registry_for
from holdfast.api.metrics.scrape import render
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.log_answers import LogAnswers
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.processes import MachineProcesses
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import stop_obstacles
from holdfast.api.routes.resources import resource_endpoints
from holdfast.config.schema import Config
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.failures import watched
from holdfast.io.settings.reload import Reloaded, ReloadError
from holdfast.io.settings.security_files import admin_context
from holdfast.security.access.access_file import AccessData, read_given
from holdfast.security.access.credentials import AdminCredentials
from holdfast.security.access.scopes import Scope
from holdfast.security.http.connections import bounded
from holdfast.security.http.guard import Guard
from holdfast.security.http.requests import Hosts
from holdfast.security.http.server import HttpServer, TlsDoor

CONNECTIONS_MAX: Final = 64
"""The most connections of the admin port. Readers of the log have a limit of their own."""


class AdminRoutes:
    """The routes of a broker's admin port."""

    def __init__(self, server: ServedProcess, access: AccessRoutes | None = None) -> None:
        """`access` None: the routes without the check of credentials, for tests and documents."""
        self._server = server
        self._access = access
        self.census = Census(server)
        self.figures = FigureRecorder(server)
        registry = registry_for(server, self.census)
        everywhere = Everywhere(server)
        self._processes = MachineProcesses(server, everywhere, registry)
        node = OwnNode(server)
        self.clients = ClientRoutes(node, everywhere)
        LogAnswers(node, everywhere)
        self._resources = resource_endpoints(node, everywhere, self.figures, self.clients)
        self._log = LogRoutes(node)
        if access is not None:
            access.share(everywhere)
        self._federation = FederationRoutes(
            server, everywhere, lambda: server.config.federation is not None
        )
        everywhere.connect()

    def application(self, gate: AccessGate, pages: Iterable[BaseRoute] = ()) -> Starlette:
        """The application of all endpoints, and of public pages."""
        return application(self.endpoints(), gate, "Holdfast admin API", pages)

    def endpoints(self) -> list[Endpoint]:
        """The declarations of all endpoints."""
        return [
            Endpoint("GET", "/healthz", Scope.HEALTH, "the process runs", self.healthz, str,
                     media_type="text/plain", any_parameter=True),
            Endpoint("GET", "/readyz", Scope.HEALTH, "whether the node serves clients",
                     self.readyz, dict, refusals=(503,), any_parameter=True),
            Endpoint("GET", "/stopz", Scope.HEALTH, "whether the others serve without this node",
                     self.stopz, dict, refusals=(503,)),
            Endpoint("GET", "/metrics", Scope.METRICS, "the metrics for Prometheus", self.metrics,
                     str, media_type="application/openmetrics-text",
                     other_media_types=("text/plain",), any_parameter=True),
            Endpoint("POST", "/api/v1/reload", Scope.OPERATOR,
                     "apply the settings and files as they are now", self.reload, Reloaded,
                     refusals=(409,)),
            # Before the log's, whose path with a partition would match theirs.
            *self._resources,
            *self._log.endpoints(),
            *ClusterRoutes(self._server).endpoints(),
            *self._federation.endpoints(),
            *([] if self._access is None else self._access.endpoints()),
        ]  # fmt: skip

    async def healthz(self, call: Call) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, call: Call) -> Response:
        """Reports the obstacles, and the figures that explain them."""
        found = await self._processes.obstacles()
        reasons = {each.name: each.text for each in found}
        body: dict[str, object] = {"ready": not found, "reasons": reasons}
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
            body["disk_full"] = "disk_full" in reasons
            body["connections"] = state.connections
            body["stopped"] = state.stopped
        cluster = self._server.cluster
        if cluster is not None:
            figures = cluster.figures()
            body["node"] = figures.node
            body["initialised"] = figures.initialised
            body["majority"] = figures.has_majority
            body["lacking"] = figures.lacking
            for name, is_true in (
                ("disk_stalled", figures.is_disk_stalled),
                ("disk_damaged", figures.is_damaged),
                ("removed", figures.is_removed),
                ("older_copy", figures.is_older_copy),
            ):
                # The reasons are those of all processes.
                body[name] = is_true or name in reasons
            body["set_aside"] = list(figures.set_aside)
        body["certificates_expired"] = ended(self.census.certificates, time.time())
        if self._server.maintenance is not None:
            body["maintenance_failing"] = self._server.maintenance.failing
        return JSONResponse(body, 503 if found else 200)

    async def stopz(self, call: Call) -> Response:
        """Reports what a stop of this node would cost the clients of the cluster."""
        found = stop_obstacles(self._server)
        reasons = {each.name: each.text for each in found}
        return JSONResponse({"may_stop": not found, "reasons": reasons}, 503 if found else 200)

    async def reload(self, call: Call) -> Reloaded:
        """Applies the configuration and the files as they are now."""
        try:
            call.after = done = await self._processes.reload()
            return done
        except ReloadError as error:
            raise ApiRefusal(409, str(error)) from None

    async def metrics(self, call: Call) -> Response:
        families = await self._processes.families()
        scrape = await render(families, call.request.headers.get("accept", ""))
        return Response(scrape.body, media_type=scrape.media_type)


class AdminServer:
    """The HTTP server inside the broker's loop."""

    def __init__(
        self, server: ServedProcess, reserved: socket.socket, hosts: Iterable[str] = ()
    ) -> None:
        """Listens at once. Raises `OSError` if the address cannot be used, and `AccessError` if the
        file of users and tokens cannot, and `SecurityFileError` for a certificate.

        `reserved`: the bound socket, which the server closes. `hosts`: names that requests may use
        for this port, besides those that need no setting.
        """
        self._gate = gate_of(server)
        self._access = AccessRoutes(self._gate, server.audit)
        reserved.listen()
        self._socket = reserved
        bind: str = reserved.getsockname()[0]
        self.port: int = reserved.getsockname()[1]
        known = Hosts([bind, socket.gethostname(), *hosts], "admin.hosts")
        self._sender = LogSender(
            lambda: server.broker,
            RequestChecks(known, self._gate),
            lambda: server.config.log.read_bytes_per_s,
        )
        connections_max = descriptors.share(CONNECTIONS_MAX)
        routes = AdminRoutes(server, self._access)
        self.census, self._figures = routes.census, routes.figures
        self._clients = routes.clients
        self.context: ssl.SSLContext | None = admin_context(server.config.admin)
        """The TLS context of new connections; None: plain HTTP."""
        connections = bounded(LogConnections, connections_max, sender=self._sender)
        pages = (
            console_routes(lambda: server.config.listeners) if server.config.admin.console else []
        )
        guard = Guard(routes.application(self._gate, pages), known, pages=PREFIX)
        self._server = HttpServer(guard, connections, 1, proxies=server.config.admin.proxies)
        self._door = TlsDoor(self._socket, self._server.new_protocol, lambda: self.context)
        self._serving: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []

    async def reload(self, context: ssl.SSLContext | None, given: AccessData) -> None:
        """Uses another certificate, and the users and tokens of the configuration as they are."""
        self.context = context
        await asyncio.to_thread(self._gate.credentials.use_given, given)

    def start(self) -> None:
        """Serves, and watches the file of users and tokens."""
        self._serving = watched(self._server.serve(sockets=[]))
        self._watching = [
            watched(each)
            for each in (
                self.census.run(),
                self._figures.run(),
                self._clients.run(),
                self._gate.watch(),
                self._door.run(),
            )
        ]

    async def stop(self) -> None:
        """Ends the connections, and writes what is only in memory."""
        self._server.should_exit = True
        self._door.close()
        for task in self._watching:
            task.cancel()
        if self._serving is not None:
            await self._serving
        await asyncio.to_thread(self._gate.close)
        self._access.close()
        await asyncio.to_thread(self._sender.close)
        self._socket.close()


def admin_hosts(config: Config) -> list[str]:
    """The host names that the operator has given to this machine."""
    advertised = (config.node.advertise, config.cluster.peer_advertise, config.admin.advertise)
    return [
        config.admin.bind,
        *config.admin.hosts,
        *(each.rpartition(":")[0] for each in advertised if each),
    ]


def audit_of(server: ServedProcess) -> AuditLog:
    """The audit of a broker's node."""

    def led_partition() -> int:
        return 0 if server.cluster is None else server.cluster.led_partition()

    return AuditLog(lambda: server.broker, led_partition, Path(server.config.node.data))


def gate_of(server: ServedProcess) -> CredentialGate:
    """The gate of a broker's port. Raises `AccessError`."""

    def open_scopes() -> frozenset[Scope]:
        return frozenset(Scope[each.upper()] for each in server.config.admin.open)

    given = read_given(server.config.admin.access_file)
    credentials = AdminCredentials(Path(server.config.node.data), given)
    cluster = server.cluster
    agreed = None if cluster is None else AgreedAccess(cluster.access, credentials)
    return CredentialGate(credentials, open_scopes, server.audit, agreed)
