"""A WebSocket between a socket and the asyncio protocol that would otherwise own the socket.

A stream is the protocol of the socket's transport and the transport of the inner protocol. Bytes
written become binary frames, and the payload of binary frames arrives as bytes. Flow control is
that of the socket, in both directions: the stream buffers nothing.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from secrets import token_bytes
from typing import Any, Final, cast

from websockets.frames import Close

from holdfast.protocol.websocket.errors import WebSocketError
from holdfast.protocol.websocket.frames import (
    BINARY,
    CLOSE,
    FRAME_BYTES_MAX,
    GOING_AWAY,
    NO_STATUS,
    NORMAL,
    PONG,
    FrameDecoder,
    close_payload,
    frame,
)

HEAD_BYTES_MAX: Final = 16_384
"""The most bytes of an HTTP request or response up to the empty line."""
ANSWER_S: Final = 1.0
"""The seconds that the peer has to reply to a close frame before the socket is closed."""
CLOSE_TIMEOUT_S: Final = 5.0
"""The seconds that it has after that to accept the last bytes."""

OPENING: Final = 0
"""The state during the HTTP upgrade."""
OPEN: Final = 1
CLOSING: Final = 2
"""The state from our close frame until the peer's."""
OVER: Final = 3
"""The state in which input is discarded until the peer closes. Closing at once, with bytes unread,
would reset the connection and might lose the last bytes sent."""


class PacketEnds:
    """Finds the ends of the MQTT packets of a stream, whatever pieces it comes in."""

    def __init__(self) -> None:
        # The bytes of the packet that are still to come, without its fixed header.
        self._left_bytes = 0
        # The place of the next seven bits of the packet's length; -1: a packet begins.
        self._shift = -1

    def next(self, data: bytes, start: int, limit: int) -> int:
        """The end of the packet at `start`, or `limit` if it goes on there."""
        position = start
        if self._left_bytes == 0 or self._shift >= 0:
            if self._shift < 0:
                self._shift = 0
                position += 1
            while True:
                if position >= limit:
                    return limit
                byte = data[position]
                position += 1
                self._left_bytes |= (byte & 127) << self._shift
                self._shift += 7
                if byte < 128:
                    break
            self._shift = -1
        end = min(limit, position + self._left_bytes)
        self._left_bytes -= end - position
        return end


