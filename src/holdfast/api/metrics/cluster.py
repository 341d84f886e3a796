"""The Prometheus metrics of a node's cluster.

All nodes report the figures that all of them know, for example under-replicated partitions. A query
must take their maximum, not their sum.
"""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.api.cluster_operations import ClusterFigures
from holdfast.api.process import ServedProcess

Read = Callable[[ClusterFigures], int]

GAUGES: Final[tuple[tuple[str, str, Read], ...]] = (
    ("metadata_leader", "1 while this node leads the metadata.", lambda f: f.is_metadata_leader),
    ("metadata_majority", "1 while this node reaches a majority.", lambda f: f.has_majority),
    ("metadata_version", "Changes of the metadata applied here.", lambda f: f.metadata_version),
    (
        "partitions_under_replicated",
        "Partitions with fewer replicas in sync than they should have.",
        lambda f: f.under_replicated,
    ),
    (
        "partitions_below_min_insync",
        "Partitions whose QoS 1 and 2 messages are refused: too few replicas are in sync.",
        lambda f: f.below_min_insync,
    ),
    ("disk_stalled", "1 while a write to the disk takes too long.", lambda f: f.is_disk_stalled),
    ("disk_damaged", "1 while this node's log is damaged.", lambda f: f.is_damaged),
    (
        "disk_older_copy",
        "1 while this node's disk is an older copy, and it takes part in nothing.",
        lambda f: f.is_older_copy,
    ),
    ("partitions_leaderless", "Partitions that nobody leads.", lambda f: f.leaderless),
    ("partitions_moving", "Partitions that get new replicas.", lambda f: f.moving),
)
COUNTERS: Final[tuple[tuple[str, str, Read], ...]] = (
    ("failovers", "Partitions taken over from a leader that was gone.", lambda f: f.failovers),
    (
        "publish_forwarded",
        "Publishes sent to the node that leads their partition.",
        lambda f: f.forwarded_publishes,
    ),
)


class ClusterCollector(Collector):
    """Collects the figures of a cluster node."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        cluster = self._server.cluster
        if cluster is None:
            return
        figures = cluster.figures()
        node = figures.node
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=["node"])
            gauge.add_metric([node], int(read(figures)))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(f"holdfast_{name}", text, labels=["node"])
            counter.add_metric([node], read(figures))
            yield counter
        connected = GaugeMetricFamily(
            "holdfast_peer_connected", "1 while there is a link to it.", labels=["node", "peer"]
        )
        skew = GaugeMetricFamily(
            "holdfast_clock_skew_seconds",
            "How far the wall clock of a node is ahead of the one that the cluster agrees on.",
            labels=["node", "peer"],
        )
        for peer, skew_s in figures.clock_skews_s.items():
            skew.add_metric([node, peer], skew_s)
        yield skew
        for peer, is_connected in figures.peers.items():
            connected.add_metric([node, peer], int(is_connected))
        yield connected
        lag = GaugeMetricFamily(
            "holdfast_replication_lag_records",
            "Records of the partitions led here that a follower does not have on disk yet.",
            labels=["node", "follower"],
        )
        for follower, records in figures.lag_records.items():
            lag.add_metric([node, follower], records)
        yield lag
