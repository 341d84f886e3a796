"""`holdfast cluster` against real nodes: drain, remove, watch, and the metrics they have."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.node.context import UNAVAILABLE_S
from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import Wire

SETTINGS: dict[str, dict[str, Any]] = {"cluster": {"partitions": 12}}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("cluster"), 3, SETTINGS) as started:
        yield started


@pytest.fixture
def cluster(processes: ClusterProcesses) -> ClusterProcesses:
    """Of three nodes that are fine, whatever the test before has left."""
    dead = [name for name, node in processes.nodes.items() if node.process is None]
    processes.restart(*dead)
    processes.wait_healthy()
    return processes


def command(cluster: ClusterProcesses, name: str, *arguments: str) -> list[str]:
    return [
        *[sys.executable, "-m", "holdfast.cli.main", "cluster", *arguments],
        *["--admin", f"127.0.0.1:{cluster.nodes[name].admin_port}"],
    ]


def ask(cluster: ClusterProcesses, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(cluster, name, *arguments),
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=90,
    )


def led_by(cluster: ClusterProcesses, name: str) -> int:
    """How many partitions."""
    return sum(each["leader"] == name for each in cluster.status()["partitions"])


def publish(cluster: ClusterProcesses, name: str, count: int = 12) -> None:
    """To as many topics, so to several partitions."""
    with Wire(cluster.nodes[name].port) as wire:
        wire.connect(f"publisher-{name}")
        for number in range(count):
            assert wire.publish(f"t/{number}", b"x", 1) == 0


def test_any_node_tells_the_same(cluster: ClusterProcesses) -> None:
    results = {name: ask(cluster, name, "status", "--json") for name in cluster.nodes}
    assert {result.returncode for result in results.values()} == {0}
    views = [json.loads(result.stdout) for result in results.values()]
    assert [view["node"] for view in views] == ["n1", "n2", "n3"]
    assert len({view["cluster_id"] for view in views}) == 1
    assert all(view["healthy"] for view in views)
    leaders = {node["node"]: node["leaders"] for node in views[0]["nodes"]}
    assert sum(leaders.values()) == 12
    assert [node["client_address"] for node in views[0]["nodes"]] == cluster.addresses
    assert ask(cluster, "n1", "init").returncode == 2
    topic = ask(cluster, "n2", "partitions", "--json", "--topic", "a/b")
    (partition,) = json.loads(topic.stdout)
    assert partition["partition"] == cluster.partition_of("a/b")
    assert partition["leader"] == cluster.leader_of(partition["partition"])


def test_watch_tells_a_failover(cluster: ClusterProcesses) -> None:
    assert ask(cluster, "n2", "rebalance").returncode == 0
    until(lambda: led_by(cluster, "n3") > 0, "n3 leads something")
    watch = subprocess.Popen(
        command(cluster, "n1", "watch"),
        env={"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert watch.stdout is not None
        assert "healthy: 3 nodes" in watch.stdout.readline()
        cluster.kill9("n3")
        text = ""
        for line in watch.stdout:
            text += line
            if "node n3 down" in text and "leader n3 -> " in text:
                break
        else:
            pytest.fail(text)
    finally:
        watch.kill()
        watch.wait()
        if watch.stdout is not None:
            watch.stdout.close()
    cluster.wait_healthy({"n3"})
    publish(cluster, "n1")


def test_metrics_of_a_cluster(cluster: ClusterProcesses) -> None:
    for name in cluster.nodes:
        publish(cluster, name)
    texts = {name: node.admin("/metrics")[1] for name, node in cluster.nodes.items()}
    assert sum('holdfast_metadata_leader{node="' in text for text in texts.values()) == 3
    assert sum(f'leader{{node="{name}"}} 1' in text for name, text in texts.items()) == 1
    for name, text in texts.items():
        assert f'holdfast_metadata_majority{{node="{name}"}} 1' in text
        assert f'holdfast_partitions_under_replicated{{node="{name}"}} 0' in text
        assert f'holdfast_refused_total{{node="{name}",reason="min_insync"}} 0' in text
        for peer in cluster.nodes.keys() - {name}:
            assert f'holdfast_peer_connected{{node="{name}",peer="{peer}"}} 1' in text
        forwarded = next(
            line
            for line in text.splitlines()
            if line.startswith("holdfast_publish_forwarded_total")
        )
        assert float(forwarded.split()[-1]) > 0
        for kind in ("publish_acknowledge", "fdatasync"):
            assert observed(text, kind, name) > 0, kind
    # A node may lead no partition that was published to.
    assert sum(observed(text, "replication", name) for name, text in texts.items()) > 0


def observed(text: str, kind: str, name: str) -> float:
    """How many durations of this kind the node has observed."""
    count = f'holdfast_{kind}_seconds_count{{node="{name}"}}'
    (line,) = [each for each in text.splitlines() if each.startswith(count)]
    return float(line.split()[-1])


def test_an_election_is_no_lost_majority(cluster: ClusterProcesses) -> None:
    """In it no node is in contact with a majority, and publishes wait as for any change of leader.
    They are refused, and a node counts as without a majority, after UNAVAILABLE_S."""
    leader = cluster.metadata_leader()
    others = [name for name in cluster.nodes if name != leader]
    lost_s: list[float] = []
    began = time.monotonic()
    cluster.kill9(leader)

    def is_another_elected() -> bool:
        views = [cluster.status(name) for name in others]
        if not all(view["has_majority"] for view in views):
            lost_s.append(time.monotonic() - began)
        return all(view["metadata_leader"] in others for view in views)

    until(is_another_elected, "another leader of the metadata")
    # The last contact was before the kill.
    assert min(lost_s, default=UNAVAILABLE_S) > UNAVAILABLE_S - 0.6
    cluster.restart(leader)
    cluster.wait_healthy()


def test_readiness_needs_a_majority(cluster: ClusterProcesses) -> None:
    assert cluster.nodes["n1"].readiness() == 200
    cluster.kill9("n2", "n3")
    until(lambda: cluster.nodes["n1"].readiness() == 503, "n1 is not ready alone")
    result = ask(cluster, "n1", "status")
    assert result.returncode == 3
    assert result.stdout.splitlines()[0].startswith("no majority: n1 acknowledges nothing")
    line = "ERROR not_ready reason=no_majority"
    until(lambda: line in cluster.nodes["n1"].log_text(), "it is an error in the log")
    assert (
        'holdfast_not_ready{node="n1",reason="no_majority"} 1'
        in (cluster.nodes["n1"].admin("/metrics")[1])
    )


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """A cluster of three that no other test uses, because the order of tests is not fixed."""
    with ClusterProcesses(tmp_path, 3, SETTINGS) as started:
        started.wait_healthy()
        yield started


def test_drain_and_remove(own_cluster: ClusterProcesses) -> None:
    cluster = own_cluster
    refused = ask(cluster, "n1", "remove", "n3")
    assert refused.returncode == 2
    assert "drain it first" in refused.stderr
    drained = ask(cluster, "n1", "drain", "n3", "--timeout", "60")
    assert (drained.returncode, drained.stderr.count("Traceback")) == (0, 0), drained.stderr
    assert drained.stdout == (
        "n3 is drained: it leads nothing and holds no replica, and has no client\n"
    )
    # Clients are sent away.
    with Wire(cluster.ports["n3"]) as late:
        assert late.connect("late").reason == 0x9C
    status, body = cluster.nodes["n3"].admin("/readyz")
    assert (status, list(json.loads(body)["reasons"])) == (503, ["sends_away"])
    back = ask(cluster, "n2", "undrain", "n3")
    assert (back.returncode, back.stderr) == (0, "")
    cluster.wait_healthy()
    assert ask(cluster, "n1", "drain", "n3", "--timeout", "60").returncode == 0
    assert cluster.stop("n3") == 0
    removed = ask(cluster, "n2", "remove", "n3")
    assert (removed.returncode, removed.stdout) == (0, "n3 removed\n"), removed.stderr
    until(lambda: len(cluster.status("n1")["nodes"]) == 2, "n1 knows of it")
    publish(cluster, "n2")
