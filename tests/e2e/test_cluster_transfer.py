"""Nodes whose log cannot tell everything: a wiped disk after retention, a witness, and nodes that
are not to be members any more."""

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.security.peer_handshake import MAGIC, NONCE_BYTES
from holdfast.security.peer_identity import WIRE_VERSION
from tests.e2e import wire
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.wire import Wire

QUOTA_EXCEEDED = 0x97
SERVER_UNAVAILABLE = 0x88

SMALL: dict[str, dict[str, Any]] = {
    "cluster": {"partitions": 4, "min_insync": 1},
    "log": {"segment_bytes": 65536, "snapshot_bytes": 131072},
    "log.retention": {"bytes": 262144, "session_bytes": 65536},
}
BUSY = "load/x"


def sequence(value: str) -> wire.PropertyList:
    return [(wire.USER_PROPERTY, ("hf-seq", value))]


def start_offsets(node: ClusterNode) -> list[int]:
    status, body = node.admin("/api/v1/log")
    assert status == 200
    return [first for first, _ in json.loads(body)["ranges"]]


class Traffic:
    """QoS 1 publishes to several partitions, all the time; none may be refused."""

    def __init__(self, port: int) -> None:
        self.refused: list[int] = []
        self.count = 0
        self._port = port
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Wire(self._port, timeout_s=30.0) as client:
            client.connect("traffic")
            while not self._ends.is_set():
                reason = client.publish(f"load/{self.count % 8}", bytes(500), 1)
                if reason >= 0x80:
                    self.refused.append(reason)
                self.count += 1
                self._ends.wait(0.005)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def fill_until_start_moves(cluster: ClusterProcesses, *names: str) -> None:
    """Until retention has taken the beginning of every partition at these nodes. A node that stops
    saves a snapshot, and one that starts looks at once for what may go."""
    with Wire(cluster.nodes[names[0]].port) as client:
        client.connect("filler")
        for number in range(400):
            assert client.publish(f"fill/{number % 16}", bytes(4000), 1) == 0
    for name in names:
        assert cluster.stop(name) == 0
        cluster.restart(name)
        cluster.wait_healthy()
    until(
        lambda: all(min(start_offsets(cluster.nodes[name])) > 0 for name in names),
        "the log's start moves",
    )


def drain(cluster: ClusterProcesses, name: str) -> None:
    status, body = cluster.nodes["n3"].admin(f"/cluster/drain?node={name}", "POST")
    assert status == 200, body


def leads_all(cluster: ClusterProcesses, name: str) -> bool:
    partitions = cluster.status(name).get("partitions") or []
    return bool(partitions) and all(each["leader"] == name for each in partitions)


def test_a_wiped_disk_gets_what_the_log_no_longer_has(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, SMALL) as cluster:
        first = cluster.nodes["n1"]
        with Wire(first.port) as client:
            client.connect("writer", expiry_s=3600)
            for number in range(12):
                assert client.publish(f"kept/{number}", b"r%d" % number, 1, retain=True) == 0
            assert client.publish("kept/0", b"", 1, retain=True) == 0
            for number in range(1, 6):
                assert (
                    client.publish(f"p/{number}", b"p", 1, props=sequence(f"prod:1:{number}")) == 0
                )
            client.send(wire.publish("once/1", b"once", 2, 77))
            assert client.expect(wire.PUBREC).reason == 0
            for number in range(6):
                with Wire(first.port) as other:
                    other.connect(f"session-{number}", expiry_s=3600)
                    other.subscribe((f"to/{number}", 1), ("once/#", 1))
                    other.disconnect()
            client.abort()
        fill_until_start_moves(cluster, "n1", "n2")
        wiped = cluster.nodes["n3"]
        with Traffic(cluster.nodes["n2"].port) as traffic:
            cluster.kill9("n3")
            shutil.rmtree(wiped.data)
            cluster.restart("n3")
            cluster.wait_healthy()
        assert traffic.count > 0
        assert traffic.refused == []
        assert "images_received" in wiped.log_text()
        drain(cluster, "n1")
        drain(cluster, "n2")
        until(lambda: leads_all(cluster, "n3"), "n3 leads everything")
        with Wire(wiped.port) as reader:
            reader.connect("reader")
            reader.subscribe(("kept/#", 1))
            kept = {
                message.topic: message.payload for message in (reader.message() for _ in range(11))
            }
            assert kept == {f"kept/{number}": b"r%d" % number for number in range(1, 12)}
        with Wire(wiped.port) as live, Wire(wiped.port) as client:
            live.connect("live")
            live.subscribe(("p/#", 1), ("once/#", 2), ("to/#", 1))
            assert client.connect("writer", clean=False, expiry_s=3600).session_present
            client.send(wire.publish("once/1", b"once", 2, 77, dup=True))
            assert client.expect(wire.PUBREC).reason == 0
            client.send(wire.ack(wire.PUBREL, 77))
            client.expect(wire.PUBCOMP)
            for number in range(1, 7):
                assert (
                    client.publish(f"p/{number}", b"p", 1, props=sequence(f"prod:1:{number}")) == 0
                )
            for number in range(6):
                assert client.publish(f"to/{number}", b"new", 1) == 0
            seen = {live.message().topic for _ in range(7)}
            assert seen == {"p/6", *(f"to/{number}" for number in range(6))}
            live.ping()
            assert not live.inbox
        for number in range(6):
            with Wire(wiped.port) as other:
                assert other.connect(f"session-{number}", clean=False).session_present
                message = other.message()
                assert (message.topic, message.payload) == (f"to/{number}", b"new")


