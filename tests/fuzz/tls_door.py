"""MQTT over TLS: handshakes and records that are damaged, cut, swapped or sent in tiny pieces."""

import random
import socket
import ssl
from pathlib import Path
from typing import Final

from tests.e2e import wire
from tests.e2e.listeners_broker import ListenersBroker
from tests.fuzz.doors import CLOSE_S
from tests.fuzz.mqtt_doors import SETTINGS, MqttDoor, stream
from tests.fuzz.mutation import damage, noise
from tests.support.certificates import Authority
from tests.support.ports import free_port

VERSIONS: Final = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
FLIGHTS_MAX: Final = 8
"""The flights of a handshake: more are a client and a broker that never agree."""
RECORDS: Final = [
    bytes.fromhex(record)
    for record in (
        "1503030002012a",  # an alert
        "1703030000",  # application data without content
        "170303ffff",  # longer than a record may be
        "140303000101",  # a change of the cipher
        "160301000401000000",  # a ClientHello without content
        "1603010200",  # one that never comes
        "802e010002",  # SSL 2
    )
]


class TlsClient:
    """A client's TLS over a socket. The rng decides which of its flights are damaged."""

    def __init__(self, port: int, context: ssl.SSLContext, rng: random.Random) -> None:
        self._rng = rng
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self._socket = socket.create_connection(("127.0.0.1", port), CLOSE_S)

    def __enter__(self) -> "TlsClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def shake_hands(self, damage_share: float, *, is_eager: bool) -> bool:
        """False: it came to no end. `is_eager`: the last flight leaves with the next write."""
        for _ in range(FLIGHTS_MAX):
            try:
                self._tls.do_handshake()
                if not is_eager:
                    self.flush(damage_share)
                return True
            except ssl.SSLWantReadError:
                self.flush(damage_share)
            except ssl.SSLError:
                return False
            data = self._socket.recv(1 << 16)
            if not data:
                return False
            self._incoming.write(data)
        return False

    def send_plain(self, data: bytes) -> None:
        """Send bytes without TLS."""
        self._socket.sendall(data)

    def write(self, data: bytes) -> None:
        """Encrypt, in records of any length."""
        size = self._rng.choice((1, 5, 100, 1 << 14, 1 << 20))
        size = max(size, len(data) // 200)
        for start in range(0, len(data), size):
            self._tls.write(data[start : start + size])

    def flush(self, damage_share: float) -> None:
        """Send what TLS has to send, damaged in this share of the cases, in one or more pieces."""
        rng = self._rng
        data = self._outgoing.read()
        if rng.random() < damage_share:
            data = rng.choice((damage(rng, data, [data, *RECORDS]), data + rng.choice(RECORDS)))
        cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else 0
        for piece in (data[:cut], data[cut:]):
            self._socket.sendall(piece)

    def end(self) -> None:
        """Send the end of TLS, of the socket, both or none, and perhaps more after it."""
        rng = self._rng
        if rng.random() < 0.5:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass
            self.flush(0.0)
        if rng.random() < 0.2:
            self._socket.sendall(rng.choice((noise(rng), *RECORDS)))
        self._socket.shutdown(socket.SHUT_WR)

    def drain(self) -> bytes:
        """Read until the broker closes."""
        received = bytearray()
        while data := self._socket.recv(1 << 16):
            received += data
        return bytes(received)


class TlsDoor(MqttDoor):
    name = "tls"

    def start(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        authority = Authority(directory)
        server = authority.issue()
        self._contexts = []
        for version in VERSIONS:
            context = ssl.create_default_context(cafile=authority.ca)
            context.minimum_version = context.maximum_version = version
            self._contexts.append(context)
        table = {"certificate": server.certificate, "key": server.key}
        self.port, self.full_port = free_port(), free_port()
        tables = [{"port": self.port, **table}]
        tables.append({"port": self.full_port, "max_connections": 1, **table})
        self._broker = ListenersBroker(directory, tables, SETTINGS)
        self.processes = [self._broker]
        self._broker.start()
        self.canary_port = self._broker.port
        self._only = TlsClient(self.full_port, self._contexts[0], random.Random(0))
        assert self._only.shake_hands(0.0, is_eager=True)
        self._only.write(wire.connect("only", 4, True, 0))
        self._only.flush(0.0)

    def case(self, rng: random.Random) -> str:
        handshake_damage, record_damage = rng.choice(((0.0, 0.0), (0.0, 0.5), (0.5, 0.0)))
        context = rng.choice(self._contexts)
        port = self.full_port if rng.random() < 0.1 else self.port
        try:
            with TlsClient(port, context, rng) as client:
                if rng.random() < 0.05:
                    # MQTT without TLS, or anything else.
                    client.send_plain(b"".join(stream(rng)))
                if not client.shake_hands(handshake_damage, is_eager=rng.random() < 0.3):
                    return "no handshake"
                for piece in stream(rng):
                    client.write(piece)
                    client.flush(record_damage)
                client.end()
                return "answered" if client.drain() else "closed"
        except TimeoutError:
            raise AssertionError("neither an answer nor an end") from None
        except ConnectionRefusedError:
            raise AssertionError("nobody listens any more") from None
        except OSError:
            # Closed by the broker while something was on its way.
            return "cut"

    def end(self) -> None:
        self._only.__exit__()
        self._broker.kill()
