"""TLS, passwords, SCRAM and permissions through a real broker, with clients of others."""

import asyncio
import ssl
import threading
from pathlib import Path

import paho.mqtt.client as paho
import pytest
import trustme
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties

from holdfast.cli.main import main
from holdfast.client.client import Client
from holdfast.client.errors import ClientError
from holdfast.client.options import Options
from holdfast.client.scram import ScramAuthentication
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from tests.e2e import wire
from tests.e2e.conftest import StartHoldfast

TIMEOUT_S = 10.0


class Attempt:
    """One paho connection, up to its CONNACK (or its failure)."""

    def __init__(self, port: int, *, user: str = "", password: str = "") -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        self.client.on_connect = self._connected
        self.client.on_message = self._arrived
        self.answered = threading.Event()
        self.arrived = threading.Event()
        self.reason = -1
        self.payload = b""
        self.port = port
        if user:
            self.client.username_pw_set(user, password)

    def _connected(
        self, client: object, data: object, flags: object, reason: object, properties: Properties
    ) -> None:
        self.reason = int(getattr(reason, "value"))  # noqa: B009
        self.answered.set()

    def _arrived(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        self.payload = message.payload
        self.arrived.set()

    def run(self) -> int:
        self.client.connect("127.0.0.1", self.port)
        self.client.loop_start()
        assert self.answered.wait(TIMEOUT_S)
        return self.reason

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def write_certificates(directory: Path) -> tuple[trustme.CA, dict[str, str]]:
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    files = {
        "certificate": str(directory / "server.pem"),
        "key": str(directory / "server.key"),
        "client_ca": str(directory / "ca.pem"),
    }
    server.private_key_pem.write_to_path(files["key"])
    for number, blob in enumerate(server.cert_chain_pems):
        blob.write_to_path(files["certificate"], append=number > 0)
    authority.cert_pem.write_to_path(files["client_ca"])
    return authority, files


def test_tls(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    _, files = write_certificates(tmp_path)
    broker = start_holdfast({"[listeners]": {name: files[name] for name in ("certificate", "key")}})
    attempt = Attempt(broker.port)
    attempt.client.tls_set(ca_certs=files["client_ca"])
    assert attempt.run() == reasons.SUCCESS
    attempt.client.subscribe("t", 1)
    attempt.client.publish("t", b"over TLS", 1).wait_for_publish(TIMEOUT_S)
    assert attempt.arrived.wait(TIMEOUT_S)
    assert attempt.payload == b"over TLS"
    attempt.close()
    # A client that speaks plain MQTT to the TLS port gets nowhere.
    plain = Attempt(broker.port)
    plain.client.connect("127.0.0.1", broker.port)
    plain.client.loop_start()
    assert not plain.answered.wait(1.0)
    plain.client.loop_stop()


def test_client_certificates(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    authority, files = write_certificates(tmp_path)
    broker = start_holdfast(
        {
            "[listeners]": {**files, "require_certificate": True},
            "security": {"allow_anonymous": False},
        }
    )
    own = authority.issue_cert("device-7", common_name="device-7")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "device.pem"))
    attempt = Attempt(broker.port)
    context = ssl.create_default_context(cafile=files["client_ca"])
    context.load_cert_chain(str(tmp_path / "device.pem"))
    attempt.client.tls_set_context(context)
    assert attempt.run() == reasons.SUCCESS
    attempt.close()


def test_passwords_and_permissions(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    assert main(["passwd", "-c", "-b", str(passwords), "alice", "secret"]) == 0
    acl = tmp_path / "acl"
    acl.write_text("user alice\ntopic readwrite open/#\ntopic deny open/closed\n")
    broker = start_holdfast({"security": {"password_file": str(passwords), "acl_file": str(acl)}})
    anonymous = Attempt(broker.port)
    assert anonymous.run() == reasons.NOT_AUTHORIZED
    anonymous.close()
    wrong = Attempt(broker.port, user="alice", password="guess")
    assert wrong.run() == reasons.BAD_USER_NAME_OR_PASSWORD
    wrong.close()
    alice = Attempt(broker.port, user="alice", password="secret")
    assert alice.run() == reasons.SUCCESS
    alice.client.subscribe("#", 1)
    alice.client.publish("open/closed", b"denied", 1).wait_for_publish(TIMEOUT_S)
    alice.client.publish("elsewhere", b"denied", 1).wait_for_publish(TIMEOUT_S)
    alice.client.publish("open/t", b"allowed", 1).wait_for_publish(TIMEOUT_S)
    assert alice.arrived.wait(TIMEOUT_S)
    assert alice.payload == b"allowed"
    alice.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_session_is_its_users(
    start_holdfast: StartHoldfast, tmp_path: Path, restarts: bool
) -> None:
    passwords = tmp_path / "passwords"
    for number, user in enumerate(("alice", "mallory")):
        assert main(["passwd", *["-c"][number:], "-b", str(passwords), user, user]) == 0
    broker = start_holdfast(
        {"security": {"password_file": str(passwords), "allow_anonymous": True}}
    )

    def connect(user: str, clean: bool) -> tuple[int, ...]:
        """Is its session there, and the reason."""
        with wire.Wire(broker.port) as client:
            name = {"username": user, "password": user.encode()} if user else {}
            expiry = ((p.SESSION_EXPIRY_INTERVAL, 1000),)
            client.send(wire.connect("dev1", clean=clean, props=expiry, **name))
            return tuple(client.expect(wire.CONNACK).body[:2])

    assert connect("alice", True) == (0, reasons.SUCCESS)
    if restarts:
        broker.kill()
        broker.start()
    for user in ("mallory", ""):
        for clean in (False, True):
            assert connect(user, clean) == (0, reasons.CLIENT_IDENTIFIER_NOT_VALID)
    assert connect("alice", False) == (1, reasons.SUCCESS)


def test_names_without_proof(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """They are none, and whoever writes rules for them is told."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite open/#\nuser alice\ntopic readwrite #\n")
    broker = start_holdfast({"security": {"acl_file": str(acl)}})
    alice = Attempt(broker.port, user="alice", password="x")
    assert alice.run() == reasons.SUCCESS
    alice.client.subscribe("#", 1)
    alice.client.publish("secret", b"denied", 1).wait_for_publish(TIMEOUT_S)
    alice.client.publish("open/t", b"allowed", 1).wait_for_publish(TIMEOUT_S)
    assert alice.arrived.wait(TIMEOUT_S)
    assert alice.payload == b"allowed"
    alice.close()
    assert "unproved_users" in broker.log_text()


@pytest.mark.parametrize(
    ("option", "method"), [("--scram", "SCRAM-SHA-256"), ("--scram-sha-512", "SCRAM-SHA-512")]
)
def test_scram(start_holdfast: StartHoldfast, tmp_path: Path, option: str, method: str) -> None:
    scram = tmp_path / "scram"
    assert main(["passwd", option, "-c", "-b", str(scram), "bob", "pencil"]) == 0
    broker = start_holdfast({"security": {"scram_file": str(scram), "allow_anonymous": False}})

    async def connect(password: str) -> bytes:
        options = Options(authentication=lambda: ScramAuthentication("bob", password, method))
        async with Client("127.0.0.1", broker.port, options=options) as client:
            await client.subscribe(("t", 1))
            await client.reauthenticate()
            await client.publish("t", b"proven", qos=1)
            message = await client.receive()
            assert message is not None
            return message.payload

    assert asyncio.run(asyncio.wait_for(connect("pencil"), TIMEOUT_S)) == b"proven"
    with pytest.raises(ClientError):
        asyncio.run(asyncio.wait_for(connect("crayon"), TIMEOUT_S))
