"""A replica whose disk has changed what was on it."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.wire import Wire


def test_a_damaged_replica_does_not_lead(tmp_path: Path) -> None:
    """It says what to do, the others go on, and with an empty disk it has everything again."""
    with ClusterProcesses(tmp_path) as cluster:
        ports = list(cluster.ports.values())
        with Wire(ports[0]) as writer:
            writer.connect("writer")
            for number in range(100):
                assert writer.publish(f"d/{number % 9}", b"x" * 100, 1) < 0x80
        node = cluster.nodes["n3"]
        assert cluster.stop("n3") == 0
        segment = min((node.data / "journal").glob("*.log"))
        data = bytearray(segment.read_bytes())
        data[200] ^= 0xFF
        segment.write_bytes(data)
        with pytest.raises(RuntimeError, match=r"are damaged.*start with an empty one"):
            node.start()
        with Wire(ports[1]) as writer:
            writer.connect("writer")
            assert writer.publish("d/0", b"x", 1) < 0x80
        shutil.rmtree(node.data)
        cluster.restart("n3")
        cluster.wait_healthy()
