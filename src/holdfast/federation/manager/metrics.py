"""Prometheus metrics of the manager, computed on request."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.federation.manager.graph.graph import structure_of
from holdfast.federation.manager.graph.health import MemberState
from holdfast.federation.manager.manager import Manager

COUNTERS = {
    "joins": "Joins, rejoins included, since the start.",
    "removals": "Members removed since the start.",
    "probes_failed": "Probes of members that failed since the start.",
    "database_losses": "How often the database was lost since the start.",
}


class TopologyCollector(Collector):
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        manager = self._manager
        state = manager.state
        verdict = manager.verdict()
        members = GaugeMetricFamily(
            "holdfast_topology_members", "Members by health.", labels=["state"]
        )
        for each in MemberState:
            members.add_metric([each.value], sum(one is each for one in verdict.states.values()))
        yield members
        found = structure_of(state.graph())
        for name, text, value in (
            ("links", "Desired links.", len(state.links)),
            ("revision", "Revision of the desired state.", state.revision),
            ("components", "Parts that no desired link joins.", len(found.components)),
            (
                "articulation_points",
                "Members that would cut others off if they failed.",
                len(found.articulation_points),
            ),
            (
                "announcements_pending",
                "Announcements that members have not got yet.",
                len(state.announcements),
            ),
            ("frozen", "1 while too many fail at once to remove anybody.", verdict.is_frozen),
            (
                "database_away",
                "1 while the database cannot be used.",
                bool(manager.changes.unknown_because),
            ),
        ):
            yield GaugeMetricFamily(f"holdfast_topology_{name}", text, value=float(value))
        counts = {**manager.counts, "database_losses": manager.changes.losses}
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(
                f"holdfast_topology_{name}", text, value=float(counts.get(name, 0))
            )


def registry_for(manager: Manager) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TopologyCollector(manager))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Returns the metrics in the OpenMetrics text format."""
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text
