"""A node that was removed while it could not be told, and runs on."""

from pathlib import Path

from holdfast import __version__
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.test_cluster_operations import ask
from tests.e2e.wire import DISCONNECT, Wire

USE_ANOTHER_SERVER = 0x9C
SERVER_UNAVAILABLE_V3 = 3
PATIENCE_S = 60.0


def test_it_sends_its_clients_away(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, {"cluster": {"partitions": 6}}) as cluster:
        port = cluster.ports["n3"]
        reference = f"127.0.0.1:{cluster.ports['n1']} 127.0.0.1:{cluster.ports['n2']}"
        with (
            Wire(port, timeout_s=PATIENCE_S) as guest,
            Wire(port, version=4, timeout_s=PATIENCE_S) as old_guest,
        ):
            guest.connect("guest")
            old_guest.connect("old-guest")
            cluster.pause("n3")
            drained = ask(cluster, "n1", "drain", "n3", "--timeout", "60")
            assert drained.returncode == 0, drained.stderr
            removed = ask(cluster, "n1", "remove", "n3")
            assert removed.returncode == 0, removed.stderr
            cluster.resume("n3")
            sent_away = guest.expect(DISCONNECT)
            assert sent_away.reason == USE_ANOTHER_SERVER
            assert reference.encode() in sent_away.body
            assert b"was removed from the cluster" in sent_away.body
            old_guest.wait_closed(PATIENCE_S)
        with Wire(port) as late:
            answer = late.connect("late")
            assert answer.reason == USE_ANOTHER_SERVER
        with Wire(port, version=4) as late:
            assert late.connect("late").reason == SERVER_UNAVAILABLE_V3
        until(lambda: cluster.nodes["n3"].readiness() == 503, "n3 is not ready")
        assert cluster.nodes["n3"].log_text().count("node_removed") == 1
        status = ask(cluster, "n3", "status")
        assert status.stdout.startswith("n3 was removed from the cluster: stop it")
        assert status.returncode == 1
        nodes = ask(cluster, "n1", "nodes")
        assert nodes.stdout.count(__version__) == 2, nodes.stdout
        with Wire(cluster.ports["n1"]) as there:
            there.connect("guest")
            assert there.publish("t", b"x", 1) == 0
