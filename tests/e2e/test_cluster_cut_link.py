"""Two nodes without a link, which a third one hears both: who of them is ready."""

import json
from pathlib import Path

import pytest

from holdfast.client import ConnectionRefused, Options
from holdfast.client.blocking import Client
from holdfast_lab.targets.namespaces import Network, missing
from tests.e2e.cluster_processes import ClusterProcesses, until

SETTINGS = {"cluster": {"partitions": 12}, "security": {"allow_anonymous": True}}
SERVER_UNAVAILABLE = 0x88


def test_a_node_that_refuses_clients_is_not_ready(tmp_path: Path) -> None:
    """n1 has no client, so nothing waits at it. A load balancer that found it ready would send it
    all clients of the others."""
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
            for node in nodes.values():
                until(lambda node=node: node.readiness() == 200, "all are ready")
            network.part(["n1"], ["n2"])

            def reasons(name: str) -> list[str]:
                return list(json.loads(nodes[name].admin("/readyz")[1])["reasons"])

            until(lambda: "ownership_unsure" in reasons("n1"), "n1 is not ready")
            options = Options(client_id="one", clean_start=False, session_expiry_s=60)
            with (
                pytest.raises(ConnectionRefused) as refused,
                Client(servers=[f"{nodes['n1'].host}:{nodes['n1'].port}"], options=options),
            ):
                pass
            assert refused.value.reason == SERVER_UNAVAILABLE
            assert "ownership_unsure" in reasons("n1")
            assert "ownership_unsure" not in reasons("n3")
            network.heal()
            for name, node in nodes.items():
                until(lambda node=node: node.readiness() == 200, f"{name} is ready again")
