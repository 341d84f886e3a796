"""Four nodes in three zones: where the replicas are, what a plan says, and a pause."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from tests.e2e.cluster_processes import ClusterProcesses
from tests.support.waiting import until

ZONES = {"n1": "a", "n2": "a", "n3": "b", "n4": "c"}


def test_replicas_are_in_different_zones_and_moves_are_planned_and_paused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"cluster": {"partitions": 16}}
    with ClusterProcesses(tmp_path, 4, settings, zones="aabc") as cluster:
        port = cluster.nodes["n1"].admin_port

        def operate(*arguments: str) -> Any:
            capsys.readouterr()
            assert main(["cluster", *arguments, "--admin", f"127.0.0.1:{port}", "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        def is_settled() -> bool:
            status = cluster.status()
            return not status["moving"] + status["under_zoned"] + status["uneven"] and all(
                sorted(ZONES[node] for node in each["replicas"]) == ["a", "b", "c"]
                for each in status["partitions"]
            )

        until(is_settled, "each partition is in three zones")
        nodes = {each["node"]: each for each in cluster.status()["nodes"]}
        assert {name: each["zone"] for name, each in nodes.items()} == ZONES
        assert [nodes[name]["replicas"] for name in ZONES] == [8, 8, 16, 16]

        joins = operate("plan", "join", "--zone", "a")
        assert 4 <= joins["copies"] <= 6, "the zone shares what it has"
        lost = operate("plan", "leave", "n4")
        assert lost["under_zoned"] == 16, "two zones are left for three replicas"
        assert lost["losses"][0]["below_min_insync"] == 0
        assert set(lost["bytes_to"]) == {"n1", "n2"}
        rows = operate("plan")
        assert {each["node"] or each["zone"] for each in rows["losses"]} == {*ZONES, *"abc"}
        assert not rows["partitions"]

        operate("pause")
        assert cluster.status()["paused"]
        operate("drain", "n2", "--no-wait")
        until(lambda: of(cluster, "n2")["leaders"] == 0, "leaderships leave all the same")
        assert of(cluster, "n2")["replicas"] == 8
        assert not cluster.status()["moving"]
        waiting = operate("plan")
        assert waiting["paused"]
        assert waiting["copies"] == 8
        operate("resume")
        until(lambda: of(cluster, "n2")["replicas"] == 0, "its replicas leave")
        until(lambda: of(cluster, "n1")["replicas"] == 16, "the other node of the zone has them")


def of(cluster: ClusterProcesses, name: str) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = cluster.status()["nodes"]
    return next(each for each in nodes if each["node"] == name)
