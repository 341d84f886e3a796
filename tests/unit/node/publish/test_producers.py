"""Producer sequences through a whole node: what is stored, what is answered, what survives."""

import itertools
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.log.batch import ATTRIBUTE_STATE, Batch
from holdfast.log.partition import partition_of
from holdfast.log.record import FLAG_PRODUCER, MESSAGE, PRODUCER, Record
from holdfast.node.config import NodeConfig
from holdfast.node.publish.producer_dedup import REFUSED_PRODUCERS_MAX
from holdfast.node.publish.producers import (
    ProducerPosition,
    ProducerTable,
    decode_producer,
    forgotten,
)
from holdfast.node.state.recovery import Recovery
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import Publish
from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench, Peer

PARTITIONS = 4
DAY_S = 86_400


def topic_in(partition: int, number: int = 0) -> str:
    """The `number`-th topic of a partition."""
    found = (name for name in map("t/{}".format, range(10_000)) if _partition(name) == partition)
    return next(itertools.islice(found, number, None))


def _partition(topic: str) -> int:
    return partition_of(topic.encode(), PARTITIONS)


TOPIC = topic_in(0)


def user_property(name: str, value: str) -> bytes:
    return p.encode_block({p.USER_PROPERTY: [(name, value)]})


def hf_seq(value: str) -> bytes:
    return user_property("hf-seq", value)


def message(
    value: str | None,
    payload: bytes = b"x",
    packet_id: int = 1,
    topic: str = TOPIC,
    qos: int = 1,
    retain: bool = False,
    properties: bytes = b"",
) -> Publish:
    block = properties + (b"" if value is None else hf_seq(value))
    return Publish(topic.encode(), payload, qos, retain, False, packet_id, block, 0, -1)


class Bench(NodeBench):
    """A bench whose log loses its beginning to retention, and whose recovery passes batches that
    are not marked for it, as a real one does."""

    def __init__(self, config: NodeConfig | None = None, *, auto_commit: bool = True) -> None:
        self.floor = [0] * PARTITIONS
        default = NodeConfig(partitions=PARTITIONS, sys_interval_s=0)
        super().__init__(config or default, auto_commit=auto_commit)

    def records(self) -> list[Record]:
        batches = [batch for batch in map(Batch, self.log) if batch.attributes & ATTRIBUTE_STATE]
        records = [record for batch in batches for record in batch.records()]
        return [each for each in records if each.offset >= self.floor[each.partition]]

    def messages(self) -> list[Record]:
        """Every message ever appended and committed."""
        return [record for record in super().records() if record.kind == MESSAGE]

    def payloads(self) -> list[bytes]:
        return [record.payload for record in self.messages()]


def reply(peer: Peer) -> m.Ack:
    (ack,) = peer.take(m.Ack)
    assert isinstance(ack, m.Ack)
    return ack


def publish(peer: Peer, value: str | None, payload: bytes = b"x", **fields: object) -> int:
    """The reason code of the one answer."""
    peer.take()
    peer.send(message(value, payload, **fields))  # type: ignore[arg-type]
    ack = reply(peer)
    assert ack.kind == (m.PUBACK if fields.get("qos", 1) == 1 else m.PUBREC)
    return ack.reason


def text_of(ack: m.Ack) -> str:
    return str(ack.properties.get(p.REASON_STRING, ""))


# ---------------------------------------------------------------------------------------------


def test_stored_once_with_its_identity_and_forwarded_unchanged() -> None:
    bench = Bench()
    subscriber = bench.connect("s")
    subscriber.send(m.Subscribe(1, [m.SubscriptionRequest("#", 1)]))
    peer = bench.connect("c")
    subscriber.take()
    assert publish(peer, "p1:7:3", b"one") == reasons.SUCCESS
    (received,) = subscriber.publishes()
    assert received.properties == hf_seq("p1:7:3")
    assert publish(peer, "p1:7:3", b"one") == reasons.SUCCESS
    assert publish(peer, "p1:7:2", b"older") == reasons.SUCCESS
    assert subscriber.publishes() == []
    (record,) = bench.messages()
    assert record.flags & FLAG_PRODUCER
    assert (record.producer, record.producer_epoch, record.sequence) == (b"p1", 7, 3)
    assert bench.node.state.stats.producer_duplicates == 2


def test_gaps_are_normal_and_partitions_are_apart() -> None:
    bench = Bench()
    peer = bench.connect("c")
    other = topic_in(1)
    assert publish(peer, "p:0:5", b"5") == 0x10
    assert publish(peer, "p:0:9", b"9", topic=other) == 0x10
    # Another topic of the first partition, a lower sequence than in the second.
    assert publish(peer, "p:0:7", b"7", topic=topic_in(0, 1)) == 0x10
    assert publish(peer, "p:0:6", b"6") == 0
    assert publish(peer, "p:0:9", b"9", topic=other) == 0
    assert publish(peer, "q:0:1", b"q") == 0x10
    assert bench.payloads() == [b"5", b"9", b"7", b"q"]


def test_extremes() -> None:
    bench = Bench()
    peer = bench.connect("c")
    name = "A" * 61 + "_.-"
    assert publish(peer, f"{name}:4294967295:9223372036854775807") == 0x10
    bench.crash()
    peer = bench.connect("c")
    assert publish(peer, f"{name}:4294967295:9223372036854775807") == 0
    assert publish(peer, f"{name}:4294967295:9223372036854775806") == 0
    assert publish(peer, f"{name}:4294967294:1") == 0x83
    assert len(bench.messages()) == 1


