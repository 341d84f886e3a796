"""Starts an HTTP server inside the event loop of a process.

asyncio's own server reports a connection only after its TLS handshake, so silent sockets could take
every descriptor unnoticed. Here a handshake counts from accept() on. A connection uses the context
as it is when it begins, so a new certificate needs no new socket.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

logger = logging.getLogger("holdfast")

HANDSHAKE_S: Final = 10.0
"""The most seconds of a handshake."""
HANDSHAKES_MAX: Final = 64
"""The most handshakes at a time. A further one ends the oldest."""
ACCEPT_PAUSE_S: Final = 0.1
"""The pause in seconds after an error of accept, for example without a free descriptor."""
SHUTDOWN_S: Final = 2.0
"""The most seconds that the end of a TLS connection waits for the client's."""

FindContext = Callable[[], ssl.SSLContext | None]


class TlsDoor:
    """The accepting side of one port, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        context: FindContext,
    ) -> None:
        """`context`: the present one, or None for plain HTTP."""
        self._listener = listener
        self._protocol = protocol
        self._context = context
        # The oldest first.
        self._handshakes: dict[asyncio.Task[None], None] = {}

    async def run(self) -> None:
        """Accepts until cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.error("http_accept_failed error=%r", str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = loop.create_task(self._open(accepted))
            self._handshakes[task] = None
            task.add_done_callback(self._done)
            # sock_accept does not wait while connections are ready, so others get a turn here.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Ends all handshakes."""
        for task in list(self._handshakes):
            task.cancel()

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._handshakes.pop(task, None)

    async def _open(self, accepted: socket.socket) -> None:
        """Hands a connection to its protocol, after the handshake if there is one."""
        loop = asyncio.get_running_loop()
        context = self._context()
        is_open = False
        try:
            with suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is None:
                await loop.connect_accepted_socket(self._protocol, accepted)
            else:
                await loop.connect_accepted_socket(
                    self._protocol,
                    accepted,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
            is_open = True
        except (OSError, asyncio.IncompleteReadError) as error:
            # ssl.SSLError is an OSError, and so is a connection reset.
            logger.debug("http_handshake_failed error=%r", str(error))
        finally:
            if not is_open:
                with suppress(OSError):
                    accepted.shutdown(socket.SHUT_RDWR)
                accepted.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals, logging and WebSockets to the process."""

    def __init__(
        self,
        application: ASGIApp,
        http: Any,
        shutdown_s: int,
        tls: ssl.SSLContext | None = None,
        proxies: Sequence[str] = (),
    ) -> None:
        """`http`: the protocol class, see `bounded`. `shutdown_s`: the seconds that responses in
        progress have at the end. `proxies`: the addresses and networks whose `X-Forwarded-For` and
        `X-Forwarded-Proto` count. By uvicorn's own default every process of this machine could
        choose its address in the audit, and have a throttle of logins for each."""
        config = uvicorn.Config(
            application,
            http=http,
            log_config=None,
            # Its only warnings are about single requests, without an address.
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=shutdown_s,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    def new_protocol(self) -> asyncio.BaseProtocol:
        """The protocol of a connection that another acceptor than uvicorn's has accepted."""
        protocol: asyncio.BaseProtocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        return protocol

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(bind: str, port: int) -> socket.socket:
    """Binds an address and listens. Raises `OSError`."""
    reserved = reserve(bind, port)
    reserved.listen()
    return reserved


def reserve(bind: str, port: int) -> socket.socket:
    """Binds an address, IPv6 with or without brackets; connections are refused until `listen`.
    Raises `OSError`."""
    host = bind.strip("[]")
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if one.family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((host, port))
        return one
    except OSError as error:
        one.close()
        # Its own text repeats the address as a tuple.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise OSError(error.errno, f"{bind}:{port}: {reason}") from error
