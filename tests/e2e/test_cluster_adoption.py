"""Adopted data directories, served by real processes: clients find what they had."""

import subprocess
import tarfile
import threading
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from holdfast.cli.main import main
from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses
from tests.support.format_samples import FOLDER
from tests.support.kept_data import check
from tests.support.kept_nodes import KINDS

TIMED_OUT = 27
"""The exit code of mosquitto_sub after -W."""


@pytest.mark.parametrize(
    ("kind", "to"),
    [("node", "node"), ("node", "cluster"), ("cluster", "cluster"), ("cluster", "node")],
)
def test_clients_after_an_adoption(kind: str, to: str, tmp_path: Path) -> None:
    """The directory is of a node of version 0.1 that was killed, with sessions, a group, retained
    messages and unfinished QoS 2. The copy is served with a port for other nodes, or without."""
    with tarfile.open(FOLDER / "0.1.0" / f"{kind}.tar.gz") as kept:
        kept.extractall(tmp_path / "old", filter="data")
    assert main(["cluster", "adopt", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    with KINDS[to](tmp_path, tmp_path / "new") as node:
        check(node.port)
        if isinstance(node, ClusterNode):
            # The adoption does not know it.
            (info,) = node.cluster()["nodes"]
            assert info["peer_address"] == node.peer_address


@pytest.mark.long
def test_a_broker_becomes_a_cluster(tmp_path: Path) -> None:
    """paho and mosquitto_sub have sessions at a broker; they find everything at each of three
    nodes, also after the death of the first one, and at a broker again."""
    single = broker(tmp_path / "single", tmp_path / "old")
    sessions = Sessions()
    sessions.begin(single.port)
    sessions.publish(single.port, 200)
    assert single.stop() == 0

    cluster = ClusterProcesses(tmp_path / "cluster", 3, {"cluster": {"partitions": 4}})
    try:
        cluster.nodes["n1"].data = tmp_path / "old"
        cluster.restart("n1", "n2", "n3")
        cluster.wait_healthy()
        assert {each["peer_address"] for each in cluster.status()["nodes"]} == {
            node.peer_address for node in cluster.nodes.values()
        }
        sessions.read_some(cluster.nodes["n2"].port, 50)
        sessions.publish(cluster.nodes["n3"].port, 100)
        cluster.kill9("n1")
        cluster.wait_healthy(without=["n1"])
        sessions.read_some(cluster.nodes["n3"].port, 50)
        cluster.restart("n1")
        cluster.wait_healthy()
        admin = ("--admin", f"127.0.0.1:{cluster.nodes['n1'].admin_port}")
        for name in ("n2", "n3"):
            assert main(["cluster", "drain", name, "--timeout", "120", *admin]) == 0
            assert main(["cluster", "remove", name, *admin]) == 0
            assert cluster.stop(name) == 0
        assert cluster.stop("n1") == 0
    finally:
        cluster.end()
    again = broker(tmp_path / "again", tmp_path / "old")
    try:
        sessions.read_rest(again.port)
    finally:
        assert again.stop() == 0


def broker(directory: Path, data: Path) -> Holdfast:
    directory.mkdir()
    made = Holdfast(directory, {"log": {"partitions": 4, "segment_bytes": 1 << 16}}, data)
    made.start()
    return made


class Sessions:
    """Three sessions: of paho at QoS 2, of mosquitto_sub at QoS 1, and a shared group's member."""

    def __init__(self) -> None:
        self.sent = 0
        self.clients: dict[str, paho.Client] = {}
        self.paho: list[int] = []
        self.mosquitto: list[int] = []
        self.shared: list[int] = []

    def begin(self, port: int) -> None:
        self._paho(port, 0, "paho", ("load/#", 2), self.paho)
        self._paho(port, 0, "member", ("$share/team/load/#", 1), self.shared)
        self._mosquitto(port, 1, wait_s=1)

    def publish(self, port: int, count: int) -> None:
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.connect("127.0.0.1", port)
        client.loop_start()
        for number in range(self.sent, self.sent + count):
            client.publish(f"load/{number % 7}", str(number), qos=2).wait_for_publish(30)
        self.sent += count
        client.disconnect()
        client.loop_stop()

    def read_some(self, port: int, count: int) -> None:
        self._paho(port, count, "paho", ("load/#", 2), self.paho)
        self._paho(port, count, "member", ("$share/team/load/#", 1), self.shared)
        self._mosquitto(port, count)

    def read_rest(self, port: int) -> None:
        everything = list(range(self.sent))
        self._paho(port, self.sent - len(self.paho), "paho", ("load/#", 2), self.paho)
        assert sorted(self.paho) == everything
        # mosquitto_sub counts what comes twice, too, so it waits for more than there is.
        self._mosquitto(port, 2 * self.sent, wait_s=3)
        self._paho(
            port,
            self.sent - len(set(self.shared)),
            "member",
            ("$share/team/load/#", 1),
            self.shared,
        )
        # At QoS 1 the messages on the way at a cut may come twice. None is missing.
        assert sorted(set(self.mosquitto)) == everything
        assert sorted(set(self.shared)) == everything

    def _paho(
        self, port: int, count: int, name: str, filter: tuple[str, int], found: list[int]
    ) -> None:
        """Read until so many different messages more are there. A client keeps its state of QoS 2
        while it has no connection."""
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = paho.Client(
                paho.CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5
            )
        enough, subscribed = threading.Event(), threading.Event()
        wanted = len(set(found)) + count

        def on_message(client: paho.Client, data: object, message: paho.MQTTMessage) -> None:
            found.append(int(message.payload))
            if len(set(found)) >= wanted:
                enough.set()

        client.on_message = on_message
        client.on_subscribe = lambda *_: subscribed.set()
        expiry = Properties(PacketTypes.CONNECT)
        expiry.SessionExpiryInterval = 3600
        client.connect("127.0.0.1", port, clean_start=False, properties=expiry)
        client.loop_start()
        client.subscribe(*filter)
        assert subscribed.wait(30)
        assert not count or enough.wait(20), f"{name}: {len(set(found))} of {wanted}"
        client.disconnect()
        client.loop_stop()

    def _mosquitto(self, port: int, count: int, wait_s: int = 60) -> None:
        command = ["mosquitto_sub", "-p", str(port), "-i", "mosquitto", "-c", "-q", "1", "-V", "5"]
        command += ["-x", "3600", "-t", "load/#", "-C", str(count), "-W", str(wait_s)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        self.mosquitto += [int(line) for line in done.stdout.split()]
        assert done.returncode in (0, TIMED_OUT), done.stderr
