"""The log as it lies on the disk, sent to readers that want much of it: Spark, above all.

`POST /api/v1/log/read` on the admin port, with JSON::

    {"ranges": [[partition, start, end], ...], "bytes": M, "filters": [...], "prefixes": [...]}

    200 application/octet-stream: raw batches in the journal's order, about M bytes of them, with
        all wanted offsets from the starts on. Others may lie between them, the first and the last
        may go beyond what was asked for, and damaged places are sent as they are. The header
        `holdfast-log` is JSON: {"next": [[partition, offset], ...], "passed": [[partition, start,
        end], ...]}: how far the answer goes, and which offsets it leaves out because `filters`
        (MQTT filters) and `prefixes` (of topics) match nothing there; without them nothing is left
        out. `next` equals the start where nothing is committed (on this node, by now).
    410 {"first_offsets": [[partition, offset], ...]} below the retention floor

Only offsets that are committed count as wanted. Such a connection leaves the event loop with its
first request: a thread of its own plans (bisection in the indexes) and the kernel sends (sendfile),
so that a reader of everything costs the clients of this node neither copies nor turns of the loop.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, Protocol, runtime_checkable

from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.drivers.broker import Broker
from holdfast.log.extents import Extent, Wanted
from holdfast.log.topic_choice import TopicChoice
from holdfast.topics.names import InvalidFilter, check_filter

logger = logging.getLogger("holdfast")

PATH: Final = "/api/v1/log/read"
FIRST_BYTES: Final = f"POST {PATH} ".encode()
"""What a connection of such a reader begins with."""
READERS_MAX: Final = 64
"""Connections, a thread each; to more of them the answer is 503."""
REQUEST_BYTES_MAX: Final = 1 << 20
READ_BYTES_DEFAULT: Final = 4 << 20
READ_BYTES_MAX: Final = 64 << 20
FILTERS_MAX: Final = 1000
IDLE_S: Final = 60.0
"""A reader that neither asks nor takes anything for so long is dropped."""
PIECE_BYTES: Final = 256 << 10
SEND_BUFFER_BYTES: Final = 256 << 10
"""Of the kernel, per connection. Without a bound it grows to megabytes, behind which what goes to
the node's clients waits in the same queues: their p50 doubles."""
PAUSE_S: Final = 0.00005
CLOSE_TIMEOUT_S: Final = 5.0

FindBroker = Callable[[], Broker | None]


class BadRead(Exception):
    """The text says what is wrong with the request."""


@runtime_checkable
class Described(Protocol):
    """A file that the kernel can send."""

    def fileno(self) -> int: ...


class LogSender:
    """The threads that send; made with the admin port, closed with it."""

    def __init__(self, find_broker: FindBroker) -> None:
        self._find_broker = find_broker
        self._lock = threading.Lock()
        self._sockets: dict[socket.socket, threading.Thread] = {}
        self._closing = False

    def take_over(self, connection: socket.socket, received: bytes) -> None:
        """Serve a connection that has sent `received` so far."""
        connection.settimeout(IDLE_S)
        with self._lock:
            full = self._closing or len(self._sockets) >= READERS_MAX
            if not full:
                thread = threading.Thread(
                    target=self._serve,
                    args=(connection, received),
                    name="log-sender",
                    daemon=True,
                )
                self._sockets[connection] = thread
        if full:
            with contextlib.suppress(OSError), connection:
                connection.settimeout(0)
                connection.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
            return
        thread.start()

    def close(self) -> None:
        """Cut all connections, wait for the threads."""
        with self._lock:
            self._closing = True
            threads = list(self._sockets.values())
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, connection: socket.socket, received: bytes) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                LogRequests(connection, received, self._find_broker)
        except OSError:
            return  # the reader has gone, or is too slow
        except Exception as error:
            logger.error("log_sender_failed error=%r", str(error), exc_info=error)
        finally:
            with self._lock:
                self._sockets.pop(connection, None)


class _Received(io.RawIOBase):
    """A connection of which the first bytes were read before."""

    def __init__(self, received: bytes, connection: socket.socket) -> None:
        self._received = received
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._received:
            return self._connection.recv_into(buffer)
        count = min(len(buffer), len(self._received))
        buffer[:count] = self._received[:count]
        self._received = self._received[count:]
        return count


