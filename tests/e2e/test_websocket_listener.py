"""A WebSocket listener: the upgrade, frames of every cut, what must not be sent, back-pressure."""

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trustme
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from tests.e2e import wire
from tests.e2e.brokers import one_process
from tests.e2e.test_garbage import AFTER_CONNECT
from tests.e2e.test_reload import until
from tests.e2e.websocket_wire import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    WebSocketHoldfast,
    WebSocketWire,
    exchange,
    frame,
    read_to_end,
    request,
    websocket_broker,
)

PACKET_BYTES = 8 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebSocketHoldfast]:
    settings = {"limits": {"packet_bytes": PACKET_BYTES}}
    with websocket_broker(tmp_path_factory.mktemp("broker"), settings) as broker:
        yield broker


def watch(broker: WebSocketHoldfast, name: str) -> wire.Wire:
    """A TCP client that is told when `name`, a client with a will, is gone."""
    watcher = wire.Wire(broker.port)
    watcher.connect(f"watch-{name}")
    watcher.subscribe((f"will/{name}", 1))
    return watcher


def will(name: str) -> wire.Will:
    return wire.Will(f"will/{name}", b"gone", 1)


# The upgrade


@pytest.mark.parametrize("subprotocol", ["mqtt", "mqttv3.1", "other, mqtt", "mqttv3.1, mqtt"])
def test_subprotocol_is_chosen(shared: WebSocketHoldfast, subprotocol: str) -> None:
    """[MQTT-6.0.0-3] [MQTT-6.0.0-4]"""
    with WebSocketWire(shared.websocket_port, subprotocol=subprotocol) as client:
        chosen = "mqtt" if "mqtt" in subprotocol.split(", ") else subprotocol
        assert f"Sec-WebSocket-Protocol: {chosen}".encode() in client.head.split(b"\r\n")
        assert client.connect("subprotocol").reason == 0


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (request("/"), 404, b"is at /mqtt"),
        (request("/mqtt/more"), 404, b"is at /mqtt"),
        (request(Sec_WebSocket_Protocol=None), 400, b"offer the subprotocol mqtt"),
        (request(Sec_WebSocket_Protocol="mqtt5"), 400, b"offer the subprotocol mqtt"),
        (request(Sec_WebSocket_Key=None), 400, b"Sec-WebSocket-Key"),
        (request(Sec_WebSocket_Version="8"), 400, b"Sec-WebSocket-Version"),
        (request(Upgrade=None, Connection=None), 426, b"You need a WebSocket client"),
        (request().replace(b"GET", b"PUT"), 405, b"PUT"),
        (b"GET /mqtt HTTP/1.0\r\nHost: a\r\n\r\n", 505, b""),
        (b"GET /mqtt\r\n\r\n", 400, b"invalid HTTP request line"),
        (b"GET /mqtt HTTP/1.1\r\nno colon\r\n\r\n", 400, b"invalid HTTP header line"),
        (request(Content_Length="5") + b"hello", 400, b"unsupported request body"),
        (wire.connect("mqtt"), 400, b"no HTTP"),
        (bytes.fromhex("16030100a5010000a10303") + bytes(160), 400, b"no HTTP"),
        (bytes(100), 400, b"no HTTP"),
        (request(X="x" * 20_000), 431, b"more than 16384 bytes"),
        (b"G" * 20_000, 431, b"more than 16384 bytes"),
    ],
)
def test_refused_upgrades(shared: WebSocketHoldfast, data: bytes, status: int, text: bytes) -> None:
    answer = exchange(shared.websocket_port, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert text in body


def test_upgrade_byte_by_byte_and_with_the_first_packet_behind_it(
    shared: WebSocketHoldfast,
) -> None:
    data = request("/mqtt?token=1") + frame(BINARY, wire.connect("impatient"))
    with socket.create_connection(("127.0.0.1", shared.websocket_port), timeout=10) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for position in range(len(data)):
            slow.sendall(data[position : position + 1])
        answer = b""
        while b"\r\n\r\n\x82" not in answer:
            received = slow.recv(4096)
            assert received, answer
            answer += received


def test_any_path(tmp_path: Path) -> None:
    with websocket_broker(tmp_path, listener={"path": "*"}) as broker:
        for path in ("/", "/mqtt", "/some/where?x=1"):
            address = ("127.0.0.1", broker.websocket_port)
            with socket.create_connection(address, timeout=10) as client:
                client.sendall(request(path))
                assert client.recv(4096).startswith(b"HTTP/1.1 101 ")


def test_path_and_origins(tmp_path: Path) -> None:
    page = "https://app.example:8443"
    listener = {"path": "/live/mqtt", "allowed_origins": [page]}
    with websocket_broker(tmp_path, listener=listener) as broker:
        port = broker.websocket_port
        assert exchange(port, request("/mqtt")).startswith(b"HTTP/1.1 404 ")
        until(lambda: "There is nothing at /mqtt" in broker.log_text(), "the path in the log")
        for origin in ("https://evil.example", "null", "https://app.example"):
            answer = exchange(port, request("/live/mqtt", Origin=origin))
            assert answer.startswith(b"HTTP/1.1 403 "), answer
        for good in (request("/live/mqtt", Origin=page), request("/live/mqtt")):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(good)
                assert client.recv(4096).startswith(b"HTTP/1.1 101 ")


LOCAL_PAGES: Final = [
    "http://localhost",
    "http://localhost:3000",
    "https://dev.localhost:8443",
    "http://127.0.0.1:8080",
    "https://127.1.2.3",
    "http://[::1]:5173",
]
FOREIGN_PAGES: Final = [
    "https://evil.example",
    "null",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
    "http://127.0.0.1:80.evil.example",
    "http://evil.example:3000",
    "http://10.0.0.1",
    "http://xlocalhost",
    "file://localhost",
    "http://localhost@evil.example",
]


def upgrade_status(port: int, origin: str | None) -> int:
    """The status of the reply to an upgrade of a page, or of a client that is no browser."""
    headers = {} if origin is None else {"Origin": origin}
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request(**headers))
        return int(client.recv(4096).split()[1])


