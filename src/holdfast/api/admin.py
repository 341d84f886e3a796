"""HTTP on the admin port.

- /healthz: the process lives. /readyz: it serves clients; 503 from a standby, with its role, and
  from a node of a cluster that is not made yet, or whose majority it does not reach.
  /metrics: Prometheus.
- /api/v1/log...: committed records as raw batches, for Spark and other readers:
  `GET /api/v1/log` -> {"node", "partitions", "ranges": [[first offset, high watermark], ...]};
  `GET /api/v1/log/P?start=A&end=B&bytes=M` -> whole batches covering offsets from A up to at
  most B (the reader trims the first and the last), about M bytes; 410 below the retention floor;
  `GET /api/v1/log/P/offset?timestamp_us=T` -> {"offset"}.
- /cluster...: the cluster, see `holdfast.api.cluster_admin`.
"""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from holdfast.api.cluster_admin import ClusterAdmin, ClusterRoutes
from holdfast.api.metrics import registry_for, render
from holdfast.api.sharing import Sharing
from holdfast.drivers.broker import Broker

READ_BYTES_DEFAULT = 4 << 20
READ_BYTES_MAX = 64 << 20


class BadRequest(Exception):
    """The text says which parameter and what is allowed."""


def _number(request: Request, name: str, default: int | None, maximum: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        if default is None:
            raise BadRequest(f"parameter {name} is missing")
        return default
    if not text.isdecimal() or int(text) > maximum:
        raise BadRequest(f"{name}={text!r}: a whole number from 0 to {maximum}")
    return int(text)


class Served(Protocol):
    """The process that the admin port tells about."""

    broker: Broker | None
    """None while it stands by."""
    sharing: Sharing | None
    cluster: ClusterAdmin | None


class NotServing(Exception):
    """Asked of a standby what only the holder of the lease has."""


class Admin:
    def __init__(self, server: Served) -> None:
        self._server = server
        self._registry = registry_for(server)

    @property
    def _broker(self) -> Broker:
        broker = self._server.broker
        if broker is None:
            raise NotServing("this node stands by: ask the holder of the lease")
        return broker

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
                Route("/metrics", self.metrics),
                Route("/api/v1/log", self.log_ranges),
                Route("/api/v1/log/{partition:int}", self.log_read),
                Route("/api/v1/log/{partition:int}/offset", self.log_offset),
                *ClusterRoutes(self._server).routes(),
            ],
            exception_handlers={BadRequest: _bad_request, NotServing: _not_serving},
        )

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        body: dict[str, object] = {"ready": False}
        sharing = self._server.sharing
        if sharing is not None:
            body["node"] = sharing.node_id
            body["role"] = sharing.role()
            body["epoch"] = sharing.mastership.epoch
            body["loaded"] = sharing.mastership.standby.is_loaded
        broker = self._server.broker
        if broker is not None:
            state = broker.node.state
            body["ready"] = not state.closing
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
            is_whole = figures.initialised and figures.has_majority and not figures.lacking
            # A witness has no clients: it is ready when it can vote.
            body["ready"] = is_whole and (bool(body["ready"]) or figures.is_witness)
        return JSONResponse(body, 200 if body["ready"] else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(
            render(self._registry),
            media_type="application/openmetrics-text; version=1.0.0; charset=utf-8",
        )

    def _committed(self, partition: int) -> int:
        """Committed and readable from the file."""
        journal = self._broker.node.state.journal
        return min(journal.high_watermark[partition], journal.written[partition])

    async def log_ranges(self, request: Request) -> Response:
        config = self._broker.node.state.config
        reader = self._broker.reader
        ranges = [
            [reader.first_offset(partition), self._committed(partition)]
            for partition in range(config.partitions)
        ]
        return JSONResponse(
            {"node": config.node_id, "partitions": config.partitions, "ranges": ranges}
        )

    def _partition(self, request: Request) -> int:
        partition: int = request.path_params["partition"]
        partitions = self._broker.node.state.config.partitions
        if partition >= partitions:
            raise BadRequest(f"partition {partition}: this node has 0 to {partitions - 1}")
        return partition

    async def log_read(self, request: Request) -> Response:
        partition = self._partition(request)
        watermark = self._committed(partition)
        start = _number(request, "start", None, 1 << 62)
        end = min(_number(request, "end", watermark, 1 << 62), watermark)
        size = _number(request, "bytes", READ_BYTES_DEFAULT, READ_BYTES_MAX)
        first = self._broker.reader.first_offset(partition)
        if start < first:
            return JSONResponse(
                {"error": "older records were removed by retention", "first_offset": first}, 410
            )
        if start >= end:
            return Response(b"", media_type="application/octet-stream")
        reader = self._broker.reader
        batches = await self._broker.in_reader_thread(
            lambda: reader.read_batches(partition, start, end, size)
        )
        return Response(b"".join(batches), media_type="application/octet-stream")

    async def log_offset(self, request: Request) -> Response:
        partition = self._partition(request)
        timestamp_us = _number(request, "timestamp_us", None, 1 << 62)
        reader = self._broker.reader
        offset = await self._broker.in_reader_thread(
            lambda: reader.offset_for_time(partition, timestamp_us)
        )
        return JSONResponse({"offset": offset})


async def _bad_request(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def _not_serving(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 503)


class _QuietServer(uvicorn.Server):
    """Leaves signals to the broker."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class AdminServer:
    """The HTTP server inside the broker's loop."""

    def __init__(self, server: Served, bind: str, port: int) -> None:
        """Binds at once. Raises OSError if the address cannot be had."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._server = _QuietServer(
            uvicorn.Config(
                Admin(server).application(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