class LogRequests(BaseHTTPRequestHandler):
    """One connection: it is served within the constructor."""

    protocol_version = "HTTP/1.1"
    server_version = "holdfast"
    sys_version = ""

    def __init__(self, connection: socket.socket, received: bytes, find_broker: FindBroker) -> None:
        self._received = received
        self._find_broker = find_broker
        self._filters: tuple[list[str], list[str]] = ([], [])
        self._choice: TopicChoice | None = None
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Received(self._received, self.connection))

    def log_message(self, format: str, *args: object) -> None:
        """Not logged."""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > REQUEST_BYTES_MAX:
            self.close_connection = True
            self._answer(400, {"error": f"a body of at most {REQUEST_BYTES_MAX} bytes is needed"})
            return
        body = self.rfile.read(int(length))
        broker = self._find_broker()
        if self.path != PATH:
            self._answer(404, {"error": f"this connection serves {PATH} only"})
        elif broker is None:
            self._answer(503, {"error": "this node stands by: ask the holder of the lease"})
        else:
            try:
                self._read(broker, body)
            except BadRead as error:
                self._answer(400, {"error": str(error)})

    def _read(self, broker: Broker, body: bytes) -> None:
        request = _parse(body)
        wanted = _ranges(request, broker.node.state.config.partitions)
        size = request.get("bytes", READ_BYTES_DEFAULT)
        if not isinstance(size, int) or not 0 <= size <= READ_BYTES_MAX:
            raise BadRead(f"bytes is a number from 0 to {READ_BYTES_MAX}")
        choice = self._topics(request)
        reader = broker.reader
        first = [[p, reader.first_offset(p)] for p, start, _ in wanted]
        if any(start < floor for (_, start, _), (_, floor) in zip(wanted, first, strict=True)):
            text = "older records were removed by retention"
            self._answer(410, {"error": text, "first_offsets": first})
            return
        journal = broker.node.state.journal
        committed = journal.high_watermark
        limited = [(p, start, min(end, committed[p])) for p, start, end in wanted]
        plan = reader.extents().plan(limited, size, choice)
        told = {"next": sorted(plan.next.items()), "passed": plan.passed}
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(plan.size_bytes))
        self.send_header("Holdfast-Log", json.dumps(told, separators=(",", ":")))
        self.end_headers()
        for extent in plan.extents:
            _send(self.connection, extent)

    def _topics(self, request: dict[str, Any]) -> TopicChoice | None:
        filters, prefixes = _texts(request, "filters"), _texts(request, "prefixes")
        for each in filters:
            try:
                check_filter(each)
            except InvalidFilter as error:
                raise BadRead(str(error)) from None
        if not filters and not prefixes:
            return None
        if self._choice is None or self._filters != (filters, prefixes):
            self._filters = (filters, prefixes)
            self._choice = TopicChoice(filters, prefixes, lambda: time.sleep(PAUSE_S))
        return self._choice

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _send(connection: socket.socket, extent: Extent) -> None:
    """Raises OSError."""
    file, position, left = extent.file, extent.position, extent.length
    if isinstance(file, Described):
        opened = io.FileIO(file.fileno(), "rb", closefd=False)
        sent = connection.sendfile(opened, position, left)
        if sent < left:
            raise OSError("the segment became shorter")
        return
    while left:
        data = file.read(position, min(left, PIECE_BYTES))
        if not data:
            raise OSError("the segment became shorter")
        connection.sendall(data)
        position += len(data)
        left -= len(data)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except ValueError:
        request = None
    if not isinstance(request, dict):
        raise BadRead("a JSON object is needed")
    return request


def _ranges(request: dict[str, Any], partitions: int) -> list[Wanted]:
    found: dict[int, Wanted] = {}
    try:
        for partition, start, end in request["ranges"]:
            if not all(isinstance(each, int) for each in (partition, start, end)):
                raise TypeError
            if not 0 <= partition < partitions or start < 0 or partition in found:
                raise BadRead(
                    f"partition {partition} from {start}: this node has partitions 0 to "
                    f"{partitions - 1}, each may be asked for once, offsets begin at 0"
                )
            found[partition] = (partition, start, end)
    except (KeyError, TypeError, ValueError):
        raise BadRead("ranges is a list of [partition, start, end]") from None
    return list(found.values())


def _texts(request: dict[str, Any], name: str) -> list[str]:
    texts = request.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise BadRead(f"{name} is a list of texts")
    if len(texts) > FILTERS_MAX:
        raise BadRead(f"{name} has {len(texts)} entries, {FILTERS_MAX} are allowed")
    return texts


class LogConnections(H11Protocol):
    """uvicorn's HTTP, but for connections that begin as a reader's do. `sender` is set by a
    subclass that is made with the admin port."""

    sender: LogSender

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._first = b""
        self._is_ours: bool | None = None
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_ours is None:
            data = self._first = self._first + data
            if data.startswith(FIRST_BYTES):
                self._is_ours = True
                self._hand_over(data)
            elif not FIRST_BYTES.startswith(data):
                self._is_ours = False
        if self._is_ours is False:
            super().data_received(data)

    def _hand_over(self, data: bytes) -> None:
        # The loop closes its descriptor of the connection, the sender goes on with another.
        descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        self.transport.abort()
        self.sender.take_over(socket.socket(fileno=descriptor), data)


def connections_for(sender: LogSender) -> type[LogConnections]:
    """The protocol class for uvicorn."""
    return type("LogConnections", (LogConnections,), {"sender": sender})
