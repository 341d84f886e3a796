"""Histograms of durations: their buckets, and how often they are observed."""

from holdfast.node.durations import BOUNDS_S, Durations, SampledDurations
from tests.support.node_bench import NodeBench
from tests.unit.node.test_rights import publication, subscribe


def test_buckets_are_cumulative_and_end_with_everything() -> None:
    durations = Durations()
    for seconds in (-1.0, 0.0001, 0.00011, 0.2, 31.0):
        durations.observe(seconds)
    buckets = dict(durations.cumulative())
    assert list(buckets) == [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    # The bound itself is in its bucket; a clock that was set back counts as 0.
    assert buckets["0.0001"] == 2
    assert buckets["0.00025"] == 3
    assert buckets["0.25"] == 4
    assert buckets["30"] == 4
    assert buckets["+Inf"] == 5
    assert abs(durations.sum_s - 31.20021) < 1e-9


def observed(durations: SampledDurations) -> int:
    return sum(durations.delivered.counts)


def test_a_turn_observes_at_most_one_delivery() -> None:
    bench = NodeBench()
    for name in ("one", "two"):
        subscribe(bench.connect(name), "#")
    durations = bench.node.state.stats.durations
    writer = bench.connect("writer")
    writer.send(publication("t", b"x", 1))
    bench.settle()
    assert observed(durations) == 0
    durations.takes_delivery = True
    writer.send(publication("t", b"x", 1), publication("t", b"x", 1))
    bench.settle()
    assert observed(durations) == 1


def test_what_was_read_later_is_not_observed() -> None:
    """A client that was away for an hour says nothing about the speed of the broker."""
    bench = NodeBench()
    peer = bench.connect("reader", expiry_s=10_000)
    subscribe(peer, "#")
    bench.connect("writer").send(publication("t", b"x", 0, retain=True))
    peer.lose()
    bench.connect("writer").send(publication("t", b"x", 1))
    bench.settle()
    bench.advance(3600)
    durations = bench.node.state.stats.durations
    durations.takes_delivery = True
    back = bench.connect("reader", clean=False, expiry_s=10_000)
    bench.settle()
    assert back.payloads() == [b"x"]
    assert observed(durations) == 0
