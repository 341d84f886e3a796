"""The sink's connections against a server that answers as each test wants, on real sockets."""

import random
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trustme

pytest.importorskip("pyspark.sql")

from holdfast.client.options import LEVEL_5, LEVEL_311
from holdfast.client.servers import Server, parse_server
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import PUBACK, Ack, Connack, Disconnect, Pingreq, Publish
from holdfast.protocol.mqtt.publish import topic_field
from holdfast_lake.sink import link as sink_link
from holdfast_lake.sink import publisher as sink_publisher
from holdfast_lake.sink.link import BrokerLink, PublishError, link_options, tls_context
from holdfast_lake.sink.publisher import Publisher
from tests.support.ports import free_port
from tests.support.sink_server import Session, SinkServer

QUOTA = reasons.QUOTA_EXCEEDED


class Sender:
    """A publisher, and what it said of refused messages."""

    def __init__(
        self, *servers: SinkServer | int | Server, level: int = LEVEL_5, **options: Any
    ) -> None:
        addresses = []
        for one in servers:
            port = one.port if isinstance(one, SinkServer) else one
            addresses.append(
                port if isinstance(port, Server) else Server("mqtt", "127.0.0.1", port)
            )
        self.level = level
        self.refused: list[str] = []
        settings: dict[str, Any] = {
            "inflight_max": 100,
            "retry_timeout_s": 30.0,
            "on_connected": lambda link: None,
            "on_refused": lambda frame, why: self.refused.append(why),
            **options,
        }
        self.publisher = Publisher(
            addresses, link_options(level, "spark-1", None, None, asks=True), **settings
        )

    def send(self, payloads: Iterable[bytes], qos: int = 1, retain: int = 0) -> None:
        empty = b"\0" if self.level == LEVEL_5 else b""
        try:
            for payload in payloads:
                self.publisher.publish(0x30 | qos << 1 | retain, topic_field(b"t"), empty + payload)
            self.publisher.finish()
        finally:
            self.publisher.close()


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("chunk_bytes", [0, 1, 3])
@pytest.mark.parametrize("level", [LEVEL_311, LEVEL_5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_everything_arrives_in_order(qos: int, level: int, chunk_bytes: int) -> None:
    with SinkServer(level=level, chunk_bytes=chunk_bytes) as server:
        sender = Sender(server, level=level)
        sender.send(numbered(500), qos)
        (session,) = server.sessions
        assert session.payloads == numbered(500)
        assert {publish.qos for publish in session.published} == {qos}
        assert isinstance(session.others[-1], Disconnect)
        assert sender.publisher.window.resolved == (500 if qos else 0)


def test_acknowledgements_of_every_form() -> None:
    def answer(_: Session, publish: Publish) -> bytes:
        packet_id = publish.packet_id.to_bytes(2, "big")
        forms = [b"\x40\x02" + packet_id, b"\x40\x03" + packet_id + b"\x10"]
        forms += [b"\x40\x04" + packet_id + b"\x10\0", b"\x40\x09" + packet_id + b"\0\5\x1f\0\2ok"]
        return forms[publish.packet_id % 4] + (b"\xd0\0" if publish.packet_id % 7 == 0 else b"")

    for chunk_bytes in (0, 5):
        with SinkServer(answer, chunk_bytes=chunk_bytes) as server:
            sender = Sender(server)
            sender.send(numbered(300))
            assert server.payloads == numbered(300)
            assert sender.publisher.window.resolved == 300


def test_receive_maximum_is_kept() -> None:
    waiting: list[int] = []
    highest = 0

    def answer(_: Session, publish: Publish) -> bytes | None:
        nonlocal highest
        waiting.append(publish.packet_id)
        highest = max(highest, len(waiting))
        if len(waiting) < 3 and publish.payload != b"29":
            return None
        taken, waiting[:] = list(waiting), []
        return b"".join(encode_ack(PUBACK, packet_id, 0, 5) for packet_id in taken)

    with SinkServer(answer, properties={p.RECEIVE_MAXIMUM: 3}) as server:
        Sender(server).send(numbered(30))
        assert server.payloads == numbered(30)
        assert highest == 3


def test_a_lost_connection_repeats_what_was_not_acknowledged() -> None:
    def answer(session: Session, publish: Publish) -> int | None:
        if session.number == 0:
            number = int(publish.payload)
            if number == 60:
                raise EOFError
            return 0 if number < 40 else None
        return 0

    with SinkServer(answer) as server:
        sender = Sender(server)
        sender.send(numbered(100))
        first, second = server.sessions
        assert first.payloads == numbered(100)[: len(first.payloads)]
        assert second.payloads == numbered(100)[40:]
        assert first.connect is not None
        assert second.connect is not None
        assert first.connect.client_id == second.connect.client_id
        assert not any(publish.dup for publish in second.published)
        assert sender.publisher.connections == 2


class RandomBroker:
    """Stores a higher number, takes a lower one for a repetition, and ends connections at random,
    at any point between reading and answering."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.stored: list[int] = []

    def __call__(self, _: Session, publish: Publish) -> int:
        if self.choose.random() < 0.02:
            raise EOFError
        number = int(publish.payload)
        if not self.stored or number > self.stored[-1]:
            self.stored.append(number)
        if self.choose.random() < 0.02:
            raise EOFError
        return 0


@pytest.mark.parametrize("seed", range(8))
def test_connections_lost_at_any_point(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_publisher, "CHUNK_BYTES", 60)
    monkeypatch.setattr(sink_link, "ROUND_FIRST_S", 0.001)
    monkeypatch.setattr(sink_link, "ROUND_MAX_S", 0.01)
    broker = RandomBroker(seed)
    maximum = broker.choose.choice([3, 20, 1000])
    with SinkServer(broker, properties={p.RECEIVE_MAXIMUM: maximum}) as server:
        Sender(server).send(numbered(300))
        assert broker.stored == list(range(300))
        assert len(server.sessions) > 1


def test_refused_for_now_is_sent_again_in_order() -> None:
    refusals = 5
    hole = 0
    stored: list[int] = []

    def answer(_: Session, publish: Publish) -> int | Ack:
        nonlocal refusals, hole
        number = int(publish.payload)
        if hole and number > hole:
            return QUOTA
        if number == 30 and refusals:
            refusals -= 1
            hole = number
            return Ack(PUBACK, publish.packet_id, QUOTA, {p.REASON_STRING: "disk full"})
        hole = 0
        stored.append(number)
        return 0

    with SinkServer(answer) as server:
        sender = Sender(server)
        sender.send(numbered(100))
        assert stored == list(range(100))
        assert sender.publisher.window.last_refusal == "Quota exceeded: disk full"
        assert not sender.refused


def test_refused_for_good_is_told_and_the_others_go_on() -> None:
    def answer(_: Session, publish: Publish) -> int:
        return reasons.NOT_AUTHORIZED if publish.payload == b"7" else 0

    for qos in (1, 2):
        with SinkServer(answer) as server:
            sender = Sender(server)
            sender.send(numbered(20), qos)
            assert sender.refused == ["Not authorized"]
            assert len(server.payloads) == 20


@pytest.mark.parametrize(
    "text", ["producer epoch is fenced: 0 is below 1", "the producer belongs to another user"]
)
def test_refused_because_of_who_sends(text: str) -> None:
    def answer(_: Session, publish: Publish) -> Ack:
        return Ack(PUBACK, publish.packet_id, 0x87, {p.REASON_STRING: text})

    with SinkServer(answer) as server:
        sender = Sender(server)
        with pytest.raises(PublishError, match=f"{text}.*same checkpoint"):
            sender.send(numbered(20))
        assert not sender.refused


def test_a_refusal_that_lasts() -> None:
    text = r"3 messages wait.*retryTimeout\): Quota exceeded"
    with SinkServer(lambda *_: QUOTA) as server, pytest.raises(PublishError, match=text):
        Sender(server, retry_timeout_s=0.3).send(numbered(3))


def test_a_silent_server_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_publisher, "RESPONSE_TIMEOUT_S", 0.4)
    monkeypatch.setattr(sink_publisher, "PATIENCE_S", 0.05)
    with SinkServer(lambda *_: None) as silent, SinkServer() as other:
        # It does not even answer the PINGREQ.
        silent._respond = lambda session, packet, respond=silent._respond: (  # type: ignore[method-assign, misc]
            session.others.append(packet)
            if isinstance(packet, Pingreq)
            else respond(session, packet)
        )
        Sender(silent, other).send(numbered(10))
        assert other.payloads == numbered(10)
        assert any(isinstance(one, Pingreq) for one in silent.sessions[0].others)


def test_a_slow_server_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_publisher, "RESPONSE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(sink_publisher, "PATIENCE_S", 0.05)
    release = threading.Event()

    def answer(_: Session, publish: Publish) -> int | None:
        if publish.payload != b"0":
            return 0
        return None

    with SinkServer(answer) as server:
        answered = server._respond

        def respond(session: Session, packet: Any) -> Any:
            if isinstance(packet, Pingreq):
                release.set()
                return b"\xd0\0" + encode_ack(PUBACK, session.published[0].packet_id, 0, 5)
            return answered(session, packet)

        server._respond = respond  # type: ignore[method-assign]
        Sender(server).send(numbered(10))
        assert release.is_set()
        assert len(server.sessions) == 1


def test_servers_that_do_not_take_us() -> None:
    def connack(_: Session) -> Connack:
        return Connack(False, reasons.SERVER_UNAVAILABLE)

    with SinkServer(connack=connack) as busy, SinkServer() as other:
        Sender(free_port(), busy, other).send(numbered(10))
        assert other.payloads == numbered(10)


def test_wrong_credentials_are_told_at_once() -> None:
    def connack(_: Session) -> Connack:
        return Connack(False, reasons.BAD_USER_NAME_OR_PASSWORD, {p.REASON_STRING: "who?"})

    with SinkServer(connack=connack) as server:
        with pytest.raises(PublishError, match=r"refused the connection: Bad.*: who\?"):
            Sender(server).send(numbered(10))
        assert len(server.sessions) == 1


def test_another_server_is_named() -> None:
    with SinkServer() as other:

        def connack(_: Session) -> Connack:
            reference = f"ws://127.0.0.1:1 mqtts://127.0.0.1:2 127.0.0.1:{other.port}"
            return Connack(False, reasons.USE_ANOTHER_SERVER, {p.SERVER_REFERENCE: reference})

        with SinkServer(connack=connack) as server:
            Sender(server).send(numbered(10))
        assert other.payloads == numbered(10)


def test_a_server_that_shuts_down() -> None:
    def answer(session: Session, publish: Publish) -> int | Disconnect:
        if session.number == 0 and publish.payload == b"5":
            return Disconnect(reasons.SERVER_SHUTTING_DOWN)
        return 0

    with SinkServer(answer) as server:
        Sender(server).send(numbered(10))
        assert server.sessions[-1].payloads == numbered(10)[5:]


def test_a_server_that_will_not_have_what_we_send() -> None:
    with SinkServer(lambda *_: Disconnect(reasons.PACKET_TOO_LARGE)) as server:
        with pytest.raises(PublishError, match="Packet too large"):
            Sender(server).send(numbered(10))
        assert len(server.sessions) == 1


def test_a_message_that_ends_every_connection() -> None:
    def answer(_: Session, publish: Publish) -> int:
        if publish.payload == b"5":
            raise EOFError
        return 0

    with SinkServer(answer) as server:
        with pytest.raises(PublishError, match=r"(5 messages wait|no connection).*closed"):
            Sender(server, retry_timeout_s=0.5).send(numbered(10))
        assert len(server.sessions) < 20, "it waits longer each time"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"\x40\x02\xff\xff", "packet id 65535"),
        (b"\x00\x00", "packet type 0|reserved"),
        (b"\x30\xff\xff\xff\x7f", "that only publishes"),
        (b"\x40\x80\x80\x80\x80\x80", "that only publishes"),
    ],
)
def test_a_broken_server(answer: bytes, text: str) -> None:
    with SinkServer(lambda *_: answer) as server, pytest.raises(PublishError) as caught:
        Sender(server).send(numbered(10))
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(str(caught.value))


def test_an_admin_port() -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    text = "as an admin port does"
    with SinkServer(connack=lambda _: answer) as server, pytest.raises(PublishError, match=text):
        Sender(server).send(numbered(1))


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with pytest.raises(PublishError, match=rf"no connection .*127.0.0.1:{port}.*refused"):
        Sender(port, retry_timeout_s=0.2).send(numbered(1))
    (line,) = caplog.messages  # a user who waits sees why
    assert f"127.0.0.1:{port}" in line
    assert line.endswith("refused; trying for 0.2 s")


def test_a_server_that_swallows_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_link, "CONNECT_TIMEOUT_S", 0.2)
    with SinkServer(connack=lambda _: None) as silent, SinkServer() as other:
        Sender(silent, other).send(numbered(5))
        assert other.payloads == numbered(5)


def test_what_the_server_announced() -> None:
    limits: p.Properties = {p.MAXIMUM_QOS: 1, p.RETAIN_AVAILABLE: 0, p.MAXIMUM_PACKET_SIZE: 50}
    with SinkServer(properties=limits) as server:
        sender = Sender(server)
        sender.publisher.publish(0x35, topic_field(b"t"), b"\0")
        sender.publisher.publish(0x33, topic_field(b"t"), b"\0")
        sender.publisher.publish(0x32, topic_field(b"t"), b"\0" + bytes(50))
        sender.send([b"fits"])
        assert server.payloads == [b"fits"]
        assert [text.split()[0] for text in sender.refused] == ["QoS", "the", "a"]


def test_large_messages_do_not_pile_up() -> None:
    payload = bytes(3 << 20)
    with SinkServer() as server:
        sender = Sender(server)
        sender.send([payload] * 12)
        assert [len(one) for one in server.payloads] == [len(payload)] * 12


class SlowLink(BrokerLink):
    """Takes a little, then nothing, and so on, and a quarter of a minute of a clock of its own
    each time; `answer` comes behind each MiB."""

    def __init__(self, answer: bytes) -> None:
        options = link_options(LEVEL_5, "spark-1", None, None, asks=True)
        super().__init__(Server("mqtt", "a", 1), socket.socket(), options)
        self.now = 0.0
        self.sent = 0
        self.is_full = False
        self.answer = answer

    def monotonic(self) -> float:
        return self.now

    def send(self, data: memoryview) -> int:
        self.is_full = not self.is_full
        if not self.is_full:
            return 0
        self.now += 15.0
        taken = min(len(data), 1 << 16)
        self.sent += taken
        return taken

    def wait(self, timeout_s: float, *, to_send: bool) -> None:
        self.now += timeout_s

    def receive(self) -> bytes:
        if self.sent < 1 << 20:
            return b""
        self.sent = 0
        return self.answer

    def shut_down(self, farewell: bytes, timeout_s: float) -> None:
        pass


def slow_sender(link: SlowLink, monkeypatch: pytest.MonkeyPatch) -> Sender:
    monkeypatch.setattr(sink_publisher, "time", link)
    monkeypatch.setattr(sink_link, "open_link", lambda *_: link)
    return Sender(link.server)


def test_an_upload_that_takes_longer_than_every_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SlowLink(encode_ack(PUBACK, 1, 0, 5))
    sender = slow_sender(link, monkeypatch)
    sender.send([bytes(1 << 20)])
    assert link.now > 2 * sink_publisher.RESPONSE_TIMEOUT_S
    assert sender.publisher.connections == 1


def test_an_upload_that_is_refused_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SlowLink(encode_ack(PUBACK, 1, QUOTA, 5))
    with pytest.raises(PublishError, match=r"1 messages wait.*Quota exceeded"):
        slow_sender(link, monkeypatch).send([bytes(1 << 20)])


def test_qos_0_waits_for_a_slow_reader() -> None:
    payload = bytes(1 << 20)
    with SinkServer() as server:
        sender = Sender(server)
        most = 0

        def payloads() -> Iterable[bytes]:
            nonlocal most
            for _ in range(20):
                most = max(most, len(sender.publisher._sending) + sender.publisher._out_bytes)
                yield payload

        sender.send(payloads(), qos=0)
        assert len(server.payloads) == 20
        assert most <= sink_publisher.UNSENT_BYTES_MAX


class Clock:
    """The real one, and what a test adds to it."""

    def __init__(self) -> None:
        self.added = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.added


@pytest.mark.parametrize("is_lost", [False, True])
def test_rows_that_come_after_a_pause(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what takes time, and not the server, which has given up perhaps."""
    clock = Clock()
    monkeypatch.setattr(sink_publisher, "time", clock)
    arrived = threading.Event()

    def answer(session: Session, publish: Publish) -> int | None:
        arrived.set()
        if is_lost and session.number == 0:
            raise EOFError
        return 0

    def payloads() -> Iterable[bytes]:
        yield b"0"
        sender.publisher.push()
        assert arrived.wait(20), "it does not wait for the next one"
        clock.added += 10_000
        yield b"1"
        sender.publisher.push()
        clock.added += 10_000
        yield b"2"

    with SinkServer(answer) as server:
        sender = Sender(server)
        sender.send(payloads())
        assert server.sessions[-1].payloads == [b"0", b"1", b"2"]
        assert len(server.sessions) == (2 if is_lost else 1)


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    with SinkServer(tls=context) as server:
        secure = parse_server(f"mqtts://localhost:{server.port}")
        sender = Sender(secure, tls=tls_context(str(ca_file), None, None))
        sender.send([*numbered(200), bytes(1 << 20)])
        assert len(server.payloads) == 201
        by_address = parse_server(f"mqtts://127.0.0.1:{server.port}")
        named = tls_context(str(ca_file), None, None)
        Sender(by_address, tls=named, server_name="localhost").send([b"x"])
        with pytest.raises(PublishError, match="certificate is not trusted"):
            Sender(secure, tls=tls_context(None, None, None)).send([b"x"])
    with pytest.raises(ValueError, match="tlsCaFile '/nowhere'"):
        tls_context("/nowhere", None, None)
    with pytest.raises(ValueError, match="tlsCertFile"):
        tls_context(str(ca_file), str(ca_file), str(ca_file))


def test_ipv6_and_a_name() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with pytest.raises(PublishError, match=r"\[::1\]:1 lost|connect to \[::1\]:1"):
        Sender(parse_server("[::1]:1"), retry_timeout_s=0.05).send([b"x"])
