"""Subscriptions that begin in the past, on one node without sockets and files."""

import pytest

from holdfast.log.reading.starts import FLOOR_BYTES
from holdfast.node.config import NodeConfig
from holdfast.node.delivery.replay import SEARCHES_MAX
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.properties import (
    CONTENT_TYPE,
    decode_block,
    encode_block,
)
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer

USER_PROPERTY = 0x26
REASON_STRING = 0x1F


def publish(bench: NodeBench, peer: Peer, topic: str, *payloads: str, qos: int = 1) -> None:
    for number, payload in enumerate(payloads, 1):
        packet_id = number if qos else 0
        peer.send(
            Publish(topic.encode(), payload.encode(), qos, False, False, packet_id, b"", 0, -1)
        )
        peer.take()
        if qos == 2:
            peer.send(m.Ack(m.PUBREL, packet_id))
        bench.advance(1)


def subscribe(
    peer: Peer, filter: str, start: str = "", *, qos: int = 1, packet_id: int = 7
) -> m.Suback:
    properties = {USER_PROPERTY: [("stream-offset", start)]} if start else {}
    peer.send(m.Subscribe(packet_id, [m.SubscriptionRequest(filter, qos)], properties))
    answers = peer.take(m.Suback)
    assert len(answers) == 1
    answer = answers[0]
    assert isinstance(answer, m.Suback)
    return answer


def drain(peer: Peer) -> list[str]:
    """Acknowledge until nothing more comes."""
    seen: list[str] = []
    while True:
        packets = peer.take()
        if not packets:
            return seen
        for packet in packets:
            if isinstance(packet, Publish):
                seen.append(packet.payload.decode())
                if packet.qos == 1:
                    peer.send(m.Ack(m.PUBACK, packet.packet_id))
                elif packet.qos == 2:
                    peer.send(m.Ack(m.PUBREC, packet.packet_id))
            elif isinstance(packet, m.Ack) and packet.kind == m.PUBREL:
                peer.send(m.Ack(m.PUBCOMP, packet.packet_id))


@pytest.fixture
def bench() -> NodeBench:
    return NodeBench()


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("expiry_s", [0, 1000])
def test_earliest_then_live(bench: NodeBench, qos: int, expiry_s: int) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a/1", "1", "2", "3", qos=2)
    reader = bench.connect("r", expiry_s=expiry_s)
    assert subscribe(reader, "a/#", "earliest", qos=qos).reasons == [qos]
    publish(bench, publisher, "a/1", "4", "5", qos=2)
    assert drain(reader) == ["1", "2", "3", "4", "5"]
    session = bench.session("r")
    assert session.tailing
    assert session.subscriptions["a/#"].replay is None


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        ("earliest", ["1", "2", "3", "4"]),
        ("latest", []),
        ("-2s", ["3", "4"]),
        ("-1h", ["1", "2", "3", "4"]),
        ("1700000001", ["2", "3", "4"]),
        ("1700000001000", ["2", "3", "4"]),
        ("2023-11-14T22:13:22Z", ["3", "4"]),
        ("last:1", ["4"]),
        ("last:3", ["2", "3", "4"]),
        ("last:9", ["1", "2", "3", "4"]),
    ],
)
def test_each_form_of_start(bench: NodeBench, start: str, wanted: list[str]) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2", "3", "4")
    by_property = bench.connect("r")
    subscribe(by_property, "a", start)
    assert drain(by_property) == wanted
    by_filter = bench.connect("old", version=4)
    subscribe(by_filter, f"$stream/@{start}/a")
    assert drain(by_filter) == wanted
    publish(bench, publisher, "a", "5")
    assert drain(by_property) == ["5"]
    assert drain(by_filter) == ["5"]
    by_filter.send(m.Unsubscribe(9, [f"$stream/@{start}/a"]))
    publish(bench, publisher, "a", "6")
    assert drain(by_filter) == []
    assert drain(by_property) == ["6"]


