"""MQTT connections of a task, on plain sockets, to one server after another until one accepts.

A task does nothing else while it publishes. An event loop would halve its speed.
"""

import logging
import select
import socket
import ssl
import time
from collections.abc import Sequence
from random import random
from typing import Final

from holdfast.client.errors import (
    ClientError,
    ConnectionLost,
    ConnectionRefused,
    ProtocolError,
    TimedOut,
    reason_text,
)
from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.options import LEVEL_5, Options
from holdfast.client.protocol.negotiation import (
    HTTP_BEGIN,
    SPEAKS_HTTP,
    ServerLimits,
    connect_packet,
    reason_string,
    server_reference,
)
from holdfast.client.reconnect import TRANSIENT
from holdfast.client.servers import Server, parse_references
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import Connack, Disconnect, Packet, Properties
from holdfast.protocol.mqtt.properties import USER_PROPERTY
from holdfast.protocol.mqtt.reasons import PACKET_TOO_LARGE

CONNECT_TIMEOUT_S: Final = 5.0
"""The timeout in seconds for the socket, for TLS and for CONNACK."""
KEEP_ALIVE_S: Final = 600
"""The keep-alive in seconds. It is long because rows may come slowly and no timer sends pings
meanwhile. If the server closes the connection, the task connects again."""
READ_BYTES: Final = 1 << 16
"""The most bytes of one read from the socket."""
UNSENT_BYTES: Final = 1 << 18
"""The most bytes in the kernel that are not yet sent (TCP_NOTSENT_LOWAT). So the bytes that the
socket takes show real progress, and a slow upload does not look like a silent server."""
PACKET_BYTES_MAX: Final = 1 << 16
"""The largest packet in bytes that the server may send. It sends only acknowledgements."""
ASKING: Final = (IDENTITY_PROPERTY, "?")
"""A user property of CONNECT: it asks whether the server uses producer sequences."""
KNOWS: Final = (IDENTITY_PROPERTY, "1")
"""The user property of CONNACK that confirms it."""


class BrokerLink:
    """A connection that the server has accepted. Its methods raise ConnectionLost when it ends."""

    def __init__(self, server: Server, connection: socket.socket, options: Options) -> None:
        self.server = server
        self.limits = ServerLimits()
        self.supports_sequences = False
        self._socket = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._level = options.level
        self.rest = b""
        """The beginning of an incomplete packet."""

    def send(self, data: memoryview) -> int:
        """Sends data, and returns how many bytes the socket took, perhaps 0."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise self._connection_lost(error) from None

    def receive(self) -> bytes:
        """Returns the bytes that have arrived, perhaps none."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return b""
        except OSError as error:
            raise self._connection_lost(error) from None
        if not data:
            raise ConnectionLost(f"{self.server.address} closed the connection")
        return data

    def wait(self, timeout_s: float, *, to_send: bool) -> None:
        """Waits until bytes have arrived or, with `to_send`, until the socket takes more."""
        if self._is_tls and self._socket.pending():  # type: ignore[attr-defined]
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if to_send else 0))
        poll.poll(max(0.0, timeout_s) * 1000)

    def packets(self, data: bytes) -> list[Packet]:
        """Decodes the packets in `data`, which begins with one. The incomplete rest goes to `rest`.

        Raises ProtocolError.
        """
        found: list[Packet] = []
        position = 0
        try:
            while (bounds := _frame(data, position)) is not None:
                start, end = bounds
                found.append(decode(data, data[position], start, end, self._level, False))
                position = end
        except ProtocolViolation as error:
            raise ProtocolError(f"{self.server.address}: {error}", error.reason) from None
        self.rest = data[position:]
        return found

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def shut_down(self, farewell: bytes, timeout_s: float) -> None:
        """Sends the last packet, and waits until the server has closed the connection.

        At QoS 0 this is the only sign that the server has read everything.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(farewell)
            if not self._is_tls:
                self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(READ_BYTES):
                pass
        except OSError:
            pass

    def _connection_lost(self, error: OSError) -> ConnectionLost:
        return ConnectionLost(f"connection to {self.server.address} lost: {error}")


def open_link(
    server: Server, options: Options, tls: ssl.SSLContext | None, server_name: str | None
) -> BrokerLink:
    """Connects to a server and waits for its CONNACK. Raises ClientError."""
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((server.host, server.port), CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if tls is not None and server.is_secure:
            connection = tls.wrap_socket(connection, server_hostname=server_name or server.host)
        link = BrokerLink(server, connection, options)
        _shake_hands(link, connection, options)
        connection.setblocking(False)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            text = f"{server.address}: its certificate is not trusted: {error.verify_message}"
            raise ClientError(text) from None
        if isinstance(error, TimeoutError):
            text = f"no CONNACK from {server.address}: is it the address of an MQTT listener?"
            raise TimedOut(text) from None
        if isinstance(error, OSError):
            raise ConnectionLost(f"cannot connect to {server.address}: {error}") from None
        raise
    return link


def _shake_hands(link: BrokerLink, connection: socket.socket, options: Options) -> None:
    """Sends CONNECT and waits for CONNACK, with one deadline for all reads."""
    connect = connect_packet(options, options.client_id, options.clean_start, None)
    connection.sendall(encode(connect, options.level))
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    found: list[Packet] = []
    while not found:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionLost(f"{link.server.address} closed the connection after CONNECT")
        if data.startswith(HTTP_BEGIN):
            raise ProtocolError(f"{link.server.address} {SPEAKS_HTTP}")
        found = link.packets(link.rest + data)
    connack = found[0]
    if not isinstance(connack, Connack) or len(found) > 1:
        raise ProtocolError(f"{link.server.address} did not answer CONNECT with CONNACK")
    if connack.reason:
        raise ConnectionRefused(
            f"{link.server.address} refused the connection: {reason_text(connack.reason)}",
            connack.reason,
            reason_string(connack.properties),
            server_reference(connack.properties),
        )
    link.limits = ServerLimits.from_connack(connack.properties, options.keep_alive_s)
    pairs = connack.properties.get(USER_PROPERTY)
    link.supports_sequences = isinstance(pairs, list) and KNOWS in pairs


def disconnected(server: Server, packet: Disconnect) -> ConnectionLost:
    """Returns the error for a server's DISCONNECT."""
    return ConnectionLost(
        f"{server.address} closed the connection: {reason_text(packet.reason)}",
        packet.reason,
        reason_string(packet.properties),
        server_reference(packet.properties),
    )


