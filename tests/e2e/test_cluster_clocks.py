"""One node's wall clock is wrong: nothing ends too soon anywhere."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.mqtt.reasons import SERVER_BUSY
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.wire import Closed, Connack, Wire

DAYS_2_S = 2 * 86_400
EXPIRY_S = 600
SETTINGS: dict[str, dict[str, Any]] = {"cluster": {"partitions": 6}}
SESSIONS = 12


def set_clock(node: ClusterNode, skew_s: float) -> None:
    (node.data.parent / "skew").write_text(str(skew_s))


def attempt(port: int, client_id: str, act: Callable[[Wire, Connack], bool]) -> bool:
    """False: the node was taken for lost for a moment, which ends what its clients begin. They come
    again."""
    with Wire(port, timeout_s=20.0) as one:
        try:
            answer = one.connect(client_id, clean=False, expiry_s=EXPIRY_S)
            if answer.reason == SERVER_BUSY:
                return False
            assert answer.reason == 0
            return act(one, answer)
        except Closed:
            return False


def leave(cluster: ClusterProcesses, name: str, prefix: str) -> None:
    """Sessions that are closed now, with a message for each."""
    for number in range(SESSIONS):
        client_id, topic = f"{prefix}{number}", f"{prefix}/{number}"

        def subscribe(one: Wire, _: Connack, topic: str = topic) -> bool:
            return one.subscribe((topic, 1)) == [1]

        def publish(one: Wire, _: Connack, topic: str = topic) -> bool:
            return one.publish(topic, b"kept", 1) < 0x80

        until(partial(attempt, cluster.ports[name], client_id, subscribe), client_id)
        until(partial(attempt, cluster.ports["n1"], "writer", publish), topic)


def is_kept(one: Wire, answer: Connack) -> bool:
    assert answer.session_present
    return one.message().payload == b"kept"


def lead(cluster: ClusterProcesses, name: str) -> None:
    """Have it lead what it should, so that it decides for sessions."""
    cluster.wait_healthy()

    def leads() -> bool:
        cluster.nodes["n1"].admin("/cluster/rebalance", "POST")
        return sum(each["leader"] == name for each in cluster.status()["partitions"]) >= 2

    until(leads, f"{name} leads")


def is_told(node: ClusterNode) -> bool:
    return "clock_skewed node='n3'" in node.log_text()


def test_a_wrong_clock_ends_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ClusterNode.command

    def skewed(node: ClusterNode) -> list[str]:
        made = command(node)
        made[made.index("holdfast.cli.main")] = "tests.support.skewed_node"
        return made

    monkeypatch.setattr(ClusterNode, "command", skewed)
    with ClusterProcesses(tmp_path, 3, SETTINGS) as cluster:
        leave(cluster, "n1", "a")
        assert cluster.stop("n2") == 0
        set_clock(cluster.nodes["n2"], DAYS_2_S)
        cluster.restart("n2")
        lead(cluster, "n2")
        leave(cluster, "n2", "b")
        # Right again while it runs, and another one jumps, and is started like that.
        set_clock(cluster.nodes["n2"], 0.0)
        until(lambda: "clock_agrees" in cluster.nodes["n1"].log_text(), "that is told")
        set_clock(cluster.nodes["n3"], 3600.0)
        leave(cluster, "n3", "c")
        until(lambda: "clock_stepped" in cluster.nodes["n3"].log_text(), "n3 tells of its own")
        cluster.kill9("n3")
        cluster.restart("n3")
        lead(cluster, "n3")
        leave(cluster, "n3", "d")
        for prefix in "abcd":
            for number in range(SESSIONS):
                client_id = f"{prefix}{number}"
                until(partial(attempt, cluster.ports["n1"], client_id, is_kept), client_id)
        for name, node in cluster.nodes.items():
            until(partial(is_told, node), f"{name} tells of n3's clock")
        skews = {each["node"]: each["clock_skew_s"] for each in cluster.status("n3")["nodes"]}
        assert abs(skews["n3"] - 3600) < 5
        assert abs(skews["n1"]) < 5
