"""Real nodes under the controllers of Kubernetes, with the figures of deploy/kubernetes."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.rolling_traffic import Writer
from tests.e2e.test_cluster_rolling import GRACE_S, LONGEST_S, ended, publish_bytes, terminate
from tests.support.kubernetes import BASE

SPEC: dict[str, Any] = yaml.safe_load((BASE / "statefulset.yaml").read_text())["spec"]
BUDGET: dict[str, Any] = yaml.safe_load((BASE / "disruption.yaml").read_text())["spec"]
CATCH_UP_BYTES_PER_S = 500_000
"""At this pace a pod fetches what no other one has in memory in twice `minReadySeconds`."""
AVAILABLE_S = 240.0
"""The most seconds until then, on a busy machine."""
SETTINGS = {
    "cluster": {
        "stop_wait_s": GRACE_S,
        "catch_up_bytes_per_s": CATCH_UP_BYTES_PER_S,
        "partitions": 8,
    }
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class StatefulSet:
    """Does with the nodes what the controllers would do with pods."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self.cluster = cluster
        self.ready_at: dict[str, float] = {}

    def is_ready(self, name: str) -> bool:
        """Whether the readiness probe passes; notes since when."""
        node = self.cluster.nodes[name]
        if node.process is None or node.readiness() != 200:
            self.ready_at.pop(name, None)
            return False
        self.ready_at.setdefault(name, time.monotonic())
        return True

    def is_available(self, name: str) -> bool:
        """Whether it has been ready for `minReadySeconds` without a break."""
        ready = self.is_ready(name)
        return ready and time.monotonic() >= self.ready_at[name] + SPEC["minReadySeconds"]

    def update(self) -> None:
        """Replace each pod, the highest ordinal first. Each misses what is published meanwhile."""
        for name in reversed(self.cluster.nodes):
            terminate(self.cluster, name)
            assert ended(self.cluster, name) == 0
            publish_bytes([a for a in self.cluster.addresses if a != self.address(name)])
            self.cluster.restart(name)
            until(lambda name=name: self.is_available(name), "available", AVAILABLE_S)  # type: ignore[misc]
            in_sync = [set(each["in_sync"]) for each in self.cluster.status()["partitions"]]
            assert all(name in each for each in in_sync), "it has fetched what it missed"

    def evict(self, name: str) -> bool:
        """The eviction that `kubectl drain` requests until the budget allows it."""
        unready = sum(not self.is_ready(each) for each in self.cluster.nodes)
        if unready >= BUDGET["maxUnavailable"]:
            return False
        terminate(self.cluster, name)
        return True

    def address(self, name: str) -> str:
        node = self.cluster.nodes[name]
        return f"{node.host}:{node.port}"


def served(stack: ExitStack, cluster: ClusterProcesses, count: int = 3) -> None:
    """At the end of `stack`, no publish to the first nodes was refused or waited for long."""
    servers = cluster.addresses[:count]
    writers = [Writer(f"w{at}", servers[at:] + servers[:at]) for at in range(count)]

    def check() -> None:
        for writer in writers:
            writer.stop()
        assert {reason for writer in writers for reason in writer.reasons} == {0}
        assert max(writer.longest_s for writer in writers) < LONGEST_S

    for writer in writers:
        writer.start()
    stack.callback(check)


def test_an_update_with_min_ready_seconds(tmp_path: Path) -> None:
    """A pod is not ready while it lags, so it is available only when it has what it missed."""
    with ClusterProcesses(tmp_path, settings=SETTINGS) as cluster, ExitStack() as stack:
        served(stack, cluster)
        StatefulSet(cluster).update()
        cluster.wait_healthy()
        logs = [node.log_text() for node in cluster.nodes.values()]
        assert ["reason=lags" in each for each in logs] == [True] * 3


def test_two_machines_are_drained_at_once(tmp_path: Path) -> None:
    """The budget lets one pod go. The other eviction is refused until that pod is ready elsewhere,
    and then waits until it is in sync."""
    with ClusterProcesses(tmp_path, settings=SETTINGS) as cluster, ExitStack() as stack:
        served(stack, cluster)
        pods = StatefulSet(cluster)
        assert pods.evict("n3")
        assert ended(cluster, "n3") == 0
        assert not pods.evict("n2"), "the budget is used up"
        publish_bytes(cluster.addresses[:2])
        cluster.restart("n3")
        until(lambda: pods.evict("n2"), "the budget allows another one")
        assert ended(cluster, "n2") == 0
        assert "stop_waits" in cluster.nodes["n2"].log_text()
        cluster.restart("n2")
        cluster.wait_healthy()


def test_three_pods_five_and_three_again_without_a_drain(tmp_path: Path) -> None:
    """The StatefulSet ends the two highest ordinals at once. Partitions with two replicas there
    would be refused, so one pod waits until they have replicas elsewhere."""
    with ClusterProcesses(tmp_path, settings=SETTINGS) as cluster, ExitStack() as stack:
        for _ in range(2):
            cluster.add_node()
        cluster.wait_healthy()
        until(
            lambda: all(
                any(name in each["in_sync"] for each in cluster.status()["partitions"])
                for name in ("n4", "n5")
            ),
            "the new nodes have replicas",
        )
        served(stack, cluster)
        pairs = [
            each["partition"]
            for each in cluster.status()["partitions"]
            if {"n4", "n5"} <= set(each["in_sync"])
        ]
        assert pairs
        terminate(cluster, "n4", "n5")
        assert [ended(cluster, name) for name in ("n4", "n5")] == [0, 0]
        until(
            lambda: all(
                len({"n1", "n2", "n3"} & set(each["in_sync"])) == 3
                for each in cluster.status("n1")["partitions"]
            ),
            "all partitions have three replicas again",
        )
        for name in ("n4", "n5"):
            code, body = cluster.nodes["n1"].admin(f"/cluster/remove?node={name}", "POST")
            assert code == 200, body
            del cluster.nodes[name]
        cluster.wait_healthy()
