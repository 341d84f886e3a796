"""The transports of a generator's connection below MQTT: TCP, TLS, or WebSocket."""

import socket
import ssl
import struct
from typing import Final

READ_BYTES: Final = 262_144
HANDSHAKE_TIMEOUT_S: Final = 10.0

_buffer = bytearray(READ_BYTES)
_view = memoryview(_buffer)

UPGRADE: Final = (
    b"GET /mqtt HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: mqtt\r\n\r\n"
)
BINARY: Final = 0x82
MASK: Final = b"\x37\xfa\x21\x3d"


class TcpChannel:
    """Bytes as they are."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), HANDSHAKE_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> bytes:
        """What has arrived; b"": the broker has closed. Raises BlockingIOError if there is
        nothing."""
        return bytes(_view[: self.socket.recv_into(_buffer)])

    def framed(self, data: bytes | bytearray) -> bytes | bytearray:
        """The data as it is written."""
        return data

    def write(self, data: bytes | bytearray) -> int:
        """Write framed bytes and return how many went. Raises BlockingIOError if none can."""
        return self.socket.send(data)


class TlsChannel(TcpChannel):
    """Nobody checks the certificate: the generator measures, and trusts the brokers it starts."""

    _context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _context.check_hostname = False
    _context.verify_mode = ssl.CERT_NONE

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._secure = self._context.wrap_socket(self.socket)
        self.socket = self._secure

    def read(self) -> bytes:
        # A record that was decrypted waits in memory, where epoll does not see it.
        pieces = []
        try:
            while True:
                piece = self._secure.recv(READ_BYTES)
                pieces.append(piece)
                if not piece or not self._secure.pending():
                    break
        except ssl.SSLWantReadError:
            if not pieces:
                raise BlockingIOError from None
        return b"".join(pieces)

    def write(self, data: bytes | bytearray) -> int:
        try:
            return self._secure.send(data)
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None


class WebSocketChannel(TcpChannel):
    """Each write is one masked binary frame."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._rest = b""
        self.socket.sendall(UPGRADE)
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = self.socket.recv(4096)
            if not data:
                raise ConnectionError(f"the upgrade was answered {answer!r}")
            answer += data
        if not answer.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(f"the upgrade was answered {answer[:80]!r}")
        self._rest = answer.partition(b"\r\n\r\n")[2]

    def read(self) -> bytes:
        data = super().read()
        if not data:
            return b""
        payload, self._rest = unframed(self._rest + data)
        if not payload:
            raise BlockingIOError
        return payload

    def framed(self, data: bytes | bytearray) -> bytes:
        size = len(data)
        if size < 126:
            head = bytes((BINARY, 0x80 | size))
        elif size < 1 << 16:
            head = struct.pack("!BBH", BINARY, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", BINARY, 0x80 | 127, size)
        mask = (MASK * (size // 4 + 1))[:size]
        masked = int.from_bytes(data, "big") ^ int.from_bytes(mask, "big")
        return head + MASK + masked.to_bytes(size, "big")


def unframed(data: bytes) -> tuple[bytes, bytes]:
    """The payload of the whole frames in `data`, and what is behind them. A server masks none."""
    payload: list[bytes] = []
    at = 0
    while len(data) - at >= 2:
        if data[at] != BINARY:
            raise ValueError(f"not the binary frames of a broker: {data[at : at + 20]!r}")
        size, head = data[at + 1], 2
        if size == 126:
            size, head = int.from_bytes(data[at + 2 : at + 4], "big"), 4
        elif size == 127:
            size, head = int.from_bytes(data[at + 2 : at + 10], "big"), 10
        if len(data) - at < head + size:
            break
        payload.append(data[at + head : at + head + size])
        at += head + size
    return b"".join(payload), data[at:]


CHANNELS: Final = {"tcp": TcpChannel, "tls": TlsChannel, "websocket": WebSocketChannel}
"""The channel of each transport."""
