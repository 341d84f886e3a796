"""A replica whose disk has changed what was on it."""

import http.client
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.wire import DISCONNECT, Wire

SETTINGS = {
    "cluster": {"partitions": 6},
    "log": {"segment_bytes": 1 << 16},
}
USE_ANOTHER_SERVER = 0x9C
COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
COUNT = 300
TOPICS = 9


def fill(cluster: ClusterProcesses, port: int, count: int = COUNT) -> None:
    with Wire(port) as writer:
        writer.connect("writer")
        for number in range(count):
            assert writer.publish(f"d/{number % TOPICS}", b"%08d" % number + b"x" * 600, 1) < 0x80


def change(path: Path, position: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def oldest_segment(node: ClusterNode) -> Path:
    segment: Path = min((node.data / "journal").glob("*.log"))
    return segment


def read_code(node: ClusterNode, partition: int) -> int:
    """HTTP status of a read of all that a partition has."""
    return read(node, partition)[0]


def read_body(node: ClusterNode, partition: int) -> bytes:
    status, body = read(node, partition)
    assert status == 200
    return body


def read(node: ClusterNode, partition: int) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", node.admin_port, timeout=10)
    try:
        connection.request("GET", f"/api/v1/log/{partition}?start=0")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_fetched_anew(cluster: ClusterProcesses, name: str) -> None:
    node = cluster.nodes[name]
    until(lambda: "begins_anew" in node.log_text(), f"{name} begins anew")
    cluster.wait_healthy()
    until(lambda: not (node.data / "damaged").exists(), "what was put aside is removed")
    assert list((node.data / "quarantine").iterdir()), "the damaged place is kept"


def test_damage_found_at_the_start(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        fill(cluster, cluster.ports["n1"])
        node = cluster.nodes["n3"]
        assert cluster.stop("n3") == 0
        segment = oldest_segment(node)
        # Nobody remembers it: it is read whole.
        segment.with_suffix(".idx").unlink(missing_ok=True)
        change(segment, 300)
        cluster.restart("n3")
        with Wire(cluster.ports["n2"]) as writer:
            writer.connect("writer")
            assert writer.publish("d/0", b"x", 1) < 0x80
        wait_fetched_anew(cluster, "n3")
        assert "partitions_damaged" in node.log_text()
        assert oldest_segment(node).read_bytes()


def test_damage_found_when_a_session_reads(tmp_path: Path) -> None:
    """In a segment that was sealed long ago. The client gets all of it, from another node."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        node = cluster.nodes["n2"]
        with Wire(node.port) as reader:
            reader.connect("reader", clean=False, expiry_s=3600)
            reader.subscribe(("d/+", 1))
        fill(cluster, cluster.ports["n1"])
        until(lambda: len(node.segments()) > 2, "the oldest segment is sealed")
        segment = oldest_segment(node)
        change(segment, segment.stat().st_size // 2)
        received: set[bytes] = set()
        with Wire(node.port, timeout_s=30.0) as reader:
            reader.connect("reader", clean=False, expiry_s=3600)
            while True:
                frame = reader.receive()
                if frame.kind == DISCONNECT:
                    assert frame.reason == USE_ANOTHER_SERVER
                    break
        assert "journal_damaged" in node.log_text()
        assert "node_damaged" in node.log_text()
        with Wire(cluster.ports["n3"], timeout_s=30.0) as reader:
            assert reader.connect("reader", clean=False, expiry_s=3600).session_present
            while len(received) < COUNT:
                received.add(reader.message().payload[:8])
        wait_fetched_anew(cluster, "n2")


def test_damage_found_when_another_node_fetches(tmp_path: Path) -> None:
    """Both of the others are asked: one gives what it has, the other one what nobody can read."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        fill(cluster, cluster.ports["n1"])
        node = cluster.nodes["n1"]
        until(lambda: len(node.segments()) > 2, "the oldest segment is sealed")
        cluster.kill9("n3")
        cluster.wait_healthy(without=["n3"])
        # After a restart nothing of it is in memory.
        cluster.kill9("n1", "n2")
        segment = oldest_segment(node)
        for part in range(1, 20):
            change(segment, segment.stat().st_size * part // 20)
        shutil.rmtree(cluster.nodes["n3"].data)
        cluster.restart("n1", "n2", "n3")
        wait_fetched_anew(cluster, "n1")
        with Wire(cluster.ports["n3"], timeout_s=30.0) as reader:
            reader.connect("late")
        for name in cluster.nodes:
            kept = subprocess.run(
                [*COMMAND, "log", "verify", str(cluster.nodes[name].data)],
                env={"PYTHONPATH": str(SOURCE)},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert kept.returncode == 0, kept.stdout + kept.stderr


def test_damage_found_by_a_reader_of_the_log(tmp_path: Path) -> None:
    """What it gets is whole, or nothing, never something with a hole."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        fill(cluster, cluster.ports["n1"])
        node = cluster.nodes["n2"]
        until(lambda: len(node.segments()) > 2, "the oldest segment is sealed")
        segment = oldest_segment(node)
        change(segment, segment.stat().st_size // 2)
        codes = [read_code(node, partition) for partition in range(6)]
        assert 503 in codes
        assert node.admin("/api/v1/log")[0] == 503
        wait_fetched_anew(cluster, "n2")
        answers = [read_code(node, partition) for partition in range(6)]
        assert answers == [200] * 6


def test_damage_at_the_end_of_a_leader_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """All are killed within a second of a publish, and one bit of the leader's last record changes.
    Nobody remembers how far it was. The others must not cut the record off to follow it."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        fill(cluster, cluster.ports["n1"], 40)
        partition = cluster.partition_of("d/0")
        leader = cluster.leader_of(partition)
        node = cluster.nodes[leader]
        with Wire(cluster.ports["n1"], timeout_s=20.0) as writer:
            writer.connect("writer")
            assert writer.publish("d/0", b"newest" + b"x" * 600, 1) < 0x80
        cluster.kill9(*cluster.nodes)
        segment = node.segments()[-1]
        change(segment, segment.read_bytes().rindex(b"newest") + 100)
        cluster.restart(*cluster.nodes)
        cluster.wait_healthy()
        for name in cluster.nodes:
            assert b"newest" in read_body(cluster.nodes[name], partition), f"{name} has lost it"
        assert "partitions_damaged" in node.log_text()
