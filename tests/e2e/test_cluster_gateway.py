"""A gateway beside three real nodes: what it stores, and what its clients see of failures."""

import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import Wire

MESSAGES = 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("gateway"), 4, gateways=("n4",)) as processes:
        yield processes


def published(port: int, name: str, topic: str, qos: int) -> "subprocess.Popen[str]":
    """mosquitto_pub, which publishes each line of its input."""
    command = ["mosquitto_pub", "-p", str(port), "-V", "5", "-i", name, "-q", str(qos), "-l"]
    return subprocess.Popen([*command, "-t", topic], stdin=subprocess.PIPE, text=True)


@pytest.mark.parametrize("qos", [1, 2])
def test_leaders_die_under_the_clients_of_a_gateway(cluster: ClusterProcesses, qos: int) -> None:
    """Everything arrives in order, and once: the gateway sends what the next leader lacks."""
    cluster.wait_healthy()
    port = cluster.ports["n4"]
    topic = f"stream/{qos}"
    subscriber = Wire(port, 5, 60.0)
    subscriber.connect(f"reader-{qos}", False, 600)
    subscriber.subscribe((topic, 2))
    lines = [f"{number}\n" for number in range(MESSAGES)]
    publisher = published(port, f"writer-{qos}", topic, qos)
    assert publisher.stdin is not None
    victim = cluster.leader_of(cluster.partition_of(topic))
    for number, line in enumerate(lines):
        publisher.stdin.write(line)
        publisher.stdin.flush()
        if number == MESSAGES // 2:
            cluster.kill9(victim)
    publisher.stdin.close()
    received = [subscriber.message().payload.decode() for _ in range(MESSAGES)]
    assert publisher.wait(60) == 0
    assert received == [line.strip() for line in lines]
    subscriber.disconnect()
    cluster.restart(victim)


def test_a_session_goes_between_a_killed_gateway_and_a_node(cluster: ClusterProcesses) -> None:
    """Messages that are acknowledged while the gateway is down arrive there when it is back."""
    cluster.wait_healthy()
    with Wire(cluster.ports["n4"], 5, 30.0) as one:
        one.connect("mover", True, 600)
        one.subscribe(("moves/#", 2))
    cluster.kill9("n4")
    payloads = [b"%d" % number for number in range(300)]
    with Wire(cluster.ports["n1"], 5, 30.0) as writer:
        writer.connect("moves-writer")
        for number, payload in enumerate(payloads):
            writer.publish(f"moves/{number % 7}", payload, 1 + number % 2)
    cluster.restart("n4")
    until(lambda: cluster.nodes["n4"].readiness() == 200, "the gateway is ready")
    with Wire(cluster.ports["n4"], 5, 30.0) as one:
        assert one.connect("mover", False, 600).session_present
        received = Counter(one.message().payload for _ in payloads)
        assert received == Counter(payloads)
        one.ping()
    assert sum(path.stat().st_size for path in cluster.nodes["n4"].segments()) == 0


def test_the_role_of_a_directory_stays(cluster: ClusterProcesses) -> None:
    cluster.wait_healthy()
    roles = {each["node"]: (each["role"], each["voter"]) for each in cluster.status()["nodes"]}
    assert roles["n4"] == ("gateway", False)
    assert roles["n1"] == ("data", True)
    node = cluster.nodes["n3"]
    assert cluster.stop("n3") == 0
    node.is_gateway = True
    try:
        node.launch()
        assert node.process is not None
        assert node.process.wait(30) != 0
        assert "n3 is a data node of the cluster, not a gateway node" in node.log_text()
    finally:
        node.kill()
        node.is_gateway = False
    cluster.restart("n3")
    cluster.wait_healthy()
