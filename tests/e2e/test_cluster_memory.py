"""A cluster that acknowledges what every replica in sync has in its file, and no disk yet."""

from pathlib import Path

from holdfast.io.disk import unsynced
from holdfast.io.disk.process_identity import boot_identity
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.files.layout import segment_name
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses
from tests.e2e.wire import Wire
from tests.support.stored_messages import stored_messages

SETTINGS = {
    "cluster": {"partitions": 4, "stop_wait_s": 0},
    "log": {"durability": "memory", "commit_gather_ms": 1},
}
LOST = "acknowledged_records_may_be_lost"


class Messages:
    """The messages that were acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []

    def publish(self, node: ClusterNode, count: int) -> None:
        with Wire(node.port) as wire:
            wire.connect("writer")
            for _ in range(count):
                payload = f"message {len(self.acknowledged)}"
                if wire.publish(f"t/{len(self.acknowledged) % 7}", payload.encode(), 1) < 0x80:
                    self.acknowledged.append(payload)

    def check(self, cluster: ClusterProcesses) -> None:
        """Stop the nodes. The log of each has every message once."""
        cluster.wait_healthy()
        for name, node in cluster.nodes.items():
            assert cluster.stop(name) == 0
            found = [each.payload.decode() for each in stored_messages(node.data, "t/+")]
            assert sorted(found) == sorted(self.acknowledged), name


def lose_the_end(node: ClusterNode) -> bool:
    """Do to the directory of a killed node what a power cut may do; False: all is synced."""
    directory = open_to_read(node.data)
    checkpoint = directory.read_checkpoint()
    path = node.data / segment_name(checkpoint.segment)
    assert checkpoint.segment == max(directory.segments())
    if path.stat().st_size == checkpoint.position:
        return False
    with path.open("r+b") as file:
        file.truncate(checkpoint.position)
    (node.data / unsynced.NAME).write_text("another boot")
    return True


def test_killed_processes_lose_nothing(tmp_path: Path) -> None:
    messages = Messages()
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        nodes = list(cluster.nodes.values())
        for node in nodes:
            messages.publish(node, 50)
            cluster.kill9(node.node_id)
            cluster.restart(node.node_id)
            cluster.wait_healthy()
        messages.publish(nodes[0], 50)
        # All at once: the system has what they have written.
        cluster.kill9(*cluster.nodes)
        cluster.restart(*cluster.nodes)
        messages.check(cluster)
        assert not any(LOST in node.log_text() for node in nodes)
        assert not any((node.data / unsynced.NAME).exists() for node in nodes)
    assert len(messages.acknowledged) == 200


def test_a_machine_that_loses_power_does_not_lead_before_it_has_everything(tmp_path: Path) -> None:
    messages = Messages()
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        n1, n2, n3 = cluster.nodes.values()
        for _ in range(20):
            messages.publish(n1, 30)
            cluster.kill9("n2")
            if lose_the_end(n2):
                break
            cluster.restart("n2")
            cluster.wait_healthy()
        # Only n3 is left that has everything.
        cluster.kill9("n1")
        cluster.restart("n2")
        cluster.wait_healthy(without={"n1"})
        assert LOST in n2.log_text()
        assert (n2.data / unsynced.NAME).read_text() == boot_identity()
        messages.publish(n2, 30)
        cluster.restart("n1")
        messages.check(cluster)
        assert not any(LOST in node.log_text() for node in (n1, n3))


def test_all_machines_lose_power_and_the_cluster_goes_on(tmp_path: Path) -> None:
    """It has what one of them has. No replica is thrown away."""
    messages = Messages()
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        for node in cluster.nodes.values():
            messages.publish(node, 30)
        cluster.kill9(*cluster.nodes)
        for node in cluster.nodes.values():
            lose_the_end(node)
            (node.data / unsynced.NAME).write_text("another boot")
        cluster.restart(*cluster.nodes)
        cluster.wait_healthy()
        messages.publish(node, 1)
        newest = messages.acknowledged[-1]
        logs = []
        for name, node in cluster.nodes.items():
            assert cluster.stop(name) == 0
            assert LOST in node.log_text()
            assert "begins_anew" not in node.log_text()
            logs.append([each.payload for each in stored_messages(node.data, "t/+")])
        assert newest.encode() in logs[0]
        assert all(sorted(each) == sorted(logs[0]) for each in logs)
