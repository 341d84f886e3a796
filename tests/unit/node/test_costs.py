"""No operation that a packet asks for is quadratic, and none of them keeps the event loop for
long. Counted in operations and passes of the timers, never in time."""

import sys
from collections.abc import Callable

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.node import (
    PACKETS_PER_TURN,
    PROGRESS_STEPS_PER_TURN,
    RECEIVERS_PER_PACKET,
    TIMERS_PER_TURN,
)
from holdfast.node.node_state import ROUTE_CHANGES_MAX, STEPS_PER_TURN
from holdfast.node.routing import routing
from holdfast.node.session.session import Inflight, Subscription
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer, check_routing
from tests.unit.node.test_publish import publish

INTERPRETED = routing.__file__.endswith(".py")


class Walked(dict[int, Inflight]):
    """Counts how often it is walked."""

    walks = 0

    def items(self):  # type: ignore[no-untyped-def, override]
        self.walks += 1
        return super().items()


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
    sessions = bench.recorded().sessions
    assert len(sessions) == 3 * TIMERS_PER_TURN
    bench.now += 11
    bench.wall_us += 11_000_000
    count = 0
    while sessions:
        before = len(sessions)
        bench.core.tick()
        bench.core.handle_timers()
        bench.commit()
        assert 0 < before - len(sessions) <= TIMERS_PER_TURN
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
    other.connection.out = None
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


