"""Two nodes without a link, which a third one hears both: their frames go through the third node,
and each of the three takes clients."""

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
                line = f"link_relayed node='{other}' through='n3'"
                until(lambda name=name, line=line: line in nodes[name].log_text(), line)
            assert ways(cluster, "n1") == {"n1": "", "n2": "n3", "n3": ""}
            assert ways(cluster, "n3") == {"n1": "", "n2": "", "n3": ""}
            for name, node in nodes.items():
                until(lambda node=node: node.readiness() == 200, f"{name} is ready")
                options = Options(client_id=name, clean_start=False, session_expiry_s=60)
                with Client(servers=[f"{node.host}:{node.port}"], options=options) as client:
                    for number in range(12):
                        large = b"x" * (300_000 if number < 3 else 10)
                        assert client.publish(f"t/{number}", large, qos=1).reason < 0x80
            status, metrics = nodes["n3"].admin("/metrics")
            assert status == 200
            assert relayed_bytes(metrics) > 300_000
            # Nobody is down: the link was a fault of neither node.
            cluster.wait_healthy()
            network.heal()
            for name, other in (("n1", "n2"), ("n2", "n1")):
                line = f"relayed_link_ended node='{other}' through='n3' text='there is a direct"
                until(lambda name=name, line=line: line in nodes[name].log_text(), line)
                assert ways(cluster, name) == {"n1": "", "n2": "", "n3": ""}
            cluster.wait_healthy()


def ways(cluster: ClusterProcesses, node: str) -> dict[str, str]:
    """The nodes, each with the one through which this node reaches it."""
    return {each["node"]: each["through"] for each in cluster.status(node)["nodes"]}


def relayed_bytes(metrics: str) -> float:
    name = "holdfast_peer_bytes_relayed_total{"
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))
