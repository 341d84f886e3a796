"""Accepting connections one by one, so that each counts from accept() on.

asyncio's own server shows a connection only after its TLS handshake, so silent sockets could take
every descriptor unseen. Without TLS it accepts all that wait before it shows the first, and pauses
for a second when no descriptor is left. uvloop does neither without TLS, and is faster there.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.server.event_loop.broker import Broker
from holdfast.server.event_loop.failures import watched
from holdfast.server.sockets.tcp import CLOSE_TIMEOUT_S

logger = logging.getLogger("holdfast")

BACKLOG: Final = 4096
ACCEPT_PAUSE_S: Final = 0.1
"""After an error of accept, as when the process has no descriptors left."""


class AcceptLoop:
    """What of an asyncio.Server the broker uses, on one socket."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        sockets_max: int,
        connection: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None,
        listener: socket.socket,
    ) -> None:
        self.sockets = (listener,)
        self._broker = broker
        self._name = name
        self._sockets_max = sockets_max
        self._connection = connection
        self._context = context
        # Of TLS: neither may be given without it.
        self._timeouts: dict[str, float] = {}
        if context is not None:
            self._timeouts = {
                "ssl_handshake_timeout": broker.node.state.config.connect_timeout_s,
                "ssl_shutdown_timeout": CLOSE_TIMEOUT_S,
            }
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        listener.listen(BACKLOG)
        self._accepting = watched(self._accept(listener))

    def close(self) -> None:
        """Accept nothing more. Open connections stay."""
        self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()
        # Not before the loop has stopped watching it.
        self._broker.loop.call_soon(self.sockets[0].close)

    async def _accept(self, listener: socket.socket) -> None:
        loop = self._broker.loop
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                logger.error("accept_failed listener=%r error=%r", self._name, str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            remote = f"{address[0]}:{address[1]}"
            self._broker.touch()
            if self._has_room(remote):
                self._broker.node.state.handshakes += 1
                task = loop.create_task(self._shake_hands(accepted, remote))
                self._handshakes[task] = None
                task.add_done_callback(self._ended)
            else:
                accepted.close()
            # While there are connections to accept, sock_accept does not wait.
            await asyncio.sleep(0)

    def _has_room(self, remote: str) -> bool:
        state = self._broker.node.state
        if state.connections + state.handshakes >= self._sockets_max and self._handshakes:
            oldest = next(iter(self._handshakes))
            # `_ended` comes later, and another connection must find another one.
            del self._handshakes[oldest]
            oldest.cancel()
            state.stats.connections_displaced += 1
            return True
        return self._broker.node.has_room(remote, self._name, self._sockets_max)

    async def _shake_hands(self, accepted: socket.socket, remote: str) -> None:
        broker = self._broker
        try:
            await broker.loop.connect_accepted_socket(
                self._connection,
                accepted,
                ssl=self._context,
                **self._timeouts,
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            # ssl.SSLError is an OSError; so is a connection that is reset.
            logger.info("tls_handshake_failed remote=%r error=%r", remote, str(error))
        finally:
            broker.node.state.handshakes -= 1

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._handshakes.pop(task, None)
        with suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                # Contained: one connection's, and the library has closed it.
                logger.error("tls_handshake_failed error=%r", str(error), exc_info=error)