class WebSocketStream:
    """The base of both sides. A subclass has `read_upgrade`, which calls `opened` when it is done.

    It has the methods of asyncio.Protocol and asyncio.Transport without the base classes, so that
    it compiles to a native class.

    The inner protocol sees an ordinary transport. It notices neither frames nor pings, and it is
    told of the end once, after the socket's. Invariant: after `_state` has left OPEN no byte
    reaches the inner protocol. Counter-example without that: it closes because of a violation, and
    processes the rest of the same read.
    """

    def __init__(self, inner: asyncio.Protocol, is_client: bool) -> None:
        self._inner = inner
        self._is_client = is_client
        self._state = OPENING
        self._socket: asyncio.Transport | None = None
        self._head = b""
        self._frames = FrameDecoder(masked=not is_client)
        # Clients built on Paho C process one packet of a message, and wait for ever for the next.
        self._packet_ends = None if is_client else PacketEnds()
        self._congested = False
        self._timer: asyncio.TimerHandle | None = None
        self._error: WebSocketError | None = None

    @property
    def socket(self) -> asyncio.Transport:
        """The transport of the socket."""
        assert self._socket is not None
        return self._socket

    def read_upgrade(self, head: bytes, rest: bytes) -> None:
        """Processes the peer's half of the upgrade, then calls `opened` or `refuse`. `head` ends
        with an empty line, `rest` is the input behind it."""
        raise NotImplementedError

    def refuse_upgrade(self, text: str, too_long: bool) -> None:
        """Refuses input that is no HTTP, or whose head is too long."""
        raise NotImplementedError

    # asyncio.Protocol, for the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Passes input on. What arrives after the end is read and discarded, see OVER."""
        if self._state == OPENING:
            self._gather_head(data)
        elif self._state != OVER:
            self._feed(data)

    def eof_received(self) -> bool:
        """Lets the socket close itself. A WebSocket has no half-closed state."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Reports the end to the inner protocol, with our own reason if there is one."""
        self._stop_timer()
        self._state = OVER
        self._inner.connection_lost(self._error if self._error is not None else error)

    def pause_writing(self) -> None:
        """Passes congestion on while the WebSocket is open."""
        self._congested = True
        if self._state == OPEN:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Passes the end of congestion on. A ping may have come meanwhile."""
        self._congested = False
        if self._state == OPEN:
            self._inner.resume_writing()
            self._reply_to_ping()

    # asyncio.Transport, for the inner protocol

    def write(self, payload: bytes) -> None:
        """Sends a binary message. Before the WebSocket is open and after `close` bytes are dropped,
        as a closed socket does."""
        if self._state != OPEN:
            return
        # Each part is a message of its own: packets need not end with messages [MQTT-6.0.0-2], and
        # some clients collect a fragmented message before they process its first packet.
        size_bytes = len(payload)
        start = 0
        frames: list[bytes] = []
        while start < size_bytes:
            end = min(size_bytes, start + FRAME_BYTES_MAX)
            if self._packet_ends is not None:
                end = self._packet_ends.next(payload, start, end)
            frames.append(self._frame(BINARY, payload[start:end]))
            start = end
        self.socket.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def writelines(self, list_of_data: Iterable[bytes]) -> None:
        """Sends all data in one write."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """False: the close frame ends both directions."""
        return False

    def close(self) -> None:
        """Begins the closing handshake. The peer's close frame, or ANSWER_S, ends it."""
        if self._state == OPEN:
            self._send_close(NORMAL, "")
            self._state = CLOSING
            self._linger()
        elif self._state == OPENING:
            self._close_socket()

    def abort(self) -> None:
        """Closes the socket at once, without a close frame."""
        self._state = OVER
        self.socket.abort()

    def is_closing(self) -> bool:
        """True from `close` on, although the socket is still open."""
        return self._state > OPEN or self.socket.is_closing()

    def pause_reading(self) -> None:
        self.socket.pause_reading()

    def resume_reading(self) -> None:
        self.socket.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self.socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket.get_extra_info(name, default)

    # For the two sides

    def opened(self, rest: bytes) -> None:
        """Ends the upgrade; `rest` is the input behind it. A client's inner protocol gets its
        connection only now."""
        self._state = OPEN
        if self._is_client:
            self._inner.connection_made(self)  # type: ignore[arg-type]
        if rest:
            self._feed(rest)

    def refuse(self, error: WebSocketError, last_words: bytes = b"") -> None:
        """Ends the connection because the upgrade failed."""
        self._error = error
        if last_words:
            self.socket.write(last_words)
        self._fail()

    # Helpers

    def _gather_head(self, data: bytes) -> None:
        """Collects the HTTP head.

        A method begins with a letter. So a TLS or MQTT client at the wrong port is refused with its
        first byte, and does not wait until HEAD_BYTES_MAX have arrived.
        """
        head = self._head + data
        if not head[:1].isalpha():
            self.refuse_upgrade("what arrived is no HTTP", False)
            return
        # The empty line may be divided between two reads, so the search goes back three bytes.
        end = head.find(b"\r\n\r\n", max(len(self._head) - 3, 0)) + 4
        if (end if end >= 4 else len(head)) > HEAD_BYTES_MAX:
            self.refuse_upgrade(f"an HTTP head of more than {HEAD_BYTES_MAX} bytes", True)
        elif end < 4:
            self._head = head
            return
        else:
            self.read_upgrade(head[:end], head[end:])
        self._head = b""

    def _feed(self, data: bytes) -> None:
        """Decodes input, and passes its payload on."""
        payload = self._frames.feed(data)
        if payload and self._state == OPEN:
            self._inner.data_received(payload)
        if self._frames.ended:
            self._end()
        else:
            self._reply_to_ping()

    def _end(self) -> None:
        """Handles the peer's close frame or violation."""
        frames = self._frames
        if self._state == CLOSING:
            self._close_socket()
        elif self._state == OPEN:
            text = str(Close(frames.code, frames.reason))
            if frames.failed:
                self._error = WebSocketError(f"WebSocket error {text}")
                self._send_close(frames.code, frames.reason)
                self._fail()
                return
            if frames.code not in (NORMAL, GOING_AWAY, NO_STATUS):
                self._error = WebSocketError(f"the WebSocket was closed with {text}")
            self._send_close(frames.code, "")
            self._state = OVER
            self._close_socket()

    def _fail(self) -> None:
        """Ends after an error. A server waits for the client to read the reason; a client has
        nobody to inform."""
        self._state = OVER
        if self._is_client:
            self._close_socket()
        else:
            self._linger()

    def _reply_to_ping(self) -> None:
        """Replies to a ping, unless the peer does not read: pongs would accumulate."""
        ping = self._frames.ping
        if ping is not None and self._state == OPEN and not self._congested:
            self._frames.ping = None
            self.socket.write(self._frame(PONG, ping))

    def _frame(self, opcode: int, payload: bytes) -> bytes:
        """A frame. A client masks each with a new random key: RFC 6455, section 5.3."""
        return frame(opcode, payload, token_bytes(4) if self._is_client else b"")

    def _send_close(self, code: int, reason: str) -> None:
        if not self.socket.is_closing():
            self.socket.write(self._frame(CLOSE, close_payload(code, reason)))

    def _linger(self) -> None:
        """Waits for the peer's reply, then closes. A server ends its half of the connection at
        once."""
        socket = self.socket
        if socket.is_closing():
            return
        # The peer's close frame must be read, even if the inner protocol has paused reading.
        socket.resume_reading()
        if not self._is_client and socket.can_write_eof():
            with suppress(OSError):  # the peer has reset the connection meanwhile
                socket.write_eof()
        self._start_timer(ANSWER_S, self._close_socket)

    def _close_socket(self) -> None:
        """Closes the socket after its last bytes, or aborts it after CLOSE_TIMEOUT_S."""
        self.socket.close()
        self._start_timer(CLOSE_TIMEOUT_S, self.socket.abort)

    def _start_timer(self, delay_s: float, callback: Any) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
