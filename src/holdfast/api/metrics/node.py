"""The Prometheus metrics of a node, computed from its counters at each request."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.api.metrics.cluster import ClusterCollector
from holdfast.api.metrics.federation import FederationCollector
from holdfast.api.process import ServedProcess
from holdfast.api.readiness import obstacles
from holdfast.server.event_loop.broker import Broker
from holdfast.storage.files.filesystem import DESCRIPTORS

COUNTERS = {
    "bytes_received": "Bytes received from clients.",
    "bytes_sent": "Bytes written to clients.",
    "packets_received": "MQTT packets received.",
    "publish_sent": "PUBLISH packets sent to clients.",
    "duplicates_received": "QoS 2 PUBLISH packets received again before PUBREL.",
    "producer_duplicates": "Messages dropped: their producer sequence was already stored.",
    "producer_fenced": "Messages refused: their producer has a newer epoch.",
    "producer_evicted": "Places of producers forgotten because of limits.producers_max.",
    "connections_opened": "CONNECT packets accepted.",
    "connections_refused": "CONNECT packets refused.",
    "handshakes_failed": "TLS handshakes and WebSocket upgrades that failed.",
    "connections_displaced": "Connections closed before CONNECT to make room for others.",
    "sessions_expired": "Sessions ended by their expiry interval.",
    "sessions_taken_over": "Connections replaced by another one with the same client id.",
    "authentications_failed": "Connections with wrong or missing credentials.",
    "authentications_shed": "CONNECT packets refused unchecked: too many passwords waited.",
    "authorizations_denied": "Publishes denied: by the access control list, or another's producer.",
    "reads_denied": "Messages not handed to a client that may not read their topic.",
    "wills_denied": "Wills to topics that their client may not write, refused or dropped.",
    "sessions_denied": "CONNECT packets refused: the client id is another user's.",
    "protocol_errors": "Connections closed because the client broke the protocol.",
    "internal_errors": "Connections cut because a packet made the node fail; the log has each.",
    "inputs_throttled": "Times a client was not read for a while, because of a rate.",
    "lockouts": "Names locked out after failed authentications.",
    "keep_alive_timeouts": "Connections closed for silence.",
    "wills_published": "Wills published.",
    "reloads": "Reloads of settings and files that were applied.",
    "reloads_failed": "Reloads that changed nothing: a file cannot be used.",
    "log_reads": "Pieces of the log read for sessions that are behind.",
    "log_records_read": "Records read for sessions that are behind.",
    "readers_fell_behind": "Times a session left the live tail for the log.",
}
DROPPED = {
    "qos0_slow": "dropped_qos0_slow",
    "expired": "dropped_expired",
    "too_large": "dropped_too_large",
    "lost": "dropped_lost",
    "unreadable": "dropped_unreadable",
}
REFUSED = {
    "disk_full": "refused_disk_full",
    "quota": "refused_quota",
    "rate": "refused_rate",
    "connect_rate": "refused_connect_rate",
    "banned": "refused_banned",
}


class LeaseCollector(Collector):
    """Collects the lease of a node on a shared data directory."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        sharing = self._server.sharing
        if sharing is None:
            return
        mastership = sharing.mastership
        for name, text, value in (
            ("lease_held", "1 while this node holds the lease.", int(mastership.is_holder)),
            ("lease_epoch", "The newest epoch of the lease that counts.", mastership.epoch),
            ("lease_takeover_seconds", "How long our takeover took.", mastership.takeover_s),
            (
                "standby_records_followed",
                "Records of the holder's journal that were followed.",
                mastership.standby.records_followed,
            ),
        ):
            gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=["node"])
            gauge.add_metric([sharing.node_id], value)
            yield gauge


