"""A broker with a WebSocket listener, and `wire` over WebSocket.

Frames are made by hand, so that they can be wrong; what comes back is read by `websockets`.
"""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from websockets.frames import Close, Frame, Opcode
from websockets.protocol import CLIENT, Protocol

from tests.e2e import wire
from tests.e2e.brokers import Holdfast, broker_toml
from tests.support.ports import free_port

CONTINUATION: Final = 0
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10

MASK: Final = b"\x37\xfa\x21\x3d"
KEY: Final = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT: Final = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""The key's answer, both from RFC 6455, section 1.3."""


class WebSocketHoldfast(Holdfast):
    """Its second listener is a WebSocket one, on `websocket_port`."""

    def __init__(
        self,
        directory: Path,
        settings: dict[str, dict[str, Any]] | None = None,
        listener: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, settings)
        self.websocket_port = free_port()
        self.listener = listener or {}

    def command(self) -> list[str]:
        command = super().command()
        second = {"transport": "websocket", "port": self.websocket_port, **self.listener}
        lines = [f"{key} = {json.dumps(value)}" for key, value in second.items()]
        (self.directory / "holdfast.toml").write_text(
            "\n".join([broker_toml(self.settings), "[[listeners]]", "[[listeners]]", *lines, ""])
        )
        return command


@contextmanager
def websocket_broker(
    directory: Path,
    settings: dict[str, dict[str, Any]] | None = None,
    listener: dict[str, Any] | None = None,
) -> Iterator[WebSocketHoldfast]:
    broker = WebSocketHoldfast(directory, settings, listener)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


def request(path: str = "/mqtt", **headers: str | None) -> bytes:
    """An upgrade; None leaves a header out, underscores stand for dashes."""
    wanted: dict[str, str | None] = {
        "Host": "broker",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": KEY,
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "mqtt",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}" for name, value in wanted.items() if value is not None]
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()


def frame(
    opcode: int, payload: bytes = b"", fin: bool = True, masked: bool = True, reserved: int = 0
) -> bytes:
    first = (0x80 if fin else 0) | reserved << 4 | opcode
    bit = 0x80 if masked else 0
    length = len(payload)
    if length < 126:
        head = bytes([first, bit | length])
    elif length < 65536:
        head = struct.pack(">BBH", first, bit | 126, length)
    else:
        head = struct.pack(">BBQ", first, bit | 127, length)
    if not masked:
        return head + payload
    stretched = int.from_bytes((MASK * (length // 4 + 1))[:length], "big")
    mixed = int.from_bytes(payload, "big") ^ stretched
    return head + MASK + mixed.to_bytes(length, "big")


def exchange(port: int, data: bytes, timeout_s: float = 10.0) -> bytes:
    """Send, and read until the broker closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(data)
        return read_to_end(connection)


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(1 << 16):
        received += data
    return received


class WebSocketWire(wire.Wire):
    """One frame for each `send`."""

    def __init__(
        self, port: int, version: int = 5, timeout_s: float = 10.0, subprotocol: str = "mqtt"
    ) -> None:
        super().__init__(port, version, timeout_s)
        self.controls: list[Frame] = []
        self.binary: list[bytes] = []
        self._reader = Protocol(CLIENT, max_size=None)
        self.socket.sendall(request(Sec_WebSocket_Protocol=subprotocol))
        head = b""
        while b"\r\n\r\n" not in head:
            data = self.socket.recv(1 << 16)
            assert data, f"refused: {head!r}"
            head += data
        self.head, _, rest = head.partition(b"\r\n\r\n")
        assert self.head.startswith(b"HTTP/1.1 101 "), head
        assert ACCEPT.encode() in self.head
        self._take(rest)

    def __enter__(self) -> "WebSocketWire":
        return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(frame(BINARY, data))

    def send_raw(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def _fill(self, timeout_s: float | None) -> None:
        self.socket.settimeout(self.timeout_s if timeout_s is None else timeout_s)
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError as error:
            raise wire.Closed(str(error)) from error
        if not data:
            raise wire.Closed("the broker closed the connection")
        self._take(data)

    def _take(self, data: bytes) -> None:
        if not data:
            return
        self._reader.receive_data(data)
        assert self._reader.parser_exc is None, self._reader.parser_exc
        for one in self._reader.events_received():
            assert isinstance(one, Frame)
            if one.opcode in (Opcode.BINARY, Opcode.CONT):
                self.binary.append(bytes(one.data))
                self.inbox += self._frames.feed(bytes(one.data))
            else:
                self.controls.append(one)

    def close_code(self) -> int:
        """Wait until the broker closes; the code of its close frame."""
        self.wait_closed()
        (close,) = [one for one in self.controls if one.opcode is Opcode.CLOSE]
        return int(Close.parse(close.data).code)

    def pong(self) -> bytes:
        """The payload of the next pong."""
        while True:
            for index, one in enumerate(self.controls):
                if one.opcode is Opcode.PONG:
                    return bytes(self.controls.pop(index).data)
            self._fill(None)
