"""What the clients of the chaos tests have in common: a durable session, and a connection that is
made again. One thread serves them all (`chaos.Crowd`). What each of them saw goes to a `Ledger`."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.e2e import wire
from tests.e2e.ledger import Key, Ledger

EXPIRY_S: Final = 3600
RECONNECT_S: Final = 0.05
UNDER_FAULTS: Final = frozenset({3, 0x88, 0x89, 0x8B, 0x8E, 0x97, 0x9C, 0x9D})
"""What a cluster may answer while something is broken: unavailable (3 in MQTT 3.1.1), busy,
shutting down, session taken over, quota exceeded, use another server, server moved."""


@dataclass(frozen=True)
class Server:
    node: str
    host: str
    port: int
    make_socket: Callable[[], socket.socket] = socket.socket

    def dial(self) -> socket.socket:
        """Begins to connect. Raises OSError."""
        made = self.make_socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            made.connect((self.host, self.port))
        except BlockingIOError:
            pass
        except OSError:
            made.close()
            raise
        return made


def on_loopback(*ports: int) -> list[Server]:
    return [Server(f"port {port}", "127.0.0.1", port) for port in ports]


class Party:
    """One client with a durable session; reconnects by itself, to the next of its servers, until
    told to stay away. `patience_s`: a server that says nothing for so long is left, half-way it
    is sent a PINGREQ; None: only the end of the connection counts. `tolerated`: reasons with which
    it may be refused or disconnected."""

    def __init__(
        self,
        name: str,
        servers: Sequence[Server],
        version: int,
        ledger: Ledger,
        *,
        keep_alive_s: int = 60,
        patience_s: float | None = None,
        tolerated: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.servers = list(servers)
        self.version = version
        self.ledger = ledger
        self.keep_alive_s = keep_alive_s
        self.patience_s = patience_s
        self.tolerated = tolerated
        self.refusals: Counter[int] = Counter()
        self.socket: socket.socket | None = None
        self.ready = False
        self.away = False
        self.connections = 0
        self.retry_at = 0.0
        self._at = -1
        self._durable = False
        self._frames = wire.Frames()
        self._out = bytearray()
        self._heard_at = 0.0
        self._asked = False

    @property
    def server(self) -> Server:
        """The one of the present connection, or of the newest one."""
        return self.servers[max(self._at, 0)]

    def on_ready(self) -> None:
        """The broker has accepted the connection."""
        raise NotImplementedError

    def on_frame(self, frame: wire.Frame) -> None:
        raise NotImplementedError

    def on_tick(self, now: float) -> None:
        """Many times a second."""

    def will(self) -> wire.Will | None:
        return None

    def open(self) -> bool:
        """Begin to connect to the next server, with CONNECT to be sent. False: not reachable."""
        self._at = (self._at + 1) % len(self.servers)
        try:
            self.socket = self.server.dial()
        except OSError:
            return False
        self._heard_at, self._asked = time.monotonic(), False
        self._frames = wire.Frames()
        props = [(wire.SESSION_EXPIRY, EXPIRY_S)] if self.version == 5 else []
        clean = self.version == 5 and not self._durable and self.connections == 0
        self._out = bytearray(
            wire.connect(self.name, self.version, clean, self.keep_alive_s, self.will(), props)
        )
        return True

    def lost(self) -> None:
        assert self.socket is not None
        self.socket.close()
        self._let_go()

    def _let_go(self) -> None:
        self.socket = None
        if self.ready:
            self.ledger.disconnected(self.name, time.monotonic())
        self.ready = False

    def release(self) -> "Former":
        """Lets go of the connection without closing it: as a client that believes it is dead."""
        assert self.socket is not None
        former = Former(self, self.socket, self._frames)
        self._let_go()
        return former

    def reset(self) -> None:
        """When it is closed, the server is to see a reset, not an end."""
        if self.socket is not None:
            linger = (1).to_bytes(4, "little") + bytes(4)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def cut(self) -> None:
        """Lose the connection as a network would: with a reset, whatever was under way."""
        if self.socket is not None:
            self.reset()
            self.lost()

    def send(self, data: bytes) -> None:
        self._out += data

    def flush(self) -> None:
        """Raises OSError when the connection is gone."""
        if self._out and self.socket is not None:
            try:
                del self._out[: self.socket.send(self._out)]
            except BlockingIOError:
                pass

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    def tick(self, now: float) -> None:
        """Raises TimeoutError when the patience is at its end."""
        if self.socket is not None and self.patience_s is not None:
            silent_s = now - self._heard_at
            if silent_s > self.patience_s:
                raise TimeoutError
            if self.ready and silent_s > self.patience_s / 2 and not self._asked:
                self._asked = True
                self.send(wire.packet(wire.PINGREQ << 4))
        self.on_tick(now)

    def read(self) -> None:
        """Take in what has arrived. Raises OSError when the connection is gone."""
        assert self.socket is not None
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            self.on_end()
            raise ConnectionResetError
        self._heard_at, self._asked = time.monotonic(), False
        for frame in self._frames.feed(data):
            if frame.kind == wire.CONNACK:
                self._on_connack(wire.read_connack(frame, self.version))
            elif frame.kind == wire.DISCONNECT:
                self.refused("disconnected", frame.reason)
            elif frame.kind != wire.PINGRESP:
                self.on_frame(frame)

    def on_end(self) -> None:
        """The server has closed the connection in an orderly way."""

    def refused(self, kind: str, reason: int) -> None:
        """Raises ConnectionResetError: it is the end of this connection."""
        self.refusals[reason] += 1
        if reason not in self.tolerated:
            self.ledger.accuse(kind, self.name, f"reason {reason:#x} from {self.server.node}")
        raise ConnectionResetError

    def _on_connack(self, connack: wire.Connack) -> None:
        if connack.reason:
            self.refused("refused", connack.reason)
        if self._durable and not connack.session_present:
            text = f"at connection {self.connections + 1}, to {self.server.node}"
            self.ledger.accuse("session lost", self.name, text)
        self._durable = True
        self.connections += 1
        self.ledger.connected(self.name, self._heard_at, self.server.node)
        self.ready = True
        self.on_ready()


class Former:
    """A connection whose client has gone to another server without closing it: the servers have
    to find out. It answers nothing."""

    def __init__(self, party: Party, connection: socket.socket, frames: wire.Frames) -> None:
        self.name = party.name
        self.socket = connection
        self._ledger = party.ledger
        self._version = party.version
        self._number = party.connections
        self._frames = frames

    def read(self) -> None:
        """Raises OSError when the connection is gone."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        for frame in self._frames.feed(data):
            if frame.kind == wire.PUBLISH:
                key = key_of(wire.read_publish(frame, self._version))
                self._ledger.deliver_former(self.name, self._number, key)


def key_of(message: wire.Message) -> Key:
    publisher, sequence, _ = message.payload.split(b" ", 2)
    return publisher.decode(), message.topic, int(sequence)
