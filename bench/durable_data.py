"""Durable sessions and a journal of a given size, made through a running broker.

Through the broker, because then they are what a broker leaves, whatever its files look like.
"""

import select
import socket
import time
from pathlib import Path
from typing import Final

from bench import wire
from bench.connection import Connection, ConnectionLost, Loop
from bench.flows import Qos1Publisher
from bench.wire import Frame

PAYLOAD_BYTES: Final = 1000
TOPICS: Final = 50
WINDOW: Final = 1000
"""Unacknowledged messages, of all topics together."""
CONNECTIONS_MAX: Final = 64
"""Sessions made at the same time; each waits for the disk twice."""
HANDSHAKE_TIMEOUT_S: Final = 60.0
STALL_TIMEOUT_S: Final = 30.0


def journal_bytes(data: Path) -> int:
    """Of all segments, those once that several epochs share. The last one of a holder that runs
    or was killed has some megabytes allocated in advance."""
    segments = (path.stat() for path in data.rglob("*.log"))
    return sum({(each.st_dev, each.st_ino): each.st_size for each in segments}.values())


def fill(port: int, missing: int) -> None:
    """Publishes payloads of `missing` bytes in all; the journal grows by a little more. Raises
    ConnectionLost."""
    loop = Loop()
    publishers = []
    for topic in range(TOPICS):
        connection = Connection(port, f"fill-{topic:02}")
        frame = Frame(f"fill/{topic:02}", 1, PAYLOAD_BYTES)
        publishers.append(Qos1Publisher(connection, frame, WINDOW // TOPICS))
        loop.add(connection, publishers[-1].handle)
    each = -(-missing // PAYLOAD_BYTES // TOPICS)
    _publish(loop, publishers, each)
    loop.close()


def _publish(loop: Loop, publishers: list[Qos1Publisher], wanted: int) -> None:
    """Until each publisher has sent so many messages and all are confirmed."""
    stalled_s = time.monotonic() + STALL_TIMEOUT_S
    while not all(each.sent == wanted and each.is_settled() for each in publishers):
        for each in publishers:
            room = min(each.room(), wanted - each.sent)
            if room > 0:
                each.publish(room)
                stalled_s = time.monotonic() + STALL_TIMEOUT_S
        loop.run_once(0.1)
        if time.monotonic() > stalled_s:
            raise ConnectionLost(f"nothing was confirmed in {STALL_TIMEOUT_S:g} s")


def add_sessions(port: int, first: int, end: int) -> None:
    """Makes durable sessions number `first` up to `end`, with a subscription each, and leaves
    them. Raises ConnectionLost."""
    waiting: dict[int, tuple[socket.socket, bytes]] = {}
    epoll = select.epoll()
    numbers = iter(range(first, end))
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    done = first
    while done < end:
        while len(waiting) < CONNECTIONS_MAX and (number := next(numbers, None)) is not None:
            client = socket.create_connection(("127.0.0.1", port), HANDSHAKE_TIMEOUT_S)
            client.sendall(
                wire.connect(f"away-{number:06}", clean=False)
                + wire.subscribe(f"away/{number:06}/+", 1)
            )
            epoll.register(client.fileno(), select.EPOLLIN)
            waiting[client.fileno()] = (client, b"")
        for descriptor, _ in epoll.poll(1.0):
            client, answer = waiting[descriptor]
            data = client.recv(64)
            answer += data
            waiting[descriptor] = (client, answer)
            if answer == wire.CONNACK_ACCEPTED + wire.suback(1):
                client.sendall(wire.DISCONNECT)
                epoll.unregister(descriptor)
                client.close()
                del waiting[descriptor]
                done += 1
                deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
            elif not data:
                raise ConnectionLost(f"session {done} was answered {answer!r}")
        if time.monotonic() > deadline_s:
            raise ConnectionLost(f"no more than {done} of {end} sessions were made")