@pytest.mark.parametrize(
    ("listener", "admits_foreign"),
    [
        ({}, False),
        ({"allowed_origins": ["loopback"]}, False),
        ({"allowed_origins": ["*"]}, True),
        ({"allow_anonymous": False}, True),
    ],
)
def test_pages_of_other_machines(
    tmp_path: Path, listener: dict[str, object], admits_foreign: bool
) -> None:
    """A page of the internet in a browser of this machine does not get in without a password."""
    with websocket_broker(tmp_path, listener=listener) as broker:
        port = broker.websocket_port
        for origin in (None, *LOCAL_PAGES):
            assert upgrade_status(port, origin) == 101, origin
        for origin in FOREIGN_PAGES:
            assert (upgrade_status(port, origin) == 101) is admits_foreign, origin
        if not admits_foreign:
            text = "HTTP 403: allowed_origins of the listener does not admit the page null"
            until(lambda: text in broker.log_text(), "the setting in the log")


def test_slow_upgrades_are_cut(tmp_path: Path) -> None:
    """connect_timeout_s begins with the connection and includes the upgrade."""
    with websocket_broker(tmp_path, {"limits": {"connect_timeout_s": 1.0}}) as broker:
        connections = []
        for data in (b"", b"GET /mqtt HT", request()[:-2], request()):
            connection = socket.create_connection(("127.0.0.1", broker.websocket_port), timeout=20)
            connection.sendall(data)
            connections.append(connection)
        ends = [read_to_end(connection) for connection in connections]
        assert ends[:3] == [b"", b"", b""]
        assert ends[3].startswith(b"HTTP/1.1 101 ")
        for connection in connections:
            connection.close()