def test_last_of_each_topic(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    for topic in ("a/1", "a/2", "a/3"):
        publish(bench, publisher, topic, *[f"{topic}:{n}" for n in range(4)])
    publish(bench, publisher, "a/1", "a/1:4")
    reader = bench.connect("r", expiry_s=100)
    subscribe(reader, "a/+", "last:2")
    publish(bench, publisher, "a/4", "new")
    assert sorted(drain(reader)) == [
        "a/1:3", "a/1:4", "a/2:2", "a/2:3", "a/3:2", "a/3:3", "new",
    ]  # fmt: skip


def test_offsets_go_on_exactly(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2", "3")
    partition = bench.messages()[0].partition
    reader = bench.connect("r")
    subscribe(reader, "a", f"offsets:{partition}:1")
    assert drain(reader) == ["2", "3"]


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("yesterday", "use 'earliest'"),
        ("-15", "use 'earliest'"),
        ("last:0", "from 1 to 10000"),
        ("last:x", "from 1 to 10000"),
        ("offsets:99:0", "no partition 99"),
        ("offsets:0:5", "beyond the log's end"),
        ("offsets:0", "PARTITION:OFFSET"),
        ("1900000000", "in the future"),
        ("9" * 5000, "at most 4096"),
        ("2026-99-99", "use 'earliest'"),
    ],
)
def test_a_start_that_is_none(bench: NodeBench, start: str, text: str) -> None:
    reader = bench.connect("r")
    answer = subscribe(reader, "a", start)
    assert answer.reasons == [0x83]
    assert text in str(answer.properties[REASON_STRING])
    assert not reader.closed
    assert subscribe(reader, "a", "earliest").reasons == [1]


def test_not_for_shared_ones_and_not_when_switched_off() -> None:
    bench = NodeBench()
    reader = bench.connect("r")
    assert subscribe(reader, "$share/g/a", "earliest").reasons == [0x83]
    assert subscribe(reader, "$stream/@earliest").reasons == [0x83]
    assert subscribe(reader, "a/#/b", "earliest").reasons == [0x8F]
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, replay_available=False))
    reader = bench.connect("r")
    assert subscribe(reader, "a", "earliest").reasons == [0x87]
    assert subscribe(reader, "a").reasons == [1]


def test_other_subscriptions_get_nothing_twice(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "b", "b1")
    reader = bench.connect("r", expiry_s=100)
    subscribe(reader, "b")
    subscribe(reader, "a/#")
    publish(bench, publisher, "b", "b2")
    publish(bench, publisher, "a/x", "a1")
    publish(bench, publisher, "c", "c1")
    assert drain(reader) == ["b2", "a1"]
    subscribe(reader, "c", "earliest")
    assert drain(reader) == ["c1"]
    # Again from the beginning: the filter is the same, its start is new.
    subscribe(reader, "a/#", "earliest")
    assert drain(reader) == ["a1"]
    subscribe(reader, "#", "earliest")
    assert sorted(drain(reader)) == ["a1", "b1", "b2", "c1"]


def test_logged_qos0_of_the_past_and_live(bench: NodeBench) -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, qos0_logged=["a"]))
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2", qos=0)
    reader = bench.connect("r")
    subscribe(reader, "a", "earliest")
    publish(bench, publisher, "a", "3", qos=0)
    assert drain(reader) == ["1", "2", "3"]


def test_no_retained_message_beside_the_replay(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publisher.send(Publish(b"a", b"kept", 1, True, False, 1, b"", 0, -1))
    reader = bench.connect("r")
    subscribe(reader, "a", "earliest")
    assert drain(reader) == ["kept"]


def test_a_search_delays_only_its_client(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1")
    bench.delay_reads = True
    reader = bench.connect("r")
    request = m.SubscriptionRequest("a", 1)
    reader.send(
        m.Subscribe(1, [request], {USER_PROPERTY: [("stream-offset", "-1h")]}),
        m.Subscribe(2, [m.SubscriptionRequest("b", 1)]),
    )
    assert not reader.take(m.Suback)
    publish(bench, publisher, "a", "2")
    bench.delay_reads = False
    bench.run()
    answers = [each.packet_id for each in reader.take(m.Suback) if isinstance(each, m.Suback)]
    assert answers == [1, 2]
    bench.run()
    assert drain(reader) == ["1", "2"]


def test_a_client_that_leaves_during_the_search(bench: NodeBench) -> None:
    bench.delay_reads = True
    reader = bench.connect("r")
    reader.send(
        m.Subscribe(
            1, [m.SubscriptionRequest("a", 1)], {USER_PROPERTY: [("stream-offset", "last:1")]}
        )
    )
    reader.lose()
    bench.delay_reads = False
    bench.run()
    assert bench.find_session("r") is None


WISHES = [("stream-offset", "earliest"), ("hf-offset", "?1"), ("hf-end", "?1")]


def told(packet: Publish) -> dict[str, str]:
    pairs = decode_block(packet.properties, 0, len(packet.properties), m.PUBLISH).get(
        USER_PROPERTY, []
    )
    assert isinstance(pairs, list)
    return dict(pairs)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_client_is_told_the_places_and_the_end(bench: NodeBench, qos: int) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2")
    reader = bench.connect("r", expiry_s=100)
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("a", qos)], {USER_PROPERTY: WISHES}))
    *past, end = reader.publishes()
    records = bench.messages()
    assert [told(each) for each in past] == [
        {
            "hf-time": str(record.timestamp_us),
            "hf-partition": str(record.partition),
            "hf-offset": str(record.offset),
            "hf-past": "1",
        }
        for record in records
    ]
    assert (end.topic, end.payload, end.qos) == (b"$stream/end", b"a", 0)
    publish(bench, publisher, "a", "3")
    (live,) = reader.publishes()
    assert told(live)["hf-offset"] == str(bench.messages()[-1].offset)
    assert "hf-past" not in told(live)
    bench.crash()
    reader = bench.connect("r", clean=False, expiry_s=100)
    publish(bench, bench.connect("p"), "a", "4")
    assert "hf-offset" in told(reader.publishes()[-1])


