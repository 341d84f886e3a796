"""One node's wall clock is wrong: nothing ends too soon anywhere."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.wire import Wire

DAYS_2_S = 2 * 86_400
EXPIRY_S = 600
SETTINGS: dict[str, dict[str, Any]] = {"cluster": {"partitions": 6}}
SESSIONS = 12


def set_clock(node: ClusterNode, skew_s: float) -> None:
    (node.data.parent / "skew").write_text(str(skew_s))


def leave(cluster: ClusterProcesses, name: str, prefix: str) -> None:
    """Sessions that are closed now, with a message for each."""
    for number in range(SESSIONS):
        with Wire(cluster.ports[name], timeout_s=20.0) as one:
            one.connect(f"{prefix}{number}", clean=False, expiry_s=EXPIRY_S)
            one.subscribe((f"{prefix}/{number}", 1))
    with Wire(cluster.ports["n1"], timeout_s=20.0) as writer:
        writer.connect("writer")
        for number in range(SESSIONS):
            assert writer.publish(f"{prefix}/{number}", b"kept", 1) < 0x80


def lead(cluster: ClusterProcesses, name: str) -> None:
    """Have it lead what it should, so that it decides for sessions."""
    cluster.wait_healthy()

    def leads() -> bool:
        cluster.nodes["n1"].admin("/cluster/rebalance", "POST")
        return sum(each["leader"] == name for each in cluster.status()["partitions"]) >= 2

    until(leads, f"{name} leads")


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
        cluster.kill9("n3")
        cluster.restart("n3")
        lead(cluster, "n3")
        leave(cluster, "n3", "d")
        for prefix in "abcd":
            for number in range(SESSIONS):
                with Wire(cluster.ports["n1"], timeout_s=20.0) as one:
                    answer = one.connect(f"{prefix}{number}", clean=False, expiry_s=EXPIRY_S)
                    assert answer.session_present, (prefix, number)
                    assert one.message().payload == b"kept"
        for name, node in cluster.nodes.items():
            assert "clock_skewed node='n3'" in node.log_text(), name
        skews = {each["node"]: each["clock_skew_s"] for each in cluster.status("n3")["nodes"]}
        assert abs(skews["n3"] - 3600) < 5
        assert abs(skews["n1"]) < 5