class NodeCollector(Collector):
    """Collects the counters and gauges of a serving broker."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    @property
    def _broker(self) -> Broker:
        broker = self._server.broker
        assert broker is not None
        return broker

    def collect(self) -> Iterable[Metric]:
        if self._server.broker is None:
            return
        state = self._broker.node.state
        stats = state.stats
        labels = ["node"]
        node = state.config.node_id
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"holdfast_{name}", text, labels=labels)
            counter.add_metric([node], getattr(stats, name))
            yield counter
        received = CounterMetricFamily(
            "holdfast_publish_received", "PUBLISH packets received.", labels=["node", "qos"]
        )
        for qos in range(3):
            received.add_metric([node, str(qos)], getattr(stats, f"publish_qos{qos}_received"))
        yield received
        dropped = CounterMetricFamily(
            "holdfast_deliveries_dropped",
            "Deliveries that will never happen.",
            labels=["node", "reason"],
        )
        for reason, attribute in DROPPED.items():
            dropped.add_metric([node, reason], getattr(stats, attribute))
        yield dropped
        refused = CounterMetricFamily(
            "holdfast_refused", "Requests refused.", labels=["node", "reason"]
        )
        for reason, attribute in REFUSED.items():
            refused.add_metric([node, reason], getattr(stats, attribute))
        if self._server.cluster is not None:
            figures = self._server.cluster.figures()
            refused.add_metric([node, "min_insync"], figures.refused_min_insync)
        yield refused
        name, text = "descriptor_waits", "Openings of files that waited for a file descriptor."
        waits = CounterMetricFamily(f"holdfast_{name}", text, labels=labels)
        waits.add_metric([node], DESCRIPTORS.waits)
        yield waits
        for name, text, value in self._gauges():
            gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=labels)
            gauge.add_metric([node], value)
            yield gauge
        yield from self._partitions(node)
        if self._server.maintenance is not None:
            failing = GaugeMetricFamily(
                "holdfast_maintenance_failing",
                "1 for work that failed when it was tried last; the log says of what.",
                labels=["node", "work"],
            )
            for work in self._server.maintenance.failing:
                failing.add_metric([node, work], 1)
            yield failing

    def _gauges(self) -> list[tuple[str, str, float]]:
        broker = self._broker
        state = broker.node.state
        journal = state.journal
        pending = state.pending_connects
        return [
            ("connections", "Open client connections.", state.connections),
            ("pending_connects", "Connections without an answered CONNECT.", len(pending)),
            ("pending_connect_bytes", "What they have sent and is kept.", pending.bytes),
            ("passwords_waiting", "Password checks that wait.", len(broker.passwords)),
            ("sessions", "Sessions, connected or not.", state.client_sessions()),
            ("subscriptions", "Subscriptions.", state.subscription_count),
            ("shared_groups", "Shared subscription groups.", len(state.groups)),
            ("retained_messages", "Retained topics.", len(state.retained)),
            ("retained_bytes", "Memory of the retained store.", state.retained.size_bytes),
            ("producers", "Producers in the producer table.", len(state.producers)),
            ("producer_places", "Their places, one per partition.", state.producers.position_count),
            ("journal_pending_bytes", "Appended, not yet written.", journal.pending_bytes),
            ("journal_held_promises", "Promises that wait for the disk.", len(state.promises)),
            ("disk_full", "1 while QoS > 0 publishes are refused.", int(state.disk_full)),
            ("disk_free_bytes", "Free space under the data directory.", broker.writer.space()),
        ]

    def _partitions(self, node: str) -> Iterable[Metric]:
        state = self._broker.node.state
        first = GaugeMetricFamily(
            "holdfast_partition_first_offset", "Retention floor.", labels=["node", "partition"]
        )
        watermark = GaugeMetricFamily(
            "holdfast_partition_high_watermark",
            "First offset not yet committed.",
            labels=["node", "partition"],
        )
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
        ready = GaugeMetricFamily("holdfast_ready", "1 while /readyz says so.", labels=["node"])
        ready.add_metric([node], int(not found))
        yield ready
        gauge = GaugeMetricFamily(
            "holdfast_not_ready", "1 for each reason why it does not.", labels=["node", "reason"]
        )
        for each in found:
            gauge.add_metric([node, each.name], 1)
        yield gauge
        broker = self._server.broker
        if broker is not None:
            waits = GaugeMetricFamily(
                "holdfast_acknowledgement_wait_seconds",
                "How long the oldest acknowledgement has been waiting for disk or replicas.",
                labels=["node"],
            )
            waits.add_metric([node], broker.runtime.waits_s(broker.loop.time()))
            yield waits


def registry_for(server: ServedProcess) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ReadinessCollector(server))
    registry.register(NodeCollector(server))
    registry.register(LeaseCollector(server))
    registry.register(ClusterCollector(server))
    registry.register(FederationCollector(server))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text
