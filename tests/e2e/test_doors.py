"""Strangers at the doors: sockets and bytes before CONNECT. Real processes, few descriptors.

The invariant: what a peer costs before its CONNECT is answered is bounded, and never taken from
clients that are known or from the broker's own files.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.protocol.mqtt.properties import AUTHENTICATION_DATA, AUTHENTICATION_METHOD
from tests.e2e import websocket_wire, wire
from tests.e2e.brokers import Holdfast, one_process
from tests.e2e.listeners_broker import ListenersBroker
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.waiting import until

DESCRIPTORS = 120
TAKEN = (0x00, 0x10)
"""Reasons of a PUBACK: the message is stored, with or without a subscriber."""


class Limited(Holdfast):
    """A broker that may have 120 file descriptors."""

    uses_uvloop = True

    def command(self) -> list[str]:
        shell = f"ulimit -n {DESCRIPTORS};"
        if not self.uses_uvloop:
            hidden = self.directory / "hidden"
            hidden.mkdir(exist_ok=True)
            (hidden / "uvloop.py").write_text("raise ImportError")
            shell += f" PYTHONPATH={hidden}:$PYTHONPATH"
        return ["/bin/sh", "-c", shell + ' exec "$@"', "sh", *super().command()]


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[..., Limited]]:
    brokers: list[Limited] = []

    def start(
        settings: dict[str, dict[str, object]] | None = None, uses_uvloop: bool = True
    ) -> Limited:
        broker = Limited(tmp_path, settings)
        broker.uses_uvloop = uses_uvloop
        brokers.append(broker)
        broker.start()
        return broker

    yield start
    for broker in brokers:
        broker.kill()
        assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


def silent_sockets(port: int, count: int) -> list[socket.socket]:
    """Connections that send nothing; the broker may have closed some of them."""
    found = []
    for _ in range(count):
        one = socket.socket()
        one.settimeout(5)
        with contextlib.suppress(OSError):
            one.connect(("127.0.0.1", port))
        found.append(one)
    return found


def is_closed(one: socket.socket, timeout_s: float) -> bool:
    one.settimeout(timeout_s)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("uses_uvloop", [True, False])
def test_silent_sockets_leave_descriptors_for_the_log(
    limited: Callable[..., Limited], uses_uvloop: bool
) -> None:
    broker = limited({"log": {"segment_bytes": 65_536}}, uses_uvloop)
    with wire.Wire(broker.port) as early:
        early.connect("early")
        sockets = silent_sockets(broker.port, 150)
        # A client that comes later displaces a silent connection.
        with wire.Wire(broker.port) as late:
            assert late.connect("late").reason == 0
            for _ in range(20):
                assert early.publish("t", bytes(20_000), qos=1) in TAKEN
                assert late.publish("t", bytes(20_000), qos=1) in TAKEN
        assert len(broker.segments()) > 5
        assert broker.metric("connections_displaced_total") > 0
        for one in sockets:
            one.close()
    assert broker.process is not None
    assert broker.process.poll() is None
    assert "no_descriptors_left" not in broker.log_text()


@one_process("each process has its own limit")
def test_open_connections_are_limited_by_descriptors(limited: Callable[..., Limited]) -> None:
    """None of them is silent, so the newest is refused; and there is room again afterwards."""
    broker = limited()
    clients = []
    refused = 0
    for number in range(100):
        client = wire.Wire(broker.port)
        try:
            client.connect(f"client-{number}")
            clients.append(client)
        except (wire.Closed, OSError):
            refused += 1
    assert refused
    assert len(clients) >= DESCRIPTORS // 2 - 2
    assert broker.admin("/readyz")[0] == 200
    assert "connections_full" in broker.log_text()
    clients.pop().socket.close()
    until(lambda: _connects(broker.port), "no room although a client has gone")


def _connects(port: int) -> bool:
    try:
        with wire.Wire(port) as client:
            return client.connect("again").reason == 0
    except (wire.Closed, OSError):
        return False


def test_silent_tls_sockets_are_counted(limited: Callable[..., Limited], tmp_path: Path) -> None:
    """asyncio shows a TLS connection only after its handshake."""
    authority = Authority(tmp_path)
    certificate = authority.issue()
    environment = f"""
