"""The same ACL file in Mosquitto and in AclFile: who may read and write what, and which files are
refused. Mosquitto answers over the wire, to paho clients that speak MQTT 5."""

import queue
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from holdfast.security.acl import AclError, AclFile
from tests.support.ports import free_port

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")

TIMEOUT_S = 10.0
NOT_AUTHORIZED = 0x87

RULES = """\
# for clients without a user name
topic read $SYS/#
topic public
topic deny public/secret
topic read public/#

user admin
topic #

user roger
topic deny late/deny
topic readwrite home/+/light
topic read home/#
topic write  two spaces
topic read with space/a b
topic deny home/roger/private/#
topic write late/#

user ann lee
topic #
topic read $SYS/broker/#

user roger
topic read more

pattern read devices/%c/#
pattern write users/%u/out
pattern readwrite mid/x%uy/%c
pattern write users/%u/out/#
pattern deny users/%u/out/secret
pattern deny public/never
"""

CLIENTS: list[tuple[str | None, str]] = [
    (None, "c1"),
    ("roger", "c1"),
    ("ann lee", "c2"),
    ("bob", "c3"),
    ("%c", "c4"),
    ("pl+us", "c5"),
    ("bob", "ha#sh"),
    ("a/b", "c6"),
    ("bob", "sl/ash"),
]

TOPICS = [
    "public",
    "public/secret",
    "public/x",
    "public/never",
    "home",
    "home/x/light",
    "home/x/other",
    "home/roger/private",
    "home/roger/private/x",
    "two spaces",
    "with space/a b",
    "late/deny",
    "late/x",
    "more",
    "devices/c1/x",
    "devices/c2/x",
    "devices/c3",
    "devices/sl/ash/x",
    "users/roger/out",
    "users/bob/out",
    "users/bob/out/secret",
    "users/bob/out/x",
    "users/ann lee/out/secret",
    "users/%c/out",
    "users/c4/out",
    "users/a/b/out",
    "users//out",
    "mid/xboby/c3",
    "mid/xrogery/c1",
    "mid/xy/c1",
]


@contextmanager
def mosquitto(directory: Path, acl: str) -> Iterator[int]:
    """A broker with this ACL file; its port. Any user name is let in without a password."""
    assert MOSQUITTO is not None
    port = free_port()
    process = start(directory, acl, port)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if b"running" in line:
                break
        else:
            raise AssertionError("mosquitto did not start")
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def start(directory: Path, acl: str, port: int) -> "subprocess.Popen[bytes]":
    assert MOSQUITTO is not None
    directory.chmod(0o755)
    (directory / "acl").write_text(acl)
    (directory / "conf").write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nacl_file {directory / 'acl'}\n"
        "user root\nlog_dest stderr\nlog_type error\nlog_type information\n"
    )
    return subprocess.Popen(
        [MOSQUITTO, "-c", str(directory / "conf")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


class Client:
    """A paho client whose calls wait for the broker's answer."""

    def __init__(self, port: int, username: str | None, client_id: str) -> None:
        self.received: list[str] = []
        self._answers: queue.Queue[int] = queue.Queue()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5
        )
        if username is not None:
            self._client.username_pw_set(username, "x")
        self._client.on_connect = lambda c, u, f, reason, p: self._answers.put(reason.value)
        self._client.on_publish = lambda c, u, mid, reason, p: self._answers.put(reason.value)
        self._client.on_subscribe = lambda c, u, mid, reasons, p: self._answers.put(
            reasons[0].value
        )
        self._client.on_message = lambda c, u, message: self.received.append(message.topic)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert self._answer() == 0

    def _answer(self) -> int:
        return self._answers.get(timeout=TIMEOUT_S)

    def publish(self, topic: str) -> int:
        self._client.publish(topic, b"x", qos=1)
        return self._answer()

    def subscribe(self, filter: str) -> int:
        """At QoS 0. At QoS 1 Mosquitto holds back what follows 20 messages without PUBACK, and
        answers later requests before it."""
        self._client.subscribe(filter, qos=0)
        return self._answer()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def test_who_may_read_and_write_what(tmp_path: Path) -> None:
    acl = AclFile.parse(RULES, "acl")
    with mosquitto(tmp_path, RULES) as port:
        admin = Client(port, "admin", "admin")
        for username, client_id in CLIENTS:
            ours = acl.for_client(username, client_id)
            client = Client(port, username, client_id)
            may_write = {t for t in TOPICS if client.publish(t) != NOT_AUTHORIZED}
            assert may_write == {t for t in TOPICS if ours.can_write(t)}, (username, client_id)

            # Subscribing is always allowed, whatever may be read.
            assert client.subscribe("#") == 0
            client.received.clear()
            for topic in TOPICS:
                admin.publish(topic)
            # What the admin's publishes caused arrives before the answer to a later request.
            client.subscribe("nothing")
            assert set(client.received) == {t for t in TOPICS if ours.can_read(t)}, (
                username,
                client_id,
            )
            client.received.clear()
            client.subscribe("$SYS/broker/version")
            client.subscribe("nothing")
            assert bool(client.received) is ours.can_read("$SYS/broker/version")
            client.close()
        admin.close()


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_a_file_without_rules_allows_nothing(tmp_path: Path, text: str) -> None:
    ours = AclFile.parse(text, "acl").for_client("bob", "c1")
    with mosquitto(tmp_path, text) as port:
        client = Client(port, "bob", "c1")
        assert (client.publish("a") != NOT_AUTHORIZED) is ours.can_write("a")
        client.close()


@pytest.mark.parametrize(
    "line",
    ["user", "topics a", "topic reed a", "topic a b", "topic", "pattern", "topic read a/#/b"],
)
def test_both_refuse_a_wrong_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(AclError):
        AclFile.parse(line, "acl")
    process = start(tmp_path, line + "\n", 1)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert b"running" not in errors
