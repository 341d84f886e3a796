"""Prometheus metrics of a node, computed from its counters at each request."""

import os
import platform
import resource
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from holdfast import __version__
from holdfast.api.census import Census
from holdfast.api.cluster_operations import ClusterFigures, ClusterOperations, PlacementFigures
from holdfast.api.log.node_figures import storage_of
from holdfast.api.metrics.catalog import (
    DROPPED,
    METRICS,
    NODE_COUNTERS,
    REFUSED,
    counter,
    gauge,
    histogram,
)
from holdfast.api.metrics.federation import FederationCollector
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import obstacles
from holdfast.io.event_loop.broker import Broker
from holdfast.log import record
from holdfast.log.files.filesystem import DESCRIPTORS
from holdfast.log.journal.segment_list import size_bytes

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
    """Collects the figures of a cluster node.

    All nodes report the figures that all of them know, for example under-replicated partitions. A
    query must take their maximum, not their sum.
    """

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


_PROC: Final = Path("/proc/self")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def process_values() -> dict[str, float]:
    """Returns the process's metrics by name. Empty without /proc."""
    try:
        # The name of the program, in brackets, may contain blanks.
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
        booted = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
        # Since Linux 6.2 the size of this folder is the number of descriptors. Listing 100,000 of
        # them takes 50 ms.
        descriptors = (_PROC / "fd").stat().st_size or len(os.listdir(_PROC / "fd"))
    except (OSError, StopIteration):
        return {}
    return {
        "process_cpu_seconds": (int(fields[11]) + int(fields[12])) / _TICKS,
        "process_virtual_memory_bytes": float(fields[20]),
        "process_resident_memory_bytes": float(fields[21]) * _PAGE_BYTES,
        "process_start_time_seconds": booted + float(fields[19]) / _TICKS,
        "process_open_fds": descriptors,
        "process_max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "process_threads": int(fields[17]),
    }


def _form() -> str:
    """Returns whether the hot modules are compiled."""
    return "interpreted" if (record.__file__ or "").endswith(".py") else "compiled"


class ProcessCollector(Collector):
    """Collects the build and the process."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        broker = self._server.broker
        loop = type(broker.loop).__module__.partition(".")[0] if broker is not None else ""
        build = gauge("build_info")
        labels = [
            self._server.config.node.id,
            __version__,
            platform.python_version(),
            _form(),
            loop,
        ]
        build.add_metric(labels, 1)
        yield build
        restarts = counter("local_process_restarts")
        restarts.add_metric([], self._server.restarts)
        yield restarts
        for name, value in process_values().items():
            made = counter if METRICS[name].kind == "counter" else gauge
            family = made(name)
            family.add_metric([], value)
            yield family


class LeaseCollector(Collector):
    """Collects the lease of a node on a shared data directory."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        sharing = self._server.sharing
        if sharing is None:
            return
        mastership = sharing.mastership
        for name, value in (
            ("lease_held", int(mastership.is_holder)),
            ("lease_epoch", mastership.epoch),
            ("lease_takeover_seconds", mastership.takeover_s),
            ("standby_records_followed", mastership.standby.records_followed),
        ):
            family = gauge(name)
            family.add_metric([sharing.node_id], value)
            yield family


