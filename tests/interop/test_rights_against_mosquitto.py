"""The same password file, rules and clients at Holdfast and at Mosquitto: what a client without the
rights gets, and may leave, is the same. Where Holdfast is stricter, it says so here."""

import queue
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from holdfast.cli.main import main
from tests.e2e.brokers import Holdfast
from tests.support.ports import free_port

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")

TIMEOUT_S = 10.0
NOT_AUTHORIZED = 0x87
RULES = """\
user alice
topic readwrite #
user mallory
topic readwrite public/#
"""
BROKERS = ["holdfast", "mosquitto"]


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The port."""
    users, acl = tmp_path / "users", tmp_path / "acl"
    for number, user in enumerate(("alice", "mallory")):
        assert main(["passwd", *["-c"][number:], "-b", str(users), user, user]) == 0
    acl.write_text(RULES)
    if request.param == "holdfast":
        security = {"password_file": str(users), "acl_file": str(acl)}
        started = Holdfast(tmp_path, {"security": security})
        started.start()
        yield started.port
        started.kill()
        assert "Traceback" not in started.log_text()
        return
    with mosquitto(tmp_path, users, acl) as port:
        yield port


@contextmanager
def mosquitto(directory: Path, users: Path, acl: Path) -> Iterator[int]:
    assert MOSQUITTO is not None
    port = free_port()
    config = directory / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous false\npassword_file {users}\n"
        f"acl_file {acl}\nuser root\nlog_dest stderr\nlog_type error\nlog_type information\n"
    )
    process = subprocess.Popen(
        [MOSQUITTO, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        assert any(b"running" in line for line in process.stderr)
        yield port
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


class Client:
    """A paho client whose calls wait for the broker's answer."""

    def __init__(
        self,
        port: int,
        user: str,
        *,
        client_id: str = "",
        clean: bool = True,
        will: str = "",
        reason: int | None = 0,
    ) -> None:
        self.received: list[str] = []
        self._answers: queue.Queue[int] = queue.Queue()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id or f"{user}-{uuid.uuid4().hex}",
            protocol=MQTTProtocolVersion.MQTTv5,
        )
        self._client.username_pw_set(user, user)
        if will:
            self._client.will_set(will, b"will", 1, True)
        self._client.on_connect = lambda c, u, f, reason, p: self._answers.put(reason.value)
        self._client.on_publish = lambda c, u, mid, reason, p: self._answers.put(reason.value)
        self._client.on_subscribe = lambda c, u, mid, reasons, p: self._answers.put(
            reasons[0].value
        )
        self._client.on_message = lambda c, u, message: self.received.append(message.topic)
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 0 if clean else 1000
        self._client.connect("127.0.0.1", port, clean_start=clean, properties=properties)
        self._client.loop_start()
        self.reason = self._answer()
        assert reason in (None, self.reason)

    def _answer(self) -> int:
        return self._answers.get(timeout=TIMEOUT_S)

    def publish(self, topic: str, *, retain: bool = False) -> int:
        self._client.publish(topic, b"x", 1, retain)
        return self._answer()

    def subscribe(self, filter: str) -> int:
        self._client.subscribe(filter, 1)
        return self._answer()

    def wait_for_message(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.received:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def drop(self) -> None:
        """Without DISCONNECT."""
        self._client.loop_stop()
        socket = self._client.socket()
        assert socket is not None
        socket.close()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.mark.parametrize("topic", ["secret/x", "$SYS/broker/version"])
def test_a_will_that_may_not_be_published_comes_to_nobody(broker: int, topic: str) -> None:
    """Mosquitto lets the client in and drops the will later; Holdfast says at once why not."""
    watcher = Client(broker, "alice")
    watcher.subscribe("#")
    watcher.subscribe("$SYS/broker/version")
    watcher.received.clear()
    mallory = Client(broker, "mallory", will=topic, reason=None)
    if mallory.reason == 0:
        mallory.drop()
    else:
        assert mallory.reason == NOT_AUTHORIZED
        mallory.close()
    Client(broker, "mallory", will="public/x").drop()
    while "public/x" not in watcher.received:
        assert watcher.subscribe("nothing") == 1
    assert watcher.received == ["public/x"]
    watcher.close()


@pytest.mark.parametrize("filter", ["#", "$share/g/#", "$share/g/secret/#"])
def test_messages_come_only_to_who_may_read_them(broker: int, filter: str) -> None:
    alice = Client(broker, "alice")
    alice.publish("secret/retained", retain=True)
    mallory = Client(broker, "mallory")
    # Subscribing is allowed, whatever may be read.
    assert mallory.subscribe(filter) == 1
    alice.publish("secret/x")
    alice.publish("public/x")
    mallory.subscribe("nothing")
    assert mallory.received == ([] if "secret" in filter else ["public/x"])
    mallory.close()
    alice.close()


def test_a_queue_goes_to_whoever_may_read_it(broker: int) -> None:
    """What was queued for a session."""
    mallory = Client(broker, "mallory", client_id="dev", clean=False)
    mallory.subscribe("#")
    mallory.close()
    alice = Client(broker, "alice")
    alice.publish("secret/x")
    alice.publish("public/x")
    mallory = Client(broker, "mallory", client_id="dev", clean=False)
    # The queue is read from the log beside the answers to packets.
    mallory.wait_for_message()
    mallory.subscribe("nothing")
    assert mallory.received == ["public/x"]
    mallory.close()
    alice.close()
