"""Sends large parts of the log as they are on disk, mainly to Spark.

`POST /api/v1/log/read` on the admin port, with the JSON of `holdfast.api.log_plan`:

    200 application/octet-stream: raw batches in the journal's order. The first and the last batch
        may exceed the range. Damaged parts are sent as they are. The header `holdfast-log` says
        what the response has, see `header_of`. `next` equals the start if nothing later is
        committed here yet.
    410 {"first_offsets": [[partition, offset], ...]} below the retention floor
    409 if the log has another generation than the request

Such a connection leaves the event loop with its first request.
A thread of its own plans the response by bisection in the indexes, and the kernel sends it
(sendfile). Large reads therefore cost the node's clients neither copies nor turns of the loop.

Invariant: of these threads, one at a time runs Python (`Turn`). So the event loop waits for the
interpreter behind one of them. Counter-example: 64 Spark tasks begin together, and the loop waits
behind 64 threads, for 0.1 ms each, before it can acknowledge a publish.
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
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from holdfast.api.access.gate import CredentialGate, shown_credentials
from holdfast.api.endpoints import ApiRefusal
from holdfast.api.log_plan import (
    PATH,
    REQUEST_BYTES_MAX,
    BadRead,
    NotStored,
    OtherGeneration,
    Pace,
    ReadPlanner,
    RemovedRecords,
    decode_request,
    header_of,
)
from holdfast.api.nodes.own_node import check_log, not_stored
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.broker import Broker
from holdfast.log.reading.byte_ranges import Extent
from holdfast.numbers import whole_number
from holdfast.security.access.scopes import Scope
from holdfast.security.http.connections import BUSY, BoundedConnection
from holdfast.security.http.requests import Hosts, page_refusal

logger = logging.getLogger("holdfast")

FIRST_BYTES: Final = f"POST {PATH} ".encode()
"""The first bytes of a connection of such a reader."""
READERS_MAX: Final = 64
"""The most connections, with one thread each. Without room, the oldest one that has shown no
credentials is closed, or one that is idle. Else the newcomer receives 503 and comes again."""
BODIES_BYTES_MAX: Final = 8 << 20
"""The most bytes of requests in memory, over all connections."""
IDLE_S: Final = 60.0
"""The time in seconds after which an inactive reader is dropped."""
REQUEST_S: Final = 10.0
"""The time in seconds from a request's first byte to its last."""
IDLE_DISPLACED_S: Final = 1.0
"""The seconds without a request after which a reader makes room for another one. Its next request
opens another connection."""
RATE_BYTES_PER_S: Final = 65_536
"""The slowest rate of a reader, IDLE_S not counted. A slower one is dropped."""
PIECE_BYTES: Final = 256 << 10
OLD_PIECE_BYTES: Final = 1 << 20
"""The bytes of old segments that are read from the disk at a time. With half of them, a disk whose
operations a hypervisor limits let a fdatasync wait longer."""
STRETCH_BYTES: Final = 4 << 20
SEND_BUFFER_BYTES: Final = 256 << 10
"""The kernel's send buffer per connection in bytes. Without a limit it grows to megabytes. Packets
to the node's clients then wait behind it in the same queues, and their p50 doubles."""
CLOSE_TIMEOUT_S: Final = 5.0

FindBroker = Callable[[], Broker | None]


@runtime_checkable
class KernelFile(Protocol):
    """A file with a descriptor, which the kernel can send."""

    def fileno(self) -> int: ...


class Turn:
    """The right to run Python, which the threads of a sender have one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leaves the turn to others during a system call that may wait."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class OldReads:
    """Reads parts of old segments into the kernel's cache, one part at a time for all readers.

    Counter-example: sendfile has the kernel read ahead for each reader, 8 MiB where the disk is
    set so. The fdatasync before a PUBACK waits behind that, and p99 is 4 to 6 times as long.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(OLD_PIECE_BYTES))

    def read(self, descriptor: int, position: int, size_bytes: int) -> None:
        """Reads at most OLD_PIECE_BYTES. The caller has the turn."""
        with self._turn.left():
            self._lock.acquire()
        try:
            # Without it, the kernel reads ahead. Others share the descriptor.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            with self._turn.left():
                os.preadv(descriptor, [self._buffer[:size_bytes]], position)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)
        finally:
            self._lock.release()


