"""A large retained set for a durable session of paho, cut off in the middle: by kill -9 of the
broker, or of the client's node, and by a lost connection at another node."""

import threading
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.conftest import StartHoldfast

KEPT = 400
WAIT_S = 30.0


def retain(port: int) -> None:
    """Publish the set at QoS 1."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", port)
    client.loop_start()
    sent = [client.publish(f"kept/{n}", str(n), qos=1, retain=True) for n in range(KEPT)]
    for each in sent:
        each.wait_for_publish(WAIT_S)
    client.disconnect()
    client.loop_stop()


class Reader:
    """A paho client with a window of 10 that acknowledges so many messages, and keeps all. At QoS 2
    a paho client that acknowledges by hand does not reply to a repeated PUBREL."""

    def __init__(self) -> None:
        self.left = 0
        self.got: list[int] = []
        self.is_present = False
        self.connected = threading.Event()
        self.is_stalled = threading.Event()
        self.client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, "reader", protocol=paho.MQTTv5, manual_ack=True
        )
        self.client.on_connect = self._on_connect
        self.client.on_message = self._on_message

    def connect(self, port: int, acknowledged: int) -> None:
        self.left = acknowledged
        self.connected.clear()
        self.is_stalled.clear()
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 3600
        properties.ReceiveMaximum = 10
        self.client.connect("127.0.0.1", port, clean_start=False, properties=properties)
        self.client.loop_start()
        assert self.connected.wait(WAIT_S)

    def _on_connect(
        self, client: paho.Client, data: object, flags: paho.ConnectFlags, *_: object
    ) -> None:
        self.is_present = flags.session_present
        self.connected.set()

    def _on_message(self, client: paho.Client, data: object, message: paho.MQTTMessage) -> None:
        self.got.append(int(message.payload))
        self.left -= 1
        if self.left >= 0:
            client.ack(message.mid, message.qos)
        if self.left < 0 or len(set(self.got)) == KEPT:
            self.is_stalled.set()

    def stall(self) -> None:
        """Wait until the window is full, or the set complete, and break the connection."""
        assert self.is_stalled.wait(WAIT_S), f"{len(set(self.got))} of {KEPT}"
        self.client.loop_stop()
        socket = self.client.socket()
        if socket is not None:
            socket.close()


@pytest.mark.timeout(240)
def test_kill_9_in_a_retained_set(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    retain(broker.port)
    reader = Reader()
    reader.connect(broker.port, 50)
    reader.client.subscribe("kept/#", 1)
    reader.stall()
    broker.kill()
    broker.start()
    complete(reader, broker.port)


@pytest.mark.timeout(240)
def test_a_retained_set_survives_its_node_and_a_lost_connection(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        ports = list(cluster.ports.values())
        retain(ports[0])
        reader = Reader()
        reader.connect(ports[0], 50)
        reader.client.subscribe("kept/#", 1)
        reader.stall()
        cluster.kill9("n1")
        reader.connect(ports[1], 50)
        assert reader.is_present
        reader.stall()
        complete(reader, ports[2])


def complete(reader: Reader, port: int) -> None:
    """Let the client come back, and get the rest."""
    reader.connect(port, 10 * KEPT)
    assert reader.is_present
    reader.stall()
    assert set(reader.got) == set(range(KEPT))
