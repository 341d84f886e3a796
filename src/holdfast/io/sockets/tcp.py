"""TCP and TLS connections: an asyncio protocol around `ConnectionDriver`.

It has the methods of asyncio.Protocol without the base class, so that it compiles to a native
class.
"""

import select
from asyncio import BaseTransport, Transport
from collections.abc import Callable
from typing import Final, cast

from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.driver import ConnectionDriver, ListenerCount, proved_name

WRITE_BUFFER_BYTES: Final = 262_144
"""The unsent bytes above which the transport calls pause_writing and the node's limits apply."""
LEFT: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
CLOSE_TIMEOUT_S: Final = 5.0
"""The time in seconds that a client has to accept the last bytes before the socket is cut."""


class TcpConnection(ConnectionDriver):
    """The socket of one client connection."""

    def __init__(self, broker: Broker, listener: ListenerCount, remote: str = "") -> None:
        """`remote`: the client's host:port; "": that of the socket."""
        super().__init__(broker, listener, remote)
        # Beside `close_called`, because an idle client's object has its size.
        self.reading_paused = False
        self.transport: Transport | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        """Admits the connection, or aborts it at the limits of the listener or the process."""
        transport = cast(Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        name = proved_name(transport, self.listener.certificate_user)
        if name is None or not self.admit(name):
            transport.abort()

    @property
    def data_received(self) -> Callable[[bytes], None]:
        """This object. uvloop keeps the callable of each connection, and a bound method would cost
        each idle one 80 bytes."""
        return self

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()
        self.transport = None

    def pause_writing(self) -> None:
        self.congest()

    def resume_writing(self) -> None:
        self.relieve()

    def write(self, data: bytes) -> None:
        transport = self.transport
        if transport is not None:
            transport.write(data)

    def finish(self) -> None:
        transport = self.transport
        if transport is not None:
            transport.close()
            if transport.get_write_buffer_size():
                self.broker.loop.call_later(CLOSE_TIMEOUT_S, transport.abort)

    def cut(self) -> None:
        # `abort`, because an orderly close of TLS waits for the peer.
        if self.transport is not None:
            self.transport.abort()

    def has_remote(self) -> bool:
        return not self.remote

    def find_remote(self) -> str:
        transport = self.transport
        if self.remote or transport is None:
            return self.remote
        peer = transport.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if peer else "?"

    def has_left(self) -> bool:
        transport = self.transport
        if transport is None or transport.is_closing():
            return True
        watched = transport.get_extra_info("socket")
        if watched is None:
            return False
        poll = select.poll()
        poll.register(watched.fileno(), LEFT)
        return bool(poll.poll(0))

    def pause_reading(self) -> None:
        transport = self.transport
        if transport is not None and not self.reading_paused and not transport.is_closing():
            self.reading_paused = True
            transport.pause_reading()

    def resume_reading(self) -> None:
        transport = self.transport
        if transport is not None and self.reading_paused and not transport.is_closing():
            self.reading_paused = False
            transport.resume_reading()
