"""The Prometheus metrics of a broker's membership of a federation."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.api.process import FederatedProcess

COUNTERS = {
    "published": "Messages of this broker that other members want.",
    "unwanted": "Messages of this broker that nobody wanted any more.",
    "delivered": "Messages of other members that arrived.",
    "control_frames": "Frames sent that carry no message.",
    "control_bytes": "Bytes of these.",
    "data_frames": "Frames sent that carry a message.",
    "data_bytes": "Bytes of these.",
    "links_up": "Links that were made.",
    "links_down": "Links that were lost.",
}
LABELLED = {
    "dropped": ("reason", "Messages and frames that went nowhere."),
    "refused": ("reason", "Connections of peers that were refused."),
    "hops": ("hops", "Messages that arrived, by the links behind them."),
}


class FederationCollector(Collector):
    """Collects the counters and gauges of a federator."""

    def __init__(self, server: FederatedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        federation = self._server.federation
        if federation is None:
            return
        federator = federation.federator
        running = GaugeMetricFamily("holdfast_federation_up", "1 while the federator runs.")
        running.add_metric([], int(federator is not None))
        yield running
        if federator is None:
            return
        status = federation.status()
        counters = _table(status, "counters")
        for name, text in COUNTERS.items():
            yield _counter(name, text, "", {"": counters.get(name, 0)})
        for name, (label, text) in LABELLED.items():
            yield _counter(name, text, label, _table(counters, name))
        edge = _table(status, "edge")
        yield _counter("edge_messages", "At the broker.", "outcome", _table(edge, "counts"))
        yield from self._gauges(status, edge)

    def _gauges(self, status: Mapping[str, object], edge: Mapping[str, object]) -> Iterable[Metric]:
        interest, custody = _table(status, "interest"), _table(status, "custody")
        clock = _table(status, "clock")
        links = status["links"]
        assert isinstance(links, list)
        for name, text, value in (
            ("epoch", "Starts of this member.", status["epoch"]),
            ("members", "Members that are known.", status["members"]),
            ("links", "Links that are up.", len(links)),
            ("interest_local", "Filters announced to others.", interest["local"]),
            ("interest_remote", "Filters that others want.", interest["remote"]),
            ("custody_messages", "Messages that others have yet to confirm.", custody["messages"]),
            ("custody_bytes", "Of these.", custody["bytes"]),
            (
                "clock_wrong",
                "1 while this member's clock is wrong by what it knows.",
                int(bool(clock["wrong"])),
            ),
            (
                "clock_disputed",
                "1 while it is more than a day apart from a linked member's.",
                int(bool(clock["disputed"])),
            ),
            ("clock_ahead_seconds", "Of the linked members' clocks.", clock["ahead_s"] or 0.0),
            ("custody_disk_full", "1 while custody has no room.", int(bool(custody["disk_full"]))),
            (
                "waiting_for_broker",
                "Messages from others that wait for the disk.",
                edge["waiting_for_broker"],
            ),
        ):
            gauge = GaugeMetricFamily(f"holdfast_federation_{name}", text)
            gauge.add_metric([], _as_float(value))
            yield gauge
        names = _table(status, "names")
        queued = GaugeMetricFamily(
            "holdfast_federation_queued",
            "Messages in custody for a member.",
            labels=["member", "site"],
        )
        for node, count in _table(custody, "queued").items():
            queued.add_metric([node, str(names.get(node, ""))], _as_float(count))
        yield queued
        rtt = GaugeMetricFamily(
            "holdfast_federation_link_rtt_ms", "Round trip of a link.", labels=["member", "site"]
        )
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


def _counter(name: str, text: str, label: str, values: Mapping[str, object]) -> CounterMetricFamily:
    counter = CounterMetricFamily(
        f"holdfast_federation_{name}", text, labels=[label] if label else []
    )
    for key, value in values.items():
        counter.add_metric([key] if label else [], _as_float(value))
    return counter