def test_a_duplicate_is_acknowledged_only_when_its_original_is_on_disk() -> None:
    bench = Bench(auto_commit=False)
    first = bench.connect("c")
    first.send(message("p:0:1"))
    first.lose()
    second = bench.connect("c")
    second.take()
    second.send(message("p:0:1", packet_id=9))
    assert second.received == []
    bench.settle()
    ack = reply(second)
    assert (ack.packet_id, ack.reason) == (9, reasons.SUCCESS)
    assert bench.payloads() == [b"x"]
    # Nothing is under way now: it does not wait.
    second.send(message("p:0:1", packet_id=10))
    assert reply(second).packet_id == 10


def test_acknowledgements_stay_in_order() -> None:
    """[MQTT-4.6.0-2]"""
    bench = Bench(auto_commit=False)
    peer = bench.connect("c")
    peer.take()
    values = ["p:0:1", "p:0:1", "bad", "p:0:2", "p:0:1", None]
    peer.send(*(message(value, packet_id=n) for n, value in enumerate(values, 1)))
    assert peer.received == []
    bench.settle()
    found = [(ack.packet_id, ack.reason) for ack in peer.take(m.Ack) if isinstance(ack, m.Ack)]
    assert found == [(1, 0x10), (2, 0), (3, 0x99), (4, 0x10), (5, 0), (6, 0x10)]


def test_higher_epoch_replaces_and_lower_is_fenced() -> None:
    bench = Bench()
    old = bench.connect("old")
    new = bench.connect("new")
    assert publish(old, "p:1:100", b"old") == 0x10
    assert publish(new, "p:2:1", b"new") == 0x10
    old.take()
    old.send(message("p:1:101", b"zombie"))
    ack = reply(old)
    assert ack.reason == reasons.IMPLEMENTATION_SPECIFIC_ERROR
    assert text_of(ack) == "producer epoch is fenced: 1 is below 2"
    assert publish(new, "p:2:1", b"new") == 0
    assert publish(new, "p:2:2", b"newer") == 0x10
    assert bench.payloads() == [b"old", b"new", b"newer"]
    assert bench.node.state.stats.producer_fenced == 1


@pytest.mark.parametrize(
    "limits", [{p.REQUEST_PROBLEM_INFORMATION: 0}, {p.MAXIMUM_PACKET_SIZE: 30}]
)
def test_no_reason_string_for_who_does_not_want_it(limits: dict[int, object]) -> None:
    """[MQTT-3.1.2-29] [MQTT-3.4.2-2]"""
    bench = Bench()
    peer = bench.connect("c", properties=limits)
    peer.take()
    peer.send(message("nonsense"))
    ack = reply(peer)
    assert (ack.reason, ack.properties) == (0x99, {})


MALFORMED = [
    "", ":", "::", "p", "p:1", "p:1:", "p::1", ":1:1", "p:1:1:", ":p:1:1", "p:1:1:1", "p:q:1:1",
    "p:01:1", "p:1:01", "p:00:1", "p:1:0", "p:1:00", "p:+1:1", "p:1:+1", "p:-1:1", "p:1:-1",
    "p:4294967296:1", "p:1:9223372036854775808", "p:1:" + "9" * 19, "p:" + "1" * 5000 + ":1",
    "p:1:" + "1" * 60_000, "p:1: 1", "p: 1:1", " p:1:1", "p:1:1 ", "p:1:1\n", "p\n:1:1", "p:1_0:1",
    "p:1:1_0", "p:1:0x1", "p:1:1e3", "p:1:١", "p:¹:1", "pé:1:1", "p/q:1:1", "p+:1:1",
    "a" * 65 + ":1:1", "a" * 60_000 + ":1:1", "p:1:1\x7f", "p:1.0:1",
]  # fmt: skip


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value[:20]))
def test_malformed_values_are_refused_and_said_to_be(value: str) -> None:
    bench = Bench()
    peer = bench.connect("c")
    assert publish(peer, "p:1:1", b"before") == 0x10
    peer.send(message(value))
    ack = reply(peer)
    assert ack.reason == reasons.PAYLOAD_FORMAT_INVALID
    assert text_of(ack).startswith("hf-seq")
    # The reader's memory of the value before was not harmed.
    assert publish(peer, "p:1:1", b"again") == 0
    assert publish(peer, "p:1:2", b"after") == 0x10
    assert bench.payloads() == [b"before", b"after"]
    assert peer.connection.unacknowledged == 0


VALID = re.compile(r"[A-Za-z0-9_.-]{1,64}:(0|[1-9][0-9]*):([1-9][0-9]*)", re.ASCII)
VALUE_TEXT = st.one_of(
    st.text(st.sampled_from("p:019-+ ")),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.from_regex(VALID, fullmatch=True),
    st.builds(
        "{}:{}:{}".format,
        st.text(st.sampled_from("aZ9_.-/"), max_size=70),
        st.integers(-1, 1 << 33),
        st.integers(-1, 1 << 64),
    ),
)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(VALUE_TEXT, min_size=1, max_size=4))
def test_any_value_is_stored_or_refused_with_0x99(values: list[str]) -> None:
    bench = Bench()
    peer = bench.connect("c")
    accepted: dict[str, tuple[int, int]] = {}
    for value in values:
        found = VALID.fullmatch(value)
        reason = publish(peer, value)
        if found is None or int(found[1]) > 0xFFFFFFFF or int(found[2]) >= 1 << 63:
            assert reason == 0x99
            continue
        name = value.partition(":")[0]
        identity = (int(found[1]), int(found[2]))
        known = accepted.get(name)
        if known is None or identity > known:
            assert reason == 0x10
            accepted[name] = identity
        else:
            assert reason == (0 if identity[0] == known[0] else 0x83)
    assert not peer.closed
    assert peer.connection.unacknowledged == 0