def test_two_nodes_and_a_witness(tmp_path: Path) -> None:
    settings = {"cluster": {"partitions": 4, "min_insync": 1, "replication_factor": 2}}
    with ClusterProcesses(tmp_path, 3, settings, witnesses=1) as cluster:
        witness = cluster.nodes["n3"]
        until(lambda: all(each["voter"] for each in cluster.status()["nodes"]), "three voters")
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", witness.port)) != 0
        with Wire(cluster.nodes["n2"].port) as client:
            client.connect("client", expiry_s=600)
            client.subscribe(("t/#", 1))
            cluster.kill9("n1")
            goes_on(client)
            client.disconnect()
        cluster.restart("n1")
        cluster.wait_healthy()
        with contextlib.ExitStack() as stack:
            wires = [stack.enter_context(Wire(cluster.nodes["n1"].port)) for _ in range(20)]
            for number, client in enumerate(wires):
                client.connect(f"alone-{number}")
            cluster.kill9("n2", "n3")
            late = stack.enter_context(Wire(cluster.nodes["n1"].port))
            late.send(wire.connect("late", props=[(wire.SESSION_EXPIRY, 600)]))
            until(lambda: is_refused(wires), "publishes are refused")
            connack = wire.read_connack(late.expect(wire.CONNACK), 5)
            assert connack.reason == SERVER_UNAVAILABLE
            cluster.restart("n3")
            last = wires.pop()
            until(lambda: last.publish("u/1", b"x", 1) == 0, "service goes on with the witness")
            back = stack.enter_context(Wire(cluster.nodes["n1"].port))
            assert back.connect("client", clean=False, expiry_s=600).session_present
            goes_on(back)
        assert sum(path.stat().st_size for path in witness.segments()) == 0


def goes_on(client: Wire) -> None:
    for number in range(8):
        assert client.publish(f"t/{number}", b"x", 1) == 0
    assert {client.message().topic for _ in range(8)} == {f"t/{number}" for number in range(8)}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    settings = {"cluster": {"partitions": 4, "min_insync": 1, "replication_factor": 2}}
    with ClusterProcesses(tmp_path_factory.mktemp("trio"), 3, settings) as cluster:
        yield cluster


def test_who_is_not_let_in(tmp_path: Path, trio: ClusterProcesses) -> None:
    """Another wire version, on either side, and another secret; each is told clearly."""
    other = WIRE_VERSION + 1
    preamble = MAGIC + other.to_bytes(2, "big") + bytes(NONCE_BYTES)
    node = trio.nodes["n1"]
    with socket.create_connection(("127.0.0.1", node.peer_port), timeout=10) as stranger:
        stranger.sendall(preamble)
        answer = b""
        while piece := stranger.recv(100):
            answer += piece
    assert answer[:10] == MAGIC + WIRE_VERSION.to_bytes(2, "big")
    refusal = f"speaks wire version {other}, this node speaks {WIRE_VERSION}: upgrade this node"
    until(lambda: node.log_text().count(refusal) == 1, "n1 says why")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outsider = ClusterNode(tmp_path / "n9", "n9", tmp_path / "n9.secret")
        outsider.secret_file.write_text("another secret, and long enough as well\n")
        outsider.secret_file.chmod(0o600)
        outsider.join = [node.peer_address, f"127.0.0.1:{listener.getsockname()[1]}"]
        outsider.start()
        try:
            listener.settimeout(10)
            accepted, _ = listener.accept()
            accepted.sendall(preamble)
            until(lambda: refusal in outsider.log_text(), "n9 says why")
            accepted.close()
            secret = "does not know this cluster's secret (cluster.secret_file)"
            until(lambda: secret in node.log_text(), "n1 does not take n9")
            hint = "has it the same cluster.secret_file?"
            until(lambda: hint in outsider.log_text(), "n9 knows where to look")
            assert [each["node"] for each in trio.status()["nodes"]] == ["n1", "n2", "n3"]
            assert outsider.readiness() == 503
        finally:
            outsider.kill()
    with Wire(node.port) as client:
        client.connect("client")
        assert client.publish("t", b"x", 1) == 0


def test_a_removed_node_comes_back_only_with_an_empty_disk(trio: ClusterProcesses) -> None:
    cluster = trio
    node = cluster.nodes["n3"]
    drain(cluster, "n3")
    until(lambda: not holds(cluster, "n3"), "n3 holds nothing")
    status, body = cluster.nodes["n1"].admin("/cluster/remove?node=n3", "POST")
    assert status == 200, body
    text = "n3 was removed from the cluster"
    until(lambda: text in node.log_text(), "n3 learns that it was removed")
    until(lambda: node.readiness() == 503, "n3 serves nobody")
    cluster.kill9("n3")
    before = node.log_text().count(text)
    cluster.restart("n3")
    until(lambda: node.log_text().count(text) > before, "n3 is refused again")

    def names() -> set[str]:
        return {each["node"] for name in ("n1", "n2") for each in cluster.status(name)["nodes"]}

    until(lambda: names() == {"n1", "n2"}, "both know")
    cluster.kill9("n3")
    shutil.rmtree(node.data)
    cluster.restart("n3")
    cluster.wait_healthy()
    assert "n3" in {each["node"] for each in cluster.status("n1")["nodes"]}


def is_refused(wires: list[Wire]) -> bool:
    """A publish of the last one. What the node cannot promise yet is not answered: that connection
    goes."""
    wires[-1].send(wire.publish("u/1", b"x", 1, 1))
    try:
        return wires[-1].expect(wire.PUBACK, timeout_s=0.5).reason == QUOTA_EXCEEDED
    except TimeoutError:
        wires.pop()
        return False


def holds(cluster: ClusterProcesses, name: str) -> int:
    """How many partitions it is a replica of."""
    return sum(
        name in each["replicas"] + each["adding"] for each in cluster.status("n1")["partitions"]
    )
