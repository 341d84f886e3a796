"""Opens the configured listeners.

asyncio's own server reports a connection only after its TLS handshake, so silent sockets could take
every descriptor unnoticed. Without TLS it accepts all waiting connections before it reports the
first, and pauses for a second without a free descriptor. uvloop has neither problem without TLS,
and is faster there.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast

from holdfast.config.listener import Listener, kind_of
from holdfast.config.schema import Config
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.io.event_loop.loop import is_uvloop
from holdfast.io.sockets.bound_sockets import (
    INHERITED,
    identity,
    remove_unix,
    reserve_tcp,
    reserve_unix,
    set_mode,
)
from holdfast.io.sockets.driver import ListenerCount
from holdfast.io.sockets.listener_files import ListenerFiles
from holdfast.io.sockets.proxy import Proxies, SilentPeer, read_proxy_header, remote_of
from holdfast.io.sockets.reception import Reception
from holdfast.io.sockets.tls_stream import TlsStream
from holdfast.io.sockets.websocket import UpgradeAdmission, WebSocketConnection
from holdfast.node.connections.pending_connects import PendingHandshake
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.protocol.proxy.header import ProxyError
from holdfast.security.tls import handshake_error

BACKLOG: Final = 4096
ACCEPT_PAUSE_S: Final = 0.1
"""The pause in seconds after an error of accept, for example without a free descriptor."""


class AcceptLoop:
    """The part of `asyncio.Server` that the broker uses, on one socket.

    Handshakes count as connections, and give way to new ones at any listener (`PendingConnects`).
    """

    def __init__(
        self,
        reception: Reception,
        name: str,
        connection: Callable[[str], asyncio.BaseProtocol],
        context: ssl.SSLContext | None,
        listener: socket.socket,
        proxies: Proxies | None = None,
    ) -> None:
        """`connection` makes the protocol of a client at host:port. `proxies`: every connection
        comes from one of these, and begins with a PROXY header; None: none does."""
        self.sockets = (listener,)
        self._reception = reception
        self._name = name
        self._connection = connection
        self._context = context
        self._proxies = proxies
        self._handshakes: dict[asyncio.Task[None], PendingHandshake] = {}
        listener.listen(BACKLOG)
        self._accepting = watched(self._accept(listener))

    def close(self, *, keeps_handshakes: bool = False) -> None:
        """Accepts no more connections. Open ones stay; handshakes end, or go on."""
        self._accepting.cancel()
        for task in () if keeps_handshakes else self._handshakes:
            task.cancel()
        # Closed later, because the loop must stop watching the socket first.
        self._reception.loop.call_soon(self.sockets[0].close)

    async def _accept(self, listener: socket.socket) -> None:
        loop = self._reception.loop
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                logger.error("accept_failed listener=%r error=%r", self._name, str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            remote = remote_of(accepted, address)
            if self._reception.has_room(remote):
                task = loop.create_task(self._shake_hands(accepted, remote))
                handshake = self._handshakes[task] = PendingHandshake(task.cancel)
                self._reception.begin_handshake(handshake)
                task.add_done_callback(self._ended)
            else:
                accepted.close()
            # sock_accept does not wait while connections are ready, so others get a turn here.
            await asyncio.sleep(0)

    async def _shake_hands(self, accepted: socket.socket, remote: str) -> None:
        try:
            client = remote
            if self._proxies is not None:
                client = await self._client_of(accepted, remote, self._proxies)
            if client and self._context is not None:
                await self._secure(accepted, self._connection(client), self._context)
            elif client:
                await self._reception.loop.connect_accepted_socket(
                    partial(self._connection, client), accepted
                )
        except (OSError, asyncio.IncompleteReadError) as error:
            # ssl.SSLError is an OSError, and so is a connection reset.
            self._fail("tls_handshake_failed", remote, handshake_error(error))

    async def _secure(
        self, accepted: socket.socket, inner: asyncio.BaseProtocol, context: ssl.SSLContext
    ) -> None:
        """Shakes hands, and connects the protocol of the client. Raises `OSError`."""
        reception = self._reception
        stream = TlsStream(
            cast(asyncio.Protocol, inner), context, reception.loop, reception.connect_timeout_s
        )
        # TlsStream has the methods of a protocol, but not the base class.
        protocol = cast(asyncio.BaseProtocol, stream)
        try:
            await reception.loop.connect_accepted_socket(lambda: protocol, accepted)
            await stream.handshake
        except ConnectionResetError:
            if not stream.is_silent:
                raise
        except asyncio.CancelledError:
            stream.abort()
            raise

    async def _client_of(self, accepted: socket.socket, remote: str, proxies: Proxies) -> str:
        """The address of the client behind a proxy, or "" if the connection was closed."""
        client = ""
        try:
            if remote not in proxies:
                raise ProxyError("the address is not in proxies of the listener")
            timeout_s = self._reception.connect_timeout_s
            with suppress(SilentPeer):
                client = await read_proxy_header(accepted, timeout_s) or remote
        except (ProxyError, OSError) as error:
            self._fail("proxy_header_failed", remote, str(error))
        finally:
            if not client:
                accepted.close()
        return client

    def _fail(self, event: str, remote: str, error: str) -> None:
        self._reception.count_failure()
        self._reception.note_failure(event, remote, error)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        # Here, because a task that is cancelled before its first step runs nothing of its own.
        self._reception.end_handshake(self._handshakes.pop(task))
        with suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                # Contained: it concerns one connection, and the library has closed it.
                logger.error("tls_handshake_failed error=%r", str(error), exc_info=error)


logger = logging.getLogger("holdfast")

T = TypeVar("T")
Listening: TypeAlias = asyncio.Server | AcceptLoop

ACCEPTS_PER_TURN: Final = 4
"""The most connections that a plain listener accepts in one turn of the loop. uvloop accepts one a
turn from each socket that it watches, so the listener's socket is watched as often. With one, each
of many clients that connect at once costs a turn: 35 µs in place of 25 (`bench --only connects`).
With eight, a client that connects alone would cost a quarter more."""
PORT_WAIT_S: Final = 5.0
PORT_PAUSE_S: Final = 0.1
"""The time in seconds that a standby waits for an occupied port, and the pause between checks."""


async def when_free(take: Callable[[], T], waits: bool) -> T:
    """The result of `take`, which binds a port. Raises `OSError`. `waits`: wait for an occupied
    port, because an outgoing connection of any process may take it while a standby starts again,
    and soon ends."""
    deadline: float | None = None
    while True:
        try:
            return take()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not waits:
                raise
            if deadline is None:
                deadline = time.monotonic() + PORT_WAIT_S
                logger.warning("port_taken error=%r wait_s=%s", error.strerror, PORT_WAIT_S)
            elif time.monotonic() >= deadline:
                raise
        await asyncio.sleep(PORT_PAUSE_S)


def reserve(listener: Listener, config: Config) -> list[socket.socket]:
    """Binds the listener's addresses, which the processes of one machine share. Raises
    `OSError`."""
    if listener.socket in INHERITED:
        return [socket.socket(fileno=os.dup(INHERITED[listener.socket]))]
    if listener.socket:
        return [reserve_unix(Path(listener.socket), int(listener.socket_mode, 8))]
    is_shared = config.server.processes not in (1, "auto")
    return reserve_tcp(listener.bind, listener.port, is_shared=is_shared)


class OpenListener:
    """A configured listener with its bound sockets.

    The sockets stay bound while other settings are applied: each opening accepts on duplicates of
    them, and the system keeps the connections that nobody has accepted.
    """

    def __init__(
        self, settings: Listener, files: ListenerFiles, sockets: list[socket.socket]
    ) -> None:
        self.settings = settings
        self.files = files
        self._sockets = sockets
        # The file of a Unix socket, which another process may replace.
        self._file = identity(Path(settings.socket)) if settings.socket else (0, 0)
        self._servers: list[Listening] = []
        self._count = ListenerCount(ListenerRules(self.name), 0, 0)

    @property
    def name(self) -> str:
        """The configured address and port, or path."""
        return self.settings.name

    @property
    def port(self) -> int:
        """The port in use, also if the system chose it; 0 of a Unix socket."""
        address = self._sockets[0].getsockname()
        return int(address[1]) if isinstance(address, tuple) else 0

    @property
    def address(self) -> str:
        """The address in use: host:port, or the path."""
        return self.name if self.settings.socket else f"{self.settings.bind}:{self.port}"

    def is_at(self, settings: Listener) -> bool:
        """Whether settings are for this listener's address."""
        return self.settings.name == settings.name

    def apply_rules(self, settings: Listener, files: ListenerFiles) -> None:
        """Makes the listener's clients follow its settings and files, the connected ones too."""
        rules = self._count.rules
        rules.passwords = files.passwords
        rules.acl = files.acl
        rules.certified = files.identities
        rules.allow_anonymous = settings.allow_anonymous
        rules.authentication = tuple(settings.authentication)
        rules.mount = settings.mount.encode()
        rules.packet_bytes_max = settings.packet_bytes
        rules.kind = kind_of(settings)

    async def open(self, broker: Broker) -> None:
        """Accepts connections, with TLS if there is a context. Raises `OSError`."""
        self.apply_rules(self.settings, self.files)
        self._servers = await _listen(
            broker,
            self.settings,
            self.files.context,
            [one.dup() for one in self._sockets],
            self._count,
        )

    async def apply(self, settings: Listener, files: ListenerFiles, broker: Broker | None) -> None:
        """Uses other settings for new connections. Existing ones and handshakes stay.

        `broker` None: the node does not serve yet. Raises `OSError`, and accepts as before then.
        """
        if settings.socket:
            set_mode(Path(settings.socket), int(settings.socket_mode, 8))
        self.settings = settings
        self.files = files
        if broker is not None:
            before = self._servers
            await self.open(broker)
            stop_accepting(before, keeps_handshakes=True)

    def close(self, *, is_removed: bool = False) -> None:
        """Refuses new connections and ends handshakes. Open connections stay. `is_removed`: the
        configuration has no such listener any more, so other processes do not accept either."""
        stop_accepting(self._servers, keeps_handshakes=False)
        self._servers = []
        is_shared = self.settings.socket in INHERITED and not is_removed
        if self.settings.socket and self._sockets and not is_shared:
            remove_unix(Path(self.settings.socket), self._file)
        for one in self._sockets:
            one.close()
        self._sockets = []


