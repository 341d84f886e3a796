"""Runs `holdfast federation sidecar`: a federator, its edge, and an admin port.

- /healthz: this process runs. /readyz: the broker accepts publishes.
- /metrics and /api/v1/federation: the same as for a broker with [federation].
"""

import asyncio
import logging
import socket
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response

from holdfast.addresses import split_address
from holdfast.api.access.audit import AuditLog
from holdfast.api.access.gate import CredentialGate
from holdfast.api.admin import CONNECTIONS_MAX
from holdfast.api.dispatch import AccessGate, application
from holdfast.api.endpoints import Call, Endpoint
from holdfast.api.federation_routes import FederationRoutes
from holdfast.api.metrics.federation import FederationCollector
from holdfast.api.metrics.scrape import render
from holdfast.config.problem import ConfigError
from holdfast.io.event_loop.failures import first_unexpected
from holdfast.io.event_loop.loop import handle_signals, spare_the_collector
from holdfast.io.event_loop.threads import run_in_thread
from holdfast.io.peers.authentication import PeerAuth
from holdfast.security.access.access_file import AccessError
from holdfast.security.access.credentials import AdminCredentials
from holdfast.security.access.scopes import Scope
from holdfast.security.http.connections import BoundedConnection, bounded
from holdfast.security.http.guard import Guard
from holdfast.security.http.requests import hosts_of_bind
from holdfast.security.http.server import HttpServer, listen
from holdfast.security.peer_secret import SecretError
from holdfast.security.tls import TlsError
from holdfast_federation.core.graph import FederationGraph
from holdfast_federation.sidecar.edge_mqtt.edge import MqttEdge
from holdfast_federation.sidecar.edge_mqtt.retained import edge_for
from holdfast_federation.sidecar.edge_mqtt.state import BadState
from holdfast_federation.sidecar.federator import Federator, FederatorError
from holdfast_federation.sidecar.in_broker import graph_of, mesh_fields
from holdfast_federation.sidecar.sidecar_settings import SidecarSettings

logger = logging.getLogger("holdfast.federator")

SHUTDOWN_S: Final = 2
"""The time in seconds for responses in progress at the end."""
OPEN_SCOPES: Final = frozenset({Scope.HEALTH, Scope.METRICS})
"""The scopes that need no credentials. The status names topics, so it does."""
METRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class SidecarFederation:
    """The federator as the routes and metrics of a broker's membership expect it."""

    def __init__(self, federator: Federator, edge: MqttEdge) -> None:
        self.federator = federator
        self.node = ""
        self.is_up = True
        self._edge = edge

    def status(self) -> dict[str, object]:
        return {
            "running": True,
            "failure": "",
            **self.federator.status(),
            "edge": self._edge.status(),
        }

    def mesh(self, topic: str) -> dict[str, object]:
        return mesh_fields(self.federator.mesh(topic))

    def graph(self) -> FederationGraph:
        return graph_of(self.federator)


class SidecarPort:
    """The application of the admin port."""

    def __init__(self, federation: SidecarFederation) -> None:
        self.federation = federation
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(FederationCollector(self))

    def application(self, gate: AccessGate) -> Starlette:
        """The application of all endpoints."""
        endpoints = [
            Endpoint("GET", "/healthz", Scope.HEALTH, "this process runs", self._health, str,
                     media_type="text/plain", any_parameter=True),
            Endpoint("GET", "/readyz", Scope.HEALTH, "whether the broker accepts publishes",
                     self._ready, dict, refusals=(503,), any_parameter=True),
            Endpoint("GET", "/metrics", Scope.METRICS, "the metrics for Prometheus",
                     self._metrics, str, media_type=METRICS_TYPE, any_parameter=True),
            *FederationRoutes(self).endpoints(),
        ]  # fmt: skip
        return application(endpoints, gate, "Holdfast sidecar")

    async def _health(self, call: Call) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, call: Call) -> Response:
        edge: Any = self.federation.status()["edge"]
        return JSONResponse({"ready": edge["is_up"]}, 200 if edge["is_up"] else 503)

    async def _metrics(self, call: Call) -> Response:
        scrape = await render(self._registry.collect(), call.request.headers.get("accept", ""))
        return Response(scrape.body, media_type=scrape.media_type)


