"""The asyncio edge of the client core: one socket, one timer."""

import asyncio
from collections.abc import Callable
from typing import Final, cast

from holdfast.client.effects import Effect
from holdfast.client.protocol import CLOSED, ClientProtocol

WRITE_BUFFER_BYTES: Final = 262_144
"""Unsent bytes above which publishers wait."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long the peer may take to accept the last bytes."""


class ClientTransport(asyncio.Protocol):
    """Moves bytes between a socket and `core` and hands its effects to `on_effect`, in order."""

    def __init__(self, core: ClientProtocol, on_effect: Callable[[Effect], None]) -> None:
        self._core = core
        self._on_effect = on_effect
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = asyncio.Event()
        """Set when the socket is closed."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._core.connect(self._loop.time())
        self.pump()

    def data_received(self, data: bytes) -> None:
        self._core.handle_data(data, self._loop.time())
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        text = "connection closed by the server" if error is None else f"connection lost: {error}"
        self._core.handle_closed(self._loop.time(), text)
        self.pump()
        self._transport = None
        self._writable.set()
        self.lost.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # For the client

    @property
    def now(self) -> float:
        """The clock of the core."""
        return self._loop.time()

    def pump(self) -> None:
        """Call after each call of the core: sends, hands on effects, sets the timer."""
        transport = self._transport
        data = self._core.data_to_send()
        if data and transport is not None and not transport.is_closing():
            transport.write(data)
        for effect in self._core.effects():
            self._on_effect(effect)
        if self._core.state == CLOSED:
            if transport is not None and not transport.is_closing():
                transport.close()
                # The peer may never take the last bytes; on a closed transport this is nothing.
                self._loop.call_later(CLOSE_TIMEOUT_S, transport.abort)
            return
        when = self._core.timer()
        # A timer that comes too early only sets a new one: cheaper than one per message.
        if when is not None and (self._timer is None or when < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = when
            self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._core.handle_timer(self._loop.time())
        self.pump()

    async def writable(self) -> None:
        """Wait until the socket takes more."""
        await self._writable.wait()

    def pause_reading(self) -> None:
        transport = self._transport
        if transport is not None and not self._paused and not transport.is_closing():
            self._paused = True
            self._core.handle_reading(True, self.now)
            transport.pause_reading()

    def resume_reading(self) -> None:
        transport = self._transport
        if transport is not None and self._paused and not transport.is_closing():
            self._paused = False
            self._core.handle_reading(False, self.now)
            transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
