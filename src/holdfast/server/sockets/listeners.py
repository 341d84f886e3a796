"""Opens the configured listeners."""

import asyncio
import socket
import ssl
from typing import cast

from holdfast.config.schema import Listener
from holdfast.server.event_loop import descriptors
from holdfast.server.event_loop.broker import Broker
from holdfast.server.event_loop.loop import is_uvloop
from holdfast.server.sockets.acceptor import BACKLOG, AcceptLoop
from holdfast.server.sockets.tcp import ListenerCount, TcpConnection
from holdfast.server.sockets.websocket import UpgradeAdmission, WebSocketConnection


def reserve(listener: Listener) -> list[socket.socket]:
    """Sockets that have the listener's addresses and refuse connections until somebody listens on
    them. Raises OSError."""
    sockets: list[socket.socket] = []
    found = socket.getaddrinfo(
        listener.bind.strip("[]"),
        listener.port,
        type=socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE,
    )
    try:
        for family, kind, protocol, _, address in found:
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setblocking(False)
            one.bind(address)
    except OSError as error:
        for one in sockets:
            one.close()
        raise OSError(
            error.errno, f"{listener.bind}:{listener.port}: {error.strerror or error}"
        ) from error
    return sockets


async def listen(
    broker: Broker,
    listener: Listener,
    context: ssl.SSLContext | None,
    sockets: list[socket.socket],
) -> list[asyncio.Server | AcceptLoop]:
    """On what `reserve` has returned; with TLS if there is a context. Raises OSError."""
    name = f"{listener.bind}:{listener.port}"
    sockets_max = descriptors.for_clients()
    accepts = context is not None or not is_uvloop(broker.loop)
    # A connection of an AcceptLoop has had its place since it was accepted.
    count = ListenerCount(name, listener.max_connections, sockets_max + accepts)
    admission = UpgradeAdmission(listener.path, listener.allowed_origins)

    def accept() -> asyncio.BaseProtocol:
        connection = TcpConnection(broker, count)
        if listener.transport == "websocket":
            return WebSocketConnection(connection, admission)
        # Duck-typed.
        return cast(asyncio.BaseProtocol, connection)

    if accepts:
        return [AcceptLoop(broker, name, sockets_max, accept, context, one) for one in sockets]
    return [await broker.loop.create_server(accept, sock=one, backlog=BACKLOG) for one in sockets]