class NodeCollector(Collector):
    """Collects the counters and gauges of a serving broker."""

    def __init__(self, server: ServedProcess, census: Census) -> None:
        self._server = server
        self._census = census

    @property
    def _broker(self) -> Broker:
        broker = self._server.broker
        assert broker is not None
        return broker

    def collect(self) -> Iterable[Metric]:
        cluster = self._server.cluster
        if self._server.broker is None or cluster is None:
            return
        state = self._broker.node.state
        stats = state.stats
        node = state.config.node_id
        for name in NODE_COUNTERS:
            count = counter(name)
            count.add_metric([node], getattr(stats, name))
            yield count
        received = counter("publish_received")
        for qos in range(3):
            received.add_metric([node, str(qos)], getattr(stats, f"publish_qos{qos}_received"))
        yield received
        dropped = counter("deliveries_dropped")
        for reason, attribute in DROPPED.items():
            dropped.add_metric([node, reason], getattr(stats, attribute))
        yield dropped
        refused = counter("refused")
        for reason, attribute in REFUSED.items():
            refused.add_metric([node, reason], getattr(stats, attribute))
        refused.add_metric([node, "min_insync"], cluster.figures().refused_min_insync)
        yield refused
        refusals = counter("connection_refusals")
        for reason, number in list(stats.connection_refusals.items()):
            refusals.add_metric([node, reason], number)
        yield refusals
        waits = counter("descriptor_waits")
        waits.add_metric([node], DESCRIPTORS.waits)
        yield waits
        maintenance = self._server.maintenance
        reclaimed = counter("log_reclaimed_bytes")
        reclaimed.add_metric([node], 0 if maintenance is None else maintenance.reclaimed_bytes)
        yield reclaimed
        lost = counter("log_lake_lost_records")
        lost.add_metric([node], 0 if maintenance is None else maintenance.lake_lost_records)
        yield lost
        for name, value in self._gauges():
            family = gauge(name)
            family.add_metric([node], value)
            yield family
        for name, durations in (
            ("publish_acknowledge_seconds", stats.durations.acknowledged),
            ("publish_deliver_seconds", stats.durations.delivered),
            ("fdatasync_seconds", self._broker.writer.synced),
            ("replication_seconds", stats.durations.replicated),
        ):
            buckets = histogram(name)
            buckets.add_metric([node], durations.cumulative(), durations.sum_s)
            yield buckets
        yield from self._partitions(node)
        if maintenance is not None:
            failing = gauge("maintenance_failing")
            for work in maintenance.failing:
                failing.add_metric([node, work], 1)
            yield failing
        expiry = gauge("certificate_expiry_timestamp_seconds")
        for each in self._census.certificates:
            expiry.add_metric([node, each.door, each.file], each.valid_until)
        yield expiry

    def _gauges(self) -> list[tuple[str, float]]:
        broker = self._broker
        state = broker.node.state
        journal = state.journal
        pending = state.pending_connects
        sessions = self._census.sessions
        away = sessions.away
        sessions_away, subscriptions_away, groups_away = state.cluster.away()
        full_in_s = storage_of(self._server, broker).full_in_s
        maintenance = self._server.maintenance
        lake = broker.runtime.cluster_node.remote_reads.lake
        session_bytes = self._server.config.log.retention.session_bytes
        return [
            ("connections", state.connections),
            ("pending_connects", len(pending)),
            ("pending_connect_bytes", pending.bytes),
            ("passwords_waiting", len(broker.passwords)),
            ("sessions", state.client_sessions() + sessions_away),
            ("sessions_away", away),
            ("sessions_behind", sessions.behind),
            ("backlog_records", sessions.backlog_records),
            ("backlog_records_max", sessions.backlog_max),
            ("subscriptions", state.subscription_count + subscriptions_away),
            ("filter_bytes", max(state.filters.total, state.recorded.filters.total)),
            ("shared_groups", len(state.groups) + groups_away),
            ("retained_messages", state.retained.topics.total),
            ("retained_bytes", state.retained.bytes.total),
            ("delayed_messages", len(state.delayed)),
            ("delayed_bytes", state.delayed.bytes.total),
            ("producers", len(state.producers)),
            ("producer_places", state.producers.position_count),
            ("log_bytes", size_bytes(journal.segments)),
            ("log_dead_bytes", sum(segment.dead_bytes for segment in journal.segments)),
            ("log_segments", len(journal.segments)),
            ("journal_pending_bytes", journal.pending_bytes),
            ("journal_held_promises", state.cluster.waiting()),
            ("disk_full", int(state.disk_full)),
            ("disk_free_bytes", broker.writer.space()),
            ("disk_full_in_seconds", inf if full_in_s is None else full_in_s),
            ("log_pinned_bytes", 0 if maintenance is None else maintenance.pinned_bytes()),
            ("log_pinned_bytes_limit", session_bytes or inf),
            (
                "log_lake_pinned_bytes",
                0 if maintenance is None else maintenance.lake_pinned_bytes(),
            ),
            ("log_lake_away", int(bool(lake.error))),
            ("log_lake_waiting_readers", lake.waiting),
        ]

    def _partitions(self, node: str) -> Iterable[Metric]:
        state = self._broker.node.state
        first = gauge("partition_first_offset")
        watermark = gauge("partition_high_watermark")
        for partition in range(state.config.partitions):
            label = [node, str(partition)]
            first.add_metric(label, self._broker.reader.first_offset(partition))
            watermark.add_metric(label, state.journal.high_watermark[partition])
        yield first
        yield watermark


class ReadinessCollector(Collector):
    """Collects readiness, also from a node that does not serve."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        node = self._server.config.node.id
        found = obstacles(self._server)
        ready = gauge("ready")
        ready.add_metric([node], int(not found))
        yield ready
        reasons = gauge("not_ready")
        for each in found:
            reasons.add_metric([node, each.name], 1)
        yield reasons
        broker = self._server.broker
        if broker is not None:
            waits = gauge("acknowledgement_wait_seconds")
            waits.add_metric([node], broker.runtime.waits_s(broker.loop.time()))
            yield waits


def registry_for(server: ServedProcess, census: Census) -> CollectorRegistry:
    """Returns the collectors of a broker's process."""
    # Without auto_describe a registration would collect everything once.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ProcessCollector(server))
    registry.register(ReadinessCollector(server))
    registry.register(NodeCollector(server, census))
    registry.register(LeaseCollector(server))
    registry.register(ClusterCollector(server))
    registry.register(FederationCollector(server))
    return registry