@pytest.mark.parametrize("qos", [0, 1])
def test_a_publisher_forges_no_place(bench: NodeBench, qos: int) -> None:
    publisher = bench.connect("p")
    reader, other = bench.connect("r"), bench.connect("o")
    for each, wishes in ((reader, {USER_PROPERTY: WISHES[1:]}), (other, {})):
        each.send(m.Subscribe(1, [m.SubscriptionRequest("a", 1)], wishes))
    forged = ["hf-time", "hf-partition", "hf-offset", "hf-past", "hf-lost", "hf-", "own", "xhf-y"]
    properties = {CONTENT_TYPE: "hf-", USER_PROPERTY: [(name, "7") for name in forged]}
    block = encode_block(properties)
    publisher.send(Publish(b"a", b"x", qos, False, False, qos, block, 0, -1))
    (packet,) = reader.publishes()
    pairs = decode_block(packet.properties, 0, len(packet.properties), m.PUBLISH)
    assert pairs[CONTENT_TYPE] == "hf-"
    own = pairs[USER_PROPERTY]
    assert isinstance(own, list)
    assert own[-2:] == [("own", "7"), ("xhf-y", "7")]
    assert [name for name, _ in own[:-2]] == (
        ["hf-time", "hf-partition", "hf-offset"] if qos else ["hf-time"]
    )
    assert all(value != "7" for _, value in own[:-2])
    # A client that has not asked for places gets what was published.
    (packet,) = other.publishes()
    assert packet.properties == block


def test_an_empty_past_has_an_end(bench: NodeBench) -> None:
    reader = bench.connect("r")
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("a", 1)], {USER_PROPERTY: WISHES}))
    assert [each.topic for each in reader.publishes()] == [b"$stream/end"]


def test_a_client_is_told_what_is_lost(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2")
    bench.lost = 5
    reader = bench.connect("r")
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("a", 1)], {USER_PROPERTY: WISHES}))
    assert [told(each).get("hf-lost") for each in reader.publishes()[:2]] == ["5", None]


def test_the_searches_of_one_packet_are_bounded(bench: NodeBench) -> None:
    reader = bench.connect("r")
    requests = [m.SubscriptionRequest(f"$stream/@last:1/a/{n}", 1) for n in range(SEARCHES_MAX + 2)]
    reader.send(m.Subscribe(1, requests))
    (answer,) = reader.take(m.Suback)
    assert isinstance(answer, m.Suback)
    assert answer.reasons == [1] * SEARCHES_MAX + [0x97] * 2


