"""Two nodes without a link, which a third one hears both: a node that is ready takes clients."""

from pathlib import Path

import pytest

from holdfast.client import Options
from holdfast.client.blocking import Client
from holdfast_lab.targets.namespaces import Network, missing
from tests.e2e.cluster_processes import ClusterProcesses, until

SETTINGS = {"cluster": {"partitions": 12}, "security": {"allow_anonymous": True}}


def test_a_ready_node_takes_clients_while_a_link_is_cut(tmp_path: Path) -> None:
    """n1 has no client, so nothing waits at it. A load balancer that found it ready while it
    refuses would send it all clients of the others."""
    if missing():
        pytest.skip(missing())
    names = ["n1", "n2", "n3"]
    with Network([*names, "operator"]) as network, network.hosts["operator"].entered():
        hosts = [network.hosts[name] for name in names]
        addresses = [host.address for host in hosts]
        prefixes = [host.command([]) for host in hosts]
        cluster = ClusterProcesses(tmp_path, 3, SETTINGS, hosts=addresses, prefixes=prefixes)
        with cluster:
            nodes = cluster.nodes
            network.part(["n1"], ["n2"])
            for name, other in (("n1", "n2"), ("n2", "n1")):
                line = f"node_suspected node='{other}'"
                until(lambda name=name, line=line: line in nodes[name].log_text(), line)
            for name, node in nodes.items():
                until(lambda node=node: node.readiness() == 200, f"{name} is ready")
                options = Options(client_id=name, clean_start=False, session_expiry_s=60)
                with Client(servers=[f"{node.host}:{node.port}"], options=options) as client:
                    assert client.publish("t", b"x", qos=1).reason < 0x80
            network.heal()
            cluster.wait_healthy()
