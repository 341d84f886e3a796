"""One client connection of the generator, and the loop that serves all of them."""

import select
import time
from collections.abc import Callable

from bench import wire
from bench.channel import CHANNELS


class ConnectionLost(Exception):
    """The broker closed a connection in the middle of a run."""


class Connection:
    """A connected client. Created blocking for the handshake, then served by a Loop."""

    def __init__(self, port: int, client_id: str, transport: str = "tcp") -> None:
        self.client_id = client_id
        self.channel = CHANNELS[transport](port)
        self.socket = self.channel.socket
        self.rest = b""
        """The start of a packet whose end has not been read yet."""
        self.unsent = bytearray()
        self.loop: Loop | None = None
        self._exchange(wire.connect(client_id), wire.CONNACK_ACCEPTED)

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self._exchange(wire.subscribe(topic_filter, qos), wire.suback(qos))

    def subscribe_all(self, topic_filters: list[str], qos: int) -> None:
        """With one packet."""
        count = len(topic_filters)
        self._exchange(wire.subscribe_all(topic_filters, qos), wire.suback_all(count, qos))

    def _exchange(self, request: bytes, expected: bytes) -> None:
        self.socket.sendall(self.channel.framed(request))
        answer = b""
        while len(answer) < len(expected):
            data = self.channel.read()
            if not data:
                raise ConnectionLost(f"{self.client_id}: closed after {answer!r}")
            answer += data
        if answer != expected:
            raise ConnectionLost(f"{self.client_id}: answered {answer!r}, expected {expected!r}")

    def receive(self) -> bytes:
        """What has arrived, behind the unfinished packet of the last read."""
        try:
            data = self.channel.read()
        except BlockingIOError:
            return self.rest
        if not data:
            raise ConnectionLost(f"{self.client_id}: closed by the broker")
        return self.rest + data

    def send(self, data: bytes | bytearray) -> None:
        data = self.channel.framed(data)
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self.channel.write(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.unsent += data[sent:]
            if self.loop is not None:
                self.loop.watch_writable(self, True)

    def flush(self) -> None:
        try:
            del self.unsent[: self.channel.write(self.unsent)]
        except BlockingIOError:
            return
        if not self.unsent and self.loop is not None:
            self.loop.watch_writable(self, False)

    def close(self) -> None:
        self.socket.close()


class Loop:
    """Waits for connections and calls the handler that belongs to each readable one."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.connections: dict[int, Connection] = {}

    def add(self, connection: Connection, handler: Callable[[], None]) -> None:
        connection.socket.setblocking(False)
        descriptor = connection.socket.fileno()
        self.epoll.register(descriptor, select.EPOLLIN)
        self.handlers[descriptor] = handler
        self.connections[descriptor] = connection
        connection.loop = self

    def watch_writable(self, connection: Connection, wanted: bool) -> None:
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        self.epoll.modify(connection.socket.fileno(), mask)

    def run_once(self, timeout_s: float) -> None:
        """Serves what is ready; waits up to `timeout_s`, in steps of a millisecond."""
        for descriptor, mask in self.epoll.poll(timeout_s):
            if mask & select.EPOLLOUT:
                self.connections[descriptor].flush()
            if mask & ~select.EPOLLOUT:
                self.handlers[descriptor]()

    def run_for(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        while (left_s := end - time.monotonic()) > 0:
            self.run_once(left_s)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.epoll.close()