def stop_accepting(servers: Sequence[Listening], *, keeps_handshakes: bool) -> None:
    """Accepts no more connections. `keeps_handshakes`: others do in place of `servers`."""
    for server in servers:
        if isinstance(server, AcceptLoop):
            server.close(keeps_handshakes=keeps_handshakes)
        else:
            server.close()


async def _listen(
    broker: Broker,
    listener: Listener,
    context: ssl.SSLContext | None,
    sockets: list[socket.socket],
    count: ListenerCount,
) -> list[Listening]:
    sockets_max = descriptors.for_clients()
    count.connections_max = listener.max_connections
    count.certificate_user = listener.certificate_user
    # A connection of an AcceptLoop is already counted when this check runs.
    count.sockets_max = sockets_max + needs_accept_loop(listener, context, broker.loop)
    reception = Reception(broker, count, sockets_max)
    return await accept_on(reception, listener, context, sockets)


def needs_accept_loop(
    listener: Listener, context: ssl.SSLContext | None, loop: asyncio.AbstractEventLoop
) -> bool:
    """Whether asyncio's own server would lose sight of connections, see `AcceptLoop`."""
    is_plain = context is None and not listener.proxies and not listener.socket
    return not is_plain or not is_uvloop(loop)


async def accept_on(
    reception: Reception,
    listener: Listener,
    context: ssl.SSLContext | None,
    sockets: list[socket.socket],
) -> list[Listening]:
    """Accepts a listener's connections on these sockets. Raises `OSError`."""
    admission = UpgradeAdmission(listener)
    proxies = Proxies(listener.proxies) if listener.proxies else None
    loop = reception.loop

    # The classes of connections have the methods of a protocol, but not the base class.
    def upgrade(remote: str = "") -> asyncio.BaseProtocol:
        connection = reception.new_connection(remote)
        outer = WebSocketConnection(connection, admission, reception)
        return cast(asyncio.BaseProtocol, outer)

    accept = cast(Callable[..., asyncio.BaseProtocol], reception.new_connection)
    if listener.transport == "websocket":
        accept = upgrade
    if needs_accept_loop(listener, context, loop):
        return [
            AcceptLoop(reception, listener.name, accept, context, one, proxies) for one in sockets
        ]
    sockets = [each for one in sockets for each in _duplicate(one)]
    return [await loop.create_server(accept, sock=one, backlog=BACKLOG) for one in sockets]


def _duplicate(one: socket.socket) -> list[socket.socket]:
    """A socket and its duplicates, ACCEPTS_PER_TURN in all."""
    return [one, *(one.dup() for _ in range(ACCEPTS_PER_TURN - 1))]
