"""What the server announces when it is configured to offer less, and enhanced authentication."""

import base64
import hashlib
import hmac
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import wire
from tests.e2e.brokers import SOURCE, Holdfast

MAXIMUM_QOS = 0x24
RETAIN_AVAILABLE = 0x25
SERVER_KEEP_ALIVE = 0x13
METHOD = 0x15
DATA = 0x16
SCRAM = "SCRAM-SHA-256"
PASSWORD = "pencil"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Holdfast] = []

    def start_with(**settings: dict[str, Any]) -> Holdfast:
        broker = Holdfast(tmp_path, settings)
        started.append(broker)
        broker.start()
        return broker

    yield start_with
    for broker in started:
        broker.kill()
        assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


def refused(broker: Holdfast, packet: bytes) -> wire.Connack:
    with wire.Wire(broker.port) as client:
        client.send(packet)
        (connack,) = client.wait_closed()
        return wire.read_connack(connack, 5)


def test_lower_maximum_qos(start: Any) -> None:
    """[MQTT-3.2.2-9] [MQTT-3.2.2-10] [MQTT-3.2.2-11] [MQTT-3.2.2-12]"""
    broker = start(limits={"qos_max": 1})
    with wire.Wire(broker.port) as client:
        assert client.connect("c").value(MAXIMUM_QOS) == 1
        (granted,) = client.subscribe(("t", 2))
        assert granted <= 2
        client.publish("t", b"x", 1)
        assert client.message().qos == 1
        client.send(wire.publish("t", b"x", 2, 9))
        assert client.wait_closed()[-1].reason == 0x9B
    assert refused(broker, wire.connect("c", will=wire.Will("w", b"", 2))).reason == 0x9B


def test_no_retain(start: Any) -> None:
    """[MQTT-3.2.2-13] [MQTT-3.2.2-14]"""
    broker = start(limits={"retain_available": False})
    with wire.Wire(broker.port) as client:
        assert client.connect("c").value(RETAIN_AVAILABLE) == 0
        client.send(wire.publish("t", b"x", retain=True))
        assert client.wait_closed()[-1].reason == 0x9A
    will = wire.Will("w", b"", retain=True)
    assert refused(broker, wire.connect("c", will=will)).reason == 0x9A


def test_server_keep_alive(start: Any) -> None:
    """The server's value replaces a longer one, and none. [MQTT-3.1.2-21] [MQTT-3.2.2-21]"""
    broker = start(limits={"keep_alive_s_max": 2})
    for asked in (0, 60):
        with wire.Wire(broker.port) as client:
            assert client.connect("c", keep_alive_s=asked).value(SERVER_KEEP_ALIVE) == 2
            (goodbye,) = client.wait_closed(10)
            assert (goodbye.kind, goodbye.reason) == (wire.DISCONNECT, 0x8D)


def test_receive_maximum_of_the_server(start: Any) -> None:
    """[MQTT-3.3.4-7]"""
    broker = start(limits={"receive_maximum": 2})
    with wire.Wire(broker.port) as client:
        assert client.connect("c").value(wire.RECEIVE_MAXIMUM) == 2
        for packet_id in (1, 2):
            client.send(wire.publish("t", b"x", 2, packet_id))
            client.expect(wire.PUBREC)
        client.send(wire.publish("t", b"x", 2, 3))
        assert client.wait_closed()[-1].reason == 0x93


def test_topic_alias_maximum_of_the_server(start: Any) -> None:
    """[MQTT-3.3.2-9] [MQTT-3.3.2-12] [MQTT-3.2.2-17]"""
    broker = start(limits={"topic_alias_max": 3})
    with wire.Wire(broker.port) as client:
        assert client.connect("c").value(wire.TOPIC_ALIAS_MAXIMUM) == 3
        client.subscribe(("t/+", 0))
        for alias in (1, 2, 3):
            client.publish(f"t/{alias}", b"", props=[(wire.TOPIC_ALIAS, alias)])
        for alias in (3, 1, 2):
            client.publish("", b"", props=[(wire.TOPIC_ALIAS, alias)])
        topics = [client.message().topic for _ in range(6)]
        assert topics == ["t/1", "t/2", "t/3", "t/3", "t/1", "t/2"]
        client.send(wire.publish("t", b"", props=[(wire.TOPIC_ALIAS, 4)]))
        assert client.wait_closed()[-1].reason == 0x94


def test_maximum_packet_size_of_the_server(start: Any) -> None:
    """[MQTT-3.2.2-15]"""
    broker = start(limits={"packet_bytes": 1000})
    with wire.Wire(broker.port) as client:
        assert client.connect("c").value(wire.MAXIMUM_PACKET_SIZE) == 1000
        fits, too_large = (wire.publish("t", bytes(size), 1, 1) for size in (991, 992))
        assert (len(fits), len(too_large)) == (1000, 1001)
        client.send(fits)
        client.expect(wire.PUBACK)
        client.send(too_large)
        assert client.wait_closed()[-1].reason == 0x95


