"""Listeners with rules of their own, with Mosquitto's clients at each of them."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import PROCESSES, one_process
from tests.e2e.listeners_broker import PUB, REFUSED, ListenersBroker, mosquitto_pub
from tests.e2e.test_reload import Client, passwords_of, post_reload, until
from tests.e2e.wire import connect
from tests.support.certificates import Authority
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(PUB is None, reason="mosquitto-clients is not installed")


class Doors:
    """A broker whose guests use one listener, its users another, and devices a third."""

    def __init__(self, directory: Path) -> None:
        self.guests, self.users, self.devices = free_port(), free_port(), free_port()
        self.tenant, self.tenant_files = free_port(), (directory / "users", directory / "rights")
        passwords_of(self.tenant_files[0], "bob")
        self.tenant_files[1].write_text("user bob\ntopic readwrite bob/#\n")
        self.authority = Authority(directory)
        server = self.authority.issue()
        passwords = directory / "passwords"
        passwords_of(passwords, "alice")
        self.broker = ListenersBroker(
            directory / "broker",
            [
                {"port": self.guests, "allow_anonymous": True, "mount": "guests/"},
                {"port": self.users, "authentication": ["password"]},
                {
                    "port": self.devices,
                    "certificate": server.certificate,
                    "key": server.key,
                    "client_ca": self.authority.ca,
                    "require_certificate": True,
                    "certificate_user": "san",
                    "authentication": ["certificate"],
                },
                {
                    "port": self.tenant,
                    "password_file": str(self.tenant_files[0]),
                    "acl_file": str(self.tenant_files[1]),
                },
            ],
            {"security": {"password_file": str(passwords), "acl_file": str(self.acl(directory))}},
        )
        self.broker.start()

    @staticmethod
    def acl(directory: Path) -> Path:
        path = directory / "acl"
        path.write_text(
            "topic readwrite guests/#\n"
            "user alice\ntopic readwrite #\n"
            "user 10.0.0.7\ntopic readwrite #\n"
            "user dev-1.example\ntopic write t\n"
        )
        return path


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    made = Doors(tmp_path)
    yield made
    assert made.broker.stop() == 0
    assert "Traceback" not in made.broker.log_text()


def test_each_listener_has_its_own_users_and_topics(doors: Doors) -> None:
    alice = Client(doors.users, "alice")
    alice.subscribe("#")
    assert mosquitto_pub("-p", str(doors.guests)).returncode == 0
    until(lambda: alice.topics == ["guests/t"], "the guest's message")
    for port in (doors.users, doors.broker.port):
        assert mosquitto_pub("-p", str(port)).returncode == REFUSED
    assert mosquitto_pub("-p", str(doors.users), "-u", "alice", "-P", "secret").returncode == 0
    until(lambda: "t" in alice.topics, "the user's message")
    alice.close()


def test_the_name_of_a_device_is_in_its_certificate(doors: Doors) -> None:
    device = doors.authority.issue("not-this", host="dev-1.example")
    files = ["--cafile", doors.authority.ca, "--cert", device.certificate, "--key", device.key]
    secure = ["-p", str(doors.devices), "-h", "127.0.0.1", *files]
    alice = Client(doors.users, "alice")
    alice.subscribe("t")
    assert mosquitto_pub(*secure).returncode == 0
    until(lambda: alice.topics == ["t"], "the device's message")
    # The certificate decides alone, whatever name and password the client sends.
    assert mosquitto_pub(*secure, "-u", "alice", "-P", "secret").returncode == 0
    assert mosquitto_pub(*secure, "-u", "not-this").returncode == 0
    until(lambda: alice.topics == 3 * ["t"], "the device's messages")
    lines = [line for line in doors.broker.log_text().splitlines() if " connected client=" in line]
    assert sum("user='dev-1.example'" in line for line in lines) == 3
    alice.close()


def test_a_reload_closes_a_listener_to_guests(doors: Doors) -> None:
    guest, alice = Client(doors.guests), Client(doors.users, "alice")
    doors.broker.listeners[0]["allow_anonymous"] = False
    doors.broker.write()
    status, body = post_reload(doors.broker)
    assert (status, body["disconnected"]) == (200, 1)
    assert guest.left.wait(20)
    assert not alice.left.is_set()
    assert mosquitto_pub("-p", str(doors.guests)).returncode == REFUSED
    for client in (guest, alice):
        client.close()


def test_a_listener_with_users_and_rights_of_its_own(doors: Doors) -> None:
    for port, name, accepted in (
        (doors.tenant, "bob", True),
        (doors.tenant, "alice", False),
        (doors.users, "bob", False),
    ):
        arguments = ["-p", str(port), "-u", name, "-P", "secret"]
        assert (mosquitto_pub(*arguments).returncode == 0) is accepted
    bob, alice = Client(doors.tenant, "bob"), Client(doors.users, "alice")
    bob.subscribe("#")
    for topic in ("t", "bob/1", "new/1"):
        alice.client.publish(topic, qos=1).wait_for_publish(20)
    until(lambda: bob.topics == ["bob/1"], "the message that bob may read")
    passwords, rights = doors.tenant_files
    rights.write_text("user bob\ntopic readwrite new/#\n")
    assert post_reload(doors.broker) == (
        200,
        {"applied": [], "needs_restart": [], "disconnected": 0},
    )
    for topic in ("bob/2", "new/2"):
        alice.client.publish(topic, qos=1).wait_for_publish(20)
    until(lambda: bob.topics == ["bob/1", "new/2"], "the message by the new rights")
    passwords_of(passwords, "carol")
    assert post_reload(doors.broker)[1]["disconnected"] == 1
    assert bob.left.wait(20)
    rights.write_text("user bob\ntopic maybe #\n")
    status, body = post_reload(doors.broker)
    assert (status, "rights:2" in str(body["error"])) == (409, True)
    for client in (bob, alice):
        client.close()


def test_a_revoked_certificate(tmp_path: Path) -> None:
    """A reload reads the revocation list again."""
    authority = Authority(tmp_path)
    server, good, bad = authority.issue(), authority.issue("good"), authority.issue("bad")
    port = free_port()
    table = {
        "port": port,
        "certificate": server.certificate,
        "key": server.key,
        "client_ca": authority.ca,
        "require_certificate": True,
        "tls_minimum": "1.3",
        "crl": authority.revoke(),
    }
    broker = ListenersBroker(tmp_path / "broker", [table])
    broker.start()
    try:
        ca = ["-h", "127.0.0.1", "-p", str(port), "--cafile", authority.ca]
        for each in (good, bad):
            files = ["--cert", each.certificate, "--key", each.key]
            assert mosquitto_pub(*ca, *files).returncode == 0
        authority.revoke(bad)
        assert post_reload(broker)[0] == 200
        for each in (good, bad):
            files = ["--cert", each.certificate, "--key", each.key]
            assert (mosquitto_pub(*ca, *files).returncode == 0) is (each is good)
        authority.revoke(bad, hours=-1)
        status, body = post_reload(broker)
        assert (status, "a revocation list ended at" in str(body["error"])) == (409, True)
        files = ["--cert", good.certificate, "--key", good.key]
        assert mosquitto_pub(*ca, *files).returncode == 0
        Path(authority.revoke()).write_text("damaged")
        status, body = post_reload(broker)
        assert status == 409
        assert "no certificate revocation list" in str(body["error"])
        until(lambda: "certificate revoked" in broker.log_text(), "the refusal in the log")
    finally:
        assert broker.stop() == 0


def test_a_start_with_a_revocation_list_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The broker serves its other listeners, and reloads what else has changed."""
    authority = Authority(tmp_path)
    server = authority.issue()
    table = {
        "port": free_port(),
        "certificate": server.certificate,
        "key": server.key,
        "client_ca": authority.ca,
        "crl": authority.revoke(hours=-1),
    }
    broker = ListenersBroker(tmp_path / "broker", [table])
    broker.start()
    try:
        assert broker.log_text().count("WARNING revocation_list_expired") == PROCESSES
        assert Client(broker.port).reason == 0
        assert post_reload(broker)[0] == 200
    finally:
        assert broker.stop() == 0
    assert main(["config", "check", "-c", str(broker.directory / "holdfast.toml")]) == 2
    assert "a revocation list ended at" in capsys.readouterr().err


