"""Nodes that are restarted one after the other, under traffic."""

import signal
import subprocess
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from holdfast.client import Options, PublishRefused, Reconnect
from holdfast.client.blocking import Client
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.rolling_traffic import Writer, rolling_traffic

LONGEST_S = 15.0
"""The most seconds that one publish may wait: those of a reconnect on a loaded machine."""


def test_a_rolling_restart_loses_and_refuses_nothing(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        servers = cluster.addresses
        orders = [servers[at:] + servers[:at] for at in range(3)]
        with rolling_traffic(servers, orders) as traffic:
            traffic.start()
            for name in cluster.nodes:
                traffic.wait()
                assert cluster.stop(name) == 0
                cluster.restart(name)
                cluster.wait_healthy()


MISSED_BYTES = 44_000_000
"""The bytes that are published to one partition while a pod is away. Its leader has the last 32 MiB
of them in memory, and sends the others at CATCH_UP_BYTES_PER_S."""
CATCH_UP_BYTES_PER_S = 2_000_000
PAYLOAD_BYTES = 1_000_000
GRACE_S = 60.0
"""`terminationGracePeriodSeconds`: afterwards follows SIGKILL."""


def publish_bytes(servers: list[str]) -> None:
    """Publish MISSED_BYTES to one partition."""
    with Client(servers=servers, options=Options(client_id="bulk"), reconnect=Reconnect()) as bulk:
        for _ in range(MISSED_BYTES // PAYLOAD_BYTES):
            assert bulk.publish("bulk", bytes(PAYLOAD_BYTES), qos=1).reason == 0


def update_stateful_set(cluster: ClusterProcesses) -> None:
    """Restart all pods as the controller of a StatefulSet does: the highest ordinal first, SIGTERM
    with a grace period, and the next one as soon as this one is ready."""
    for name, node in reversed(cluster.nodes.items()):
        assert node.process is not None
        node.process.send_signal(signal.SIGTERM)
        node.process.wait(GRACE_S)
        node.process = None
        publish_bytes([each for each in cluster.addresses if each != f"{node.host}:{node.port}"])
        cluster.restart(name)
        until(lambda node=node: node.readiness() == 200, "ready")


@pytest.mark.parametrize("stop_wait_s", [pytest.param(0.0, marks=pytest.mark.long), GRACE_S / 2])
def test_a_rolling_update_waits_for_what_its_last_pod_missed(
    tmp_path: Path, stop_wait_s: float
) -> None:
    """A pod is ready long before it has fetched what it missed. Without a wait, the stop of the
    next one leaves one replica in sync, and the cluster refuses publishes."""
    settings = {
        "cluster": {
            "stop_wait_s": stop_wait_s,
            "catch_up_bytes_per_s": CATCH_UP_BYTES_PER_S,
            "partitions": 8,
        }
    }
    with ClusterProcesses(tmp_path, settings=settings) as cluster:
        servers = cluster.addresses
        writers = [Writer(f"w{at}", servers[at:] + servers[:at]) for at in range(3)]
        # On a busy machine the replicas of a new cluster are in sync only after a moment.
        before = [node.log_text() for node in cluster.nodes.values()]
        for writer in writers:
            writer.start()
        # Without the wait the bulk publishes meet a refusal, or only the delay before one.
        with nullcontext() if stop_wait_s else suppress(PublishRefused):
            update_stateful_set(cluster)
        for writer in writers:
            writer.stop()
        texts = [node.log_text() for node in cluster.nodes.values()]
        logs = [text.removeprefix(old) for text, old in zip(texts, before, strict=True)]
        is_refused = any("not_ready reason=below_min_insync" in each for each in logs)
        assert is_refused == (stop_wait_s == 0)
        if stop_wait_s:
            assert {reason for writer in writers for reason in writer.reasons} == {0}
            assert max(writer.longest_s for writer in writers) < LONGEST_S
            assert sum("stop_waits" in each for each in logs) == 2, "all but the first pod waited"
            assert sum("stop_continues" in each for each in logs) == 2


def terminate(cluster: ClusterProcesses, *names: str) -> list[subprocess.Popen[bytes]]:
    """Send SIGTERM to several nodes at the same moment; `restart` starts them again."""
    processes = [process for name in names if (process := cluster.nodes[name].process) is not None]
    for process in processes:
        process.send_signal(signal.SIGTERM)
    return processes


def ended(cluster: ClusterProcesses, name: str) -> int:
    """The exit code of a node that received SIGTERM."""
    node = cluster.nodes[name]
    assert node.process is not None
    code, node.process = node.process.wait(GRACE_S), None
    return code


def test_of_two_that_stop_at_once_one_waits_for_the_other(tmp_path: Path) -> None:
    """Each alone could be spared. Both together would leave no majority."""
    with ClusterProcesses(tmp_path) as cluster:
        writer = Writer("w", [cluster.addresses[2]])
        writer.start()
        _, second = terminate(cluster, "n1", "n2")
        assert ended(cluster, "n1") == 0
        assert second.poll() is None
        cluster.restart("n1")
        assert ended(cluster, "n2") == 0
        cluster.restart("n2")
        cluster.wait_healthy()
        writer.stop()
        assert set(writer.reasons) == {0}
        assert "stop_waits" not in cluster.nodes["n1"].log_text()
        assert "stop_waits" in cluster.nodes["n2"].log_text()


def test_all_stop_at_once(tmp_path: Path) -> None:
    """Nobody is left to be served, so none waits."""
    with ClusterProcesses(tmp_path, settings={"cluster": {"stop_wait_s": 3600.0}}) as cluster:
        terminate(cluster, *cluster.nodes)
        assert [ended(cluster, name) for name in cluster.nodes] == [0, 0, 0]
