"""The cluster on the admin port: HTTP, readiness, metrics."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from holdfast.api.cluster_operations import PlacementFigures
from tests.support.fake_cluster import FakeCluster, admin_port

CHANGES = {
    "/cluster/init": "init",
    "/cluster/rebalance": "rebalance",
    "/cluster/resize?replication_factor=3&min_insync=2": "resize 3 2 False",
    "/cluster/resize?automatic=true": "resize 0 0 True",
    "/cluster/drain?node=n2": "drain n2",
    "/cluster/undrain?node=n2": "undrain n2",
    "/cluster/unsafe-recover?node=n1&accept_loss=true": "unsafe-recover n1",
    "/cluster/remove?node=n%202%26": "remove n 2&",
}


def ask(
    port: int, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", method=method, headers=headers or {}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            code, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        code, body = error.code, error.read()
    return code, json.loads(body) if body.startswith(b"{") else body.decode()


def test_status_is_what_the_cluster_says() -> None:
    cluster = FakeCluster()
    with admin_port(cluster) as port:
        assert ask(port, "/cluster") == (200, cluster.status())


def test_changes_reach_the_cluster() -> None:
    cluster = FakeCluster()
    with admin_port(cluster) as port:
        for path, asked in CHANGES.items():
            code, body = ask(port, path, "POST")
            assert (code, cluster.asked[-1]) == (200, asked)
            assert body == (cluster.status() if asked == "init" else {})


@pytest.mark.parametrize("path", CHANGES)
def test_a_refusal_is_409_with_its_reason(path: str) -> None:
    cluster = FakeCluster()
    cluster.refusal = "not now"
    with admin_port(cluster) as port:
        assert ask(port, path, "POST") == (409, {"error": "not now"})


@pytest.mark.parametrize("path", CHANGES)
def test_changes_need_post_and_no_browser(path: str) -> None:
    """A page on another site can make a browser send a POST here, but not without an Origin."""
    cluster = FakeCluster()
    with admin_port(cluster) as port:
        assert ask(port, path)[0] == 405
        assert ask(port, path, "POST", {"Origin": "http://evil.example"})[0] == 403
        # A page of another port of this machine is another site; one of this port is not.
        assert ask(port, path, "POST", {"Origin": f"http://127.0.0.1:{port + 1}"})[0] == 403
        assert ask(port, path, "POST", {"Origin": "null"})[0] == 403
        assert cluster.asked == []
        assert ask(port, path, "POST", {"Origin": f"http://127.0.0.1:{port}"})[0] == 200


@pytest.mark.parametrize("path", ["/cluster", *CHANGES])
def test_a_standby_is_503(path: str) -> None:
    with admin_port(None) as port:
        code, body = ask(port, path, "GET" if path == "/cluster" else "POST")
        assert (code, body["error"]) == (503, "this node stands by: ask the holder of the lease")


def test_wrong_requests() -> None:
    cluster = FakeCluster()
    with admin_port(cluster) as port:
        assert ask(port, "/cluster/drain", "POST") == (400, {"error": "parameter node is missing"})
        assert ask(port, "/cluster/drain?node=", "POST")[0] == 400
        assert ask(port, "/cluster/drian?node=n1", "POST")[0] == 404
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("initialised", "majority", "witness", "lacking", "expected"),
    [
        (True, True, True, 0, 200),
        (True, False, True, 0, 503),
        (False, True, True, 0, 503),
        (True, True, True, 2, 503),
        (True, True, False, 0, 503),  # it has no broker that serves
    ],
)
def test_readiness(
    initialised: bool, majority: bool, witness: bool, lacking: int, expected: int
) -> None:
    cluster = FakeCluster()
    cluster.values = replace(
        cluster.values,
        initialised=initialised,
        has_majority=majority,
        is_witness=witness,
        lacking=lacking,
    )
    with admin_port(cluster) as port:
        code, body = ask(port, "/readyz")
    assert code == expected
    assert bool(body.pop("reasons")) == (expected == 503)
    assert body == {
        "ready": expected == 200,
        "node": "n1",
        "initialised": initialised,
        "majority": majority,
        "lacking": lacking,
        "disk_stalled": False,
        "disk_damaged": False,
        "removed": False,
        "older_copy": False,
        "set_aside": [],
        "certificates_expired": [],
    }


@pytest.mark.parametrize("name", ["is_disk_stalled", "is_damaged", "is_removed"])
@pytest.mark.parametrize("is_witness", [False, True])
def test_a_node_that_is_out_of_it_is_not_ready(name: str, is_witness: bool) -> None:
    cluster = FakeCluster()
    cluster.values = replace(cluster.values, is_witness=True)
    with admin_port(cluster) as port:
        assert ask(port, "/readyz")[0] == 200
        changes: dict[str, Any] = {name: True, "is_witness": is_witness}
        cluster.values = replace(cluster.values, **changes)
        code, body = ask(port, "/readyz")
    assert code == 503
    told = {"is_disk_stalled": "disk_stalled", "is_damaged": "disk_damaged"}.get(name, "removed")
    assert [body[each] for each in ("disk_stalled", "disk_damaged", "removed")].count(True) == 1
    assert body[told] is True


def test_readers_that_wait_for_a_replica_are_named() -> None:
    cluster = FakeCluster()
    cluster.values = replace(cluster.values, unread=[3, 5])
    with admin_port(cluster) as port:
        code, body = ask(port, "/readyz")
    assert code == 503
    assert "no replica of partitions 3, 5 can be read" in body["reasons"]["reads_wait"]


@pytest.mark.parametrize(
    ("name", "reason"), [("leaderless", "leaderless"), ("below_min_insync", "below_min_insync")]
)
def test_a_node_whose_publishes_are_refused_is_not_ready(name: str, reason: str) -> None:
    cluster = FakeCluster()
    changes: dict[str, Any] = {name: 3}
    cluster.values = replace(cluster.values, **changes)
    with admin_port(cluster) as port:
        code, body = ask(port, "/readyz")
    assert code == 503
    assert "3 partitions" in body["reasons"][reason]


def metrics(port: int) -> dict[tuple[str, ...], float]:
    """Name and labels, the node's own first -> value, without those of the process."""
    text = ask(port, "/metrics")[1]
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return {
        (sample.name, sample.labels.pop("node"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name not in ("holdfast_build_info", "holdfast_local_process_restarts_total")
        and not sample.name.startswith("process_")
    }


def test_metrics() -> None:
    cluster = FakeCluster()
    cluster.values = replace(
        cluster.values,
        is_metadata_leader=True,
        metadata_version=9,
        under_replicated=4,
        below_min_insync=3,
        leaderless=2,
        moving=1,
        peers={"n2": True, "n3": False},
        relayed={"n2"},
        relayed_bytes=5,
        sent_frames=12,
        sent_bytes=3456,
        lag_records={"n2": 12},
        failovers=3,
        forwarded_publishes=77,
        is_damaged=True,
        clock_skews_s={"n2": -1.5},
    )
    cluster.placement = PlacementFigures("a", 6, 2, True, 21, 64)
    with admin_port(cluster) as port:
        found = metrics(port)
    assert found == {
        ("holdfast_ready", "n1"): 0,
        ("holdfast_not_ready", "n1", "disk_damaged"): 1,
        ("holdfast_not_ready", "n1", "leaderless"): 1,
        ("holdfast_not_ready", "n1", "below_min_insync"): 1,
        ("holdfast_not_ready", "n1", "not_serving"): 1,
        ("holdfast_partitions_below_min_insync", "n1"): 3,
        ("holdfast_metadata_leader", "n1"): 1,
        ("holdfast_metadata_majority", "n1"): 1,
        ("holdfast_metadata_version", "n1"): 9,
        ("holdfast_partitions_under_replicated", "n1"): 4,
        ("holdfast_partitions_leaderless", "n1"): 2,
        ("holdfast_partitions_moving", "n1"): 1,
        ("holdfast_partitions_under_zoned", "n1"): 6,
        ("holdfast_replicas_uneven", "n1"): 2,
        ("holdfast_moves_paused", "n1"): 1,
        ("holdfast_partitions_led", "n1"): 21,
        ("holdfast_partitions_stored", "n1"): 64,
        ("holdfast_node_zone", "n1", "a"): 1,
        ("holdfast_disk_stalled", "n1"): 0,
        ("holdfast_disk_damaged", "n1"): 1,
        ("holdfast_disk_older_copy", "n1"): 0,
        ("holdfast_logs_set_aside", "n1"): 0,
        ("holdfast_clock_skew_seconds", "n1", "n2"): -1.5,
        ("holdfast_failovers_total", "n1"): 3,
        ("holdfast_publish_forwarded_total", "n1"): 77,
        ("holdfast_peer_connected", "n1", "n2"): 1,
        ("holdfast_peer_connected", "n1", "n3"): 0,
        ("holdfast_peer_relayed", "n1", "n2"): 1,
        ("holdfast_peer_relayed", "n1", "n3"): 0,
        ("holdfast_peer_bytes_relayed_total", "n1"): 5,
        ("holdfast_peer_frames_sent_total", "n1"): 12,
        ("holdfast_peer_bytes_sent_total", "n1"): 3456,
        ("holdfast_replication_lag_records", "n1", "n2"): 12,
    }


def test_a_standby_has_no_metrics_of_the_cluster() -> None:
    with admin_port(None) as port:
        assert metrics(port) == {
            ("holdfast_ready", "n1"): 0,
            ("holdfast_not_ready", "n1", "not_serving"): 1,
        }
