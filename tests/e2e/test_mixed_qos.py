"""A paho publisher that mixes QoS 0 and 1 on one topic, and what subscribers get: on one broker,
and from one node of a cluster to the others."""

import threading
from pathlib import Path

import paho.mqtt.client as paho
import pytest

from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.conftest import StartHoldfast

PAIRS = 200
WAIT_S = 30.0


class Subscriber:
    def __init__(self, port: int, topic: str, qos: int) -> None:
        self.got: list[str] = []
        self.is_subscribed = threading.Event()
        self.has_all = threading.Event()
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        self.client.on_subscribe = lambda *_: self.is_subscribed.set()
        self.client.on_message = self._on_message
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.client.subscribe(topic, qos)
        assert self.is_subscribed.wait(WAIT_S)

    def _on_message(self, client: paho.Client, data: object, message: paho.MQTTMessage) -> None:
        self.got.append(message.payload.decode())
        if len(self.got) == 2 * PAIRS:
            self.has_all.set()

    def end(self) -> list[str]:
        assert self.has_all.wait(WAIT_S), self.got
        self.client.disconnect()
        self.client.loop_stop()
        return self.got


def publish(port: int, topic: str, *, awaits: bool) -> list[str]:
    """Publish pairs of QoS 1 and 0, the second one right behind the first, or its PUBACK."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", port)
    client.loop_start()
    sent = []
    for number in range(PAIRS):
        first = client.publish(topic, f"{number} closed", qos=1)
        if awaits:
            first.wait_for_publish(WAIT_S)
        client.publish(topic, f"{number} open", qos=0, retain=number % 3 == 0)
        first.wait_for_publish(WAIT_S)
        sent += [f"{number} closed", f"{number} open"]
    client.disconnect()
    client.loop_stop()
    return sent


@pytest.mark.timeout(120)
def test_qos_0_follows_qos_1_on_one_broker(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    subscribers = [Subscriber(broker.port, "valve", qos) for qos in (0, 1)]
    sent = publish(broker.port, "valve", awaits=False)
    assert [each.end() for each in subscribers] == [sent, sent]


@pytest.mark.timeout(180)
def test_qos_0_follows_qos_1_in_a_cluster(tmp_path: Path) -> None:
    """At the publisher's node always. At the others behind the PUBACK, where a later message of
    QoS 1 may still come between. A node that is unsure whether it owns its sessions sends them QoS
    0 alone, which a busy machine must not cause here."""
    with ClusterProcesses(tmp_path, settings={"cluster": {"suspect_s": 10.0}}) as cluster:
        here, *others = cluster.ports.values()
        near = Subscriber(here, "near", 1)
        sent = publish(here, "near", awaits=False)
        assert near.end() == sent
        subscribers = [Subscriber(port, "far", qos) for port in (here, *others) for qos in (0, 1)]
        sent = publish(here, "far", awaits=True)
        for each in subscribers:
            got = each.end()
            assert sorted(got) == sorted(sent)
            assert all(
                got.index(sent[at]) < got.index(sent[at + 1]) for at in range(0, len(sent), 2)
            )
        assert [each.got for each in subscribers[:2]] == [sent, sent]
