"""Accepts the connections of other nodes, and of strangers that find the port."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from holdfast.addresses import UNIX, join_address
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.failures import report
from holdfast.io.sockets.bound_sockets import reserve_tcp, reserve_unix

BACKLOG: Final = 128
GREETINGS_MAX: Final = 64
"""The most accepted connections in the handshake. A further one displaces the oldest.

A node needs milliseconds for its handshake, so idle connections of strangers do not keep it out.
"""
SOCKET_MODE: Final = 0o600
ACCEPT_PAUSE_S: Final = 0.1
"""The pause in seconds after an error of accept, for example without a free descriptor."""


class PeerListener:
    """Runs `greet(socket, remote)`, which owns the socket, for each connection.

    With too many handshakes it cancels the oldest one and calls `crowded`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        greet: Callable[[socket.socket, str], Coroutine[Any, Any, None]],
        crowded: Callable[[], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self.greetings: dict[asyncio.Task[None], None] = {}
        """The handshakes in progress, the oldest first."""
        self._loop = loop
        self._greet = greet
        self._crowded = crowded
        self._failed = failed
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, bind: str, port: int) -> int:
        """Listens on all addresses of a host and returns the port; or at the path of a Unix socket,
        `unix:PATH`. Raises `OSError`."""
        if bind.startswith(UNIX):
            self._sockets.append(reserve_unix(Path(bind.removeprefix(UNIX)), SOCKET_MODE))
        else:
            self._sockets = await asyncio.to_thread(reserve_tcp, bind, port)
            port = self._sockets[0].getsockname()[1]
        for one in self._sockets:
            one.listen(BACKLOG)
            task = self._loop.create_task(self._accept(one))
            task.add_done_callback(report)
            self._tasks.append(task)
        return port

    async def stop(self) -> None:
        tasks = [*self._tasks, *self.greetings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for one in self._sockets:
            one.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                one, address = await self._loop.sock_accept(listener)
            except OSError as error:
                self._failed(error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            # The dialling end of a Unix socket has no address.
            remote = join_address(*address[:2]) if one.family != socket.AF_UNIX else UNIX
            task = self._loop.create_task(self._greet(one, remote))
            self.greetings[task] = None
            task.add_done_callback(self._ended)
            if len(self.greetings) > descriptors.share(GREETINGS_MAX):
                oldest = next(iter(self.greetings))
                del self.greetings[oldest]
                oldest.cancel()
                self._crowded()
            # sock_accept does not wait while connections are ready, so others get a turn here.
            await asyncio.sleep(0)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.greetings.pop(task, None)
        report(task)