def test_twice_is_malformed() -> None:
    bench = Bench()
    peer = bench.connect("c")
    for between in (b"", user_property("a", "b"), b"\x01\x01"):
        peer.take()
        peer.send(message("p:0:1", properties=hf_seq("p:0:1") + between))
        ack = reply(peer)
        assert (ack.reason, text_of(ack)) == (0x99, "hf-seq stands more than once")
    assert bench.messages() == []


def hiding_places(value: str) -> list[bytes]:
    """The encoded property as bytes within other properties."""
    whole = hf_seq(value)
    return [
        p.encode_block({p.CORRELATION_DATA: whole}),
        p.encode_block({p.CORRELATION_DATA: b"before" + whole + b"after"}),
        # A user property `...&` whose value begins with the length 6 and the name.
        user_property("name&", "hf-seq"),
        p.encode_block({p.CONTENT_TYPE: "x&"}) + b"\x26\x00\x01a\x00\x01b",
        p.encode_block({p.MESSAGE_EXPIRY_INTERVAL: 0x26}) + user_property("hf-seqs", value),
        user_property("x", "hf-seq") + user_property("Hf-seq", value),
        user_property("hf-se", "q" + value),
    ]


@pytest.mark.parametrize("number", range(len(hiding_places("p:0:1"))))
def test_what_lies_in_another_property_is_not_looked_at(number: int) -> None:
    bench = Bench()
    peer = bench.connect("c")
    hidden = hiding_places("p:0:1")[number]
    for _ in range(2):
        assert publish(peer, None, b"plain", properties=hidden) == 0x10
    assert all(record.flags & FLAG_PRODUCER == 0 for record in bench.messages())
    # With the real one before or after it.
    assert publish(peer, "p:0:1", b"1", properties=hidden) == 0x10
    assert publish(peer, "p:0:1", b"1", properties=hidden) == 0
    assert publish(peer, None, b"2", properties=hf_seq("p:0:2") + hidden) == 0x10
    assert publish(peer, None, b"2", properties=hf_seq("p:0:2") + hidden) == 0
    assert bench.payloads() == [b"plain", b"plain", b"1", b"2"]


SMALL_TEXT = st.text(st.sampled_from("&hf-seqp:01"), max_size=12)
PROPERTY = st.one_of(
    st.builds(user_property, SMALL_TEXT, SMALL_TEXT),
    st.builds(user_property, st.just("hf-seq"), st.sampled_from(["p:0:1", "x", ""])),
)
ONCE = st.fixed_dictionaries(
    {},
    optional={
        p.PAYLOAD_FORMAT_INDICATOR: st.integers(0, 1),
        p.MESSAGE_EXPIRY_INTERVAL: st.sampled_from([0x26, 0x260006, 0x66_2D_73_65]),
        p.CONTENT_TYPE: SMALL_TEXT,
        p.RESPONSE_TOPIC: st.sampled_from(["hf-seq", "&"]),
        p.CORRELATION_DATA: st.sampled_from(
            [b"&\0", b"&\0\6hf", hf_seq("p:0:1"), b"\0&\0\6hf-seq"]
        ),
    },
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PROPERTY, max_size=4), ONCE, st.randoms(use_true_random=False))
def test_the_property_is_found_just_where_the_decoder_finds_it(
    repeated: list[bytes], once: dict[int, object], random: object
) -> None:
    blocks = [*repeated, *(p.encode_block({key: value}) for key, value in once.items())]  # type: ignore[dict-item]
    random.shuffle(blocks)  # type: ignore[attr-defined]
    block = b"".join(blocks)
    pairs = p.decode_block(block, 0, len(block), m.PUBLISH).get(p.USER_PROPERTY, [])
    assert isinstance(pairs, list)
    values = [pair[1] for pair in pairs if isinstance(pair, tuple) and pair[0] == "hf-seq"]
    bench = Bench()
    peer = bench.connect("c")
    reason = publish(peer, None, properties=block)
    if not values:
        assert reason == 0x10
        assert not bench.messages()[0].flags & FLAG_PRODUCER
    elif values == ["p:0:1"]:
        assert reason == 0x10
        assert bench.messages()[0].flags & FLAG_PRODUCER
    else:
        assert reason == 0x99


def test_only_qos_1_of_mqtt_5_is_looked_at() -> None:
    bench = Bench()
    peer = bench.connect("c")
    for packet_id in (1, 2):
        peer.send(message("nonsense", b"0", 0, qos=0))
        peer.send(message("p:0:1", b"0", 0, qos=0))
        assert publish(peer, "p:0:1", b"2", qos=2, packet_id=packet_id) == 0x10
    assert bench.payloads() == [b"2", b"2"]
    old = bench.connect("v4", 4)
    old.take()
    old.send(message("p:0:1", b"v4", 1), message("p:0:1", b"v4", 2))
    assert len(old.take(m.Ack)) == 2
    assert bench.payloads() == [b"2", b"2", b"v4", b"v4"]
    assert all(record.flags & FLAG_PRODUCER == 0 for record in bench.messages())


def test_a_repetition_does_not_set_the_retained_message_again() -> None:
    bench = Bench()
    peer = bench.connect("c")
    assert publish(peer, "p:0:1", b"first", retain=True) == 0x10
    assert publish(peer, "p:0:2", b"second", retain=True) == 0x10
    assert publish(peer, "p:0:1", b"first", retain=True) == 0
    for _ in range(2):
        reader = bench.connect("r")
        reader.send(m.Subscribe(1, [m.SubscriptionRequest("#", 1)]))
        assert reader.payloads() == [b"second"]
        bench.crash()


# ------------------------------------------------------------------------- receive maximum, quota


