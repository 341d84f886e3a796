"""Producer sequences at QoS 2, for a client that has asked for them."""

import random

import pytest

from holdfast.log.partition import partition_of
from holdfast.log.record import MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer

PARTITIONS = 4
ASKS = {p.USER_PROPERTY: [("hf-seq", "?"), ("hf-seq", "?2")]}


WINDOW = 20


def new_bench(*, auto_commit: bool = True) -> NodeBench:
    config = NodeConfig(partitions=PARTITIONS, sys_interval_s=0, receive_maximum=WINDOW)
    return NodeBench(config, auto_commit=auto_commit)


def connect(bench: NodeBench, name: str = "c", *, asks: bool = True) -> Peer:
    """With a session that stays."""
    peer = bench.connect(name, clean=False, expiry_s=600, properties=dict(ASKS) if asks else None)
    bench.settle()
    return peer


def message(
    value: str, payload: bytes, packet_id: int, qos: int = 2, topic: str = "t", dup: bool = False
) -> Publish:
    block = p.encode_block({p.USER_PROPERTY: [("hf-seq", value)]})
    return Publish(topic.encode(), payload, qos, False, dup, packet_id, block, 0, -1)


def acks(peer: Peer) -> list[tuple[int, int, int]]:
    return [
        (ack.kind, ack.packet_id, ack.reason) for ack in peer.take(m.Ack) if isinstance(ack, m.Ack)
    ]


def release(peer: Peer, packet_id: int) -> int:
    """The reason of the PUBCOMP."""
    peer.send(m.Ack(m.PUBREL, packet_id))
    ((kind, found, reason),) = acks(peer)
    assert (kind, found) == (m.PUBCOMP, packet_id)
    return reason


def stored(bench: NodeBench) -> list[Record]:
    return [record for record in bench.records() if record.kind == MESSAGE]


def test_the_second_question_is_answered_beside_the_first() -> None:
    peer = new_bench().connect("c", properties=dict(ASKS))
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.properties[p.USER_PROPERTY] == [("hf-seq", "1"), ("hf-seq", "2")]


def test_a_publisher_that_forgot_its_packet_ids_is_stored_once() -> None:
    bench = new_bench()
    peer = connect(bench)
    peer.take()
    peer.send(message("p:1:5", b"five", 1))
    assert acks(peer) == [(m.PUBREC, 1, reasons.NO_MATCHING_SUBSCRIBERS)]
    assert release(peer, 1) == reasons.SUCCESS
    peer.lose()
    for crashes in (False, True):
        if crashes:
            bench.crash()
        again = connect(bench)
        again.take()
        again.send(message("p:1:5", b"five", 7))
        assert acks(again) == [(m.PUBREC, 7, reasons.SUCCESS)]
        # Before its release it counts as any QoS 2 message.
        again.send(message("p:1:5", b"five", 7, dup=True))
        assert acks(again) == [(m.PUBREC, 7, reasons.SUCCESS)]
        assert release(again, 7) == reasons.SUCCESS
        assert release(again, 7) == reasons.PACKET_IDENTIFIER_NOT_FOUND
        again.lose()
    assert [record.payload for record in stored(bench)] == [b"five"]
    assert [record.flags & 3 for record in stored(bench)] == [2]


def test_nobody_looks_at_it_without_the_question() -> None:
    bench = new_bench()
    peer = connect(bench, asks=False)
    for packet_id in (1, 2):
        peer.send(message("p:1:5", b"same", packet_id))
    assert len(stored(bench)) == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("p:0:9", reasons.IMPLEMENTATION_SPECIFIC_ERROR),
        ("p:1:05", reasons.PAYLOAD_FORMAT_INVALID),
        ("p:1:1", reasons.SUCCESS),
    ],
)
def test_what_is_not_stored_takes_no_place_of_the_window(value: str, reason: int) -> None:
    bench = new_bench()
    peer = connect(bench)
    peer.take()
    peer.send(message("p:1:1", b"first", 1))
    assert release_after_pubrec(peer, 1)
    connection = peer.connection
    for turn in range(3 * WINDOW):
        packet_id = 2 + turn % 5
        peer.send(message(value, b"again", packet_id))
        assert acks(peer) == [(m.PUBREC, packet_id, reason)]
        if reason < 0x80:
            assert release(peer, packet_id) == reasons.SUCCESS
    assert not peer.closed
    assert connection.unacknowledged == 0
    assert len(stored(bench)) == 1


def release_after_pubrec(peer: Peer, packet_id: int) -> bool:
    assert [kind for kind, _, _ in acks(peer)] == [m.PUBREC]
    return release(peer, packet_id) == reasons.SUCCESS


def test_a_repetition_waits_for_the_record_that_it_repeats() -> None:
    bench = new_bench(auto_commit=False)
    peer = connect(bench)
    peer.take()
    peer.send(message("p:1:1", b"x", 1), message("p:1:1", b"x", 2))
    assert acks(peer) == []
    bench.settle()
    assert [(kind, id) for kind, id, _ in acks(peer)] == [(m.PUBREC, 1), (m.PUBREC, 2)]
    assert len(stored(bench)) == 1


def test_random_crashes_of_both_sides() -> None:
    """A producer that sends again from the first message that it does not know to be done, under
    other packet ids and at the QoS of each, to a broker that crashes, too: each is stored once, and
    in order in each partition."""
    topics = ["t/0", "t/1", "t/2"]
    for seed in range(60):
        choose = random.Random(seed)
        bench = new_bench(auto_commit=False)
        count = 40
        kinds = {
            number: (choose.choice((1, 2)), choose.choice(topics)) for number in range(1, count + 1)
        }
        first_undone = 1
        done: set[int] = set()
        peer: Peer | None = None
        in_flight: dict[int, int] = {}
        next_number, next_id = 1, 1
        steps = 0
        while first_undone <= count:
            steps += 1
            assert steps < 5000, seed
            what = choose.random()
            if peer is None:
                peer = connect(bench, "producer")
                peer.take()
                in_flight, next_number = {}, first_undone
                # What a publisher of before left open.
                peer.send(*(m.Ack(m.PUBREL, id) for id in range(1, 65)))
                bench.settle()
                peer.take()
            elif what < 0.5 and next_number <= count and len(in_flight) < 10:
                qos, topic = kinds[next_number]
                peer.send(message(f"p:1:{next_number}", b"%d" % next_number, next_id, qos, topic))
                in_flight[next_id] = next_number
                next_number += 1
                next_id = next_id % 64 + 1
            elif what < 0.8:
                bench.settle()
                for kind, id, reason in acks(peer):
                    assert reason < 0x80
                    if kind == m.PUBREC:
                        peer.send(m.Ack(m.PUBREL, id))
                    else:
                        done.add(in_flight.pop(id))
                while first_undone in done:
                    first_undone += 1
            elif what < 0.83:
                peer.lose()
                peer = None
                # It remembers less than it knew.
                first_undone = choose.randint(max(1, first_undone - 5), first_undone)
                done = set()
            elif what < 0.86:
                bench.crash(keep_uncommitted=choose.random() < 0.5)
                peer = None
                done = set()
        by_partition: dict[int, list[int]] = {}
        for record in stored(bench):
            by_partition.setdefault(record.partition, []).append(int(record.payload))
        for partition, numbers in by_partition.items():
            expected = [
                number
                for number, (_, topic) in kinds.items()
                if partition_of(topic.encode(), PARTITIONS) == partition
            ]
            assert numbers == expected, seed
        assert sum(map(len, by_partition.values())) == count, seed