def answered(port: int) -> bool:
    """Whether there is any answer to an upgrade, before the connection is cut."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(request())
            return bool(connection.recv(4096))
    except ConnectionError:
        return False


@one_process("each has its share of the limit")
def test_connections_max_counts_upgrades(tmp_path: Path) -> None:
    with websocket_broker(tmp_path, listener={"max_connections": 2}) as broker:
        port = broker.websocket_port
        with socket.create_connection(("127.0.0.1", port)), WebSocketWire(port) as second:
            second.connect("second")
            assert not answered(port)
            second.ping()
        deadline = time.monotonic() + 10
        while not answered(port):
            assert time.monotonic() < deadline


# Frames


def test_packets_and_frames_need_not_align(shared: WebSocketHoldfast) -> None:
    """[MQTT-6.0.0-2]"""
    with WebSocketWire(shared.websocket_port) as client:
        stream = wire.connect("cuts") + wire.subscribe(1, [("cuts", 1)])
        stream += b"".join(wire.publish("cuts", b"%d" % n, 1, n + 2) for n in range(50))
        client.send_raw(*(frame(BINARY, bytes([byte])) for byte in stream))
        assert [client.message().payload for _ in range(50)] == [b"%d" % n for n in range(50)]

        many = b"".join(wire.publish("cuts", b"%d" % n, 1, n + 100) for n in range(500))
        client.send(many)
        assert [client.message().payload for _ in range(500)] == [b"%d" % n for n in range(500)]

        packet = wire.publish("cuts", b"pieces", 1, 7)
        client.send_raw(
            frame(BINARY, packet[:1], fin=False),
            frame(PING, b"in between"),
            frame(CONTINUATION, b"", fin=False),
            frame(CONTINUATION, packet[1:5], fin=False),
            frame(PONG, b"unasked"),
            frame(CONTINUATION, packet[5:]),
            frame(BINARY),
        )
        assert client.message().payload == b"pieces"
        assert client.pong() == b"in between"


def test_each_packet_has_a_frame(shared: WebSocketHoldfast) -> None:
    """Clients built on Paho C read one packet of a frame, and wait for ever for the next."""
    with WebSocketWire(shared.websocket_port) as client:
        client.connect("framed")
        client.subscribe(("framed", 1))
        client.binary.clear()
        client.send(b"".join(wire.publish("framed", b"%d" % n, n % 2, n + 2) for n in range(200)))
        assert {int(client.message().payload) for _ in range(200)} == set(range(200))
        client.ping()
        assert client.binary
        for each in client.binary:
            size, start = wire.read_varint(each, 1)
            assert start + size == len(each)


def test_frames_cut_by_the_network(shared: WebSocketHoldfast) -> None:
    with WebSocketWire(shared.websocket_port) as client:
        client.connect("network")
        client.subscribe(("network", 1))
        data = b"".join(
            frame(BINARY, wire.publish("network", b"n" * size, 1, 9)) for size in (1, 124, 60_000)
        )
        for start in range(400):
            client.socket.sendall(data[start : start + 1])
        client.socket.sendall(data[400:])
        assert [len(client.message().payload) for _ in range(3)] == [1, 124, 60_000]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, wire.packet(wire.PINGREQ << 4)), 1003),
        (frame(TEXT, b"", fin=False), 1003),
        (frame(BINARY, b"\xc0\0", masked=False), 1002),
        (frame(BINARY, b"\xc0\0", reserved=4), 1002),
        (frame(CONTINUATION, b"\xc0\0"), 1002),
        (frame(PING, bytes(126)), 1002),
        (frame(11), 1002),
        (frame(CLOSE, b"\x03\xed"), 1002),
    ],
)
def test_violations_close_the_connection(
    shared: WebSocketHoldfast, data: bytes, code: int, request: pytest.FixtureRequest
) -> None:
    """[MQTT-6.0.0-1] What came before is carried out, what comes after is not."""
    name = "".join(c for c in request.node.name if c.isalnum())
    watcher = watch(shared, name)
    watcher.subscribe((f"said/{name}", 1))
    with WebSocketWire(shared.websocket_port) as client:
        client.connect(name, will=will(name))
        before = frame(BINARY, wire.publish(f"said/{name}", b"before"))
        after = frame(BINARY, wire.publish(f"said/{name}", b"after"))
        client.send_raw(before, data, after)
        assert client.close_code() == code
    messages = [watcher.message() for _ in range(2)]
    assert [one.payload for one in messages] == [b"before", b"gone"]


def test_mqtt_violations_say_disconnect_then_close(shared: WebSocketHoldfast) -> None:
    wrong = {name: data for name, data in AFTER_CONNECT.items() if name != "publish too large"}
    for name, data in wrong.items():
        with WebSocketWire(shared.websocket_port) as client:
            client.connect("violation")
            client.send(data)
            assert [one.kind for one in client.wait_closed()] in ([], [wire.DISCONNECT]), name
            assert [one.opcode.value for one in client.controls] == [CLOSE], name


def test_frames_of_any_announced_length_are_streamed(tmp_path: Path) -> None:
    """A frame's length is no promise: packets in it are handled as they come, and fifty frames
    that announce exabytes take no memory."""
    with websocket_broker(tmp_path, {"limits": {"packet_bytes": 1 << 20}}) as broker:
        endless = b"\x82\xff" + (1 << 60).to_bytes(8, "big") + bytes(4)
        with WebSocketWire(broker.websocket_port) as client:
            # With a key of zeros the payload is as it is.
            client.send_raw(endless, wire.connect("endless"))
            assert client.expect(wire.CONNACK).body[1] == 0
            before = broker.rss_bytes()
            others = []
            for number in range(50):
                other = WebSocketWire(broker.websocket_port)
                other.send_raw(endless, wire.connect(f"endless-{number}"))
                assert other.expect(wire.CONNACK).body[1] == 0
                others.append(other)
            for _ in range(30):
                client.send_raw(wire.publish("endless", bytes(1 << 18)))
            client.send_raw(wire.publish("endless", bytes(1 << 18), 1, 1))
            client.expect(wire.PUBACK)
            assert broker.rss_bytes() - before < 20 << 20
            client.send_raw(wire.publish("endless", bytes(1 << 21)))
            (disconnect,) = client.wait_closed()
            assert disconnect.reason == 0x95
            for other in others:
                other.socket.close()


# The end


@pytest.mark.parametrize(("payload", "answer"), [(b"", b""), (b"\x03\xe9leaving", b"\x03\xe9")])
def test_close_frame_without_disconnect(
    shared: WebSocketHoldfast, payload: bytes, answer: bytes
) -> None:
    """In the middle of a packet: the close frame is answered, the will is published."""
    watcher = watch(shared, "leaver")
    with WebSocketWire(shared.websocket_port) as client:
        client.connect("leaver", will=will("leaver"))
        client.send_raw(frame(BINARY, wire.publish("t", b"x" * 100)[:50]), frame(CLOSE, payload))
        assert client.wait_closed() == []
        assert [bytes(one.data) for one in client.controls] == [answer]
    assert watcher.message().payload == b"gone"


def test_disconnect_keeps_the_will_and_ends_the_websocket(shared: WebSocketHoldfast) -> None:
    watcher = watch(shared, "polite")
    for close in (b"", frame(CLOSE, b"\x03\xe8")):
        with WebSocketWire(shared.websocket_port) as client:
            client.connect("polite", will=will("polite"))
            client.send_raw(frame(BINARY, wire.disconnect()), close)
            assert client.close_code() == 1000
    with pytest.raises(TimeoutError):
        watcher.message(timeout_s=0.3)


def test_vanished_and_half_open(shared: WebSocketHoldfast) -> None:
    """A reset, an end of the stream, and silence beyond the keep alive: each publishes the will."""
    watcher = watch(shared, "vanish")
    for way in ("reset", "half-close", "silence"):
        client = WebSocketWire(shared.websocket_port)
        client.connect("vanish", will=will("vanish"), keep_alive_s=1 if way == "silence" else 0)
        if way == "reset":
            client.abort()
        elif way == "half-close":
            client.socket.shutdown(socket.SHUT_WR)
        assert watcher.message().payload == b"gone", way
        if way != "reset":
            client.wait_closed()
        client.socket.close()


def test_take_over_and_shutdown(tmp_path: Path) -> None:
    with websocket_broker(tmp_path) as broker:
        first = WebSocketWire(broker.websocket_port)
        first.connect("twin")
        second = WebSocketWire(broker.websocket_port)
        second.connect("twin")
        (disconnect,) = first.wait_closed()
        assert disconnect.reason == 0x8E
        silent = WebSocketWire(broker.websocket_port)
        silent.connect("silent")
        assert broker.stop() == 0
        (disconnect,) = second.wait_closed()
        assert disconnect.reason == 0x8B
        assert [one.opcode.value for one in second.controls] == [CLOSE]
        for client in (first, second, silent):
            client.socket.close()


# Back-pressure


@one_process("topics of two partitions have no common order")
def test_big_payloads_to_a_slow_reader(shared: WebSocketHoldfast) -> None:
    """More than the buffers hold, and nothing is lost or out of order at QoS 1."""
    count, size = 12, 5_000_000
    with WebSocketWire(shared.websocket_port, timeout_s=60) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        slow.connect("slow-reader", expiry_s=60)
        slow.subscribe(("big/#", 1))
        with WebSocketWire(shared.websocket_port, timeout_s=60) as publisher:
            publisher.connect("big-publisher")
            publisher.publish("big/0", b"\0" * size, 1)
            before = shared.rss_bytes()
            for number in range(1, count):
                assert publisher.publish(f"big/{number}", bytes([number]) * size, 1) == 0
            assert shared.rss_bytes() - before < 6 * size
        for number in range(count):
            message = slow.message()
            assert (message.topic, len(message.payload)) == (f"big/{number}", size)
            assert message.payload[:1] == message.payload[-1:] == bytes([number])


def test_pings_of_a_peer_that_does_not_read(shared: WebSocketHoldfast) -> None:
    """Their answers must not gather in the broker."""
    with WebSocketWire(shared.websocket_port, timeout_s=60) as client:
        client.connect("pinger")
        before = shared.rss_bytes()
        pings = b"".join(frame(PING, b"%-100d" % number) for number in range(1000))
        for _ in range(500):
            client.socket.sendall(pings)
        last = frame(PING, b"last")
        client.send_raw(last)
        while client.pong() != b"last":
            pass
        client.ping()
        assert shared.rss_bytes() - before < 10 << 20


def test_a_thousand_idle_connections(shared: WebSocketHoldfast) -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    before = shared.rss_bytes()
    clients = []
    for number in range(1000):
        client = WebSocketWire(shared.websocket_port)
        assert client.connect(f"idle-{number}").reason == 0
        clients.append(client)
    assert shared.rss_bytes() - before < 15 << 20
    for client in clients[::100]:
        client.ping()
    for client in clients:
        client.socket.close()


# Other people's client


def test_library_client_over_tls(tmp_path: Path) -> None:
    """`websockets` as the client: TLS with a client certificate, compression offered and not
    taken, big messages, its ping, its close."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = authority.issue_cert("localhost", "127.0.0.1")
    server.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for blob in server.cert_chain_pems:
        blob.write_to_path(str(tmp_path / "chain.pem"), append=True)
    listener = {
        "certificate": str(tmp_path / "chain.pem"),
        "key": str(tmp_path / "key.pem"),
        "client_ca": str(tmp_path / "ca.pem"),
    }
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    authority.issue_cert("device", common_name="device").configure_cert(context)

    async def test(port: int) -> None:
        async with connect(
            f"wss://localhost:{port}/mqtt",
            ssl=context,
            subprotocols=["mqtt"],  # type: ignore[list-item]
            max_size=None,
        ) as client:
            assert client.subprotocol == "mqtt"
            assert client.protocol.extensions == []
            await client.send(wire.connect("library") + wire.subscribe(1, [("l", 0)]))
            await (await client.ping())
            payload = b"p" * 2_000_000
            await client.send(wire.publish("l", payload))
            expected = len(wire.publish("l", payload))
            received = b""
            while len(received) < expected:
                message = await client.recv()
                assert isinstance(message, bytes)
                received += message
            assert payload in received
            await client.send("text")
            with pytest.raises(ConnectionClosedError) as caught:
                await client.recv()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1003

    with websocket_broker(tmp_path, listener=listener) as broker:
        asyncio.run(asyncio.wait_for(test(broker.websocket_port), 60))
