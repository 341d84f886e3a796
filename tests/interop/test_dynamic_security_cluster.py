"""Dynamic security in a cluster: mosquitto_ctrl at any node, and the rights at all of them."""

import threading
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e import wire
from tests.e2e.cluster_processes import ClusterNode, ClusterProcesses, until
from tests.interop.test_import_dynamic_security import CONTROL, PASSWORD, control, sends

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.skipif(CONTROL is None, reason="mosquitto_ctrl is not installed"),
]


def login(node: ClusterNode, user: str, password: str) -> tuple[wire.Wire, int]:
    client = wire.Wire(node.port)
    client.send(wire.connect(user, username=user, password=password.encode()))
    return client, wire.read_connack(client.expect(wire.CONNACK), 5).reason


def may_log_in(node: ClusterNode, user: str, password: str) -> bool:
    client, reason = login(node, user, password)
    client.socket.close()
    return reason == 0


def listed(node: ClusterNode) -> set[str]:
    """The users at a node. Warnings of the tool have spaces."""
    lines = control(node.port, "listClients").splitlines()
    return {line for line in lines if line and " " not in line}


def test_users_change_at_all_nodes(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    control(0, "init", str(users), "admin", PASSWORD)
    seed = users.read_bytes()
    passwords, rules = tmp_path / "passwords", tmp_path / "acl"
    for file in (passwords, rules):
        file.touch(mode=0o600)
    security = {
        "dynamic_security_file": str(users),
        "password_file": str(passwords),
        "acl_file": str(rules),
        "allow_anonymous": False,
    }
    with ClusterProcesses(tmp_path / "nodes", 3, {"security": security}) as cluster:
        n1, n2, n3 = cluster.nodes.values()
        # A right and a user that one node gives are there at the others.
        control(n1.port, "createRole", "devices")
        control(n2.port, "addRoleACL", "devices", "publishClientSend", "site/#", "allow")
        control(n3.port, "createClient", "alice", "-p", PASSWORD)
        control(n1.port, "addClientRole", "alice", "devices")
        for node in (n1, n2, n3):
            until(lambda node=node: sends(node.port, "alice", PASSWORD, "site/1") == 0, "a right")

        # Changes at all nodes at once: each takes effect.
        def create(node: ClusterNode, numbers: range) -> None:
            for number in numbers:
                control(node.port, "createClient", f"user{number}", "-p", PASSWORD)

        threads = [
            threading.Thread(target=create, args=(node, range(2 * index, 2 * index + 2)))
            for index, node in enumerate((n1, n2, n3))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = {f"user{number}" for number in range(6)} | {"admin", "alice"}
        for node in (n1, n2, n3):
            assert listed(node) == names

        # A right that is taken, and a client that is disabled at another node.
        alice, reason = login(n2, "alice", PASSWORD)
        assert reason == 0
        assert alice.publish("site/1", b"x", qos=1) in (0, 0x10)
        control(n1.port, "removeRoleACL", "devices", "publishClientSend", "site/#")
        until(lambda: alice.publish("site/1", b"x", qos=1) == 0x87, "the right is taken", 10.0)
        control(n3.port, "disableClient", "alice")
        assert alice.expect(14, 10.0).reason == 0x98
        alice.socket.close()

        # What was confirmed survives its node, and a node that was away has it when it serves.
        n3.kill()
        control(n1.port, "deleteClient", "user1")
        n1.kill()
        n3.start()
        until(lambda: n3.readiness() == 200, "n3 serves")
        assert not may_log_in(n3, "user1", PASSWORD)
        assert may_log_in(n3, "user2", PASSWORD)
        n1.start()
        until(lambda: n1.readiness() == 200, "n1 serves")
        assert not may_log_in(n1, "user1", PASSWORD)
        assert not may_log_in(n1, "alice", PASSWORD)
        # A reload does not bring the users of the file back.
        assert n1.admin("/api/v1/reload", "POST")[0] == 200
        assert not may_log_in(n1, "alice", PASSWORD)
        assert listed(n1) == names - {"user1"}
        assert users.read_bytes() == seed
        # Nobody has the password of the administrator any more: the files of one node help.
        assert main(["passwd", "-b", str(passwords), "rescue", PASSWORD]) == 0
        rules.write_text("user rescue\ntopic readwrite $CONTROL/dynamic-security/v1/#\n")
        assert n1.admin("/api/v1/reload", "POST")[0] == 200
        arguments = ("setClientPassword", "admin", "another password")
        control(n1.port, *arguments, user=("rescue", PASSWORD))
        until(lambda: may_log_in(n2, "admin", "another password"), "a new password", 10.0)
        assert not may_log_in(n2, "admin", PASSWORD)
        for node in (n1, n2, n3):
            assert PASSWORD not in node.log_text()