def _shake_hands_and_send(port: int, context: ssl.SSLContext, first: bytes) -> bytes:
    """Send the first packet in one write with the last bytes of the handshake. The plain bytes that
    come back until the end."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    received = b""
    with socket.create_connection(("127.0.0.1", port), 20) as plain:
        while not client.cipher() or not outgoing.pending:
            if outgoing.pending:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65536))
            with suppress(ssl.SSLWantReadError):
                client.do_handshake()
        client.write(first)
        plain.sendall(outgoing.read())
        with suppress(ConnectionResetError):
            while data := plain.recv(65536):
                received += data
    return received


@one_process("each has its share of the limit")
@pytest.mark.parametrize("transport", ["tcp", "websocket"])
def test_a_client_above_a_limit_sends_with_its_handshake(tmp_path: Path, transport: str) -> None:
    """It is cut when the handshake ends, and its first packet is here by then. Others stay."""
    authority = Authority(tmp_path)
    server = authority.issue()
    port = free_port()
    table = {
        "port": port,
        "certificate": server.certificate,
        "key": server.key,
        "transport": transport,
        "max_connections": 1,
    }
    broker = ListenersBroker(tmp_path / "broker", [table])
    broker.start()
    try:
        context = ssl.create_default_context(cafile=authority.ca)
        upgrade = (
            b"GET /mqtt HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: mqtt\r\n\r\n"
        )
        first = upgrade if transport == "websocket" else connect("late", 4)
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as only,
        ):
            until(lambda: broker.metric("connections") == 1, "the first client")
            for _ in range(20):
                _shake_hands_and_send(port, context, first)
            until(lambda: "listener_full" in broker.log_text(), "a refusal in the log")
            only.sendall(first)
            assert only.recv(4)[:1] in (b"\x20", b"H")
    finally:
        assert broker.stop() == 0


def test_alpn(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue()
    port = free_port()
    table = {"port": port, "certificate": server.certificate, "key": server.key}
    broker = ListenersBroker(tmp_path / "broker", [table])
    broker.start()
    try:
        for offered, chosen in ((["x", "mqtt"], "mqtt"), (["x"], None)):
            context = ssl.create_default_context(cafile=authority.ca)
            context.set_alpn_protocols(offered)
            with (
                socket.create_connection(("127.0.0.1", port), 20) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
            ):
                assert client.selected_alpn_protocol() == chosen
                client.sendall(connect("c", 4))
                assert client.recv(4)[:1] == b"\x20"
    finally:
        assert broker.stop() == 0