def test_the_starts_of_a_session_are_bounded_in_bytes(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.node.delivery.replay.FLOORS_BYTES_MAX", 2 * FLOOR_BYTES)
    publisher = bench.connect("p")
    for topic in ("a/1", "b/1"):
        publish(bench, publisher, topic, "1")
    bench.delay_reads = True
    reader = bench.connect("r")
    request = [m.SubscriptionRequest(f"$stream/@last:1/{each}/+", 1) for each in ("a", "b")]
    reader.send(m.Subscribe(1, request))
    bench.delay_reads = False
    bench.run()
    (answer,) = reader.take(m.Suback)
    assert isinstance(answer, m.Suback)
    assert answer.reasons == [1, 0x97]
    assert "bytes" in str(answer.properties[REASON_STRING])


def test_other_topics_overtake_a_replay(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "old/1", *[f"o{n}" for n in range(20)])
    reader = bench.connect("r", expiry_s=100, properties={33: 2})
    subscribe(reader, "#")
    subscribe(reader, "$stream/@earliest/old/#")
    first = reader.publishes()
    assert [each.payload for each in first] == [b"o0", b"o1"]
    publish(bench, publisher, "alarm", "now")
    publish(bench, publisher, "old/2", "later")
    reader.send(m.Ack(m.PUBACK, first[0].packet_id), m.Ack(m.PUBACK, first[1].packet_id))
    second = reader.publishes()
    assert [each.payload for each in second] == [b"now", b"o2"]
    bench.advance(1)
    bench.crash()
    reader = bench.connect("r", clean=False, expiry_s=100)
    seen = drain(reader)
    assert sorted(set(seen)) == sorted({"now", *(f"o{n}" for n in range(2, 20)), "later"})
    assert seen.index("later") == len(seen) - 1
    assert seen.count("now") == 1


def test_other_topics_overtake_a_replay_that_goes_on_after_a_reconnect(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "old/1", *[f"o{n}" for n in range(20)])
    reader = bench.connect("r", expiry_s=100, properties={33: 2})
    subscribe(reader, "#")
    subscribe(reader, "$stream/@earliest/old/#")
    first = reader.publishes()
    assert [each.payload for each in first] == [b"o0", b"o1"]
    reader.send(m.Ack(m.PUBACK, first[0].packet_id), m.Ack(m.PUBACK, first[1].packet_id))
    reader.lose()
    publish(bench, publisher, "alarm", *[f"away{n}" for n in range(5)])
    reader = bench.connect("r", clean=False, expiry_s=100, properties={33: 2})
    publish(bench, publisher, "alarm", "now")
    seen = drain(reader)
    # Two were in flight before.
    assert sorted(seen[:2]) == ["o2", "o3"]
    assert seen[2:8] == [*(f"away{n}" for n in range(5)), "now"]
    assert seen[8:] == [f"o{n}" for n in range(4, 20)]


def test_live_messages_during_the_read_of_a_lane() -> None:
    config = NodeConfig(partitions=1, sys_interval_s=0, outbox_messages=3)
    bench = NodeBench(config)
    publisher = bench.connect("p")
    publish(bench, publisher, "old", "o0", "o1", "o2", "o3")
    reader = bench.connect("r", expiry_s=100, properties={33: 1})
    subscribe(reader, "new")
    subscribe(reader, "old", "earliest")
    reader.lose()
    for late in (2, 5):
        # The second time they have no room, and are read.
        publish(bench, publisher, "new", f"away{late}")
        bench.delay_reads = True
        reader = bench.connect("r", clean=False, expiry_s=100, properties={33: 1})
        publish(bench, publisher, "new", *[f"n{n}" for n in range(late)])
        bench.delay_reads = False
        bench.run()
        first = reader.publishes()
        reader.send(m.Ack(m.PUBACK, first[0].packet_id))
        seen = [first[0].payload.decode(), *[each.decode() for each in reader.payloads()]]
        while seen[-1][0] != "o" or len(seen) == 1:
            reader.send(m.Ack(m.PUBACK, reader.connection.session.next_packet_id - 1))
            seen += [each.decode() for each in reader.payloads()]
        assert seen[1:-1] == [f"away{late}", *[f"n{n}" for n in range(late)]]
        reader.lose()


def test_other_topics_overtake_a_replay_of_a_session_that_was_behind() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, outbox_messages=3)
    bench = NodeBench(config)
    publisher = bench.connect("p")
    publish(bench, publisher, "old", "o0", "o1")
    reader = bench.connect("r", properties={33: 1})
    subscribe(reader, "new")
    publish(bench, publisher, "new", *[f"n{n}" for n in range(10)])
    assert not bench.session("r").tailing
    subscribe(reader, "old", "earliest")
    publish(bench, publisher, "new", "n10")
    assert drain(reader) == [*(f"n{n}" for n in range(11)), "o0", "o1"]


