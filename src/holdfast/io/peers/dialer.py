"""Connects to the addresses of other nodes, repeatedly."""

import asyncio
import errno
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.addresses import UNIX, split_address
from holdfast.io.event_loop.failures import report

DELAY_S_MIN: Final = 0.02
DELAY_S_MAX: Final = 1.0
USER_TIMEOUT_MS: Final = 5000
"""The time in milliseconds without an acknowledgement after which a connection is dead."""
KEEPALIVE_IDLE_S: Final = 2
KEEPALIVE_INTERVAL_S: Final = 1
KEEPALIVE_PROBES: Final = 3


class PeerDialer:
    """Dials one address while `needed` is set: at once, then after growing, jittered delays.

    `attempt` makes one connection and returns when it is established or has failed.
    """

    def __init__(
        self,
        address: str,
        node_id: str,
        attempt: Callable[["PeerDialer"], Awaitable[None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`node_id`: the node expected at the address, "" for any."""
        self.address = address
        self.node_id = node_id
        self.answered = node_id
        """The node that was last found at the address."""
        self.needed = asyncio.Event()
        self.tried = asyncio.Event()
        """Set when an attempt has ended, or was not needed."""
        self._attempt = attempt
        self._failures = 0
        self._urgent = asyncio.Event()
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(report)

    def at_once(self) -> None:
        """Dials without a delay, because a link that had lasted was lost."""
        self._failures = 0
        self._urgent.set()

    def stop(self) -> "asyncio.Task[None]":
        """Cancels the dialer and returns its task, which ends soon."""
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        while True:
            await self.needed.wait()
            if self._failures:
                await self._pause()
            # It may have been cleared during the pause.
            if self.needed.is_set():
                self._failures += 1
                await self._attempt(self)
            self.tried.set()

    async def _pause(self) -> None:
        longest_s = min(DELAY_S_MAX, DELAY_S_MIN * 2 ** min(self._failures - 1, 16))
        self._urgent.clear()
        try:
            async with asyncio.timeout(random.uniform(longest_s / 2, longest_s)):
                await self._urgent.wait()
        except TimeoutError:
            pass


async def connect(
    loop: asyncio.AbstractEventLoop,
    address: str,
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext | None,
    sockets: str = "",
) -> None:
    """Connects a protocol to host:port, with TLS if there is a context, or to a Unix socket in the
    directory `sockets`.

    Raises `OSError`, which includes `ssl.SSLError`. `ConnectionRefusedError` means that no address
    of the host has a listener.
    """
    if address.startswith(UNIX):
        path = f"{sockets}/{address.removeprefix(UNIX)}"
        try:
            await loop.create_unix_connection(lambda: protocol, path, ssl=context)
        except FileNotFoundError:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "there is no socket") from None
        return
    host, port = split_address(address)
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(errno.EINVAL, "no valid host name") from None
    name = None if context is None else ""
    failure: OSError | None = None
    for family, _, _, _, target in found:
        try:
            # create_connection gets an address, not a socket: uvloop 0.22 and 0.23 close a given
            # socket twice if the connection ends before the call returns. The second time its
            # number may belong to another file.
            await loop.create_connection(
                lambda: protocol,
                str(target[0]),
                int(target[1]),
                ssl=context,
                family=family,
                server_hostname=name,
            )
            return
        except OSError as error:
            if failure is None or not isinstance(error, ConnectionRefusedError):
                failure = error
    raise failure or OSError(errno.EADDRNOTAVAIL, "the host has no address")


def configure(transport: asyncio.BaseTransport) -> None:
    """Sends small frames without delay, and notice a dead machine within seconds."""
    one: socket.socket = transport.get_extra_info("socket")
    for level, name, value in (
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            try:
                one.setsockopt(level, option, value)
            except OSError:
                return  # The connection has ended already, and the protocol receives that event.
