"""Subscriptions that begin in the past, with clients that know nothing of Holdfast, with `holdfast
sub`, and across kill -9."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.wire import Wire
from tests.support.sidecars import wait_until

SUB = shutil.which("mosquitto_sub")
COUNT = 300
RUN_S = 60
TOPIC = "plant/line"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


def publish(broker: Holdfast, first: int, count: int) -> None:
    """Publish numbers at QoS 1, and wait until each is acknowledged."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    sent = [client.publish(TOPIC, str(n), qos=1) for n in range(first, first + count)]
    for each in sent:
        each.wait_for_publish(RUN_S)
    client.disconnect()
    client.loop_stop()


def holdfast_sub(broker: Holdfast, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "holdfast.cli.main", "sub", "-p", str(broker.port)]
    done = subprocess.run(
        [*command, "-q", "1", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Holdfast]:
    broker = Holdfast(tmp_path)
    broker.start()
    yield broker
    broker.stop()


@pytest.mark.skipif(SUB is None, reason="mosquitto_sub is not installed")
def test_mosquitto_sub_reads_the_past(broker: Holdfast) -> None:
    numbers = [str(n) for n in range(COUNT)]
    publish(broker, 0, COUNT)
    base = [str(SUB), "-p", str(broker.port), "-C", str(COUNT), "-W", str(RUN_S)]
    for arguments in (
        ["-V", "5", "-t", "plant/#", "-q", "2", "-D", "subscribe", "user-property",
         "stream-offset", "earliest"],
        ["-V", "311", "-t", "$stream/@-1h/plant/#", "-q", "1"],
        ["-V", "31", "-t", f"$stream/@last:{COUNT}/plant/+"],
    ):  # fmt: skip
        done = subprocess.run(
            [*base, *arguments], capture_output=True, text=True, timeout=RUN_S, check=True
        )
        assert done.stdout.splitlines() == numbers


def test_holdfast_sub_prints_a_span_and_ends(broker: Holdfast) -> None:
    publish(broker, 0, 20)
    numbers = [str(n) for n in range(20)]
    assert holdfast_sub(broker, "-t", "plant/#", "--until", "now") == numbers
    last = holdfast_sub(broker, "-t", "plant/#", "--last", "3", "--until", "now")
    assert last == numbers[-3:]
    both = ["-t", "plant/#", "-t", "none/#", "--since", "-1h", "--until", "now"]
    assert holdfast_sub(broker, *both) == numbers
    assert holdfast_sub(broker, "-t", "plant/#", "--until", "1700000000") == []


class Reader:
    """A paho client with a durable session that notes what it receives."""

    def __init__(self, broker: Holdfast, wanted: int) -> None:
        self.seen: list[int] = []
        self.properties: list[dict[str, str]] = []
        self.is_complete = threading.Event()
        self._wanted = wanted
        self._client = paho.Client(paho.CallbackAPIVersion.VERSION2, "reader", protocol=paho.MQTTv5)
        self._client.on_connect = self._connected
        self._client.on_message = self._received
        self._client.reconnect_delay_set(1, 1)
        fields = Properties(PacketTypes.CONNECT)
        fields.SessionExpiryInterval = 3600
        fields.ReceiveMaximum = 10
        self._client.connect("127.0.0.1", broker.port, clean_start=False, properties=fields)
        self._client.loop_start()

    def _connected(self, client: paho.Client, _: object, flags: object, *__: object) -> None:
        if flags.session_present:  # type: ignore[attr-defined]
            return
        fields = Properties(PacketTypes.SUBSCRIBE)
        fields.UserProperty = [("stream-offset", "earliest"), ("hf-offset", "?1")]
        client.subscribe("plant/#", qos=2, properties=fields)

    def _received(self, _: paho.Client, __: object, message: paho.MQTTMessage) -> None:
        self.seen.append(int(message.payload))
        self.properties.append(dict(message.properties.UserProperty))  # type: ignore[union-attr]
        if self.seen[-1] == self._wanted - 1:
            self.is_complete.set()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def test_paho_reads_on_across_kill_9(broker: Holdfast) -> None:
    publish(broker, 0, 2000)
    reader = Reader(broker, 2100)
    wait_until(lambda: len(reader.seen) > 50, "fifty messages")
    broker.kill()
    broker.start()
    publish(broker, 2000, 100)
    assert reader.is_complete.wait(RUN_S)
    reader.close()
    # Published at QoS 1, so a message may come again; the first arrivals are complete, in order.
    assert list(dict.fromkeys(reader.seen)) == list(range(2100))
    offsets = [int(each["hf-offset"]) for each in reader.properties]
    # A record of the session may lie between two messages.
    first = dict(zip(reversed(reader.seen), reversed(offsets), strict=True))
    assert len(set(offsets)) == 2100
    assert sorted(first.values()) == [first[number] for number in range(2100)]
    assert "hf-past" not in reader.properties[-1]


@pytest.mark.skipif(SUB is None, reason="mosquitto_sub is not installed")
def test_a_queue_keeps_what_arrives_without_members(broker: Holdfast) -> None:
    base = [str(SUB), "-p", str(broker.port), "-W", str(RUN_S), "-q", "1", "-t"]
    subprocess.run([*base, "$queue/plant/#", "-E"], timeout=RUN_S, check=True)
    publish(broker, 0, 50)
    broker.kill()
    broker.start()
    publish(broker, 50, 50)
    command = [*base, "$queue/plant/#", "-C", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    # Published at QoS 1, so a message may come again.
    assert list(dict.fromkeys(map(int, done.stdout.split()))) == list(range(100))


def test_a_delayed_message_comes_after_kill_9(broker: Holdfast) -> None:
    with Wire(broker.port) as reader:
        reader.connect("reader", expiry_s=1000)
        reader.subscribe(("lamp/#", 2))
    with Wire(broker.port) as client:
        client.connect("p")
        for number in range(20):
            client.publish(f"$delayed/{1 + number % 3}/lamp/1", b"%d" % number, qos=1 + number % 2)
    broker.kill()
    broker.start()
    with Wire(broker.port) as reader:
        assert reader.connect("reader", clean=False, expiry_s=1000).session_present
        seen = [int(reader.message(RUN_S).payload) for _ in range(20)]
        broker.kill()
        broker.start()
    assert sorted(seen) == list(range(20))
    with Wire(broker.port) as reader:
        reader.connect("late")
        reader.subscribe(("$stream/@earliest/lamp/#", 2))
        assert sorted(int(reader.message(RUN_S).payload) for _ in range(20)) == list(range(20))
        with pytest.raises(TimeoutError):
            reader.message(0.5)
