"""An MQTT server on a real socket, in a thread, whose every answer a test chooses."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode, encode_ack
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import (
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Properties,
    Publish,
)

STOP_S = 10.0

Answer = Callable[["Session", Publish], int | bytes | Packet | None]
"""To a PUBLISH: a reason code, what is to be sent instead, or None for no answer at all. Raising
EOFError closes the connection."""


def accept(_session: "Session", _publish: Publish) -> int:
    return 0


@dataclass
class Session:
    """One connection: its number, from 0, and what came over it."""

    number: int
    connect: Connect | None = None
    published: list[Publish] = field(default_factory=list)
    others: list[Packet] = field(default_factory=list)

    @property
    def payloads(self) -> list[bytes]:
        return [publish.payload for publish in self.published]


class SinkServer:
    """`with` it: serves on `port`. `connack` answers CONNECT."""

    def __init__(
        self,
        answer: Answer = accept,
        connack: Callable[[Session], Connack | bytes | None] | None = None,
        *,
        properties: Properties | None = None,
        level: int = 5,
        chunk_bytes: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`chunk_bytes`: cut every answer into pieces of that size."""
        self.sessions: list[Session] = []
        self._answer = answer
        self._connack = connack or (lambda _: Connack(False, 0, properties or {}))
        self._level = level
        self._chunk_bytes = chunk_bytes
        self._tls = tls
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @property
    def payloads(self) -> list[bytes]:
        return [payload for session in self.sessions for payload in session.payloads]

    def __enter__(self) -> "SinkServer":
        self._start(self._serve)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Closing alone does not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(STOP_S)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            session = Session(len(self.sessions))
            self.sessions.append(session)
            self._open.append(connection)
            self._start(lambda c=connection, s=session: self._attend(c, s))  # type: ignore[misc]

    def _attend(self, connection: socket.socket, session: Session) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            frames = FrameReader(PACKET_BYTES_MAX)
            with connection:
                while data := connection.recv(65_536):
                    frames.feed(data)
                    while frames.next():
                        packet = decode(
                            frames.buffer, frames.first, frames.start, frames.end, self._level, True
                        )
                        self._send(connection, self._respond(session, packet))

    def _respond(self, session: Session, packet: Packet) -> bytes | Packet | None:
        if isinstance(packet, Connect):
            session.connect = packet
            return self._connack(session)
        if isinstance(packet, Publish):
            session.published.append(packet)
            answer = self._answer(session, packet)
            if not packet.qos or not isinstance(answer, int):
                return None if isinstance(answer, int) else answer
            kind = PUBACK if packet.qos == 1 else PUBREC
            return encode_ack(kind, packet.packet_id, answer, self._level)
        session.others.append(packet)
        if isinstance(packet, Ack) and packet.kind == PUBREL:
            return encode_ack(PUBCOMP, packet.packet_id, 0, self._level)
        if isinstance(packet, Pingreq):
            return b"\xd0\0"
        if isinstance(packet, Disconnect):
            raise EOFError
        return None

    def _send(self, connection: socket.socket, answer: bytes | Packet | None) -> None:
        if answer is None:
            return
        data = answer if isinstance(answer, bytes) else encode(answer, self._level)
        size = self._chunk_bytes or len(data)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
