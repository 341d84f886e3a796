"""A broker that serves alone becomes the first node of a cluster, and serves alone again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.cli.main import main
from tests.e2e import wire
from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import ClusterProcesses, until

PAYLOADS = {b"%d" % number for number in range(8)}


@contextmanager
def site(directory: Path) -> Iterator[tuple[Holdfast, ClusterProcesses]]:
    """A broker that serves alone, and the cluster whose first node has its directory. Neither is
    started."""
    cluster = ClusterProcesses(directory / "cluster", 2, {"cluster": {"partitions": 4}})
    alone = Holdfast(directory / "alone", {"log": {"partitions": 4}}, cluster.nodes["n1"].data)
    alone.directory.mkdir()
    alone.processes = 1
    try:
        yield alone, cluster
    finally:
        alone.kill()
        cluster.end()


def test_from_one_node_to_two_and_back(tmp_path: Path) -> None:
    with site(tmp_path) as (alone, cluster):
        first, second = cluster.nodes["n1"], cluster.nodes["n2"]
        alone.start()
        with wire.Wire(alone.port) as client:
            client.connect("c", expiry_s=1000)
            client.subscribe(("a/#", 1))
            for payload in sorted(PAYLOADS):
                client.publish(f"a/{payload.decode()}", payload, 1)
            client.abort()
        assert alone.stop() == 0

        cluster.restart("n1", "n2")
        until(lambda: second.readiness() == 200, "n2 serves")
        assert {each["node"] for each in first.cluster()["nodes"]} == {"n1", "n2"}
        with wire.Wire(second.port) as client:
            assert client.connect("c", clean=False, expiry_s=1000).session_present
            assert {client.message().payload for _ in PAYLOADS} == PAYLOADS
            client.abort()

        def operate(*arguments: str) -> int:
            return main(["cluster", *arguments, "--admin", f"127.0.0.1:{first.admin_port}"])

        assert operate("drain", "n2", "--timeout", "60") == 0
        assert second.stop() == 0
        assert operate("remove", "n2") == 0
        assert first.stop() == 0
        alone.start()
        with wire.Wire(alone.port) as client:
            assert client.connect("c", clean=False, expiry_s=1000).session_present


def test_a_shared_group_loses_nothing_when_its_only_node_is_killed_and_grows(
    tmp_path: Path,
) -> None:
    """Only the inflight entries of a member say what it has, and no log has those."""
    with site(tmp_path) as (alone, cluster):
        second = cluster.nodes["n2"]
        alone.start()
        with wire.Wire(alone.port) as client, wire.Wire(alone.port) as publisher:
            client.connect("c", expiry_s=1000)
            client.subscribe(("$share/g/a/#", 1))
            publisher.connect("p")
            for payload in sorted(PAYLOADS):
                publisher.publish(f"a/{payload.decode()}", payload, 1)
            for _ in PAYLOADS:
                client.expect(wire.PUBLISH)
            alone.kill()

        cluster.restart("n1", "n2")
        until(lambda: second.readiness() == 200, "n2 serves")
        with wire.Wire(second.port) as client:
            client.connect("other")
            client.subscribe(("$share/g/a/#", 1))
            assert {client.message().payload for _ in PAYLOADS} == PAYLOADS
