"""What the admin port tells of the log; reading much of it is `holdfast.api.log_sender`.

- `GET /api/v1/log` -> {"node", "log", "partitions", "ranges": [[first offset, high watermark],
  ...], "leads": [partition, ...]}. `log` names the log: the same on all nodes of a cluster.
  `leads`: the partitions whose records come to this node first; readers better ask another one.
- `GET /api/v1/log/offsets?timestamp_us=T` -> {"offsets": [...]}: per partition the first offset
  whose record is not older; the end if all are.
- `GET /api/v1/log/P?start=A&end=B&bytes=M` -> whole raw batches that cover the offsets from A up to
  at most B (the reader trims the first and the last), about M bytes; 410 below the retention floor.
- `GET /api/v1/log/P/offset?timestamp_us=T` -> {"offset"}.
"""

from functools import partial
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.api.cluster_admin import ClusterAdmin
from holdfast.drivers.broker import Broker

READ_BYTES_DEFAULT: Final = 4 << 20
READ_BYTES_MAX: Final = 64 << 20


class BadRequest(Exception):
    """The text says which parameter and what is allowed."""


class NotServing(Exception):
    """Asked of a standby what only the holder of the lease has."""


class HasLog(Protocol):
    broker: Broker | None
    """None while the node stands by."""
    cluster: ClusterAdmin | None


class LogRoutes:
    def __init__(self, server: HasLog) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        return [
            Route("/api/v1/log", self._ranges),
            Route("/api/v1/log/offsets", self._offsets),
            Route("/api/v1/log/{partition:int}", self._read),
            Route("/api/v1/log/{partition:int}/offset", self._offset),
        ]

    @property
    def _broker(self) -> Broker:
        broker = self._server.broker
        if broker is None:
            raise NotServing("this node stands by: ask the holder of the lease")
        if not broker.believes_disk:
            raise NotServing("the log of this node is damaged: ask another node")
        return broker

    def _committed(self, partition: int) -> int:
        """Committed and readable from the file."""
        journal = self._broker.node.state.journal
        return min(journal.high_watermark[partition], journal.written[partition])

    async def _ranges(self, request: Request) -> Response:
        config = self._broker.node.state.config
        reader = self._broker.reader
        ranges = [
            [reader.first_offset(partition), self._committed(partition)]
            for partition in range(config.partitions)
        ]
        log, leads = self._place()
        return JSONResponse(
            {
                "node": config.node_id,
                "log": log,
                "partitions": config.partitions,
                "ranges": ranges,
                "leads": leads,
            }
        )

    def _place(self) -> tuple[str, list[int]]:
        """The log's name, and the partitions that this node leads."""
        config = self._broker.node.state.config
        cluster = self._server.cluster
        if cluster is None:
            return config.node_id, list(range(config.partitions))
        status = cluster.status()
        partitions = status["partitions"]
        assert isinstance(partitions, list)
        leads = [each["partition"] for each in partitions if each["leader"] == config.node_id]
        return str(status["cluster_id"]), leads

    def _partition(self, request: Request) -> int:
        partition: int = request.path_params["partition"]
        partitions = self._broker.node.state.config.partitions
        if partition >= partitions:
            raise BadRequest(f"partition {partition}: this node has 0 to {partitions - 1}")
        return partition

    async def _read(self, request: Request) -> Response:
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
        # What was damaged is left out; another node has it.
        _ = self._broker
        return Response(b"".join(batches), media_type="application/octet-stream")

    async def _offset(self, request: Request) -> Response:
        partition = self._partition(request)
        timestamp_us = _number(request, "timestamp_us", None, 1 << 62)
        reader = self._broker.reader
        offset = await self._broker.in_reader_thread(
            lambda: reader.offset_for_time(partition, timestamp_us)
        )
        return JSONResponse({"offset": offset})

    async def _offsets(self, request: Request) -> Response:
        timestamp_us = _number(request, "timestamp_us", None, 1 << 62)
        reader = self._broker.reader
        offsets: list[int] = []
        for partition in range(self._broker.node.state.config.partitions):
            # One after the other: clients' reads come in between.
            work = partial(reader.offset_for_time, partition, timestamp_us)
            offsets.append(await self._broker.in_reader_thread(work))
        return JSONResponse({"offsets": offsets})


def _number(request: Request, name: str, default: int | None, maximum: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        if default is None:
            raise BadRequest(f"parameter {name} is missing")
        return default
    if not text.isdecimal() or int(text) > maximum:
        raise BadRequest(f"{name}={text!r}: a whole number from 0 to {maximum}")
    return int(text)
