"""Connects any kind of client socket to the node: admission, input, output."""

from asyncio import BaseTransport

from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.transport import ClientTransport
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.security.certificates import user_of
from holdfast.security.psk import PskObject


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


def proved_name(transport: BaseTransport, source: str) -> str | None:
    """The user name that the client's TLS has proved, or "". None: the client must not be admitted,
    because it resumes a session whose pre-shared key is not known any more. `source`: see
    Listener.certificate_user."""
    tls = transport.get_extra_info("ssl_object")
    if isinstance(tls, PskObject):
        identity = tls.psk_identity
        return (identity if source != "none" else "") if identity else None
    if tls is None:
        return ""
    return user_of(transport.get_extra_info("peercert"), source)


class ConnectionDriver(ClientTransport):
    """The link between a socket, wherever it is, and the node's `Connection`.

    Reading pauses while the node has paused the connection's input.
    """

    def __init__(self, broker: Broker, listener: ListenerCount, remote: str) -> None:
        self.broker = broker
        self.listener = listener
        self.remote = remote
        self.connection: Connection | None = None
        self.close_called = False

    def write(self, data: bytes) -> None:
        """Sends bytes to the client."""
        raise NotImplementedError

    def finish(self) -> None:
        """Closes the socket after the bytes written, or soon if the client does not take them."""
        raise NotImplementedError

    def find_remote(self) -> str:
        return self.remote

    def admit(self, certificate_name: str) -> bool:
        """Registers the connection. False: it is at a limit of the listener or the process."""
        broker = self.broker
        listener = self.listener
        remote = self.find_remote()
        broker.touch()
        if listener.connections_max and listener.connections >= listener.connections_max:
            limit = listener.connections_max
            broker.node.refuse_connection("listener_full", remote, listener.name, limit)
            return False
        if not broker.node.has_room(remote, listener.name, listener.sockets_max):
            return False
        listener.connections += 1
        connection = broker.node.handle_connected(remote, listener.rules)
        connection.transport = self
        if certificate_name:
            connection.certificate_name = certificate_name
        self.connection = connection
        return True

    def take(self, data: bytes) -> None:
        """Hands bytes to the node. An exception cuts this connection only, see `failures`."""
        broker = self.broker
        broker.touch()
        connection = self.connection
        assert connection is not None
        try:
            broker.node.handle_data(connection, data)
        except Exception as error:  # noqa: BLE001
            broker.contain(connection, error)
            self.cut()
            return
        if connection.input_paused:
            self.pause_reading()

    def __call__(self, data: bytes) -> None:
        """Receives data from the socket. It is in the first class with attributes, because mypyc's
        layout of an object depends on it."""
        self.take(data)

    def buffer_upgrade(self, size_bytes: int) -> None:
        """Counts the bytes of an HTTP request that are buffered before MQTT begins."""
        connection = self.connection
        if connection is not None:
            self.broker.touch()
            self.broker.node.handle_upgrade(connection, size_bytes)

    def congest(self) -> None:
        """Lets the node write no more for now."""
        if self.connection is not None:
            self.connection.congested = True

    def relieve(self) -> None:
        """Lets the node write again, what has waited first."""
        connection = self.connection
        if connection is None:
            return
        self.broker.touch()
        connection.congested = False
        self.flush(connection)
        self.broker.node.handle_writable(connection)

    def leave(self) -> None:
        """Reports the end to the node. A connection that was not admitted is unknown to it."""
        connection = self.connection
        if connection is None:
            return
        connection.recall_remote()
        self.listener.connections -= 1
        self.broker.touch()
        self.broker.node.handle_disconnected(connection)
        self.broker.note_disconnected()
        connection.transport = None
        self.connection = None

    def flush(self, connection: Connection) -> None:
        """Writes what the node queued, and then closes the socket if the node asked for that."""
        if self.connection is None or (connection.congested and not connection.closing):
            return
        out = connection.out
        if out is not None:
            data = out[0] if len(out) == 1 else b"".join(out)
            connection.out = None
            connection.out_bytes = 0
            state = self.broker.node.state
            state.stats.bytes_sent += len(data)
            self.write(data)
            if len(data) > state.config.outbox_bytes and not connection.congested:
                # The node stopped at the limit of `out`, and below the transport's limit
                # `relieve` is never called. So the node continues here.
                self.broker.node.handle_writable(connection)
        if connection.closing and not self.close_called:
            self.close_called = True
            self.finish()
