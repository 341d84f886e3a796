"""Connections that do nothing: how fast they are accepted and what each one costs."""

import select
import socket
import time

from bench import wire
from bench.connection import ConnectionLost
from bench.measurement import Measurement
from bench.process import cpu_s, rss_bytes
from bench.scenarios import Scenario

FIRST = 1000
"""Connections before memory is counted: they pay for pools and tables made once."""
CONNECTING_MAX = 64
"""Handshakes under way at a time; below the listen backlog of either broker (100)."""
SETTLE_S = 0.5
HANDSHAKES_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 60


class Crowd:
    """Clients that have finished or are in the middle of CONNECT."""

    def __init__(self, port: int, keep_alive_s: int = KEEP_ALIVE_S) -> None:
        self.port = port
        self.keep_alive_s = keep_alive_s
        self.connected: list[socket.socket] = []
        self.started = 0
        self.waiting: dict[int, socket.socket] = {}
        self.epoll = select.epoll()

    def start_one(self) -> None:
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", self.port))
        self.epoll.register(client.fileno(), select.EPOLLOUT)
        self.waiting[client.fileno()] = client
        self.started += 1

    def grow(self, connections: int) -> None:
        """Until `connections` clients in all hold a CONNACK."""
        deadline = time.monotonic() + HANDSHAKES_TIMEOUT_S
        while len(self.connected) < connections:
            while self.started < connections and len(self.waiting) < CONNECTING_MAX:
                self.start_one()
            for descriptor, mask in self.epoll.poll(1.0):
                if mask & select.EPOLLOUT and not mask & (select.EPOLLERR | select.EPOLLHUP):
                    self._send_connect(descriptor)
                else:
                    self._finish(descriptor)
            if time.monotonic() > deadline:
                raise ConnectionLost(f"{len(self.connected)} of {connections} were accepted")

    def _send_connect(self, descriptor: int) -> None:
        client_id = f"idle-{self.started:06}-{descriptor:06}"
        self.waiting[descriptor].send(wire.connect(client_id, self.keep_alive_s))
        self.epoll.modify(descriptor, select.EPOLLIN)

    def _finish(self, descriptor: int) -> None:
        client = self.waiting.pop(descriptor)
        answer = client.recv(64)
        if answer != wire.CONNACK_ACCEPTED:
            raise ConnectionLost(f"connection {len(self.connected)} was answered {answer!r}")
        self.epoll.unregister(descriptor)
        self.connected.append(client)

    def alive(self) -> int:
        """How many the broker has not closed or sent anything to."""
        count = 0
        for client in self.connected:
            try:
                client.recv(1)
            except BlockingIOError:
                count += 1
        return count

    def close(self) -> None:
        for client in self.connected:
            client.close()
        self.epoll.close()


def run(scenario: Scenario, port: int, broker_pid: int) -> Measurement:
    crowd = Crowd(port)
    cpu_before_s, start = cpu_s(broker_pid), time.monotonic()
    crowd.grow(FIRST)
    first_s = time.monotonic() - start
    time.sleep(SETTLE_S)
    rss_first = rss_bytes(broker_pid)
    start = time.monotonic()
    crowd.grow(scenario.connections)
    duration_s = first_s + time.monotonic() - start
    broker_cpu_s = cpu_s(broker_pid) - cpu_before_s
    time.sleep(SETTLE_S)
    rss_all = rss_bytes(broker_pid)
    missing = scenario.connections - crowd.alive()
    crowd.close()
    return Measurement(
        messages=scenario.connections,
        duration_s=duration_s,
        broker_cpu_s=broker_cpu_s,
        generator_cpu_s=time.process_time(),
        broker_rss_bytes=rss_all,
        missing=missing,
        other={
            "connection_bytes": (rss_all - rss_first) / (scenario.connections - FIRST),
            "connect_s": duration_s,
        },
    )
