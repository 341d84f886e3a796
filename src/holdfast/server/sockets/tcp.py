"""TCP and TLS connections: an asyncio protocol around `Connection`.

It has the methods of asyncio.Protocol without the base class, so that it compiles to a native
class.
"""

import select
from asyncio import BaseTransport, Transport
from typing import Final, cast

from holdfast.broker.session.connection import Connection
from holdfast.broker.session.listener_rules import ListenerRules
from holdfast.security.certificates import user_of
from holdfast.server.event_loop.broker import Broker
from holdfast.server.sockets.transport import ClientTransport

WRITE_BUFFER_BYTES: Final = 262_144
"""The unsent bytes above which the transport calls pause_writing and the node's limits apply."""
LEFT: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
CLOSE_TIMEOUT_S: Final = 5.0
"""The time in seconds that a client has to accept the last bytes before the socket is cut."""


class ListenerCount:
    """The connections of one listener.

    `connections_max` of 0: the listener has no limit of its own. `sockets_max`: the limit of all
    listeners together, including TLS handshakes.
    """

    def __init__(self, rules: ListenerRules, connections_max: int, sockets_max: int) -> None:
        self.rules = rules
        self.name = rules.name
        self.connections_max = connections_max
        self.sockets_max = sockets_max
        self.connections = 0
        # "cn", "san" or "none": see Listener.certificate_user.
        self.certificate_user = "cn"


class TcpConnection(ClientTransport):
    """The socket of one client connection.

    Reading pauses while the node has paused the connection's input.
    """

    def __init__(self, broker: Broker, listener: ListenerCount, remote: str = "") -> None:
        """`remote`: the client's host:port; "": that of the socket."""
        self.broker = broker
        self.remote = remote
        self.listener = listener
        self.transport: Transport | None = None
        self.connection: Connection | None = None
        self.reading_paused = False
        self.close_called = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Admit the connection, or abort it at the limits of the listener or the process."""
        transport = cast(Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        remote = self.remote
        if not remote:
            peer = transport.get_extra_info("peername")
            self.remote = remote = f"{peer[0]}:{peer[1]}" if peer else "?"
        broker = self.broker
        broker.touch()
        listener = self.listener
        if listener.connections_max and listener.connections >= listener.connections_max:
            limit = listener.connections_max
            broker.node.refuse_connection("listener_full", remote, listener.name, limit)
            transport.abort()
            return
        if not broker.node.has_room(remote, listener.name, listener.sockets_max):
            transport.abort()
            return
        listener.connections += 1
        connection = broker.node.handle_connected(remote, listener.rules)
        connection.transport = self
        name = user_of(transport.get_extra_info("peercert"), listener.certificate_user)
        if name:
            connection.certificate_name = name
        self.connection = connection

    def data_received(self, data: bytes) -> None:
        """Hand bytes to the node. An exception cuts this connection only, see `failures`."""
        broker = self.broker
        broker.touch()
        connection = self.connection
        assert connection is not None
        try:
            broker.node.handle_data(connection, data)
        except Exception as error:  # noqa: BLE001
            broker.contain(connection, error)
            if self.transport is not None:
                self.transport.abort()
            return
        if connection.input_paused:
            self.pause_reading()

    def buffer_upgrade(self, size_bytes: int) -> None:
        """Count the bytes of an HTTP request that are buffered before MQTT begins."""
        connection = self.connection
        if connection is not None:
            self.broker.touch()
            self.broker.node.handle_upgrade(connection, size_bytes)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Report the end to the node. A connection that was not admitted is unknown to it."""
        connection = self.connection
        if connection is None:
            return
        self.listener.connections -= 1
        self.broker.touch()
        self.broker.node.handle_disconnected(connection)
        self.broker.note_disconnected()
        connection.transport = None
        self.connection = None
        self.transport = None

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.congested = True

    def resume_writing(self) -> None:
        connection = self.connection
        if connection is None:
            return
        self.broker.touch()
        connection.congested = False
        self.flush(connection)
        self.broker.node.handle_writable(connection)

    def cut(self) -> None:
        # `abort`, because an orderly close of TLS waits for the peer.
        if self.transport is not None:
            self.transport.abort()

    def has_left(self) -> bool:
        transport = self.transport
        if transport is None or transport.is_closing():
            return True
        watched = transport.get_extra_info("socket")
        if watched is None:
            return False
        poll = select.poll()
        poll.register(watched.fileno(), LEFT)
        return bool(poll.poll(0))

    def pause_reading(self) -> None:
        transport = self.transport
        if transport is not None and not self.reading_paused and not transport.is_closing():
            self.reading_paused = True
            transport.pause_reading()

    def resume_reading(self) -> None:
        transport = self.transport
        if transport is not None and self.reading_paused and not transport.is_closing():
            self.reading_paused = False
            transport.resume_reading()

    def flush(self, connection: Connection) -> None:
        """Write what the node queued, and close the socket after it if the node asked for that."""
        transport = self.transport
        if transport is None or (connection.congested and not connection.closing):
            return
        out = connection.out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            connection.out_bytes = 0
            self.broker.node.state.stats.bytes_sent += len(data)
            transport.write(data)
            if len(data) > self.broker.node.state.config.outbox_bytes and not connection.congested:
                # The node stopped at the limit of `out`, and below the transport's limit
                # resume_writing is never called. So the node continues here.
                self.broker.node.handle_writable(connection)
        if connection.closing and not self.close_called:
            self.close_called = True
            transport.close()
            if transport.get_write_buffer_size():
                self.broker.loop.call_later(CLOSE_TIMEOUT_S, transport.abort)
