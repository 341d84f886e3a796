import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import PUBLISH, Publish
from holdfast.protocol.mqtt.properties import REPEATS_MAX, decode_block, encode_block
from holdfast.protocol.mqtt.publish import (
    decode_publish,
    encode_publish,
    splice_properties,
    topic_field,
)
from tests.data.packets import USER, text

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
BLOCKS = st.builds(
    encode_block,
    st.fixed_dictionaries(
        {},
        optional={
            1: st.integers(0, 1),
            2: st.integers(0, 0xFFFFFFFF),
            3: TEXT,
            8: st.just("reply/to"),
            9: st.binary(max_size=20),
            38: st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3),
        },
    ),
)


def decode_frame(data: bytes, version: int, from_client: bool) -> Publish:
    reader = FrameReader(268_435_460)
    reader.feed(data)
    assert reader.next()
    assert reader.end == len(data)
    return decode_publish(
        reader.buffer, reader.first, reader.start, reader.end, version, from_client
    )


@given(
    topic=st.binary(max_size=50),
    payload=st.binary(max_size=200),
    qos=st.integers(0, 2),
    retain=st.booleans(),
    dup=st.booleans(),
    packet_id=st.integers(1, 65_535),
    block=BLOCKS,
    version=st.integers(3, 5),
)
def test_round_trip(
    topic: bytes,
    payload: bytes,
    qos: int,
    retain: bool,
    dup: bool,
    packet_id: int,
    block: bytes,
    version: int,
) -> None:
    """[MQTT-3.3.2-15] [MQTT-3.3.2-16] [MQTT-3.3.2-17] [MQTT-3.3.2-18] [MQTT-3.3.2-20]
    [MQTT-3.3.2-4] properties come out as they went in"""
    dup = dup and qos > 0
    packet_id = packet_id if qos else 0
    data = encode_publish(topic, payload, qos, retain, dup, packet_id, block, version)
    publish = decode_frame(data, version, True)
    assert (publish.topic, publish.payload, publish.qos) == (topic, payload, qos)
    assert (publish.retain, publish.dup, publish.packet_id) == (retain, dup, packet_id)
    assert publish.properties == (block if version == 5 else b"")
    assert publish.topic_alias == 0
    assert publish.subscription_ids is None
    decoded = decode_block(publish.properties, 0, len(publish.properties), PUBLISH)
    assert publish.expiry_s == decoded.get(2, -1)


@given(
    block=BLOCKS,
    expiry_s=st.integers(-1, 0xFFFFFFFF),
    ids=st.lists(st.integers(1, 268_435_455), max_size=3),
    alias=st.integers(0, 65_535),
)
def test_splice(block: bytes, expiry_s: int, ids: list[int], alias: int) -> None:
    """[MQTT-3.3.2-6] [MQTT-3.3.4-3] [MQTT-3.3.4-4]"""
    spliced = splice_properties(block, expiry_s, tuple(ids), alias)
    expected = decode_block(block, 0, len(block), PUBLISH)
    if expiry_s >= 0:
        expected[2] = expiry_s
    if ids:
        expected[11] = ids
    if alias:
        expected[35] = alias
    assert decode_block(spliced, 0, len(spliced), PUBLISH) == expected
    # What a receiver of it keeps is the message as it was published, but for its expiry.
    publish = decode_frame(encode_publish(b"t", b"", 0, False, False, 0, spliced, 5), 5, False)
    assert publish.subscription_ids == (ids or None)
    assert publish.topic_alias == alias
    assert publish.properties == splice_properties(block, expiry_s, (), 0)


def test_splice_keeps_the_order_of_the_others() -> None:
    block = b"\x01\x00\x02\x00\x00\x00\x09" + USER
    assert splice_properties(block, 5, (), 0) == b"\x01\x00\x02\x00\x00\x00\x05" + USER
    assert splice_properties(block, -1, (), 0) == block


@pytest.mark.parametrize("from_client", [True, False])
def test_alias_and_identifiers_are_taken_out_anywhere(from_client: bool) -> None:
    alias = b"\x23\x00\x03"
    for parts in (
        [alias, USER, b"\x01\x00"],
        [USER, alias, b"\x01\x00"],
        [USER, b"\x01\x00", alias],
    ):
        block = b"".join(parts)
        data = encode_publish(b"t", b"p", 0, False, False, 0, block, 5)
        publish = decode_frame(data, 5, from_client)
        assert publish.topic_alias == 3
        assert publish.properties == USER + b"\x01\x00"
        assert publish.payload == b"p"


def test_properties_longer_than_127_bytes() -> None:
    block = USER * 50
    data = encode_publish(b"t", b"p", 1, False, False, 9, block, 5)
    assert decode_frame(data, 5, True).properties == block
    # The same bytes, and no room for them.
    body = text("t") + b"\x00\x09" + varint(len(block)) + block
    for end in range(5, len(body)):
        with pytest.raises(ProtocolViolation):
            decode_publish(body, 0x32, 0, end, 5, True)


def test_identifiers_are_bounded() -> None:
    block = b"\x0b\x01" * (REPEATS_MAX + 1)
    data = encode_publish(b"t", b"", 0, False, False, 0, block, 5)
    with pytest.raises(ProtocolViolation) as raised:
        decode_frame(data, 5, False)
    assert raised.value.reason == 0x97


def test_largest_packet_id_and_topic() -> None:
    topic = b"t" * 65_535
    publish = decode_frame(encode_publish(topic, b"", 1, False, False, 65_535, b"", 4), 4, True)
    assert publish.topic == topic
    assert publish.packet_id == 65_535


def test_topic_field() -> None:
    assert topic_field(b"") == b"\x00\x00"
    assert topic_field(b"x" * 300)[:3] == b"\x01\x2cx"
    with pytest.raises(ValueError):
        topic_field(b"x" * 65_536)


@pytest.mark.parametrize(
    ("qos", "dup", "packet_id"),
    [(3, False, 1), (-1, False, 1), (0, True, 0), (1, False, 0), (2, False, 65_536)],
)
def test_what_has_no_encoding(qos: int, dup: bool, packet_id: int) -> None:
    """[MQTT-2.2.1-3] [MQTT-2.2.1-4] [MQTT-3.3.1-2] [MQTT-3.3.1-4]"""
    with pytest.raises(ValueError):
        encode_publish(b"t", b"", qos, False, dup, packet_id, b"", 4)


def test_alias_without_encoding() -> None:
    with pytest.raises(ValueError):
        splice_properties(b"", -1, (), 65_536)


def test_qos_0_has_no_packet_id() -> None:
    """[MQTT-2.2.1-2]"""
    assert encode_publish(b"t", b"p", 0, False, False, 5, b"", 4) == b"\x30\x04\x00\x01tp"