def test_live_qos0_keeps_the_order_of_a_replayed_topic() -> None:
    """The log has each QoS 0 message of `a`, and none of `b`."""
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, qos0_logged=["a"]))
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "a1", "a2")
    publish(bench, publisher, "b", "b1", "b2")
    reader = bench.connect("r", properties={33: 1})
    live = bench.connect("live")
    subscribe(live, "+", qos=0)
    subscribe(reader, "+", "earliest")
    for topic in ("a", "b"):
        publish(bench, publisher, topic, f"{topic}3", qos=0)
        publish(bench, publisher, topic, f"{topic}4")
        publish(bench, publisher, topic, f"{topic}5", qos=0)
    publish(bench, publisher, "c", "c1", qos=0)
    assert [each.decode() for each in live.payloads()] == [
        "a3", "a4", "a5", "b3", "b4", "b5", "c1",
    ]  # fmt: skip
    seen = drain(reader)
    for topic in ("a", "b"):
        assert [each for each in seen if each[0] == topic] == [f"{topic}{n}" for n in range(1, 6)]
    assert seen[-1] == "c1"
    # What the log has comes from there afterwards, too, and at once if there is room.
    bench.auto_commit = False
    publish(bench, publisher, "a", "a6", qos=0)
    assert (live.payloads(), drain(reader)) == ([b"a6"], [])
    bench.auto_commit = True
    bench.run()
    assert drain(reader) == ["a6"]
    publish(bench, publisher, "b", "b6", qos=0)
    assert (live.payloads(), drain(reader)) == ([b"b6"], ["b6"])


def test_a_logged_qos0_message_on_its_way_to_the_log_at_subscribe() -> None:
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, qos0_logged=["a"]))
    publisher, reader = bench.connect("p"), bench.connect("r")
    publish(bench, publisher, "a", "1", qos=0)
    bench.auto_commit = False
    publish(bench, publisher, "a", "2", qos=0)
    subscribe(reader, "a", "earliest", qos=0)
    publish(bench, publisher, "a", "3", qos=0)
    bench.auto_commit = True
    bench.run()
    assert drain(reader) == ["1", "2", "3"]


def test_a_session_keeps_reading_logged_qos0_after_a_restart() -> None:
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, qos0_logged=["a"]))
    reader = bench.connect("r", expiry_s=100)
    subscribe(reader, "a", "earliest", qos=0)
    publish(bench, bench.connect("p"), "a", "1", qos=0)
    assert drain(reader) == ["1"]
    bench.advance(1)
    bench.crash()
    publish(bench, bench.connect("p"), "a", "2", qos=0)
    reader = bench.connect("r", clean=False, expiry_s=100)
    subscribe(reader, "a", qos=0)
    publish(bench, bench.connect("p"), "a", "3", qos=0)
    assert drain(reader) == ["2", "3"]


def test_waiting_qos0_is_bounded_and_counted() -> None:
    config = NodeConfig(partitions=1, sys_interval_s=0, outbox_messages=3)
    bench = NodeBench(config)
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2")
    reader = bench.connect("r", properties={33: 1})
    subscribe(reader, "a", "earliest")
    publish(bench, publisher, "a", *[f"q{n}" for n in range(5)], qos=0)
    assert drain(reader) == ["1", "2", "q0", "q1", "q2"]
    assert bench.node.state.stats.dropped_qos0_slow == 2
    assert bench.session("r").waiting_qos0 is None


@pytest.mark.parametrize("is_removed", [True, False])
def test_waiting_qos0_keeps_its_order_when_the_subscription_changes(is_removed: bool) -> None:
    """[MQTT-3.8.4-4] The older message stays if the subscription is replaced. If it is removed, it
    is dropped, because the next subscription must not get it after a newer one."""
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0))
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1", "2")
    reader = bench.connect("r", properties={33: 1})
    subscribe(reader, "a", "earliest")
    subscribe(reader, "b/+", "earliest")
    publish(bench, publisher, "a", "open", qos=0)
    publish(bench, publisher, "b/1", "other", qos=0)
    if is_removed:
        reader.send(m.Unsubscribe(8, ["a"]))
    subscribe(reader, "a")
    publish(bench, publisher, "a", "closed", qos=0)
    seen = [each for each in drain(reader) if each not in ("1", "2")]
    kept = [] if is_removed else ["open"]
    assert [each for each in seen if each != "other"] == [*kept, "closed"]
    assert seen.count("other") == 1
    assert bench.session("r").waiting_qos0 is None


