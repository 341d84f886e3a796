"""No operation that a packet asks for is quadratic, and none of them keeps the event loop for
long. Counted in operations and passes of the timers, never in time."""

import pytest

from holdfast.mqtt import packets as m
from holdfast.mqtt.encode import encode
from holdfast.mqtt.publish import Publish
from holdfast.node.config import NodeConfig
from holdfast.node.node import TIMERS_PER_TURN
from holdfast.node.state import STEPS_PER_TURN
from tests.support.node_bench import NodeBench, Peer
from tests.unit.test_node_publish import publish


def subscribe(*filters: str, qos: int = 1) -> m.Subscribe:
    return m.Subscribe(1, [m.SubscriptionRequest(filter, qos) for filter in filters])


def passes(bench: NodeBench, peers: dict[str, Peer] | None = None) -> tuple[int, dict[str, int]]:
    """Fires the timers, as often as an event loop would, until no large job is left. Returns how
    often, and after how many passes each of the peers had something."""
    first: dict[str, int] = {}
    count = 0
    while bench.node.state.work:
        count += 1
        bench.node.tick(bench.now, bench.wall_us)
        bench.node.handle_timers()
        for name, peer in (peers or {}).items():
            if name not in first and peer.connection.out:
                first[name] = count
    return count, first


def feed(peer: Peer, *packets: object) -> None:
    """As Peer.send, without carrying on with what is left for later turns."""
    data = b"".join(encode(packet, peer.version) for packet in packets)  # type: ignore[arg-type]
    peer.bench.node.handle_data(peer.connection, data)


def with_retained(count: int) -> NodeBench:
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0))
    publisher = bench.connect("p")
    for number in range(count):
        publisher.send(publish(f"{number:05}/x", b"x", 0, retain=True))
    return bench


def test_sessions_that_expire_together_end_a_few_in_a_pass() -> None:
    bench = NodeBench()
    for number in range(3 * TIMERS_PER_TURN):
        bench.connect(f"c{number}", expiry_s=10).lose()
    bench.now += 11
    count = 0
    while bench.node.state.sessions:
        before = len(bench.node.state.sessions)
        bench.node.tick(bench.now, bench.wall_us)
        bench.node.handle_timers()
        assert before - len(bench.node.state.sessions) <= TIMERS_PER_TURN
        count += 1
    assert count >= 3


def test_a_retained_scan_that_finds_nothing_is_cut_by_what_it_looks_at() -> None:
    """Every first level is another one, so each of the filters has to look at every topic."""
    topics, filters = 2000, 20
    bench = with_retained(topics)
    hostile = bench.connect("hostile")
    feed(hostile, subscribe(*(f"+/none{number}" for number in range(filters))))
    count, _ = passes(bench)
    assert count >= topics * filters // STEPS_PER_TURN - 1


def test_retained_scans_of_sessions_take_turns() -> None:
    topics, filters = 2000, 50
    bench = with_retained(topics)
    hostile = bench.connect("hostile")
    other = bench.connect("other")
    feed(hostile, subscribe(*(f"+/none{number}" for number in range(filters))))
    feed(other, subscribe("+/x", qos=0))
    other.connection.out.clear()
    bench.node.state.dirty.clear()
    count, first = passes(bench, {"other": other})
    assert first["other"] <= 2
    assert count > 50


@pytest.mark.parametrize("length", [1, 60_000])
def test_a_long_topic_counts_for_more_than_one_step(length: int) -> None:
    bench = with_retained(0)
    state = bench.node.state
    publisher = bench.connect("p2")
    for number in range(20):
        publisher.send(
            Publish(f"{number}{'y' * length}/x".encode(), b"x", 0, True, False, 0, b"", 0, -1)
        )
    scan = state.retained.scan("+/none")
    scan.next(100, 1000)
    assert scan.done == (length == 1)
