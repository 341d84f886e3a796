"""WebSocket frames as a stream of bytes. RFC 6455, section 5.

To MQTT a WebSocket is a stream: packets need not begin or end with frames [MQTT-6.0.0-2]. So the
decoder returns the part of a frame that has arrived. It buffers at most a header or a control
frame, whatever length a frame announces. The parsers of libraries differ: `websockets` collects
each frame, and `wsproto` takes several times as long for each. With frames of one byte a peer could
then stall the event loop. Unmasking is that of `websockets`.

Extensions are never negotiated, so no frame is compressed.
"""

from typing import Final

from websockets.exceptions import ProtocolError
from websockets.frames import Close

try:
    from websockets.speedups import apply_mask
except ImportError:
    from websockets.utils import apply_mask

CONTINUATION: Final = 0
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED_DATA: Final = 1003
NO_STATUS: Final = 1005
INVALID_DATA: Final = 1007

CONTROL_BYTES_MAX: Final = 125
"""The most bytes of a control frame's payload: RFC 6455, section 5.5."""
FRAME_BYTES_MAX: Final = 16_384
"""The most bytes of a message that is sent: the work of some clients for a frame grows with its
size times the packets in it."""


class FrameDecoder:
    """The decoder of one direction: feed() the input. After a close frame or a violation it stays
    ended.

    `ping` is the last ping without reply: the caller replies and clears it. When `ended`, `code`
    and `reason` are those of the peer's close frame, or, if `failed`, those to send.

    Invariant: between two calls it has at most 13 bytes of a header and 125 of a control frame, so
    a peer cannot make it use memory.
    """

    def __init__(self, masked: bool) -> None:
        """`masked`: the peer is the client, so it must mask its frames."""
        self.masked = masked
        self.ping: bytes | None = None
        self.ended = False
        self.failed = False
        self.code = NO_STATUS
        self.reason = ""
        # The start of a header whose rest has not arrived.
        self._head = b""
        self._opcode = BINARY
        # Payload bytes of the frame that are still to come, and the key for the next one.
        self._left = 0
        self._key = b""
        self._control = b""
        # True between the frames of a fragmented message.
        self._in_message = False

    def feed(self, data: bytes) -> bytes:
        """The payload of binary messages, up to the end of `data` or of the WebSocket."""
        if self.ended:
            return b""
        if self._head:
            data = self._head + data
            self._head = b""
        end = len(data)
        position = 0
        pieces: list[bytes] = []
        while position < end:
            if self._left == 0:
                size = self._read_header(data, position, end)
                if size == 0:
                    if not self.ended:
                        self._head = data[position:]
                    break
                position += size
                if self._left:
                    continue
                # A frame without payload is complete. The loop would not look at it again, and a
                # ping or close without payload would stay without a reply.
                piece = b""
            else:
                piece = data[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                if self.masked:
                    piece = self._unmask(piece)
            if self._opcode < CLOSE:
                pieces.append(piece)
                continue
            self._control += piece
            if self._left == 0:
                self._handle_control()
                if self.ended:
                    break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _unmask(self, piece: bytes) -> bytes:
        """Unmasks a part of a payload, and turns the key to where the next part begins."""
        key = self._key
        turn = len(piece) & 3
        if turn and self._left:
            self._key = key[turn:] + key[:turn]
        return apply_mask(piece, key)

    def _read_header(self, data: bytes, position: int, end: int) -> int:
        """The size of the header, or 0 if it is incomplete or invalid."""
        if end - position < 2:
            return 0
        first = data[position]
        second = data[position + 1]
        opcode = first & 0x0F
        length = second & 0x7F
        if not self._check(first, opcode, second):
            return 0
        size = 2
        if length >= 126:
            size = 4 if length == 126 else 10
            if end - position < size:
                return 0
            length = int.from_bytes(data[position + 2 : position + size], "big")
            # The length is not bounded otherwise: nothing is allocated for it, and the MQTT decoder
            # bounds the packets inside.
            if length >> 63:
                self._fail(PROTOCOL_ERROR, "a frame length with the highest bit set")
                return 0
        if self.masked:
            size += 4
            if end - position < size:
                return 0
            self._key = data[position + size - 4 : position + size]
        self._opcode = opcode
        self._left = length
        # Control frames may come between the frames of a message, so they do not change this.
        if opcode < CLOSE:
            self._in_message = first < 0x80
        else:
            self._control = b""
        return size

    def _check(self, first: int, opcode: int, second: int) -> bool:
        """Whether a frame may begin with these bytes here."""
        if first & 0x70:
            return self._fail(PROTOCOL_ERROR, "reserved bits without an extension")
        if (second >= 0x80) != self.masked:
            return self._fail(
                PROTOCOL_ERROR,
                "a client's frames must be masked" if self.masked else "a server's frame is masked",
            )
        if opcode == BINARY:
            if self._in_message:
                return self._fail(PROTOCOL_ERROR, "a new message inside a fragmented one")
        elif opcode == CONTINUATION:
            if not self._in_message:
                return self._fail(PROTOCOL_ERROR, "a continuation of no message")
        elif opcode == TEXT:
            # [MQTT-6.0.0-1]
            return self._fail(UNSUPPORTED_DATA, "MQTT is sent in binary frames")
        elif opcode not in (CLOSE, PING, PONG):
            return self._fail(PROTOCOL_ERROR, f"unknown opcode {opcode}")
        elif first < 0x80:
            return self._fail(PROTOCOL_ERROR, "a fragmented control frame")
        elif second & 0x7F > CONTROL_BYTES_MAX:
            return self._fail(PROTOCOL_ERROR, "a control frame of more than 125 bytes")
        return True

    def _handle_control(self) -> None:
        """Handles a complete control frame."""
        if self._opcode == PING:
            # A reply to the last one is enough: RFC 6455, section 5.5.3.
            self.ping = self._control
        elif self._opcode == CLOSE:
            try:
                close = Close.parse(self._control)
            except ProtocolError as error:
                self._fail(PROTOCOL_ERROR, str(error))
            except UnicodeDecodeError:
                self._fail(INVALID_DATA, "the reason in a close frame is not UTF-8")
            else:
                self.ended = True
                self.code = int(close.code)
                self.reason = close.reason

    def _fail(self, code: int, text: str) -> bool:
        """Ends the decoder with a violation. Always False, for `_check`."""
        self.ended = True
        self.failed = True
        self.code = code
        self.reason = text
        return False


def frame(opcode: int, payload: bytes, key: bytes) -> bytes:
    """One complete frame. `key`: four random bytes at the client, none at the server."""
    length = len(payload)
    if length < 126 and not key:
        return bytes((0x80 | opcode, length)) + payload
    if length < 126:
        size = length.to_bytes(1, "big")
    elif length < 65_536:
        size = b"\x7e" + length.to_bytes(2, "big")
    else:
        size = b"\x7f" + length.to_bytes(8, "big")
    first = (0x80 | opcode).to_bytes(1, "big")
    if not key:
        return b"".join((first, size, payload))
    size = (0x80 | size[0]).to_bytes(1, "big") + size[1:]
    return b"".join((first, size, key, apply_mask(payload, key)))


def close_payload(code: int, reason: str) -> bytes:
    """The payload of a close frame; NO_STATUS has none. A reason too long for a frame is cut."""
    if code == NO_STATUS:
        return b""
    # The cut may be within a character. The rest of it is dropped, because a close frame with
    # invalid UTF-8 is a violation itself.
    text = reason.encode()[: CONTROL_BYTES_MAX - 2]
    return code.to_bytes(2, "big") + text.decode(errors="ignore").encode()
