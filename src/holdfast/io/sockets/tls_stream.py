"""TLS between the socket of a client and its protocol.

The event loop's own TLS reads until OpenSSL raises that there is no more, so each wake-up of a
connection costs an exception. This one looks first whether anything is left.
"""

import ssl
from asyncio import AbstractEventLoop, BaseTransport, Future, Protocol, TimerHandle, Transport
from collections.abc import Callable
from typing import Any, Final, cast

from holdfast.io.sockets.tcp import CLOSE_TIMEOUT_S

RECORD_BYTES_MAX: Final = 16_384
"""The most bytes that a record carries. [RFC 8446 section 5.1]"""
REPLIES_BYTES_MAX: Final = 65_536
"""The most bytes of TLS's own replies, for example to updates of keys, to a client that does not
read them."""

SHAKING: Final = 0
"""The state during the handshake."""
OPEN: Final = 1
CLOSING: Final = 2
"""The state from our close_notify until the peer's. Its data is discarded: closing at once, with
bytes unread, would reset the connection and might lose the last bytes sent."""
OVER: Final = 3


class TlsStream:
    """The protocol of a socket's transport, and the transport of the inner protocol.

    It has the methods of both without the base classes, so that it compiles to a native class. The
    inner protocol gets its connection after the handshake, and its end once. Flow control is that
    of the socket in both directions: the stream buffers at most an incomplete record.
    """

    def __init__(
        self,
        inner: Protocol,
        context: ssl.SSLContext,
        loop: AbstractEventLoop,
        handshake_timeout_s: float,
    ) -> None:
        self._inner = inner
        self._loop = loop
        self._handshake_timeout_s = handshake_timeout_s
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        # The object below has the same methods without a frame of Python for each call.
        below: Any = getattr(self._tls, "_sslobj", self._tls)
        self._decrypt: Callable[[int], bytes] = below.read
        self._encrypt: Callable[[bytes], int] = below.write
        self._state = SHAKING
        self._is_connected = False
        """Whether the inner protocol has a connection that must end."""
        self._is_congested = False
        self._socket: Transport | None = None
        self._timer: TimerHandle | None = None
        self.is_silent = True
        """Whether the peer has sent nothing yet."""
        self.handshake: Future[None] = loop.create_future()
        """The end of the handshake. Raises `OSError` when it has failed."""

    # asyncio.Protocol, for the socket

    def connection_made(self, transport: BaseTransport) -> None:
        self._socket = cast(Transport, transport)
        self._start_timer(self._handshake_timeout_s, self._time_out)

    def data_received(self, data: bytes) -> None:
        if self._state == OVER:
            return
        self._incoming.write(data)
        if self._state == OPEN:
            self._read(len(data))
        elif self._state == SHAKING:
            self.is_silent = False
            self._shake_hands()
        else:
            self._discard()

    def eof_received(self) -> bool:
        """Lets the socket close itself: MQTT has no half-closed state."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._state = OVER
        self._socket = None
        self._stop_timer()
        if self._is_connected:
            self._is_connected = False
            self._inner.connection_lost(error)
        elif not self.handshake.done():
            self.handshake.set_exception(error or ConnectionResetError("closed by the client"))

    def pause_writing(self) -> None:
        self._is_congested = True
        if self._state == OPEN:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_congested = False
        if self._state == OPEN:
            self._flush()
            self._inner.resume_writing()

    # asyncio.Transport, for the inner protocol

    def write(self, data: bytes) -> None:
        """Sends bytes. After the end they are dropped, as a closed socket does."""
        socket = self._socket
        if self._state != OPEN or socket is None or not data:
            return
        try:
            sent = self._encrypt(data)
            while sent < len(data):
                sent += self._encrypt(data[sent : sent + RECORD_BYTES_MAX])
        except ssl.SSLError as error:
            self._fail(error)
            return
        socket.write(self._outgoing.read())

    def close(self) -> None:
        """Sends close_notify, and closes the socket when the peer's has come."""
        socket = self._socket
        if self._state != OPEN or socket is None:
            return
        self._state = CLOSING
        self._start_timer(CLOSE_TIMEOUT_S, self.abort)
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            # The peer's close_notify must be read, even if the inner protocol has paused reading.
            socket.resume_reading()
            self._flush()
        else:
            self._flush()
            socket.close()

    def abort(self) -> None:
        """Closes the socket at once. Nothing more reaches the inner protocol but the end: its first
        bytes may be here already when it aborts its new connection."""
        self._state = OVER
        if self._socket is not None:
            self._socket.abort()

    def is_closing(self) -> bool:
        return self._state > OPEN or self._socket is None or self._socket.is_closing()

    def pause_reading(self) -> None:
        if self._state == OPEN and self._socket is not None:
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        if self._state == OPEN and self._socket is not None:
            self._socket.resume_reading()

    def can_write_eof(self) -> bool:
        """False: close_notify ends both directions."""
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Sets the limits of the socket, whose bytes are encrypted."""
        if self._socket is not None:
            self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return 0 if self._socket is None else self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        if name == "peercert":
            return self._tls.getpeercert()
        return default if self._socket is None else self._socket.get_extra_info(name, default)

    # Helpers

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()
        self._stop_timer()
        self._state = OPEN
        self._is_connected = True
        self._inner.connection_made(self)  # type: ignore[arg-type]
        if not self.handshake.done():
            self.handshake.set_result(None)
        if self._incoming.pending and self._state == OPEN:
            self._read(RECORD_BYTES_MAX)

    def _read(self, size: int) -> None:
        """Passes on the content of the records that `size` bytes from the socket have completed."""
        pieces: list[bytes] = []
        has_ended = False
        failure: ssl.SSLError | None = None
        incoming = self._incoming
        try:
            while True:
                piece = self._decrypt(min(size, RECORD_BYTES_MAX))
                if not piece:
                    has_ended = True
                    break
                pieces.append(piece)
                # A record is longer than its content, so `size` bytes come out only if a part of it
                # was here before. Then more of it may be left.
                if len(piece) < size and not incoming.pending:
                    break
                size = RECORD_BYTES_MAX + 1
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            failure = error
        if pieces:
            self._inner.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._outgoing.pending:
            self._reply()
        if failure is not None:
            self._fail(failure)
        elif has_ended:
            self.close()

    def _reply(self) -> None:
        """Sends TLS's own replies, unless the peer does not read."""
        if not self._is_congested:
            self._flush()
        elif self._outgoing.pending > REPLIES_BYTES_MAX:
            self.abort()

    def _discard(self) -> None:
        """Closes the socket once the peer's close_notify has come."""
        try:
            while self._tls.read(RECORD_BYTES_MAX):
                pass
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError:
            self.abort()
            return
        if self._socket is not None:
            self._socket.close()

    def _fail(self, error: OSError) -> None:
        """Closes the socket after an error of TLS, with the alert that says why."""
        if self._state == OVER:
            return
        self._state = OVER
        self._flush()
        if not self.handshake.done():
            self.handshake.set_exception(error)
        if self._socket is not None:
            self._socket.close()
            self._start_timer(CLOSE_TIMEOUT_S, self.abort)

    def _time_out(self) -> None:
        error = f"no complete handshake within {self._handshake_timeout_s:g} s"
        self._fail(ConnectionAbortedError(error))
        self.abort()

    def _flush(self) -> None:
        if self._outgoing.pending and self._socket is not None:
            self._socket.write(self._outgoing.read())

    def _start_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(delay_s, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