async def run(settings: SidecarSettings) -> None:
    """Runs until SIGTERM or SIGINT. At SIGHUP, new links and new connections to the broker use the
    files of `settings` as they are then.

    Raises `FederatorError` if the federator cannot start or continue.
    """
    stop, renewals = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    handle_signals(loop, stop.set, renewals.set)
    listener = _listener(settings.admin)
    gate = _gate(Path(settings.federation.data))
    edge = edge_for(settings.edge)
    federator = Federator(settings.federation, edge)
    try:
        await federator.start()
    except (BadState, OSError) as error:
        raise FederatorError(str(error)) from error
    unexpected = first_unexpected(loop)
    stopping = loop.create_task(stop.wait())
    failing = loop.create_task(_failed(federator, edge))
    serving: list[asyncio.Task[None]] = []
    server = _server(SidecarPort(SidecarFederation(federator, edge)), settings.admin, gate)
    if listener is not None:
        serving.append(loop.create_task(server.serve(sockets=[listener])))
        watching = loop.create_task(gate.watch())
        stopping.add_done_callback(lambda _: watching.cancel())
    renewing = loop.create_task(_renew(federator, settings, renewals))
    stopping.add_done_callback(lambda _: renewing.cancel())
    spare_the_collector()
    logger.info(
        "federator_ready node=%s federation=%r broker=%r admin=%s",
        federator.node.hex(), settings.federation.name, " ".join(settings.edge.servers),
        settings.admin or "off",
    )  # fmt: skip
    try:
        ends: set[asyncio.Future[Any]] = {stopping, failing, unexpected, *serving}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        await asyncio.gather(*serving, return_exceptions=True)
        if listener is not None:
            listener.close()
        await federator.stop()
        logger.info("federator_stopped")
        stopping.cancel()
        if not failing.done():
            failing.cancel()
        await asyncio.gather(stopping, failing, return_exceptions=True)
    if unexpected.done():
        raise FederatorError(f"unexpected: {unexpected.result()!r}")
    if not failing.cancelled():
        failing.result()


async def _renew(federator: Federator, settings: SidecarSettings, requests: asyncio.Event) -> None:
    """Reads the certificates, the CAs and the secret again at each request, until cancelled."""
    while True:
        await requests.wait()
        requests.clear()
        try:
            loaded = await run_in_thread("reload", partial(PeerAuth.load, settings.federation))
            names = [] if settings.edge_tls is None else settings.edge_tls.renew()
        except (ConfigError, OSError, SecretError, TlsError) as error:
            logger.error("reload_failed error=%r text='everything stays as it was'", str(error))
            continue
        assert federator.auth is not None
        names += [f"federation.{name}" for name in federator.auth.renew(loaded)]
        logger.info("reloaded settings=%s", names)


async def _failed(federator: Federator, edge: MqttEdge) -> None:
    """Raises `FederatorError` once the federator or the edge cannot continue."""
    loop = asyncio.get_running_loop()
    waiting: set[asyncio.Task[Any]] = {
        loop.create_task(federator.failed()), loop.create_task(edge.failed()),
    }  # fmt: skip
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    raise FederatorError(str(next(iter(done)).result()))


def _listener(address: str) -> socket.socket | None:
    """Binds the admin port, or returns None. Raises `FederatorError` if it cannot be used."""
    if not address:
        return None
    try:
        return listen(*split_address(address))
    except OSError as error:
        raise FederatorError(
            f"admin.address {address}: {error.strerror or error}; choose another one"
        ) from None


def _gate(directory: Path) -> CredentialGate:
    """The gate of the port, with the users and tokens in the sidecar's directory. Raises
    `FederatorError` if their file cannot be used."""
    try:
        credentials = AdminCredentials(directory)
    except AccessError as error:
        raise FederatorError(str(error)) from None
    # The port changes nothing, so there is nothing to record.
    audit = AuditLog(lambda: None, lambda: 0, directory)
    return CredentialGate(credentials, lambda: OPEN_SCOPES, audit)


def _server(port: SidecarPort, address: str, gate: CredentialGate) -> HttpServer:
    return HttpServer(
        Guard(port.application(gate), hosts_of_bind(split_address(address)[0])),
        bounded(BoundedConnection, CONNECTIONS_MAX),
        SHUTDOWN_S,
    )
