"""A cluster that its nodes create without a command: one, whatever starts first or is lost."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.test_cluster_operations import ask
from tests.e2e.wire import Wire

SETTINGS: dict[str, dict[str, object]] = {"cluster": {"partitions": 8, "wait_for_init": False}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """Three nodes, none started, each with the addresses of `join` in another order."""
    made = ClusterProcesses(tmp_path, 3, SETTINGS)
    for number, node in enumerate(made.nodes.values()):
        node.join = node.join[number:] + node.join[:number]
    yield made
    made.end()
    for node in made.nodes.values():
        assert "Traceback" not in node.log_text(), made.logs()


def start(*nodes: ClusterNode) -> None:
    for node in nodes:
        node.launch()
    for node in nodes:
        node.await_ready()


def waits_for(node: ClusterNode, *others: ClusterNode) -> bool:
    return set(node.cluster()["waits_for"]) == {each.peer_address for each in others}


def test_it_is_created_when_all_are_connected(cluster: ClusterProcesses) -> None:
    """Two of three would be a majority, and still wait: the third may belong to a cluster."""
    first, second, third = cluster.nodes.values()
    fourth = cluster._make_node()
    fourth.join = [node.peer_address for node in (first, second, third)]
    # A node that no list names never creates it, although its id is the smallest.
    fourth.node_id = "a0"
    start(second, third, fourth)
    until(lambda: waits_for(second, first) and waits_for(third, first), "the two wait")
    until(lambda: waits_for(fourth, first), "the fourth waits")
    text = ask(cluster, "n2", "status").stdout
    assert f"no cluster yet: n2 waits for {first.peer_address}" in text
    assert f"cluster_creation_waits addresses={first.peer_address}" in second.log_text()
    start(first)
    cluster.wait_healthy()
    assert {node.cluster()["cluster_id"] for node in cluster.nodes.values()} == {
        first.cluster()["cluster_id"]
    }


def test_a_lost_disk_makes_no_second_cluster(cluster: ClusterProcesses) -> None:
    """The node that created the cluster returns with an empty disk before the others are up."""
    first, second, third = cluster.nodes.values()
    start(first, second, third)
    cluster.wait_healthy()
    cluster_id = first.cluster()["cluster_id"]
    with Wire(second.port) as client:
        client.connect("c")
        client.publish("t", b"kept", qos=1, retain=True)
    cluster.kill9("n1", "n2", "n3")
    shutil.rmtree(first.data)
    start(first)
    until(lambda: waits_for(first, second, third), "the empty one waits")
    assert not first.cluster()["initialised"]
    start(second)
    until(lambda: second.cluster()["cluster_id"] == cluster_id, "the second has its cluster")
    start(third)
    cluster.wait_healthy()
    assert first.cluster()["cluster_id"] == cluster_id
    with Wire(first.port) as client:
        client.connect("d")
        client.subscribe(("t", 1))
        assert client.message().payload == b"kept"
