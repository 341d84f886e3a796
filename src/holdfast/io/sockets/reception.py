"""Receives the connections of a listener: what its sockets report to the broker."""

import logging

from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.driver import ListenerCount
from holdfast.io.sockets.tcp import TcpConnection
from holdfast.node.connections.pending_connects import PendingHandshake

logger = logging.getLogger("holdfast")


class Reception:
    """The receiver of a listener's connections. `connect_timeout_s`: the seconds until a complete
    CONNECT, and so also for a TLS handshake or the header of a proxy."""

    def __init__(self, broker: Broker, count: ListenerCount, sockets_max: int) -> None:
        self.loop = broker.loop
        self.connect_timeout_s = broker.node.state.config.connect_timeout_s
        self._broker = broker
        self._count = count
        self._sockets_max = sockets_max

    def new_connection(self, remote: str = "") -> TcpConnection:
        """The protocol of a new socket. `remote`: the client's host:port; "": the socket's."""
        return TcpConnection(self._broker, self._count, remote)

    def has_room(self, remote: str) -> bool:
        """Makes room for a handshake if necessary. False: the socket is closed."""
        self._broker.touch()
        return self._broker.node.has_room(remote, self._count.name, self._sockets_max)

    def begin_handshake(self, handshake: PendingHandshake) -> None:
        """Counts a handshake. A newcomer at any listener may displace it."""
        state = self._broker.node.state
        state.handshakes += 1
        state.pending_connects.begin_handshake(handshake)

    def end_handshake(self, handshake: PendingHandshake) -> None:
        state = self._broker.node.state
        state.handshakes -= 1
        state.pending_connects.end_handshake(handshake)

    def count_failure(self) -> None:
        """Counts a failed handshake, upgrade or header of a proxy."""
        self._broker.node.state.stats.handshakes_failed += 1

    def note_failure(self, event: str, remote: str, error: str) -> None:
        """Logs what ended a connection below MQTT."""
        logger.info(f"{event} remote=%r listener=%r error=%r", remote, self._count.name, error)