def test_every_answer_gives_its_place_back() -> None:
    """[MQTT-3.3.4-7] A publisher with one message in flight is never over the receive maximum."""
    config = NodeConfig(partitions=PARTITIONS, sys_interval_s=0, receive_maximum=1)
    bench = Bench(config)
    peer = bench.connect("c")
    for value in ("p:1:1", "p:1:1", "p:0:1", "bad", "p:1:2", "p:1:2"):
        publish(peer, value)
        assert peer.connection.unacknowledged == 0
    bench.node.state.disk_full = True
    for value in ("p:1:3", "p:1:4", "p:1:1", "q:1:1"):
        publish(peer, value)
        assert peer.connection.unacknowledged == 0
    assert not peer.closed


def test_after_a_refusal_later_ones_wait_for_it() -> None:
    """Window of five, disk full for the second only: the order at the broker stays."""
    bench = Bench()
    state = bench.node.state
    peer = bench.connect("c")
    assert publish(peer, "p:0:1", b"1") == 0x10
    state.disk_full = True
    assert publish(peer, "p:0:2", b"2") == 0x97
    state.disk_full = False
    for number, topic in ((3, TOPIC), (4, topic_in(1)), (5, topic_in(2))):
        peer.take()
        peer.send(message(f"p:0:{number}", b"%d" % number, topic=topic))
        ack = reply(peer)
        assert ack.reason == 0x97
        assert "an earlier sequence" in text_of(ack)
    # Others are not held back.
    assert publish(peer, "q:0:4", b"q") == 0x10
    assert publish(peer, None, b"plain") == 0x10
    topics = {4: topic_in(1), 5: topic_in(2)}
    for number in (2, 3, 4, 5):
        topic = topics.get(number, TOPIC)
        assert publish(peer, f"p:0:{number}", b"%d" % number, topic=topic) == 0x10
    assert bench.payloads() == [b"1", b"q", b"plain", b"2", b"3", b"4", b"5"]
    assert state.stats.refused_disk_full + state.stats.refused_unavailable == 4


def test_a_hole_moves_down_and_is_filled_by_a_lower_one() -> None:
    bench = Bench()
    state = bench.node.state
    peer = bench.connect("c")
    state.disk_full = True
    assert publish(peer, "p:0:5", b"5") == 0x97
    assert publish(peer, "p:0:3", b"3") == 0x97
    state.disk_full = False
    assert publish(peer, "p:0:5", b"5") == 0x97
    assert publish(peer, "p:0:4", b"4") == 0x97
    assert publish(peer, "p:0:2", b"2") == 0x10
    assert publish(peer, "p:0:3", b"3") == 0x10
    assert bench.payloads() == [b"2", b"3"]


def test_a_hole_is_filled_by_a_repetition_of_something_stored() -> None:
    bench = Bench()
    peer = bench.connect("c")
    assert publish(peer, "p:0:1", b"1") == 0x10
    bench.node.state.disk_full = True
    assert publish(peer, "p:0:2", b"2") == 0x97
    # The client starts again from further back; what is stored needs no space.
    assert publish(peer, "p:0:1", b"1") == 0
    assert publish(peer, "p:0:2", b"2") == 0x97
    assert publish(peer, "p:0:3", b"3") == 0x97
    bench.node.state.disk_full = False
    assert publish(peer, "p:0:3", b"3") == 0x97
    assert publish(peer, "p:0:2", b"2") == 0x10
    assert publish(peer, "p:0:3", b"3") == 0x10


def test_a_new_connection_and_a_new_epoch_have_no_holes() -> None:
    bench = Bench()
    state = bench.node.state
    peer = bench.connect("c")
    state.disk_full = True
    assert publish(peer, "p:0:1", b"1") == 0x97
    state.disk_full = False
    other = bench.connect("d")
    assert publish(other, "p:0:2", b"2") == 0x10
    assert publish(peer, "p:0:3", b"3") == 0x97
    assert publish(peer, "p:1:4", b"4") == 0x10
    assert publish(peer, "p:1:5", b"5") == 0x10
    assert publish(peer, "p:0:1", b"1") == 0x83


def test_refusals_for_good_leave_no_hole() -> None:
    bench = Bench()
    bench.node.state.acl = AclFile.parse(f"topic readwrite {TOPIC}\n", "acl")
    peer = bench.connect("c")
    assert publish(peer, "p:0:1", topic=topic_in(0, 1)) == 0x87
    assert publish(peer, "p:0:2", b"2") == 0x10
    assert publish(peer, "p:zero:3") == 0x99
    assert publish(peer, "p:0:4", b"4") == 0x10
    assert bench.payloads() == [b"2", b"4"]


def test_holes_of_a_connection_are_bounded() -> None:
    config = NodeConfig(partitions=PARTITIONS, sys_interval_s=0, receive_maximum=10)
    bench = Bench(config)
    peer = bench.connect("c")
    bench.node.state.disk_full = True
    for number in range(REFUSED_PRODUCERS_MAX):
        assert publish(peer, f"p{number}:0:2") == 0x97
    # Those that wait already may go on waiting.
    assert publish(peer, "p0:0:1") == 0x97
    assert not peer.closed
    peer.take()
    peer.send(message("one-more:0:1"))
    (goodbye,) = peer.take(m.Disconnect)
    assert isinstance(goodbye, m.Disconnect)
    assert goodbye.reason == 0x97
    assert peer.closed


# ------------------------------------------------------------------------------- expiry, eviction


def limited(**limits: int) -> NodeConfig:
    config = NodeConfig(partitions=PARTITIONS, sys_interval_s=0)
    for name, value in limits.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("crash", [False, True])
