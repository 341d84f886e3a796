"""Port between a listener's sockets and the process that receives its clients: the broker itself,
or an I/O worker.
"""

import asyncio
import logging
import socket
from typing import Protocol

from holdfast.config.listener import Listener
from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.driver import ListenerCount
from holdfast.io.sockets.tcp import TcpConnection
from holdfast.node.connections.pending_connects import PendingHandshake

logger = logging.getLogger("holdfast")


class ReceivedConnection(Protocol):
    """The protocol of a client's socket, with what a WebSocket in front of it reports."""

    def find_remote(self) -> str:
        """The client's address."""

    def buffer_upgrade(self, size_bytes: int) -> None:
        """Counts the bytes of an HTTP request that are buffered before MQTT begins."""


class Reception:
    """The receiver of a listener's connections. `connect_timeout_s`: the seconds until a complete
    CONNECT, and so also for a TLS handshake or the header of a proxy."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connect_timeout_s: float) -> None:
        self.loop = loop
        self.connect_timeout_s = connect_timeout_s

    def new_connection(self, remote: str = "") -> ReceivedConnection:
        """The protocol of a new socket. `remote`: the client's host:port; "": the socket's."""
        raise NotImplementedError

    def has_room(self, remote: str) -> bool:
        """Makes room for a handshake if necessary. False: the socket is closed."""
        raise NotImplementedError

    def begin_handshake(self, handshake: PendingHandshake) -> None:
        """Counts a handshake. A newcomer at any listener may displace it."""
        raise NotImplementedError

    def end_handshake(self, handshake: PendingHandshake) -> None:
        raise NotImplementedError

    def count_failure(self) -> None:
        """Counts a failed handshake, upgrade or header of a proxy."""
        raise NotImplementedError

    def note_failure(self, event: str, remote: str, error: str) -> None:
        """Logs what ended a connection below MQTT."""
        raise NotImplementedError


class RelayedListener:
    """A listener that accepts in other processes."""

    def close(self) -> None:
        """Accepts no more connections, and ends handshakes. Open connections stay."""
        raise NotImplementedError


class ListenerHost:
    """Processes beside the broker's that accept the connections of listeners."""

    def listen(
        self,
        broker: Broker,
        settings: Listener,
        sockets: list[socket.socket],
        count: ListenerCount,
    ) -> RelayedListener:
        """Accepts on these sockets, which the host takes over, in place of those that the listener
        had before. Raises `OSError`."""
        raise NotImplementedError


class BrokerReception(Reception):
    """The reception in the broker's own process."""

    def __init__(self, broker: Broker, count: ListenerCount, sockets_max: int) -> None:
        super().__init__(broker.loop, broker.node.state.config.connect_timeout_s)
        self._broker = broker
        self._count = count
        self._sockets_max = sockets_max

    def new_connection(self, remote: str = "") -> TcpConnection:
        return TcpConnection(self._broker, self._count, remote)

    def has_room(self, remote: str) -> bool:
        self._broker.touch()
        return self._broker.node.has_room(remote, self._count.name, self._sockets_max)

    def begin_handshake(self, handshake: PendingHandshake) -> None:
        state = self._broker.node.state
        state.handshakes += 1
        state.pending_connects.begin_handshake(handshake)

    def end_handshake(self, handshake: PendingHandshake) -> None:
        state = self._broker.node.state
        state.handshakes -= 1
        state.pending_connects.end_handshake(handshake)

    def count_failure(self) -> None:
        self._broker.node.state.stats.handshakes_failed += 1

    def note_failure(self, event: str, remote: str, error: str) -> None:
        logger.info(f"{event} remote=%r listener=%r error=%r", remote, self._count.name, error)
