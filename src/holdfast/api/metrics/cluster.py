"""Prometheus metrics of a node's cluster.

All nodes report the figures that all of them know, for example under-replicated partitions. A query
must take their maximum, not their sum.
"""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from holdfast.api.cluster_operations import ClusterFigures, ClusterOperations, PlacementFigures
from holdfast.api.metrics.catalog import counter, gauge
from holdfast.api.process import ServedProcess

Read = Callable[[ClusterFigures], int]

GAUGES: Final[dict[str, Read]] = {
    "metadata_leader": lambda f: f.is_metadata_leader,
    "metadata_majority": lambda f: f.has_majority,
    "metadata_version": lambda f: f.metadata_version,
    "partitions_under_replicated": lambda f: f.under_replicated,
    "partitions_below_min_insync": lambda f: f.below_min_insync,
    "disk_stalled": lambda f: f.is_disk_stalled,
    "disk_damaged": lambda f: f.is_damaged,
    "disk_older_copy": lambda f: f.is_older_copy,
    "logs_set_aside": lambda f: len(f.set_aside),
    "partitions_leaderless": lambda f: f.leaderless,
    "partitions_moving": lambda f: f.moving,
}
COUNTERS: Final[dict[str, Read]] = {
    "failovers": lambda f: f.failovers,
    "publish_forwarded": lambda f: f.forwarded_publishes,
    "peer_bytes_relayed": lambda f: f.relayed_bytes,
    "peer_frames_sent": lambda f: f.sent_frames,
    "peer_bytes_sent": lambda f: f.sent_bytes,
}


PLACEMENT: Final[dict[str, Callable[[PlacementFigures], int]]] = {
    "partitions_under_zoned": lambda f: f.under_zoned,
    "replicas_uneven": lambda f: f.uneven,
    "moves_paused": lambda f: f.is_paused,
    "partitions_led": lambda f: f.leaders,
    "partitions_stored": lambda f: f.replicas,
}


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
        for name, read in GAUGES.items():
            family = gauge(name)
            family.add_metric([node], int(read(figures)))
            yield family
        for name, read in COUNTERS.items():
            count = counter(name)
            count.add_metric([node], read(figures))
            yield count
        yield from self._placement(cluster, node)
        skew = gauge("clock_skew_seconds")
        for peer, skew_s in figures.clock_skews_s.items():
            skew.add_metric([node, peer], skew_s)
        yield skew
        connected = gauge("peer_connected")
        for peer, is_connected in figures.peers.items():
            connected.add_metric([node, peer], int(is_connected))
        yield connected
        relayed = gauge("peer_relayed")
        for peer in figures.peers:
            relayed.add_metric([node, peer], int(peer in figures.relayed))
        yield relayed
        lag = gauge("replication_lag_records")
        for follower, records in figures.lag_records.items():
            lag.add_metric([node, follower], records)
        yield lag

    def _placement(self, cluster: ClusterOperations, node: str) -> Iterable[Metric]:
        figures = cluster.placement_figures()
        if figures is None:
            return
        for name, read in PLACEMENT.items():
            family = gauge(name)
            family.add_metric([node], int(read(figures)))
            yield family
        zone = gauge("node_zone")
        zone.add_metric([node, figures.zone], 1)
        yield zone
