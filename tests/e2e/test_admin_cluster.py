"""Access and audit in a cluster: the audit of all nodes at any node, also after a node has died."""

import json
from pathlib import Path
from typing import Any

from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.test_admin_access import ask, made_token, wait_for


def test_the_audit_of_all_nodes(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        nodes = cluster.running
        # The first node has users, the others have a copy of its file.
        token = made_token(nodes[0].data, "admin")
        for node in nodes[1:]:
            copy = node.data / "access.json.new"
            copy.write_bytes((nodes[0].data / "access.json").read_bytes())
            copy.rename(node.data / "access.json")
        for node in nodes:
            wait_for(
                lambda node=node: ask(node.admin_port, "GET", "/cluster").status == 401,  # type: ignore[misc]
                "the token is not noticed",
            )
            assert ask(node.admin_port, "GET", "/cluster", token).status == 200
        # Each node makes changes, whichever partitions it leads.
        for number in range(4):
            for node in nodes:
                reply = ask(node.admin_port, "POST", "/cluster/undrain?node=none", token)
                assert reply.status == 409, (number, reply.body)

        def entries(port: int, path: str = "/api/v1/audit") -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            following = path
            while True:
                page = ask(port, "GET", following, token).json
                assert page["missing"] == []
                found += page["entries"]
                if page["next"] is None:
                    return found
                following = f"/api/v1/audit?limit=5&before={page['next']}"

        for node in nodes:
            found = entries(node.admin_port, "/api/v1/audit?limit=5")
            assert len(found) == 12
            assert {each["node"] for each in found} == {"n1", "n2", "n3"}
            times = [(each["time_us"], each["node"]) for each in found]
            assert times == sorted(times, reverse=True)
            assert len(set(times)) == 12
            assert {each["error"] != "" for each in found} == {True}
        assert ask(nodes[0].admin_port, "POST", "/cluster/drain?node=n2", token).status == 200
        drained = ask(nodes[1].admin_port, "GET", "/api/v1/audit?limit=1", token).json["entries"][0]
        phases = [
            {node["node"]: node["state"] for node in drained[when]} for when in ("before", "after")
        ]
        assert [each["n2"] for each in phases] == ["up", "draining"]
        assert ask(nodes[0].admin_port, "POST", "/cluster/undrain?node=n2", token).status == 200
        gone = nodes[-1]
        cluster.kill9(gone.node_id)
        wait_for(
            lambda: (
                json.loads(ask(nodes[0].admin_port, "GET", "/api/v1/audit", token).body)["missing"]
                != []
            ),
            "the dead node is not named",
        )
