"""Prometheus metrics of a broker's membership of a federation."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.api.metrics.catalog import METRICS, counter, gauge
from holdfast.api.process import FederatedProcess

COUNTERS = (
    "published",
    "unwanted",
    "delivered",
    "control_frames",
    "control_bytes",
    "data_frames",
    "data_bytes",
    "links_up",
    "links_down",
)
LABELLED = ("dropped", "refused", "hops")


class FederationCollector(Collector):
    """Collects the counters and gauges of a federator."""

    def __init__(self, server: FederatedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        federation = self._server.federation
        if federation is None:
            return
        federator = federation.federator
        running = gauge("federation_up")
        running.add_metric([], int(federation.is_up))
        yield running
        if federator is None:
            return
        status = federation.status()
        counters = _table(status, "counters")
        for name in COUNTERS:
            yield _counter(name, {"": counters.get(name, 0)})
        for name in LABELLED:
            yield _counter(name, _table(counters, name))
        edge = _table(status, "edge")
        yield _counter("edge_messages", _table(edge, "counts"))
        yield from self._gauges(status, edge)

    def _gauges(self, status: Mapping[str, object], edge: Mapping[str, object]) -> Iterable[Metric]:
        interest, custody = _table(status, "interest"), _table(status, "custody")
        clock = _table(status, "clock")
        links = status["links"]
        assert isinstance(links, list)
        for name, value in (
            ("epoch", status["epoch"]),
            ("members", status["members"]),
            ("links", len(links)),
            ("interest_local", interest["local"]),
            ("interest_remote", interest["remote"]),
            ("custody_messages", custody["messages"]),
            ("custody_bytes", custody["bytes"]),
            ("clock_wrong", int(bool(clock["wrong"]))),
            ("clock_disputed", int(bool(clock["disputed"]))),
            ("clock_ahead_seconds", clock["ahead_s"] or 0.0),
            ("custody_disk_full", int(bool(custody["disk_full"]))),
            ("waiting_for_broker", edge["waiting_for_broker"]),
        ):
            family = gauge(f"federation_{name}")
            family.add_metric([], _as_float(value))
            yield family
        names = _table(status, "names")
        queued = gauge("federation_queued")
        for node, count in _table(custody, "queued").items():
            queued.add_metric([node, str(names.get(node, ""))], _as_float(count))
        yield queued
        rtt = gauge("federation_link_rtt_ms")
        for link in links:
            if link["rtt_ms"] is not None:
                rtt.add_metric([link["id"], link["name"]], link["rtt_ms"])
        yield rtt


def _table(values: Mapping[str, object], name: str) -> dict[str, object]:
    found = values.get(name, {})
    assert isinstance(found, dict)
    return found


def _as_float(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _counter(name: str, values: Mapping[str, object]) -> CounterMetricFamily:
    """Returns a counter with its values, by the value of its only label, or without one."""
    declared = METRICS[f"federation_{name}"]
    family = counter(f"federation_{name}")
    for key, value in values.items():
        family.add_metric([key] if declared.labels else [], _as_float(value))
    return family