[[listeners]]
bind = "127.0.0.1"
port = 0
certificate = {certificate.certificate!r}
key = {certificate.key!r}
[log]
segment_bytes = 65536
"""
    broker = _TlsLimited(tmp_path, environment)
    broker.start()
    try:
        sockets = silent_sockets(broker.port, 150)
        context = ssl.create_default_context(cafile=authority.ca)
        plain = socket.create_connection(("127.0.0.1", broker.port), timeout=10)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
            client.sendall(wire.connect("known"))
            assert client.recv(100)[0] == wire.CONNACK << 4
            for number in range(1, 11):
                client.sendall(wire.publish("t", bytes(20_000), 1, number))
                assert client.recv(100)[0] == wire.PUBACK << 4
        for one in sockets:
            one.close()
        assert broker.process is not None
        assert broker.process.poll() is None
        assert "no_descriptors_left" not in broker.log_text()
    finally:
        broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


class _TlsLimited(Limited):
    def __init__(self, directory: Path, settings: str) -> None:
        super().__init__(directory)
        self._text = settings

    def command(self) -> list[str]:
        command = super().command()
        configuration = self.directory / "holdfast.toml"
        configuration.write_text(self._text)
        return command


FIRST_BYTES = {
    "http": b"G",
    "tls": b"\x16",
    "subscribe": b"\x82",
    "connect with flags": b"\x11",
    "announced publish": b"\x30",
}


@pytest.mark.parametrize("name", FIRST_BYTES)
def test_first_byte_that_is_no_connect_closes(broker: Holdfast, name: str) -> None:
    with socket.create_connection(("127.0.0.1", broker.port)) as one:
        one.sendall(FIRST_BYTES[name])
        assert is_closed(one, 5)


def test_connect_above_the_bound_closes_at_its_header(broker: Holdfast) -> None:
    with socket.create_connection(("127.0.0.1", broker.port)) as one:
        one.sendall(b"\x10" + wire.varint(524_289))
        assert is_closed(one, 5)


def test_large_connect_within_the_bound_is_answered_and_large_packets_follow(
    broker: Holdfast,
) -> None:
    will = wire.Will("will", bytes(65_000))
    pairs = [(wire.USER_PROPERTY, ("k", "x" * 60_000))] * 6
    with wire.Wire(broker.port) as client:
        assert client.connect("large", will=will, props=pairs).reason == 0
        assert client.publish("t", bytes(2_000_000), qos=1) in TAKEN


@one_process("each process has its own limit")
def test_incomplete_connects_share_a_bound(
    start_holdfast: Callable[..., Holdfast],
) -> None:
    broker = start_holdfast({"limits": {"pending_connect_bytes": 1 << 20}})
    before = broker.rss_bytes()
    sockets = []
    for _ in range(64):
        one = socket.create_connection(("127.0.0.1", broker.port), timeout=5)
        with contextlib.suppress(OSError):
            one.sendall(b"\x10" + wire.varint(520_000) + bytes(500_000))
        sockets.append(one)
    with wire.Wire(broker.port) as client:
        assert client.connect("known").reason == 0
    until(lambda: broker.metric("connections_displaced_total") >= 60, "none is displaced")
    # 32 MB were sent.
    assert broker.rss_bytes() - before < 16 << 20
    for one in sockets:
        one.close()


@one_process("each process has its own limit")
def test_one_address_has_its_share(start_holdfast: Callable[..., Holdfast]) -> None:
    broker = start_holdfast({"limits": {"pending_connects_per_address": 5}})
    sockets = silent_sockets(broker.port, 6)
    until(lambda: "address_full" in broker.log_text(), "none is refused")
    # Of connections that come at once, any may be the last that the listener accepts. The one that
    # found the broker ready counts, too, until its end is seen.
    closed = sum(is_closed(each, 0.5) for each in sockets)
    assert closed in (1, 2)
    until(lambda: broker.metric("pending_connects") == 6 - closed, "others count")
    assert broker.metric("connections_refused_total") == closed
    for each in sockets:
        each.close()
    until(lambda: _connects(broker.port), "the address is full for ever")


@one_process("each has its share of the limit")
def test_silent_connections_take_no_place_of_clients(
    start_holdfast: Callable[..., Holdfast],
) -> None:
    broker = start_holdfast({"limits": {"connections": 2}})
    sockets = silent_sockets(broker.port, 10)
    with wire.Wire(broker.port) as first, wire.Wire(broker.port) as second:
        assert first.connect("first").reason == 0
        assert second.connect("second").reason == 0
        with wire.Wire(broker.port) as third:
            assert third.connect("third").reason == 0x97
    for one in sockets:
        one.close()


@one_process("each process has its own limit")
def test_incomplete_upgrades_share_the_bound(tmp_path: Path) -> None:
    settings: dict[str, dict[str, object]] = {"limits": {"pending_connect_bytes": 1 << 20}}
    with websocket_wire.websocket_broker(tmp_path, settings) as broker:
        sockets = []
        for _ in range(150):
            one = socket.create_connection(("127.0.0.1", broker.websocket_port), timeout=5)
            with contextlib.suppress(OSError):
                one.sendall(b"GET /mqtt HTTP/1.1\r\nX: " + b"x" * 16_000)
            sockets.append(one)
        # 150 heads of 16 kB are more than twice the bound.
        displaced = "connections_displaced_total"
        until(lambda: broker.metric(displaced) >= 80, "none is displaced")
        with websocket_wire.WebSocketWire(broker.websocket_port) as client:
            assert client.connect("known").reason == 0
        for one in sockets:
            one.close()


def test_a_websocket_is_bounded_before_connect(tmp_path: Path) -> None:
    with websocket_wire.websocket_broker(tmp_path) as broker:
        for payload in (b"\x30", b"\x10" + wire.varint(524_289)):
            with websocket_wire.WebSocketWire(broker.websocket_port) as client:
                client.send_raw(websocket_wire.frame(websocket_wire.BINARY, payload))
                with pytest.raises(wire.Closed):
                    client.receive()


def test_websocket_pings_keep_no_connection(tmp_path: Path) -> None:
    """[MQTT-3.1.2-22] is about control packets."""
    with (
        websocket_wire.websocket_broker(tmp_path) as broker,
        websocket_wire.WebSocketWire(broker.websocket_port) as client,
    ):
        client.connect("pinger", keep_alive_s=1)
        ping = websocket_wire.frame(websocket_wire.PING, b"x")
        frame = None
        with contextlib.suppress(wire.Closed, OSError):
            while frame is None:
                client.send_raw(ping)
                with contextlib.suppress(TimeoutError):
                    frame = client.receive(0.2)
        assert frame is not None
        assert (frame.kind, frame.reason) == (wire.DISCONNECT, 0x8D)


def half_exchange() -> bytes:
    """A CONNECT that begins a SCRAM exchange, which its client never goes on with."""
    first = b"n,,n=ada,r=nonce"
    props = [(AUTHENTICATION_METHOD, "SCRAM-SHA-256"), (AUTHENTICATION_DATA, first)]
    return wire.connect("stranger", props=props)


UNPROVED = {
    "silent": ("plain", b""),
    "part of a CONNECT": ("plain", wire.connect("stranger")[:-1]),
    "exchange": ("plain", half_exchange()),
    "handshake": ("tls", b""),
    "part of a handshake": ("tls", b"\x16\x03\x01\x02\x00\x01"),
    "proxy without a header": ("proxied", b""),
    "part of a header": ("proxied", b"PROXY TCP4 "),
}
"""The states before a proof, each with a listener and what a stranger sends there."""


@pytest.mark.parametrize("state", UNPROVED)
def test_who_has_proved_nothing_makes_room_at_every_door(tmp_path: Path, state: str) -> None:
    """Strangers take more sockets than the broker has, in one state, at one listener."""
    authority = Authority(tmp_path)
    files = authority.issue()
    scram = tmp_path / "scram"
    assert main(["passwd", "--scram", "-c", "-b", str(scram), "ada", "pencil"]) == 0
    broker = _LimitedDoors(tmp_path / "broker", files.certificate, files.key, str(scram))
    broker.start()
    ports = {"plain": broker.port, "tls": broker.tls_port, "proxied": broker.proxied_port}
    door, sent = UNPROVED[state]
    context = ssl.create_default_context(cafile=authority.ca)
    try:
        sockets = silent_sockets(ports[door], 150)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.sendall(sent)
        for _ in range(5):
            with wire.Wire(broker.port) as known:
                assert known.connect("known").reason == 0
            plain = socket.create_connection(("127.0.0.1", broker.tls_port), timeout=10)
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
                client.sendall(wire.connect("known"))
                assert client.recv(100)[0] == wire.CONNACK << 4
            with socket.create_connection(
                ("127.0.0.1", broker.proxied_port), timeout=10
            ) as proxied:
                proxied.sendall(b"PROXY UNKNOWN\r\n" + wire.connect("known"))
                assert proxied.recv(100)[0] == wire.CONNACK << 4
            assert broker.admin("/healthz")[0] == 200
        for one in sockets:
            one.close()
    finally:
        broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


class _LimitedDoors(ListenersBroker):
    """A broker with few descriptors and three listeners: plain, TLS, and behind a proxy."""

    def __init__(self, directory: Path, certificate: str, key: str, scram: str) -> None:
        self.tls_port, self.proxied_port = free_port(), free_port()
        listeners = [
            {"port": self.tls_port, "certificate": certificate, "key": key},
            {"port": self.proxied_port, "proxies": ["127.0.0.1"]},
        ]
        super().__init__(
            directory, listeners, {"security": {"scram_file": scram, "allow_anonymous": True}}
        )

    def command(self) -> list[str]:
        shell = f'ulimit -n {DESCRIPTORS}; exec "$@"'
        return ["/bin/sh", "-c", shell, "sh", *super().command()]
