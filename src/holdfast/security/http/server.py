"""Starts an HTTP server inside the event loop of a process."""

import asyncio
import os
import socket
import ssl
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


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
