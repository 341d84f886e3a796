"""The turns of the event loop that a plain listener needs for many clients at once."""

import asyncio
import socket

import pytest

from holdfast.config.listener import Listener
from holdfast.config.schema import Config
from holdfast.io.event_loop.loop import is_uvloop, new_event_loop
from holdfast.io.sockets.listeners import accept_on, reserve, stop_accepting
from holdfast.io.sockets.reception import Reception

CLIENTS = 40
TIMEOUT_S = 20.0


class Silent(asyncio.Protocol):
    """The protocol of an accepted socket."""

    remote = ""

    def buffer_upgrade(self, size_bytes: int) -> None:
        """Do nothing."""


class CountedReception(Reception):
    """A reception that counts the turns of the loop until the last client."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.connect_timeout_s = loop, TIMEOUT_S
        self.accepted = 0
        self.turns = 0
        self.all = asyncio.Event()

    def count_turn(self) -> None:
        self.turns += 1
        if not self.all.is_set():
            self.loop.call_soon(self.count_turn)

    def new_connection(self, remote: str = "") -> Silent:  # type: ignore[override]
        self.accepted += 1
        if self.accepted == CLIENTS:
            self.all.set()
        return Silent()


async def _turns() -> int:
    loop = asyncio.get_running_loop()
    if not is_uvloop(loop):
        pytest.skip("asyncio accepts all at once")
    settings = Listener(bind="127.0.0.1", port=0)
    sockets = reserve(settings, Config())
    address = sockets[0].getsockname()
    reception = CountedReception(loop)
    servers = await accept_on(reception, settings, None, sockets)
    # The kernel connects them before the listener's process accepts any.
    clients = [socket.create_connection(address) for _ in range(CLIENTS)]
    reception.count_turn()
    async with asyncio.timeout(TIMEOUT_S):
        await reception.all.wait()
    stop_accepting(servers, keeps_handshakes=False)
    for each in clients:
        each.close()
    await asyncio.sleep(0)
    return reception.turns


def test_a_turn_accepts_several_of_the_clients_that_wait() -> None:
    loop = new_event_loop()
    try:
        assert loop.run_until_complete(_turns()) <= CLIENTS / 2
    finally:
        loop.close()
