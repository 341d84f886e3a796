"""What a node says of itself while it cannot do all that clients want."""

from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from holdfast.api.readiness import Readiness, obstacles
from holdfast.io.event_loop.broker import Broker
from tests.support.fake_cluster import FakeCluster, FakeServer


def witness() -> tuple[FakeCluster, FakeServer]:
    """The node with the fewest parts that can be ready."""
    cluster = FakeCluster()
    cluster.values = replace(cluster.values, is_witness=True)
    return cluster, FakeServer(cluster)


def test_a_line_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    cluster, server = witness()
    readiness = Readiness(server)
    with caplog.at_level("INFO"):
        readiness.look(0.0)
        cluster.values = replace(cluster.values, has_majority=False)
        for now in (1.0, 2.0, 3.0):
            readiness.look(now)
        cluster.values = replace(cluster.values, has_majority=True)
        readiness.look(4.5)
        readiness.look(5.0)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        (
            "ERROR",
            "not_ready reason=no_majority text='the node reaches no majority of the cluster:"
            " nothing is acknowledged'",
        ),
        ("WARNING", "obstacle_gone reason=no_majority seconds=3.5"),
    ]


def test_a_start_is_no_event(caplog: pytest.LogCaptureFixture) -> None:
    cluster, server = witness()
    cluster.values = replace(cluster.values, initialised=False)
    readiness = Readiness(server)
    with caplog.at_level("INFO"):
        readiness.look(0.0)
        cluster.values = replace(cluster.values, initialised=True, lacking=4)
        readiness.look(1.0)
        cluster.values = replace(cluster.values, lacking=0)
        readiness.look(2.0)
    assert caplog.records == []
    assert obstacles(server) == []


def test_a_broker_that_starts_with_a_full_disk_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its log has the line `ready`, because it serves all that needs no room."""
    state = SimpleNamespace(closing=False, redirect="", disk_full=True, has_stopped_partition=False)
    server = FakeServer(FakeCluster())
    server.broker = cast(
        Broker,
        SimpleNamespace(
            node=SimpleNamespace(state=state),
            runtime=SimpleNamespace(waits_s=lambda now: 0.0),
            loop=SimpleNamespace(time=lambda: 0.0),
        ),
    )
    readiness = Readiness(server)
    with caplog.at_level("INFO"):
        readiness.look(0.0)
        readiness.look(0.5)
        state.disk_full = False
        readiness.look(1.0)
    assert [each.getMessage().split(" text")[0] for each in caplog.records] == [
        "not_ready reason=disk_full",
        "obstacle_gone reason=disk_full seconds=1.0",
    ]


def test_a_node_that_refuses_clients_is_not_ready() -> None:
    """A heartbeat that comes late is no obstacle, or every failover would be one at all nodes."""
    cluster = FakeCluster()
    server = FakeServer(cluster)
    cluster.values = replace(cluster.values, unsure_s=1.0)
    assert [each.name for each in obstacles(server)] == ["not_serving"]
    cluster.values = replace(cluster.values, unsure_s=2.5)
    assert [each.name for each in obstacles(server)] == ["ownership_unsure", "not_serving"]
    cluster.values = replace(cluster.values, lags=True, unsure_s=0.0)
    lags, not_serving = obstacles(server)
    assert (lags.name, not_serving.name) == ("lags", "not_serving")
    # It belongs to each start, so it is no error in the log.
    assert lags.is_expected
    cluster.values = replace(cluster.values, lags=False, unsure_s=2.5)
    # Then the others may serve without this node, and the majority is the reason.
    cluster.values = replace(cluster.values, has_majority=False)
    assert [each.name for each in obstacles(server)] == ["no_majority", "not_serving"]