class SendLimits(NamedTuple):
    """The limits that all connections of a sender share."""

    pace: Pace
    old_reads: OldReads
    turn: Turn


class LogSender:
    """The threads that send the log, from the start of the admin port to its end."""

    def __init__(
        self,
        find_broker: FindBroker,
        checks: "RequestChecks",
        bytes_per_s: Callable[[], int] = lambda: 0,
    ) -> None:
        """`bytes_per_s`: the most that all readers together are sent; 0: no limit."""
        self._find_broker = find_broker
        self._checks = checks
        self._turn = Turn()
        self._limits = SendLimits(Pace(bytes_per_s), OldReads(self._turn), self._turn)
        self._readers_max = descriptors.share(READERS_MAX)
        self._bodies = Budget(BODIES_BYTES_MAX)
        self._lock = threading.Lock()
        self._sockets: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, float] = {}
        """The connections without a request, the longest first, and since when."""
        self._unproved: dict[socket.socket, None] = {}
        """The connections whose credentials are not checked yet, the oldest first."""
        self._closing = False

    def take_over(self, connection: socket.socket, received: bytes) -> None:
        """Serves a connection that has already sent `received`."""
        connection.settimeout(IDLE_S)
        with self._lock:
            full = self._closing or not self._make_room()
            if not full:
                thread = threading.Thread(
                    target=self._serve,
                    args=(connection, received),
                    name="log-sender",
                    daemon=True,
                )
                self._sockets[connection] = thread
                self._unproved[connection] = None
        if full:
            with contextlib.suppress(OSError), connection:
                connection.settimeout(0)
                connection.send(BUSY)
            return
        thread.start()

    def close(self) -> None:
        """Cuts all connections and waits for the threads."""
        with self._lock:
            self._closing = True
            threads = list(self._sockets.values())
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _make_room(self) -> bool:
        """Makes room for one more if necessary. The thread of a displaced connection then ends."""
        if len(self._sockets) < self._readers_max:
            return True
        oldest = next(iter(self._unproved), None)
        if oldest is None:
            oldest, since = next(iter(self._idle.items()), (None, 0.0))
            if oldest is None or time.monotonic() - since < IDLE_DISPLACED_S:
                return False
        self._remove(oldest)
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return True

    def _remove(self, connection: socket.socket) -> None:
        self._sockets.pop(connection, None)
        self._unproved.pop(connection, None)
        self._idle.pop(connection, None)

    def _note_idle(self, connection: socket.socket, is_idle: bool) -> None:
        """Notes whether a connection waits for its next request."""
        with self._lock:
            self._idle.pop(connection, None)
            if is_idle and connection in self._sockets:
                self._idle[connection] = time.monotonic()

    def _note_proof(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproved.pop(connection, None)

    def _serve(self, connection: socket.socket, received: bytes) -> None:
        try:
            with connection, self._turn:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                LogRequests(
                    connection,
                    _Received(
                        received, connection, self._turn, partial(self._note_idle, connection)
                    ),
                    self._find_broker,
                    self._checks,
                    self._bodies,
                    self._limits,
                    partial(self._note_proof, connection),
                )
        except OSError:
            return  # The reader has closed the connection, or is too slow.
        except Exception as error:
            logger.error("log_sender_failed error=%r", str(error), exc_info=error)
        finally:
            with self._lock:
                self._remove(connection)


class RequestChecks:
    """The checks of `holdfast.security.http.guard` and of the port's gate, for connections that
    bypass both. Any thread may call them."""

    def __init__(self, hosts: Hosts, gate: CredentialGate) -> None:
        self._hosts = hosts
        self._gate = gate

    def check(self, headers: Message, remote: str) -> None:
        """Checks the origin and the access of a request. Raises `ApiRefusal` (401, 403)."""
        hosts = headers.get_all("Host", [])
        origins, sites = headers.get_all("Origin", []), headers.get_all("Sec-Fetch-Site", [])
        own = [each for each in hosts if self._hosts.knows(each)]
        text = page_refusal(origins, sites, own) or self._hosts.refusal(hosts)
        if text:
            raise ApiRefusal(403, text)
        self._gate.decide_now(shown_credentials(headers.get, remote), Scope.READER)


class Budget:
    """A number of bytes that several threads share."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if size_bytes > self._left:
                return False
            self._left -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._left += size_bytes


class _Received(io.RawIOBase):
    """A connection with bytes read before. Until `rest`, a request has REQUEST_S to arrive."""

    def __init__(
        self,
        received: bytes,
        connection: socket.socket,
        turn: Turn,
        note_idle: Callable[[bool], None],
    ) -> None:
        """`note_idle` is called before and after each wait for the next request."""
        self._note_idle = note_idle
        self._received = received
        self._connection = connection
        self.turn = turn
        self._deadline = time.monotonic() + REQUEST_S

    def rest(self) -> None:
        """Ends the limit, because the request is complete."""
        self._deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads some bytes. Raises `TimeoutError` when the limit has passed."""
        if not self._received:
            wait_s = IDLE_S
            if self._deadline:
                wait_s = self._deadline - time.monotonic()
                if wait_s <= 0:
                    raise TimeoutError("the request takes too long")
            self._connection.settimeout(wait_s)
            if not self._deadline:
                self._note_idle(True)
            with self.turn.left():
                count = self._connection.recv_into(buffer)
            if not self._deadline:
                self._note_idle(False)
                self._deadline = time.monotonic() + REQUEST_S
            return count
        count = min(len(buffer), len(self._received))
        buffer[:count] = self._received[:count]
        self._received = self._received[count:]
        return count


class _Sent(io.BufferedIOBase):
    """The heads and refusals of a connection. Its thread leaves the turn while it sends them."""

    def __init__(self, connection: socket.socket, turn: Turn) -> None:
        self._connection = connection
        self._turn = turn

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._turn.left():
            self._connection.sendall(data)
        return len(data)


class LogRequests(BaseHTTPRequestHandler):
    """One connection, served inside the constructor."""

    protocol_version = "HTTP/1.1"
    server_version = "holdfast"
    sys_version = ""

    def __init__(
        self,
        connection: socket.socket,
        received: _Received,
        find_broker: FindBroker,
        checks: "RequestChecks",
        bodies: Budget,
        limits: SendLimits,
        note_proof: Callable[[], None],
    ) -> None:
        """`note_proof` is called when a request has passed the checks."""
        self._input = received
        self._turn = received.turn
        self._limits = limits
        self._find_broker = find_broker
        self._checks = checks
        self._bodies = bodies
        self._note_proof = note_proof
        self._planner = ReadPlanner()
        self._remote: str = connection.getpeername()[0]
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(self._input)
        self.wfile = _Sent(self.connection, self._turn)

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: requests are not logged."""

    def do_POST(self) -> None:
        """Serves one request. A refused body stays unread, so the connection then ends."""
        try:
            self._checks.check(self.headers, self._remote)
        except ApiRefusal as error:
            self.close_connection = True
            self._answer(error.status, {"error": str(error)}, error.headers)
            return
        self._note_proof()
        length = whole_number(self.headers.get("Content-Length", ""), REQUEST_BYTES_MAX)
        if length is None:
            self.close_connection = True
            self._answer(400, {"error": f"a body of at most {REQUEST_BYTES_MAX} bytes is needed"})
            return
        if not self._bodies.take(length):
            self.close_connection = True
            self._answer(503, {"error": "too many requests are read: come again"})
            return
        try:
            self._serve_body(self.rfile.read(length))
        finally:
            self._bodies.give_back(length)

    def _serve_body(self, body: bytes) -> None:
        self._input.rest()
        broker = self._find_broker()
        if self.path != PATH:
            self._answer(404, {"error": f"this connection serves {PATH} only"})
        elif broker is None:
            self._answer(503, {"error": "this node stands by: ask the holder of the lease"})
        else:
            try:
                check_log(broker)
                self._read(broker, body)
            except BadRead as error:
                self._answer(400, {"error": str(error)})
            except ApiRefusal as error:
                self._answer(error.status, {"error": str(error)}, error.headers)

    def _read(self, broker: Broker, body: bytes) -> None:
        try:
            plan = self._planner.plan(broker, decode_request(body))
        except RemovedRecords as error:
            self._answer(410, {"error": str(error), "first_offsets": error.first})
            return
        except OtherGeneration as error:
            self._answer(409, {"error": str(error)})
            return
        except NotStored as error:
            raise not_stored(broker, error.partition) from None
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(plan.size_bytes))
        self.send_header("Holdfast-Log", header_of(plan))
        self.end_headers()
        deadline = time.monotonic() + IDLE_S + plan.size_bytes / RATE_BYTES_PER_S
        for extent in plan.extents:
            deadline += _send(self.connection, extent, deadline, self._limits)

    def _answer(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.connection.settimeout(IDLE_S)
        self.wfile.write(data)


def _send(connection: socket.socket, extent: Extent, deadline: float, limits: SendLimits) -> float:
    """Sends a range of a file, and returns the seconds that the pace has taken. Raises `OSError`,
    also when the deadline has passed, which does not count these seconds."""
    pace, old_reads, turn = limits
    file, position, left = extent.file, extent.position, extent.length
    paced_s = 0.0
    opened = io.FileIO(file.fileno(), "rb", closefd=False) if isinstance(file, KernelFile) else None
    piece_bytes = OLD_PIECE_BYTES if extent.is_cold else STRETCH_BYTES
    if opened is None:
        piece_bytes = PIECE_BYTES
    while left:
        pause_s = pace.take(min(left, piece_bytes))
        if pause_s:
            with turn.left():
                time.sleep(pause_s)
        paced_s += pause_s
        wait_s = deadline + paced_s - time.monotonic()
        if wait_s <= 0:
            raise TimeoutError("the reader is too slow")
        connection.settimeout(min(wait_s, IDLE_S))
        if opened is not None:
            if extent.is_cold:
                old_reads.read(opened.fileno(), position, min(left, piece_bytes))
            # Sent in stretches of two system calls each, so that the deadline is checked.
            with turn.left():
                sent = connection.sendfile(opened, position, min(left, piece_bytes))
        else:
            data = file.read(position, min(left, piece_bytes))
            with turn.left():
                connection.sendall(data)
            sent = len(data)
        if not sent:
            raise OSError("the segment became shorter")
        position += sent
        left -= sent
    if opened is not None and extent.is_cold:
        # What one reader has read is not worth the pages of the newest records. The kernel keeps
        # those that are still being sent.
        os.posix_fadvise(opened.fileno(), extent.position, extent.length, os.POSIX_FADV_DONTNEED)
    return paced_s


class LogConnections(BoundedConnection):
    """The admin port's HTTP. Connections of readers go to `sender`, set by `bounded`."""

    sender: LogSender

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._first = b""
        # The kernel cannot send what has to be encrypted here.
        self._is_ours = None if transport.get_extra_info("sslcontext") is None else False
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Decides by the first bytes whether this connection belongs to a reader."""
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
        # The loop closes its descriptor of the connection, and the sender uses a duplicate.
        try:
            descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError as error:
            # No descriptor is free.
            logger.error("log_reader_refused error=%r", str(error))
            self.transport.write(BUSY)
            self.transport.close()
            return
        self.transport.abort()
        self.sender.take_over(socket.socket(fileno=descriptor), data)
