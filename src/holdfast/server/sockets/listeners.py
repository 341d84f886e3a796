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
    """Bind the listener's addresses; connections are refused until `listen`.

    Raises `OSError` if an address cannot be used.
    """
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
    """Accept on reserved sockets, with TLS if there is a context. Raises `OSError`."""
    name = f"{listener.bind}:{listener.port}"
    sockets_max = descriptors.for_clients()
    accepts = context is not None or not is_uvloop(broker.loop)
    # A connection of an AcceptLoop is already counted when this check runs.
    count = ListenerCount(name, listener.max_connections, sockets_max + accepts)
    admission = UpgradeAdmission(listener.path, listener.allowed_origins)

    def accept() -> asyncio.BaseProtocol:
        connection = TcpConnection(broker, count)
        if listener.transport == "websocket":
            return WebSocketConnection(connection, admission)
        # TcpConnection has the methods of a protocol, but not the base class.
        return cast(asyncio.BaseProtocol, connection)

    if accepts:
        return [AcceptLoop(broker, name, sockets_max, accept, context, one) for one in sockets]
    return [await broker.loop.create_server(accept, sock=one, backlog=BACKLOG) for one in sockets]
