"""The clocks of the other nodes, at one that has just started."""

from types import SimpleNamespace
from typing import Any, cast

from holdfast.cluster.failure.cluster_clock import ClusterClock
from holdfast.cluster.failure.health import Presence
from holdfast.cluster.partitions.disk_position import (
    FEATURE,
    DiskMemory,
    DiskPosition,
    encode_report,
)
from holdfast.cluster.parts import Parts
from holdfast.cluster.position_reports import PositionReports

TRUE_US = 1_790_000_000_000_000
DAY_US = 86_400_000_000


def reports(members: list[str] | None) -> tuple[PositionReports, Any]:
    """The reports at n2, which has just started. `members` None: it does not know them yet."""
    metadata = None if members is None else SimpleNamespace(nodes=dict.fromkeys(members))
    journal = SimpleNamespace(high_watermark=[0], durable_offset=[0])
    context = SimpleNamespace(metadata=metadata, features={}, outgoing=[], journal=journal)
    meta = SimpleNamespace(durable=(0, 0))
    parts = SimpleNamespace(
        context=context, meta=meta, clock=ClusterClock("n2"), disk_memory=DiskMemory()
    )
    return PositionReports(cast(Parts, parts)), parts


def test_a_node_that_does_not_know_the_members_yet_takes_their_clocks() -> None:
    """The next report may come after it leads a partition. Counter-example: its own clock is years
    ahead, and ends a session at once."""
    found, parts = reports(None)
    found.connected("n1", Presence("i", "a", features=FEATURE), 5.0)
    found.handle("n1", encode_report(TRUE_US, TRUE_US, DiskPosition()), 5.0)
    parts.clock.has_agreed = True
    assert parts.clock.tick(5.0, TRUE_US + 1000 * DAY_US) == TRUE_US


def test_a_node_waits_for_the_clock_of_another_member() -> None:
    found, _ = reports(["n1", "n2"])
    assert not found.is_awaited(), "nobody is connected"
    found.connected("n3", Presence("i", "a", features=FEATURE), 5.0)
    found.connected("n1", Presence("i", "a"), 5.0)
    assert not found.is_awaited(), "no member reports its clock"
    found.connected("n1", Presence("i", "a", features=FEATURE), 5.0)
    assert found.is_awaited()
    found.handle("n3", encode_report(TRUE_US, TRUE_US, DiskPosition()), 5.0)
    assert found.is_awaited(), "n3 is no member"
    found.handle("n1", encode_report(TRUE_US, TRUE_US, DiskPosition()), 5.0)
    assert not found.is_awaited()
