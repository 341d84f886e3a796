"""Two builds with different wire versions: every node is replaced while traffic flows.

The newer build is a copy of this tree that speaks one more version.
"""

import re
import shutil
from pathlib import Path

import pytest

from holdfast.security.peer_identity import WIRE_VERSION
from holdfast_federation.core.frames import VERSION
from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.federated import Member
from tests.e2e.pair import wait_until
from tests.e2e.rolling_traffic import rolling_traffic

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source folder of the newer build."""
    root = tmp_path_factory.mktemp("newer")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ("holdfast", "holdfast_federation"):
        shutil.copytree(SOURCE / package, root / package, ignore=ignored)
    raise_number(root / "holdfast/security/peer_identity.py", "WIRE_VERSION", WIRE_VERSION)
    raise_number(root / "holdfast_federation/core/frames.py", "VERSION", VERSION)
    return root


def raise_number(file: Path, name: str, number: int) -> None:
    text = file.read_text()
    raised = text.replace(f"\n{name}: Final = {number}\n", f"\n{name}: Final = {number + 1}\n")
    assert raised != text
    file.write_text(raised)


def agreed(node: Holdfast, peer: str) -> int:
    """The wire version of the node's newest link to a peer; 0 without one."""
    found = re.findall(rf"_connected node={peer} .*wire_version=(\d+)", node.log_text())
    return int(found[-1]) if found else 0


def test_a_cluster_is_upgraded_node_by_node(tmp_path: Path, newer: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        servers, nodes = cluster.addresses, cluster.nodes
        orders = [servers[at:] + servers[:at] for at in range(3)]
        replaced: set[str] = set()
        with rolling_traffic(servers, orders) as traffic:
            traffic.start()
            # The first one also goes back and forth: an upgrade can be undone.
            for name in ("n1", "n1", "n1", "n2", "n3"):
                traffic.wait()
                assert cluster.stop(name) == 0
                replaced ^= {name}
                nodes[name].source = newer if name in replaced else SOURCE
                cluster.restart(name)
                cluster.wait_healthy()
                for other in nodes.keys() - {name}:
                    both = WIRE_VERSION + ({name, other} <= replaced)
                    assert agreed(nodes[name], other) == both
                    until(lambda o=other, b=both, n=name: agreed(nodes[o], n) == b, "agreed")
        assert replaced == set(nodes)


def test_a_federation_is_upgraded_member_by_member(tmp_path: Path, newer: Path) -> None:
    settings = {"federation": {"name": "f"}}
    members = [Member(tmp_path, name, settings) for name in ("a", "b", "c")]
    first, middle, last = members
    first.link_to(middle)
    last.link_to(middle)
    try:
        for member in members:
            member.start()
        wait_until(lambda: middle.is_linked(2), "linked")
        servers = [f"127.0.0.1:{member.port}" for member in members]
        with rolling_traffic(servers[2:], [servers[:1]]) as traffic:
            first.await_sending("rolling/#")
            traffic.start()
            for member in members:
                traffic.wait()
                assert member.stop() == 0
                member.source = newer
                member.start()
                wait_until(lambda: middle.is_linked(2), "linked")
            versions = re.findall(r"federation_connected .*wire_version=(\d+)", last.log_text())
            assert versions[0] == str(VERSION)
            assert versions[-1] == str(VERSION + 1)
    finally:
        for member in members:
            member.kill()
