"""Accepts connections one by one, so that each counts from accept() on.

asyncio's own server reports a connection only after its TLS handshake, so silent sockets could take
every descriptor unnoticed. Without TLS it accepts all waiting connections before it reports the
first, and pauses for a second without a free descriptor. uvloop has neither problem without TLS,
and is faster there.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, cast

from holdfast.io.event_loop.failures import watched
from holdfast.io.sockets.proxy import Proxies, SilentPeer, read_proxy_header, remote_of
from holdfast.io.sockets.reception import Reception
from holdfast.io.sockets.tls_stream import TlsStream
from holdfast.node.connections.pending_connects import PendingHandshake
from holdfast.protocol.proxy.header import ProxyError
from holdfast.security.tls import handshake_error

logger = logging.getLogger("holdfast")

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
