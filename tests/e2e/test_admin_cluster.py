"""Access and audit in a cluster: the audit of all nodes at any node, also after a node has died."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.e2e.test_admin_access import PASSWORD, Reply, ask, login, made_token, open_stream


def read(port: int, path: str, token: str) -> Any:
    """The JSON of a reply. A node refuses with 503 while leaders move: the client sends again."""
    replies: list[Reply] = []

    def is_answered() -> bool:
        replies.append(ask(port, "GET", path, token))
        return replies[-1].status != 503

    until(is_answered, f"{path} is refused")
    assert replies[-1].status == 200, replies[-1].body
    return replies[-1].json


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
            until(
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
                page = read(port, following, token)
                assert page["missing"] == []
                found += page["entries"]
                if page["next"] is None:
                    return found
                following = f"/api/v1/audit?limit=5&before={page['next']}"

        for node in nodes:
            found = entries(node.admin_port, "/api/v1/audit?limit=5")
            times = [(each["time_us"], each["node"]) for each in found]
            assert times == sorted(times, reverse=True)
            assert len(set(times)) == 13
            # The first change came before any node had a log.
            first = found.pop()
            assert (first["path"], first["node"], first["who"]) == ("/cluster/init", "n1", "local")
            assert {each["node"] for each in found} == {"n1", "n2", "n3"}
            assert {each["error"] != "" for each in found} == {True}
        assert ask(nodes[0].admin_port, "POST", "/cluster/drain?node=n2", token).status == 200
        drained = read(nodes[1].admin_port, "/api/v1/audit?limit=1", token)["entries"][0]
        phases = [
            {node["node"]: node["state"] for node in drained[when]} for when in ("before", "after")
        ]
        assert [each["n2"] for each in phases] == ["up", "draining"]
        assert ask(nodes[0].admin_port, "POST", "/cluster/undrain?node=n2", token).status == 200
        gone = nodes[-1]
        cluster.kill9(gone.node_id)
        until(
            lambda: (
                json.loads(ask(nodes[0].admin_port, "GET", "/api/v1/audit", token).body)["missing"]
                != []
            ),
            "the dead node is not named",
        )


def test_users_and_tokens_belong_to_the_cluster(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        n1, n2, n3 = cluster.running
        assert ask(n3.admin_port, "GET", "/api/v1/users").json == []
        token = made_token(n1.data, "admin")
        for node in (n1, n2, n3):
            until(
                lambda node=node: ask(node.admin_port, "GET", "/metrics").status == 401,  # type: ignore[misc]
                "the token is not everywhere",
            )
        user = {"name": "ada", "role": "operator", "password": PASSWORD}
        assert ask(n2.admin_port, "POST", "/api/v1/users", token, user).status == 200
        until(lambda: login(n3.admin_port, "ada", PASSWORD).status == 200, "the user is not at n3")
        made = ask(n3.admin_port, "POST", "/api/v1/tokens", token, {"role": "reader"}).json
        until(
            lambda: ask(n1.admin_port, "GET", "/metrics", made["token"]).status == 200, "no token"
        )
        sent = {"Authorization": f"Bearer {made['token']}"}
        streams = [open_stream(each.admin_port, "/api/v1/events", sent) for each in (n1, n2, n3)]
        assert ask(n2.admin_port, "DELETE", f"/api/v1/tokens/{made['id']}", token).status == 200
        for stream in streams:
            stream.read()

        # A new disk. Nobody is let in before the node knows the users again.
        cluster.kill9("n3")
        shutil.rmtree(n3.data)
        n3.launch()
        statuses: set[int] = set()

        def knows() -> bool:
            try:
                statuses.add(ask(n3.admin_port, "GET", "/api/v1/users").status)
                return ask(n3.admin_port, "GET", "/api/v1/users", token).status == 200
            except OSError:
                return False

        until(knows, "the new disk does not know the token")
        assert statuses <= {401, 503}
        assert login(n3.admin_port, "ada", PASSWORD).status == 200
        raft = b"".join(each.read_bytes() for each in (n1.data / "raft").iterdir())
        assert PASSWORD.encode() not in raft
        assert token.split("_", 2)[2].encode() not in raft


class AnywhereNode(ClusterNode):
    """A node whose admin port listens on all addresses."""

    def command(self) -> list[str]:
        command = super().command()
        command[command.index("--admin") + 1] = f"0.0.0.0:{self.admin_port}"
        return command


class AnywhereCluster(ClusterProcesses):
    node_class = AnywhereNode


def test_watch_goes_on_at_another_node(tmp_path: Path) -> None:
    """The address to listen on stands for every machine: whoever asked there would ask itself."""
    with AnywhereCluster(tmp_path) as cluster:
        n1, *others = cluster.running
        rows = json.loads(ask(n1.admin_port, "GET", "/cluster").body)["nodes"]
        addresses = {row["node"]: row["admin_address"] for row in rows}
        assert addresses == {
            each.node_id: f"127.0.0.1:{each.admin_port}" for each in cluster.running
        }
        watch = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "cluster", "watch", "--admin",
             f"127.0.0.1:{n1.admin_port}"],
            stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=str(SOURCE)),
        )  # fmt: skip
        try:
            assert watch.stdout is not None
            assert "healthy" in watch.stdout.readline()
            cluster.kill9("n1")
            lines = []
            while not any("n1 is down" in line for line in lines):
                lines.append(watch.stdout.readline())
                assert lines[-1], lines
            assert any(
                f"asking {each.node_id} at {addresses[each.node_id]} now" in line
                for line in lines
                for each in others
            )
        finally:
            watch.kill()
            watch.wait()