class ScramClient:
    """RFC 5802 from the client's side, for SHA-256 and ASCII."""

    def __init__(self, user: str, password: str) -> None:
        self.password = password.encode()
        self.first_bare = f"n={user},r=clientnonce"
        self.signature = b""

    def first(self) -> bytes:
        return f"n,,{self.first_bare}".encode()

    def final(self, server_first: bytes) -> bytes:
        fields = dict(part.split("=", 1) for part in server_first.decode().split(","))
        salt, rounds = base64.b64decode(fields["s"]), int(fields["i"])
        salted = hashlib.pbkdf2_hmac("sha256", self.password, salt, rounds)
        key = self._hmac(salted, b"Client Key")
        without_proof = f"c=biws,r={fields['r']}"
        message = f"{self.first_bare},{server_first.decode()},{without_proof}".encode()
        signature = self._hmac(hashlib.sha256(key).digest(), message)
        proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
        self.signature = self._hmac(self._hmac(salted, b"Server Key"), message)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def knows(self, server_final: bytes) -> bool:
        """Whether the server has proved that it knows the credentials."""
        return server_final == b"v=" + base64.b64encode(self.signature)

    @staticmethod
    def _hmac(key: bytes, data: bytes) -> bytes:
        return hmac.digest(key, data, "sha256")


def auth(reason: int, data: bytes, method: str = SCRAM) -> bytes:
    return wire.packet(0xF0, bytes([reason]) + wire.properties([(METHOD, method), (DATA, data)]))


def auth_properties(frame: wire.Frame) -> dict[int, wire.PropertyValue]:
    return dict(wire.read_properties(frame.body, 1)[0])


@pytest.fixture
def scram_broker(start: Any, tmp_path: Path) -> Holdfast:
    file = tmp_path / "scram"
    command = [sys.executable, "-m", "holdfast.cli.main", "passwd", "--scram", "-c", "-b"]
    subprocess.run(
        [*command, str(file), "user", PASSWORD], check=True, env={"PYTHONPATH": str(SOURCE)}
    )
    broker: Holdfast = start(security={"scram_file": str(file), "allow_anonymous": False})
    return broker


def begin(broker: Holdfast, client: wire.Wire, scram: ScramClient) -> wire.Frame:
    """CONNECT with the first message; the server's answer."""
    props: list[tuple[int, wire.PropertyValue]] = [(METHOD, SCRAM), (DATA, scram.first())]
    client.send(wire.connect("c", props=props))
    return client.receive()


def test_scram(scram_broker: Holdfast) -> None:
    """Connect and authenticate again. [MQTT-4.12.0-2] [MQTT-4.12.0-3] [MQTT-4.12.0-5]
    [MQTT-4.12.1-1] [MQTT-3.15.2-1] [MQTT-3.1.2-30]"""
    with wire.Wire(scram_broker.port) as client:
        scram = ScramClient("user", PASSWORD)
        challenge = begin(scram_broker, client, scram)
        assert (challenge.kind, challenge.body[0]) == (wire.AUTH, 0x18)
        assert auth_properties(challenge)[METHOD] == SCRAM
        data = auth_properties(challenge)[DATA]
        assert isinstance(data, bytes)
        client.send(auth(0x18, scram.final(data)))
        connack = wire.read_connack(client.receive(), 5)
        assert connack.reason == 0
        assert connack.value(METHOD) == SCRAM
        proof = connack.value(DATA)
        assert isinstance(proof, bytes)
        assert scram.knows(proof)

        again = ScramClient("user", PASSWORD)
        client.send(auth(0x19, again.first()))
        data = auth_properties(client.expect(wire.AUTH))[DATA]
        assert isinstance(data, bytes)
        client.send(auth(0x18, again.final(data)))
        answer = client.expect(wire.AUTH)
        assert answer.body[0] == 0x00
        client.ping()

        # Failing leaves nothing behind but the reason. [MQTT-4.12.1-2]
        wrong = ScramClient("user", "not the password")
        client.send(auth(0x19, wrong.first()))
        data = auth_properties(client.expect(wire.AUTH))[DATA]
        assert isinstance(data, bytes)
        client.send(auth(0x18, wrong.final(data)))
        (goodbye,) = client.wait_closed()
        assert (goodbye.kind, goodbye.reason) == (wire.DISCONNECT, 0x87)


@pytest.mark.parametrize(("user", "password"), [("user", "wrong"), ("nobody", PASSWORD)])
def test_scram_fails(scram_broker: Holdfast, user: str, password: str) -> None:
    """[MQTT-4.12.0-4] [MQTT-3.1.4-2]"""
    with wire.Wire(scram_broker.port) as client:
        scram = ScramClient(user, password)
        data = auth_properties(begin(scram_broker, client, scram))[DATA]
        assert isinstance(data, bytes)
        client.send(auth(0x18, scram.final(data)))
        (connack,) = client.wait_closed()
        assert wire.read_connack(connack, 5).reason == 0x87


def test_another_method_in_between(scram_broker: Holdfast) -> None:
    """[MQTT-4.12.0-5]"""
    with wire.Wire(scram_broker.port) as client:
        assert begin(scram_broker, client, ScramClient("user", PASSWORD)).kind == wire.AUTH
        client.send(auth(0x18, b"", method="PLAIN"))
        for frame in client.wait_closed():
            assert frame.kind == wire.CONNACK
            assert frame.body[1] >= 0x80


def test_other_packets_before_connack(scram_broker: Holdfast) -> None:
    """[MQTT-3.1.2-30] [MQTT-3.14.0-1]"""
    with wire.Wire(scram_broker.port) as client:
        assert begin(scram_broker, client, ScramClient("user", PASSWORD)).kind == wire.AUTH
        client.send(wire.publish("t", b"too early"))
        assert all(frame.kind == wire.CONNACK for frame in client.wait_closed())


def test_anonymous_is_refused(scram_broker: Holdfast) -> None:
    assert refused(scram_broker, wire.connect("c")).reason in (0x86, 0x87)