def test_a_silent_producer_is_forgotten(crash: bool) -> None:
    bench = Bench(limited(producer_expiry_s=DAY_S))
    peer = bench.connect("c")
    assert publish(peer, "p:5:10", b"a") == 0x10
    bench.advance(DAY_S)
    if crash:
        bench.crash()
        peer = bench.connect("c")
    assert publish(peer, "p:5:10", b"a") == 0
    # A repetition stores nothing, so it keeps nothing alive: replay would not see it.
    bench.advance(1)
    if crash:
        bench.crash()
        peer = bench.connect("c")
    assert publish(peer, "p:4:1", b"b") == 0x10
    assert publish(peer, "p:4:1", b"b") == 0


def test_a_producer_that_begins_anew_is_not_mistaken_after_a_crash() -> None:
    """Forgotten, it starts from 1 again in one partition. The log still has what it did in another
    one long ago: that must not make its new messages there look like repetitions."""
    bench = Bench(limited(producer_expiry_s=DAY_S))
    peer = bench.connect("c")
    other = topic_in(1)
    for topic in (TOPIC, other):
        assert publish(peer, "p:0:100", b"old", topic=topic) == 0x10
    bench.advance(DAY_S + 1)
    assert publish(peer, "p:0:1", b"1") == 0x10
    snapshot = bench.snapshot()
    for taken in (None, snapshot):
        bench.crash(snapshot=taken)
        peer = bench.connect("c")
        assert publish(peer, "p:0:1", b"1") == 0
    assert publish(peer, "p:0:2", b"2", topic=other) == 0x10
    assert bench.payloads() == [b"old", b"old", b"1", b"2"]


def test_the_idlest_producer_goes_first() -> None:
    bench = Bench(limited(producers_max=3))
    peer = bench.connect("c")
    for name in ("a", "b", "c", "a"):
        publish(peer, f"{name}:0:{'2' if name == 'a' else '1'}")
    publish(peer, "a:0:3")
    assert publish(peer, "d:0:1") == 0x10
    state = bench.node.state
    assert state.stats.producer_evicted == 1
    assert len(state.producers) == 3
    for name in ("a", "c", "d"):
        assert publish(peer, f"{name}:0:1") == 0
    assert publish(peer, "b:0:1") == 0x10
    assert publish(peer, "c:0:1") == 0x10
    assert publish(peer, "e:0:1") == 0x10
    notes = [note for note in bench.notes if note.event == "producers_evicted"]
    assert len(notes) == 1
    assert notes[0].fields == {"producers_max": 3}
    bench.advance(61)
    publish(peer, "f:0:1")
    assert len([note for note in bench.notes if note.event == "producers_evicted"]) == 2


def test_places_are_what_is_bounded() -> None:
    bench = Bench(limited(producers_max=4))
    peer = bench.connect("c")
    table = bench.node.state.producers
    publish(peer, "a:0:1")
    for partition in range(4):
        assert publish(peer, "wide:0:1", topic=topic_in(partition)) == 0x10
    assert (len(table), table.position_count) == (1, 4)
    publish(peer, "b:0:1")
    assert (len(table), table.position_count) == (1, 1)
    bench = Bench(limited(producers_max=1))
    peer = bench.connect("c")
    for partition in range(4):
        publish(peer, "wide:0:1", topic=topic_in(partition))
    # One producer may always have all of its own.
    assert all(publish(peer, "wide:0:1", topic=topic_in(n)) == 0 for n in range(4))
    assert bench.node.state.stats.producer_evicted == 0


def test_expired_producers_make_room_for_new_ones() -> None:
    table = ProducerTable(1000, 10)
    for number in range(100):
        table.store(b"old%d" % number, 0, 0, 1, 0)
    for number in range(100):
        table.store(b"new%d" % number, 0, 0, 1, 11_000_000)
        forget(table, table.expired(11_000_000))
    assert len(table) == table.position_count == 100


def forget(table: ProducerTable, chosen: list[tuple[bytes, ProducerPosition]]) -> None:
    for producer_id, place in chosen:
        table.forget(forgotten(producer_id, place, 0))