def test_overlapping_filters_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged two by two, the subscription ids of n filters are copied n times: quadratic."""
    bench = NodeBench()
    peer = bench.connect("c")
    for number in range(200):
        levels = ["+" if number >> bit & 1 else "x" for bit in range(8)]
        peer.send(m.Subscribe(1, [m.SubscriptionRequest("/".join(levels), 1)], {11: [number + 1]}))
    copies = 0
    if INTERPRETED:
        make = Subscription.__init__

        def copied(*arguments: object) -> None:
            nonlocal copies
            copies += 1
            make(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Subscription, "__init__", copied)
    (target,) = routing.find_route(bench.node.state, b"x/x/x/x/x/x/x/x").targets
    assert target.additions is not None
    assert sorted(target.additions.ids) == list(range(1, 201))
    assert copies <= 1


def test_a_change_leaves_the_routes_of_other_topics_alone() -> None:
    bench = NodeBench()
    state = bench.node.state
    peer = bench.connect("c")
    peer.send(subscribe("a/1", "a/#", "b/#"))
    a = routing.find_route(state, b"a/1")
    targets = a.targets
    peer.send(subscribe("c/#"), m.Unsubscribe(2, ["b/#"]))
    bench.connect("newcomer").lose()
    assert routing.find_route(state, b"a/1").targets is targets
    other = bench.connect("other")
    other.send(subscribe("+/1"))
    assert len(routing.find_route(state, b"a/1").targets) == 2
    other.send(m.Unsubscribe(2, ["+/1"]))
    assert len(routing.find_route(state, b"a/1").targets) == 1
    for number in range(2 * ROUTE_CHANGES_MAX):
        other.send(subscribe(f"x{number}"))
    other.send(subscribe("a/+"))
    assert len(routing.find_route(state, b"a/1").targets) == 2


def test_a_member_of_a_group_is_looked_at_once_until_it_has_room() -> None:
    """A group of n members whose windows are full: each acknowledgement hands out one message,
    whatever n."""
    bench = NodeBench()
    members = [bench.connect(f"m{number}", properties={33: 1}) for number in range(50)]
    for member in members:
        member.send(subscribe("$share/g/t"))
    publisher = bench.connect("p")
    for number in range(60):
        publisher.send(publish("t", str(number).encode(), 1, number + 1))
    group = bench.node.state.groups["$share/g/t"]
    assert group.ready == 0
    got = [member.publishes() for member in members]
    assert [len(each) for each in got] == [1] * 50
    members[20].send(m.Ack(m.PUBACK, got[20][0].packet_id))
    assert [len(member.publishes()) for member in members] == [0] * 20 + [1] + [0] * 29
    assert group.ready == 0
    check_routing(bench.node.state)


def test_a_session_in_many_groups_feeds_those_that_wait_in_turn() -> None:
    bench = NodeBench()
    groups = [f"$share/g/t{number}" for number in range(100)]
    peer = bench.connect("c", properties={33: 1})
    peer.send(subscribe(*groups))
    publisher = bench.connect("p")
    for number in range(90, 10, -1):
        publisher.send(publish(f"t{number}", b"x", 1, number))
    topics = []
    while True:
        got = peer.publishes()
        if not got:
            break
        assert len(got) == 1
        session = bench.node.state.sessions["c"]
        assert len(session.blocked or ()) <= 79
        topics.append(int(got[0].topic[1:]))
        peer.send(m.Ack(m.PUBACK, got[0].packet_id))
    assert topics == list(range(90, 10, -1))


def test_leaving_many_groups_walks_inflight_once() -> None:
    """[MQTT-4.8.2-4] What was not acknowledged goes back, each record to its own group."""
    bench = NodeBench()
    groups = [f"$share/g/t{number}" for number in range(30)]
    first = bench.connect("first")
    first.send(subscribe(*groups))
    publisher = bench.connect("p")
    for number in range(30):
        publisher.send(publish(f"t{number}", b"x", 1, number + 1))
    assert len(first.publishes()) == 30
    second = bench.connect("second")
    second.send(subscribe(*groups))
    session = bench.node.state.sessions["first"]
    if INTERPRETED:
        session.inflight = Walked(session.inflight)
    first.send(m.Unsubscribe(3, groups[:20]))
    if isinstance(session.inflight, Walked):
        assert session.inflight.walks == 1
    assert sorted(each.topic for each in second.publishes()) == sorted(
        group[9:].encode() for group in groups[:20]
    )
    first.lose()
    assert len(second.publishes()) == 10
    check_routing(bench.node.state)


@pytest.mark.parametrize("kind", ["", "$share/g/"])
def test_a_session_with_many_subscriptions_ends_in_slices(kind: str) -> None:
    """Nobody sees the ones that are still there. A group is there until the coordinator ends it."""
    count = 5 * STEPS_PER_TURN
    bench = NodeBench()
    state = bench.node.state
    peer = bench.connect("c", expiry_s=100)
    filters = [f"{kind}t/{number}" for number in range(count)]
    for start in range(0, count, 1000):
        peer.send(subscribe(*filters[start : start + 1000]))
    publisher = bench.connect("p")
    other = bench.connect("other")
    feed(peer, m.Disconnect(0, {17: 0}))
    bench.commit()
    assert "c" not in state.sessions
    assert state.subscription_count > count // 2
    assert routing.find_route(state, b"t/0").targets == []
    feed(publisher, publish("t/0", b"before", 1, 1))
    bench.commit()
    feed(other, subscribe(filters[0]))
    if kind:
        assert len(state.groups[filters[0]].members) == 1
    assert state.ended
    bench.run()
    check_routing(state)
    assert other.payloads() == ([b"before"] if kind else [])
    assert state.subscription_count == 1
    assert not state.ended


def calls(work: Callable[[], object]) -> int:
    """How many functions it calls, built in ones too. In the compiled form few of them show."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_catching_up_costs_records_plus_filters() -> None:
    """Not records times filters."""
    filters, records = 2000, 100
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=100)
    half = filters // 2
    for kind in ("c/{}", "+/c/{}"):
        peer.send(subscribe(*(kind.format(number) for number in range(half))))
    peer.lose()
    publisher = bench.connect("p")
    for number in range(records):
        publisher.send(publish(f"c/{number}", b"x", 1, number + 1))
    bench.delay_reads = True
    again = bench.connect("c", clean=False, expiry_s=100)
    (effect,) = bench.delayed
    found = bench.messages()
    limits = list(effect.limits)

    def read() -> None:
        bench.node.handle_read(effect, found, limits, True, 0)
        bench.run()

    assert calls(read) < 20 * (filters + records)
    assert len(again.publishes()) == records