def test_the_lane_closes_when_it_is_full() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, outbox_messages=3)
    bench = NodeBench(config)
    publisher = bench.connect("p")
    publish(bench, publisher, "old", "o0", "o1")
    reader = bench.connect("r", properties={33: 1})
    subscribe(reader, "new")
    subscribe(reader, "old", "earliest")
    publish(bench, publisher, "new", *[f"n{n}" for n in range(10)])
    seen = drain(reader)
    assert seen[:4] == ["o0", "n0", "n1", "n2"]
    assert [each for each in seen if each[0] == "n"] == [f"n{n}" for n in range(10)]
    assert [each for each in seen if each[0] == "o"] == ["o0", "o1"]
    assert bench.session("r").lane is None


def test_a_message_waits_in_the_lane_of_a_replay_without_records() -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0))
    publisher = bench.connect("p")
    reader = bench.connect("r", properties={33: 1})
    subscribe(reader, "new")
    publish(bench, publisher, "new", "n0", "n1")
    subscribe(reader, "old", "earliest")
    session = bench.session("r")
    assert session.lane is not None
    assert session.lane.queue
    assert not session.outbox
    session.check()
    assert drain(reader) == ["n0", "n1"]
    assert session.lane is None
    session.check()


def test_a_subscription_during_a_read_begins_with_the_next_message(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "1")
    publish(bench, publisher, "b", "1")
    reader = bench.connect("r")
    bench.delay_reads = True
    subscribe(reader, "a", "earliest")
    subscribe(reader, "b")
    bench.delay_reads = False
    bench.run()
    publish(bench, publisher, "b", "2")
    assert drain(reader) == ["1", "2"]


def test_a_second_replay_during_the_read_of_the_first(bench: NodeBench) -> None:
    """The result of that read says nothing of the second one's past."""
    publisher = bench.connect("p")
    publish(bench, publisher, "a", "a1")
    publish(bench, publisher, "b", "b1")
    reader = bench.connect("r")
    bench.delay_reads = True
    subscribe(reader, "a", "earliest")
    subscribe(reader, "b", "earliest")
    bench.delay_reads = False
    bench.run()
    assert sorted(drain(reader)) == ["a1", "b1"]


def test_replays_read_in_turns_at_their_rate() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, replay_bytes_per_s=100_000)
    bench = NodeBench(config)
    publisher = bench.connect("p")
    for _ in range(12):
        publish(bench, publisher, "a", *["x" * 1000 for _ in range(100)])
    readers = [bench.connect(name) for name in ("r1", "r2")]
    for reader in readers:
        subscribe(reader, "a", "earliest")
    counts = [0, 0]
    for second in range(40):
        for number, reader in enumerate(readers):
            counts[number] += len(drain(reader))
        # A read brings 500 messages.
        assert sum(counts) <= 2 * 500 + 100 * second
        assert abs(counts[0] - counts[1]) <= 1000
        bench.advance(1)
    assert counts == [1200, 1200]
    assert not bench.node.state.replay_pace.waiting


def test_a_start_that_keeps_too_much_log_is_refused() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, replay_pin_bytes=1000)
    bench = NodeBench(config)
    publisher = bench.connect("p")
    reader = bench.connect("r")
    publish(bench, publisher, "a", "1")
    assert subscribe(reader, "a", "-1h").reasons == [1]
    publish(bench, publisher, "a", "x" * 2000)
    for start in ("earliest", "-1h", "last:1"):
        answer = subscribe(reader, "a", start)
        assert answer.reasons == [0x97]
        assert "may need 1000 bytes" in str(answer.properties[REASON_STRING])
    assert subscribe(reader, "a", "latest").reasons == [1]


def test_a_commit_brings_logged_qos0_to_those_who_read_the_log() -> None:
    """The others receive it before its commit."""
    bench = NodeBench(NodeConfig(partitions=1, sys_interval_s=0, qos0_logged=["a"]))
    reader, live, publisher = bench.connect("r"), bench.connect("live"), bench.connect("p")
    subscribe(reader, "a", "earliest", qos=0)
    subscribe(live, "a", qos=0)
    bench.auto_commit = False
    for payload in (b"1", b"2"):
        publisher.send(Publish(b"a", payload, 0, False, False, 0, b"", 0, -1))
    assert (drain(reader), drain(live)) == ([], ["1", "2"])
    bench.settle()
    assert (drain(reader), drain(live)) == (["1", "2"], [])
