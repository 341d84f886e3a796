"""Drives the client core with asyncio: one socket, one timer."""

import asyncio
from collections.abc import Callable
from typing import Final, cast

from holdfast.client.errors import ClientError, ConnectionLost, ProtocolError
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.effects import Closed, Effect, Traced
from holdfast.protocol.mqtt import reasons

WRITE_BUFFER_BYTES: Final = 262_144
"""The unsent bytes above which publishers wait."""
CLOSE_TIMEOUT_S: Final = 5.0
"""The seconds that the peer has to accept the last bytes."""
LINGER_S: Final = 1.0
"""The seconds that the peer has to close, once this end will send nothing more."""


class ClientSocket(asyncio.Protocol):
    """One socket for `core`; it passes the core's effects to `on_effect`, in order.

    At first it only has the open socket, reported by `on_opened`; `start` sends CONNECT. Once the
    core's connection is over, or after `abandon`, it no longer touches the core. The core may have
    a new connection while this socket is closing.
    """

    def __init__(
        self,
        core: ClientProtocol,
        on_effect: Callable[[Effect], None],
        on_opened: Callable[[], None],
        on_failed: Callable[[ClientError], None],
    ) -> None:
        """`on_failed`: the socket was closed before `start`."""
        self._core = core
        self._on_effect = on_effect
        self._on_opened = on_opened
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._unsent = 0
        """The bytes in the write buffer when the timer last fired."""
        self._paused = False
        self._started = False
        self._attached = True
        self._writable = asyncio.Event()
        self._writable.set()
        self.opened = asyncio.Event()
        """The event that the socket is open, TLS and WebSocket included."""
        self.closed = asyncio.Event()
        """The event that the socket is closed."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Reports the open socket."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._attached:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.opened.set()
        self._on_opened()

    def data_received(self, data: bytes) -> None:
        """Passes bytes to the core."""
        if not self._attached:
            return
        if not self._started:
            self._fail(ProtocolError("the server sent something before CONNECT"))
            return
        self._core.handle_data(data, self._loop.time())
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """Reports the closed socket to the core, or as a failed attempt."""
        text = "connection closed by the server" if error is None else f"connection lost: {error}"
        if self._attached and self._started:
            self._core.handle_closed(self._loop.time(), text)
            self.pump()
        elif self._attached:
            failure = ConnectionLost(text)
            failure.__cause__ = error
            self._fail(failure)
        self._transport = None
        self._writable.set()
        self.closed.set()

    def pause_writing(self) -> None:
        """Lets publishers wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Lets publishers continue."""
        self._writable.set()

    # For the client

    @property
    def now(self) -> float:
        """The clock of the core."""
        return self._loop.time()

    def start(self) -> None:
        """Sends CONNECT."""
        self._started = True
        self._core.connect(self._loop.time())
        self.pump()

    @property
    def is_writable(self) -> bool:
        """Whether publishers need not wait."""
        return self._writable.is_set()

    def pump(self) -> None:
        """Sends, passes on effects and sets the timer. Called after each call of the core."""
        if not self._attached:
            return
        transport = self._transport
        data = self._core.data_to_send()
        if data and transport is not None and not transport.is_closing():
            transport.write(data)
        for effect in self._core.effects():
            if isinstance(effect, Closed):
                self._detach()
                self._close(effect.error)
            self._on_effect(effect)
        if not self._attached:
            return
        when = self._core.timer()
        # A timer that fires early only starts a new one, which is cheaper than one per message.
        if when is not None and (self._timer is None or when < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = when
            self._timer = self._loop.call_at(when, self._fire)

    def _close(self, error: ClientError | None) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if error is not None and error.reason == reasons.KEEP_ALIVE_TIMEOUT:
            transport.abort()
            return
        if transport.can_write_eof():
            # Reads on until the server closes. A socket that is closed with unread data sends a
            # reset, at which a server may drop what it has not read: acknowledgements, or messages
            # of QoS 0. RFC 1122, section 4.2.2.13.
            try:
                transport.write_eof()
            except OSError:
                # The server has reset the connection meanwhile, which nobody has noticed yet.
                transport.abort()
                return
            if self._paused:
                transport.resume_reading()
            self._loop.call_later(LINGER_S, transport.close)
        else:
            transport.close()
        # The peer may never take the last bytes. On a closed transport this does nothing.
        self._loop.call_later(CLOSE_TIMEOUT_S, transport.abort)

    def _detach(self) -> None:
        self._attached = False
        self._writable.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, error: ClientError) -> None:
        self._detach()
        self.abort()
        self._on_failed(error)

    def abandon(self) -> None:
        """Aborts the socket; the application never had this connection."""
        if self._attached and self._started:
            self._core.handle_closed(self.now)
            for effect in self._core.effects():
                if isinstance(effect, Traced):
                    self._on_effect(effect)
        self._detach()
        self.abort()

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._transport is not None:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._core.handle_progress(now)
            self._unsent = unsent
        self._core.handle_timer(now)
        self.pump()

    async def writable(self) -> None:
        """Waits until the socket takes more."""
        await self._writable.wait()

    def pause_reading(self) -> None:
        """Stops reading, because the queue of received messages is full."""
        transport = self._transport
        if self._attached and not self._paused and transport and not transport.is_closing():
            self._paused = True
            self._core.handle_reading(True, self.now)
            transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads again."""
        transport = self._transport
        if self._attached and self._paused and transport and not transport.is_closing():
            self._paused = False
            self._core.handle_reading(False, self.now)
            transport.resume_reading()

    def abort(self) -> None:
        """Aborts the socket at once."""
        if self._transport is not None:
            self._transport.abort()