def test_catching_up_with_overlapping_filters_goes_on_in_slices() -> None:
    records = 100
    bench = NodeBench()
    peer = bench.connect("c", expiry_s=100)
    for number in range(64):
        levels = ["+" if number >> bit & 1 else "x" for bit in range(6)]
        peer.send(subscribe("/".join([*levels, "+"])))
    peer.lose()
    publisher = bench.connect("p")
    for number in range(records):
        publisher.send(publish(f"x/x/x/x/x/x/{number}", b"x", 1, number + 1))
    bench.delay_reads = True
    again = bench.connect("c", clean=False, expiry_s=100)
    session = bench.node.state.sessions["c"]
    (effect,) = bench.delayed
    bench.node.handle_read(effect, bench.messages(), list(effect.limits), True, 0)
    assert session.reading
    count, _ = passes(bench)
    assert count > 1
    assert not session.reading
    bench.run()
    assert len(again.publishes()) == records


@pytest.mark.parametrize("packet", [m.Pingreq(), m.Ack(m.PUBREL, 7)])
def test_what_one_read_brings_is_processed_over_several_turns(packet: object) -> None:
    count = 3 * PACKETS_PER_TURN
    bench = NodeBench()
    peer = bench.connect("c")
    peer.take()
    feed(peer, *[packet] * count)
    assert peer.connection.input_paused
    assert len(peer.connection.out or ()) <= PACKETS_PER_TURN
    bench.run()
    assert len(peer.take()) == count
    assert not peer.connection.input_paused


def test_filters_of_one_read_are_taken_over_several_turns() -> None:
    bench = NodeBench()
    peer = bench.connect("c")
    feed(peer, *(subscribe(*(f"f{a}/{b}" for b in range(500))) for a in range(20)))
    assert bench.node.state.subscription_count <= 2 * PACKETS_PER_TURN
    bench.run()
    assert bench.node.state.subscription_count == 10_000


def test_filters_of_a_session_are_bounded_in_bytes_and_number() -> None:
    config = NodeConfig(
        partitions=2, sys_interval_s=0, filter_bytes_per_session=100, subscriptions_per_session=3
    )
    bench = NodeBench(config)
    peer = bench.connect("c")
    peer.take()
    long = "\u00fc" * 40
    peer.send(subscribe(long, "a" * 21, "b", "b", "c", "d"), m.Unsubscribe(2, [long]))
    peer.send(subscribe("a" * 21), subscribe("e" * 99), subscribe("e" * 98, "b"))
    codes = [each.reasons for each in peer.take(m.Suback) if isinstance(each, m.Suback)]
    assert codes == [[1, 0x97, 1, 1, 1, 0x97], [1], [0x97], [0x97, 1]]
    assert bench.node.state.sessions["c"].filter_bytes == 23


def test_fan_out_counts_for_how_much_one_read_may_bring() -> None:
    receivers = 64
    bench = NodeBench()
    for number in range(receivers):
        bench.connect(f"c{number}").send(subscribe("t"))
    publisher = bench.connect("p")
    feed(publisher, *[publish("t", b"x", 0)] * PACKETS_PER_TURN)
    limit = PACKETS_PER_TURN * RECEIVERS_PER_PACKET
    assert bench.node.state.stats.publish_sent <= limit
    bench.run()
    assert bench.node.state.stats.publish_sent == PACKETS_PER_TURN * receivers


def test_progress_of_many_sessions_is_logged_over_several_passes() -> None:
    count = 2 * PROGRESS_STEPS_PER_TURN
    bench = NodeBench()
    state = bench.node.state
    for number in range(count):
        bench.connect(f"c{number}", expiry_s=100).send(subscribe("t"))
    bench.advance(1)
    bench.connect("p").send(publish("t", b"x", 1, 1))
    assert len(state.sessions_in_progress) == count
    bench.now += 1
    lengths = []
    while state.sessions_in_progress:
        bench.node.tick(bench.now, bench.wall_us)
        bench.node.handle_timers()
        lengths.append(len(state.sessions_in_progress))
    assert len(lengths) >= 2
    assert not state.progress_armed
