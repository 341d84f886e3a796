"""A node whose disk does not answer, though everything else of it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import DISCONNECT, Wire
from tests.support.faulty_disk import FaultyDisk, faulty_disk, missing

USE_ANOTHER_SERVER = 0x9C
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@contextmanager
def with_hanging_disk(
    tmp_path: Path, stall_s: float
) -> Iterator[tuple[ClusterProcesses, FaultyDisk]]:
    """A cluster whose n1 has a disk that can hang."""
    settings = {"cluster": {"partitions": 6, "disk_stall_s": stall_s}}
    cluster = ClusterProcesses(tmp_path / "cluster", 3, settings)
    with faulty_disk(tmp_path / "disk") as disk:
        cluster.nodes["n1"].data = disk.directory / "data"
        with cluster:
            until(lambda: cluster.status()["not_preferred"] == 0, "every node leads its share")
            try:
                yield cluster, disk
            finally:
                # Nobody can be killed while it waits for its disk.
                disk.go_on()


def topics_led_by(cluster: ClusterProcesses, name: str) -> list[str]:
    topics = [f"t/{number}" for number in range(60)]
    led = [topic for topic in topics if cluster.leader_of(cluster.partition_of(topic)) == name]
    assert led, f"{name} leads nothing"
    return led


def in_sync(cluster: ClusterProcesses, of: str) -> list[int]:
    """The partitions in which a node is in sync, as n2 sees it."""
    partitions = cluster.status("n2")["partitions"]
    return [each["partition"] for each in partitions if of in each["in_sync"]]


def state_of(cluster: ClusterProcesses, name: str) -> str:
    (state,) = (each["state"] for each in cluster.status("n2")["nodes"] if each["node"] == name)
    return str(state)


def test_a_leader_with_a_hanging_disk_is_replaced_and_comes_back(tmp_path: Path) -> None:
    with with_hanging_disk(tmp_path, 1.0) as (cluster, disk):
        port = cluster.ports["n2"]
        with (
            Wire(port, timeout_s=PATIENCE_S) as writer,
            Wire(cluster.ports["n1"], timeout_s=PATIENCE_S) as guest,
            Wire(cluster.ports["n1"], version=4, timeout_s=PATIENCE_S) as old_guest,
        ):
            writer.connect("writer")
            guest.connect("guest")
            old_guest.connect("old-guest")
            topics = topics_led_by(cluster, "n1")
            assert writer.publish(topics[0], b"before", 1) == 0
            disk.hang()
            # The answer comes from those who took over: the disk still hangs.
            assert writer.publish(topics[0], b"during", 1) == 0
            assert disk.hangs
            until(lambda: state_of(cluster, "n1") == "down", "n1 counts as down")
            until(lambda: not in_sync(cluster, "n1"), "n1 is in sync nowhere")
            until(lambda: cluster.status("n2")["metadata_leader"] in ("n2", "n3"), "new leader")
            for topic in topics:
                assert writer.publish(topic, b"during", 1) == 0
            sent_away = guest.expect(DISCONNECT)
            assert sent_away.reason == USE_ANOTHER_SERVER
            assert f":{port}".encode() in sent_away.body
            old_guest.wait_closed(PATIENCE_S)
            until(lambda: cluster.nodes["n1"].readiness() == 503, "n1 is not ready")
            metrics = cluster.nodes["n1"].admin("/metrics")[1]
            assert 'holdfast_disk_stalled{node="n1"} 1.0' in metrics
            disk.go_on()
            cluster.wait_healthy()
            assert writer.publish(topics[0], b"after", 1) == 0
        with Wire(cluster.ports["n1"]) as back:
            back.connect("guest")
            assert back.publish("t/0", b"x", 1) == 0
        log = cluster.nodes["n1"].log_text()
        assert "disk_stalled" in log
        assert "disk_goes_on" in log


def test_a_follower_with_a_hanging_disk_is_not_waited_for(tmp_path: Path) -> None:
    """By what it has acknowledged: nobody says that it is down."""
    with (
        with_hanging_disk(tmp_path, 600.0) as (cluster, disk),
        Wire(cluster.ports["n2"], timeout_s=PATIENCE_S) as writer,
    ):
        writer.connect("writer")
        topics = topics_led_by(cluster, "n2") + topics_led_by(cluster, "n3")
        partitions = {cluster.partition_of(topic) for topic in topics}
        disk.hang()
        for topic in topics:
            assert writer.publish(topic, b"during", 1) == 0
        # Leaders know before n2 does.
        until(lambda: partitions.isdisjoint(in_sync(cluster, "n1")), "n1 has left them")
        assert state_of(cluster, "n1") == "up"
        disk.go_on()
        cluster.wait_healthy()
        assert len(in_sync(cluster, "n1")) == 6