def link_options(
    level: int, client_id: str, username: str | None, password: str | None, *, asks: bool
) -> Options:
    """Returns the client's options. With `asks`, CONNECT asks for producer sequences. Raises
    ValueError."""
    properties: Properties = {}
    if asks and level >= LEVEL_5:
        properties[USER_PROPERTY] = [ASKING]
    return Options(
        level=level,
        client_id=client_id,
        keep_alive_s=KEEP_ALIVE_S,
        username=username,
        password=None if password is None else password.encode(),
        packet_bytes_max=PACKET_BYTES_MAX,
        properties=properties,
    )


def tls_context(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Returns the TLS settings. Raises ValueError, which names the file."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"tlsCaFile {ca!r}: {error}") from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"tlsCertFile {certificate!r}, tlsKeyFile {key!r}: {error}") from None
    return context


def _frame(data: bytes, position: int) -> tuple[int, int] | None:
    """Returns the start and end of the body of the packet at `position`, or None if it is
    incomplete.

    Raises ProtocolViolation.
    """
    length = 0
    shift = 0
    at = position + 1
    while at < len(data):
        byte = data[at]
        length |= (byte & 127) << shift
        at += 1
        if length > PACKET_BYTES_MAX or shift > 21:
            raise ProtocolViolation(
                PACKET_TOO_LARGE, f"a packet of {length} bytes or more, to one that only publishes"
            )
        if byte < 128:
            return (at, at + length) if at + length <= len(data) else None
        shift += 7
    return None


logger = logging.getLogger("holdfast.pipeline")

ROUND_FIRST_S: Final = 0.02
ROUND_MAX_S: Final = 5.0
"""The longest pause in seconds between two rounds through the servers. The first is
ROUND_FIRST_S."""
SERVERS_MAX: Final = 64
"""The most servers in one round, including those that other servers named."""


class PublishError(RuntimeError):
    """The task cannot continue. The text says why and what to do."""


class LinkDialer:
    """The dialer of one task. A round begins with the server that accepted last.

    The pause before a round grows until a message is acknowledged. So a connection that ends before
    any acknowledgement counts like a failed one, and a server that accepts and disconnects is not
    called in a tight loop.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        options: Options,
        tls: ssl.SSLContext | None,
        server_name: str | None,
        retry_timeout_s: float,
    ) -> None:
        self._servers = list(servers)
        self._options = options
        self._tls = tls
        self._server_name = server_name
        self._retry_timeout_s = retry_timeout_s
        self._round_s = 0.0
        self._is_told = False
        """True after a warning that no server accepts."""

    def connect(self, since: float) -> BrokerLink:
        """Connects to the first server that accepts.

        `since` is the time of the last acknowledgement, on the monotonic clock. Raises
        PublishError.
        """
        while True:
            if self._round_s:
                time.sleep(self._round_s * (0.5 + 0.5 * random()))
            self._round_s = min(max(self._round_s * 2, ROUND_FIRST_S), ROUND_MAX_S)
            errors: list[ClientError] = []
            link = self._try_servers(errors)
            if link is not None:
                return link
            text = "; ".join(map(str, errors))
            if not any(map(is_transient, errors)):
                raise PublishError(text)
            stuck_s = time.monotonic() - since
            if stuck_s > self._retry_timeout_s:
                raise PublishError(f"no connection for {stuck_s:.0f} s (retryTimeout): {text}")
            if not self._is_told:
                self._is_told = True
                logger.warning("%s; trying for %g s", text, self._retry_timeout_s)

    def succeeded(self) -> None:
        """Notes that a message was acknowledged: the next round begins without a pause."""
        self._round_s = 0.0
        self._is_told = False

    def avoid(self, server: Server) -> None:
        """Moves a silent server to the end. It may still accept connections."""
        self._servers.remove(server)
        self._servers.append(server)

    def _try_servers(self, errors: list[ClientError]) -> BrokerLink | None:
        candidates = list(self._servers)
        for server in candidates:
            try:
                link = open_link(server, self._options, self._tls, self._server_name)
            except ClientError as error:
                errors.append(error)
                self._follow(candidates, error.server_reference, server)
                continue
            if server in self._servers:
                self._servers.remove(server)
            self._servers.insert(0, server)
            return link
        return None

    def _follow(self, candidates: list[Server], references: str, origin: Server) -> None:
        """Adds the servers that a refusal named to the current round."""
        for server in parse_references(references, origin):
            is_reachable = not server.is_websocket and (self._tls or not server.is_secure)
            if is_reachable and server not in candidates and len(candidates) < SERVERS_MAX:
                candidates.append(server)


def is_transient(error: Exception) -> bool:
    """Returns whether another attempt may succeed."""
    if isinstance(error, ConnectionLost | ConnectionRefused):
        return error.reason in TRANSIENT
    return isinstance(error, TimedOut)
