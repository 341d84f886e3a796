"""Nodes that are restarted one after the other, under traffic."""

from pathlib import Path

from tests.e2e.cluster_processes import ClusterProcesses
from tests.e2e.rolling_traffic import rolling_traffic


def test_a_rolling_restart_loses_and_refuses_nothing(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        servers = cluster.addresses
        orders = [servers[at:] + servers[:at] for at in range(3)]
        with rolling_traffic(servers, orders) as traffic:
            traffic.start()
            for name in cluster.nodes:
                traffic.wait()
                assert cluster.stop(name) == 0
                cluster.restart(name)
                cluster.wait_healthy()