def test_a_position_that_has_moved_is_not_forgotten() -> None:
    """Its record follows the message that moved it, or began again with the same number."""
    for epoch, sequence, stored_us in ((0, 2, 5), (1, 1, 5), (0, 1, 9)):
        table = ProducerTable(1, DAY_S)
        table.store(b"a", 0, 0, 1, 5)
        table.store(b"b", 0, 0, 1, 6)
        (chosen,) = table.excess()
        # It is not chosen twice while its record is under way.
        assert table.excess() == []
        record = forgotten(*chosen, 7)
        table.store(b"a", 0, epoch, sequence, stored_us)
        table.forget(record)
        assert table.find_position(b"a", 0, 10) is not None
        assert [producer_id for producer_id, _ in table.excess()] == [b"b"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_user_of_a_producer_does_not_depend_on_the_order_of_partitions(
    order: tuple[int, ...],
) -> None:
    table = ProducerTable(10, DAY_S)
    for partition in order:
        table.bind(b"p", partition, ("", "alice", "bob")[partition], 5)
    producer = table.find(b"p", 6)
    assert producer is not None
    assert producer.owner == "alice"
    again = ProducerTable(10, DAY_S)
    for entry in table.snapshot():
        again.restore(entry)
    assert sorted(again.snapshot()) == sorted(table.snapshot())
    table.remove(b"p", 1)
    assert producer.owner == "bob"


def test_replay_keeps_to_the_limit() -> None:
    bench = Bench(limited(producers_max=50))
    peer = bench.connect("c")
    for number in range(30):
        for partition in range(3):
            publish(peer, f"p{number}:0:{partition + 1}", topic=topic_in(partition))
    places = bench.node.state.producers.position_count
    assert places <= 50
    for snapshot in (None, bench.snapshot()):
        bench.crash(snapshot=snapshot)
        assert bench.node.state.producers.position_count <= 50
        peer = bench.connect("c")
        assert publish(peer, "p29:0:1") == 0
    bench.config.producers_max = 7
    bench.floor = list(bench.journal.next_offset)
    bench.crash(snapshot=bench.snapshot())
    # A lower limit counts from the next new position on.
    assert places - 3 <= bench.node.state.producers.position_count
    assert publish(bench.connect("c"), "new:0:1") == 0x10
    assert 4 < bench.node.state.producers.position_count <= 7
    assert publish(bench.connect("c"), "p29:0:1") == 0


# ----------------------------------------------------------------------------------------- owners


def login(bench: NodeBench, name: str) -> Peer:
    peer = bench.peer()
    peer.send(m.Connect(5, True, 0, f"client-{name}", None, name, b"secret", {}))
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == 0
    return peer


def guarded(**limits: int) -> Bench:
    bench = Bench(limited(authenticates_users=True, **limits))
    let_in(bench)
    return bench


def let_in(bench: NodeBench) -> None:
    bench.node.state.admission.checks_passwords = True
    bench.valid_passwords = {"alice": b"secret", "mallory": b"secret"}


def restart(bench: NodeBench, snapshot: list[tuple[int, bytes]] | None = None) -> None:
    bench.crash(snapshot=snapshot)
    let_in(bench)


def test_a_producer_belongs_to_the_first_user() -> None:
    bench = guarded()
    assert publish(login(bench, "alice"), "p:0:1", b"1") == 0x10

    def strangers_are_refused() -> None:
        for stranger in (login(bench, "mallory"), bench.connect("nobody")):
            stranger.take()
            # Neither as a new epoch, nor as a repetition, nor in another partition.
            for value, topic in (
                ("p:999:999", TOPIC), ("p:0:1", TOPIC), ("p:0:2", topic_in(1)),
            ):  # fmt: skip
                stranger.send(message(value, b"forged", topic=topic))
                ack = reply(stranger)
                assert ack.reason == reasons.NOT_AUTHORIZED
                assert text_of(ack) == "the producer belongs to another user"
            assert stranger.connection.unacknowledged == 0

    strangers_are_refused()
    restart(bench)
    strangers_are_refused()
    bench.floor = list(bench.journal.next_offset)
    restart(bench, bench.snapshot())
    strangers_are_refused()
    alice = login(bench, "alice")
    assert publish(alice, "p:0:1", b"1") == 0
    assert publish(alice, "p:0:2", b"2") == 0x10
    assert publish(alice, "p:0:3", b"3", topic=topic_in(1)) == 0x10
    assert bench.payloads() == [b"1", b"2", b"3"]
    assert bench.node.state.stats.authorizations_denied == 6


def test_each_partition_says_whose_it_is_before_the_first_message() -> None:
    bench = guarded()
    alice = login(bench, "alice")
    for partition in (0, 1, 0):
        publish(alice, f"p:3:{5 + bench.journal.sequence}", topic=topic_in(partition))
    for partition, kinds in ((0, [PRODUCER, MESSAGE, MESSAGE]), (1, [PRODUCER, MESSAGE])):
        found = [record for record in bench.records() if record.partition == partition]
        assert [record.kind for record in found] == kinds
        assert (found[0].producer, found[0].client_id) == (b"p", b"alice")


def test_a_stranger_cannot_make_a_hole_or_a_place() -> None:
    bench = guarded()
    alice, mallory = login(bench, "alice"), login(bench, "mallory")
    publish(alice, "p:0:1")
    bench.node.state.disk_full = True
    assert publish(mallory, "p:0:2") == 0x87
    bench.node.state.disk_full = False
    assert publish(mallory, "p:0:3") == 0x87
    assert publish(alice, "p:0:2") == 0x10


def test_what_nobody_owns_becomes_the_first_users() -> None:
    bench = guarded()
    anonymous = bench.connect("anonymous")
    assert publish(anonymous, "p:0:1", b"1") == 0x10
    alice = login(bench, "alice")
    assert publish(alice, "p:0:1", b"1") == 0
    assert publish(anonymous, "p:0:2", b"2") == 0x10
    assert publish(alice, "p:0:3", b"3") == 0x10
    assert publish(anonymous, "p:0:4", b"4") == 0x87
    restart(bench)
    assert publish(bench.connect("anonymous"), "p:0:4", b"4") == 0x87
    assert publish(login(bench, "alice"), "p:0:4", b"4") == 0x10
    assert bench.payloads() == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("heir", ["mallory", None])
def test_a_forgotten_producer_is_free_and_stays_its_new_owners(heir: str | None) -> None:
    bench = guarded(producer_expiry_s=DAY_S)
    assert publish(login(bench, "alice"), "p:0:9", b"alice") == 0x10
    bench.advance(DAY_S + 1)

    def heirs() -> Peer:
        return bench.connect("nobody") if heir is None else login(bench, heir)

    assert publish(heirs(), "p:0:1", b"heir") == 0x10
    for snapshot in (None, bench.snapshot()):
        restart(bench, snapshot)
        assert publish(heirs(), "p:0:1", b"heir") == 0
    if heir is not None:
        assert publish(login(bench, "alice"), "p:0:10", b"alice") == 0x87


def test_names_that_prove_nothing_own_nothing() -> None:
    """A broker without credentials takes any user name: it must not lock anybody out."""
    bench = Bench()
    assert publish(login(bench, "alice"), "p:0:1") == 0x10
    assert publish(login(bench, "mallory"), "p:0:1") == 0
    assert publish(bench.connect("nobody"), "p:0:2") == 0x10
    kinds = [record.kind for record in bench.records() if record.producer]
    assert kinds == [MESSAGE, MESSAGE]


def test_owners_do_not_matter_once_nobody_is_verified() -> None:
    bench = guarded()
    assert publish(login(bench, "alice"), "p:0:1") == 0x10
    bench.config.authenticates_users = False
    bench.crash()
    assert publish(bench.connect("nobody"), "p:0:1") == 0
    assert publish(bench.connect("nobody"), "p:0:2") == 0x10
    assert publish(bench.connect("nobody"), "p:0:3", topic=topic_in(1)) == 0x10
    # And matter again when they are.
    bench.config.authenticates_users = True
    restart(bench)
    assert publish(bench.connect("nobody"), "p:0:4", topic=topic_in(1)) == 0x87
    assert publish(login(bench, "alice"), "p:0:4") == 0x10


def test_an_old_owner_does_not_come_back_with_an_old_snapshot() -> None:
    bench = guarded(producer_expiry_s=DAY_S)
    assert publish(login(bench, "alice"), "p:0:1") == 0x10
    saved = bench.snapshot()
    bench.floor = list(bench.journal.next_offset)
    bench.config.authenticates_users = False
    bench.crash(snapshot=saved)
    bench.advance(DAY_S + 1)
    assert publish(bench.connect("nobody"), "p:0:1") == 0x10
    bench.config.authenticates_users = True
    restart(bench, saved)
    assert publish(bench.connect("nobody"), "p:0:2") == 0x10


def test_certificates_and_exchanges_prove_a_name_and_a_bare_name_is_refused() -> None:
    bench = Bench(limited(authenticates_users=True))

    def certified(name: str) -> Peer:
        peer = bench.peer()
        peer.connection.certificate_name = name
        return peer.send(m.Connect(5, True, 0, f"client-{name}", None, None, None, {}))

    assert publish(bench.connect("nobody"), "p:0:1") == 0x10
    assert publish(certified("alice"), "p:0:3") == 0x10
    assert publish(bench.connect("nobody"), "p:0:4") == 0x87
    assert publish(certified("mallory"), "p:0:4") == 0x87
    bare = bench.peer()
    bare.connection.listener.authentication = ("certificate",)
    bare.send(m.Connect(5, True, 0, "other", None, "alice", b"secret", {}))
    (connack,) = bare.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == 0x87
    # A password or an exchange that has proved it, too.
    exchanged = bench.connect("other")
    exchanged.connection.username = "alice"
    assert publish(exchanged, "p:0:4") == 0x10


# -------------------------------------------------------------------------------- crash, snapshot

STEPS = "new", "again", "first", "crash", "kill", "snapshot", "retention"


def sequences() -> set[tuple[str, ...]]:
    """Every sequence of four steps after a message, each once: a step that changes nothing is left
    out, and the first message is "first"."""
    found: set[tuple[str, ...]] = set()
    for steps in itertools.product(STEPS, repeat=4):
        kept: list[str] = []
        for step in steps:
            if step == "again" and "new" not in kept:
                kept.append("first")
            elif step == "retention" and "snapshot" not in kept:
                continue
            elif step not in ("snapshot", "retention") or kept[-1:] != [step]:
                kept.append(step)
        found.add(tuple(kept))
    return found


@pytest.mark.parametrize("second", ["new", "first", "crash", "kill", "snapshot"])
def test_every_order_of_publishing_crashing_saving_and_removing(second: str) -> None:
    """A message, then every sequence of four steps: what was acknowledged is there once."""
    for rest in sorted(sequences()):
        if rest[:1] != (second,):
            continue
        steps = ("new", *rest)
        try:
            _walk(steps)
        except AssertionError as error:
            raise AssertionError(f"{steps}: {error}") from error


def _walk(steps: tuple[str, ...]) -> None:
    bench = Bench()
    peer = bench.connect("c")
    snapshot: list[tuple[int, bytes]] | None = None
    covered = list(bench.floor)
    sent = 0
    for step in steps:
        if step == "new":
            sent += 1
            assert publish(peer, f"p:1:{sent}", b"%d" % sent) == 0x10
        elif step in ("again", "first"):
            number = sent if step == "again" else 1
            assert publish(peer, f"p:1:{number}", b"%d" % number) == 0
        elif step == "snapshot":
            covered = list(bench.journal.next_offset)
            snapshot = bench.snapshot()
        elif step == "retention":
            # Only what a snapshot covers may go.
            bench.floor = list(covered)
        else:
            bench.crash(keep_uncommitted=step == "kill", snapshot=snapshot)
            peer = bench.connect("c")
    bench.crash(snapshot=snapshot)
    peer = bench.connect("c")
    for number in range(1, sent + 1):
        assert publish(peer, f"p:1:{number}", b"%d" % number) == 0
    assert bench.payloads() == [b"%d" % number for number in range(1, sent + 1)]


def test_an_uncommitted_message_that_a_crash_took_is_stored_when_it_comes_again() -> None:
    bench = Bench(auto_commit=False)
    peer = bench.connect("c")
    peer.send(message("p:0:1", b"1"))
    bench.crash()
    peer = bench.connect("c")
    peer.take()
    peer.send(message("p:0:1", b"1"))
    bench.settle()
    assert reply(peer).reason == 0x10
    assert bench.payloads() == [b"1"]


def test_a_snapshot_taken_while_the_table_changes() -> None:
    """Whatever happens between two of its entries, snapshot and records together are right."""
    for pause in range(1, 8):
        bench = Bench(limited(producers_max=6))
        peer = bench.connect("c")
        for name in "abcd":
            publish(peer, f"{name}:0:1")
        publish(peer, "d:0:2", topic=topic_in(1))
        begun = list(bench.node.state.delivered)
        entries = bench.core.cluster.replicated.snapshot()
        taken = list(itertools.islice(entries, pause))
        publish(peer, "a:0:2")
        publish(peer, "b:1:1")
        publish(peer, "c:0:5", topic=topic_in(2))
        publish(peer, "new:0:1")
        publish(peer, "newer:0:1")
        taken += list(entries)
        expected = {name: places_of(bench, name) for name in bench.node.state.producers.by_id}
        for floor in ([0] * PARTITIONS, begun):
            bench.floor = floor
            bench.crash(snapshot=taken)
            known = bench.node.state.producers.by_id
            for name, places in expected.items():
                assert places_of(bench, name) == places, (pause, name)
            assert b"newer" in known


def places_of(bench: NodeBench, name: bytes) -> set[tuple[int, int, int]]:
    places = bench.node.state.producers.by_id[name].positions()
    return {(place.partition, place.epoch, place.sequence) for place in places}


def test_a_snapshot_entry_that_is_none_is_refused() -> None:
    table = ProducerTable(10, 1000)
    table.bind(b"p", 3, "alice", 5)
    table.store(b"p", 3, 7, 8, 9)
    table.bind(b"p", 2, "alice", 5)
    table.store(b"p", 2, 1, 2, 3)
    (entry,) = table.snapshot()
    again = ProducerTable(10, 1000)
    again.restore(entry)
    assert list(again.snapshot()) == [entry]
    assert again.position_count == 2
    again.restore(entry)
    assert again.position_count == 2
    producer_id, producer = decode_producer(entry)
    assert (producer_id, producer.owner) == (b"p", "alice")
    for length in range(len(entry)):
        with pytest.raises((ValueError, struct.error)):
            decode_producer(entry[:length])
    with pytest.raises(ValueError, match="places"):
        decode_producer(entry + b"\0")


def test_a_record_that_cannot_be_read_is_counted_and_passed() -> None:
    state = Bench().recorded()
    recovery = Recovery(state)
    recovery.apply(
        Record(
            0,
            PRODUCER,
            flags=FLAG_PRODUCER,
            timestamp_us=5,
            client_id=b"\xff",
            producer=b"p",
            sequence=1,
            offset=0,
        )
    )
    assert recovery.damaged == 1
    assert len(state.producers) == 0


def test_sys_topics_tell() -> None:
    bench = Bench(limited(producers_max=1))
    peer = bench.connect("c")
    for value in ("p:1:1", "p:1:1", "p:0:1", "q:0:1"):
        publish(peer, value)
    values = bench.node.sys_topics.values()
    shown = {
        name: values[f"producers/{name}"] for name in ("count", "duplicates", "fenced", "evicted")
    }
    assert shown == {"count": "1", "duplicates": "1", "fenced": "1", "evicted": "1"}


# ------------------------------------------------------------------------------- holders


def test_a_client_that_numbers_ever_new_producers_pushes_out_its_own() -> None:
    bench = Bench(limited(producers_max=20))
    victims = [bench.connect(f"v{number}") for number in range(10)]
    for number, victim in enumerate(victims):
        assert publish(victim, f"v{number}:0:1") == 0x10
    attacker = bench.connect("attacker")
    for number in range(200):
        assert publish(attacker, f"a{number}:0:1") == 0x10
    table = bench.node.state.producers
    assert table.position_count == 20
    for number, victim in enumerate(victims):
        assert publish(victim, f"v{number}:0:1") == 0, "stored a second time"
    # So after a restart, from the log or a snapshot.
    for taken in (None, bench.snapshot()):
        bench.crash(snapshot=taken)
        attacker = bench.connect("attacker")
        for number in range(200, 400):
            publish(attacker, f"a{number}:0:1")
        victim = bench.connect("v")
        for number in range(10):
            assert publish(victim, f"v{number}:0:1") == 0, "stored a second time"


def test_users_count_and_not_their_clients() -> None:
    table = ProducerTable(10, DAY_S)
    for number in range(4):
        table.store(b"v%d" % number, 0, 0, 1, number + 1, b"victim")
        table.bind(b"v%d" % number, 0, "victim", number + 1)
    for number in range(50):
        name = b"a%d" % number
        table.bind(name, 0, "attacker", 100 + number)
        table.store(name, 0, 0, 1, 100 + number, b"client%d" % number)
        forget(table, table.excess())
    assert all(table.find(b"v%d" % number, 200) for number in range(4))
    assert table.position_count == 10
    assert table.holders[b"uattacker"].position_count == 6


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "bind", "remove", "restore"]),
            st.sampled_from([b"p%d" % number for number in range(12)]),
            st.integers(0, 3),
            st.sampled_from([b"", b"c1", b"c2"]),
            st.sampled_from(["", "u1", "u2"]),
        ),
        max_size=60,
    )
)
def test_places_of_holders_add_up(steps: list[tuple[str, bytes, int, bytes, str]]) -> None:
    table = ProducerTable(8, DAY_S)
    for now, (kind, name, partition, client, owner) in enumerate(steps):
        if kind == "store":
            table.store(name, partition, 0, 1, now, client)
        elif kind == "bind":
            table.bind(name, partition, owner, now)
        elif kind == "remove":
            table.remove(name, partition)
        else:
            for data in list(table.snapshot()):
                table.restore(data)
        forget(table, table.excess())
        counted = {id(producer.holder): 0 for producer in table.by_id.values()}
        for producer in table.by_id.values():
            counted[id(producer.holder)] += len(producer.positions())
        assert {id(holder): holder.position_count for holder in table.holders.values()} == counted
        assert sum(counted.values()) == table.position_count
        assert table.position_count <= 8 or len(table.by_id) == 1
        assert table.leaving_count == 0
