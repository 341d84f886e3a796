"""Every packet of the corpus, decoded, encoded again, cut short and put together wrongly."""

import pytest

from holdfast.protocol.mqtt.decode import FILTERS_MAX, decode, decode_ack
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import Ack, Packet, Publish
from holdfast.protocol.mqtt.publish import decode_publish
from tests.data.packets import (
    CASES,
    CLIENT,
    INVALID,
    MALFORMED,
    PROPERTIES,
    PROPERTY_CARRIERS,
    PROTOCOL,
    VALID,
    Case,
    Property,
    pkt,
    props,
    text,
)


def decode_frame(data: bytes, version: int, from_client: bool) -> Packet:
    reader = FrameReader(268_435_460)
    reader.feed(data)
    assert reader.next()
    return decode(reader.buffer, reader.first, reader.start, reader.end, version, from_client)


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", VALID, ids=name_of)
def test_valid(case: Case) -> None:
    """[MQTT-3.1.2-1] [MQTT-3.1.2-9] [MQTT-3.1.2-12] [MQTT-3.1.2-17] [MQTT-3.1.2-19]
    [MQTT-3.1.3-1] [MQTT-3.1.3-3] [MQTT-3.1.3-4] [MQTT-3.1.3-5] [MQTT-3.3.2-1] [MQTT-3.8.3-1]
    [MQTT-3.10.3-1] [MQTT-3.9.3-1] [MQTT-3.11.3-1]"""
    assert decode_frame(case.data, case.version, case.from_client) == case.packet


@pytest.mark.parametrize("case", INVALID, ids=name_of)
def test_invalid(case: Case) -> None:
    """[MQTT-1.5.7-1] [MQTT-2.1.3-1] [MQTT3-2.2.2-2] [MQTT-2.2.1-3] [MQTT-2.2.1-4]
    [MQTT-3.1.2-1] [MQTT-3.1.2-2]
    [MQTT3-3.1.2-1] [MQTT3-3.1.2-2] [MQTT-3.1.2-3] [MQTT-3.1.2-11] [MQTT-3.1.2-12]
    [MQTT-3.1.2-13] [MQTT-3.1.2-16] [MQTT-3.1.2-17] [MQTT-3.1.2-18] [MQTT-3.1.2-19]
    [MQTT3-3.1.2-22] [MQTT-3.1.3-11] [MQTT-3.1.3-12] [MQTT-3.1.4-1] [MQTT-3.2.2-1]
    [MQTT-3.2.2-6] [MQTT-3.2.2-8] [MQTT-3.3.1-2] [MQTT-3.3.1-4] [MQTT-3.3.2-8] [MQTT-3.3.2-13]
    [MQTT-3.3.2-14] [MQTT-3.3.2-19] [MQTT-3.3.4-6] [MQTT-3.4.2-1] [MQTT-3.6.1-1] [MQTT-3.6.2-1]
    [MQTT-3.8.1-1] [MQTT-3.8.3-2] [MQTT-3.8.3-5] [MQTT3-3.8.3-4] [MQTT-3.9.3-2] [MQTT3-3.9.3-2]
    [MQTT-3.10.1-1] [MQTT-3.10.3-2] [MQTT-3.11.3-2] [MQTT-3.14.1-1] [MQTT-3.14.2-1]
    [MQTT-3.14.2-2] [MQTT-3.15.1-1] [MQTT-3.15.2-1] [MQTT-4.13.1-1]"""
    with pytest.raises(ProtocolViolation) as raised:
        decode_frame(case.data, case.version, case.from_client)
    assert hex(raised.value.reason) == hex(case.reason)
    assert isinstance(raised.value, MalformedPacket) == (case.reason == MALFORMED)
    assert 0 < len(str(raised.value)) < 200


@pytest.mark.parametrize("case", [case for case in VALID if case.canonical], ids=name_of)
def test_encodes_to_the_same_bytes(case: Case) -> None:
    """[MQTT-1.5.5-1] [MQTT-2.2.2-1] [MQTT-2.1.3-1]"""
    assert case.packet is not None
    assert encode(case.packet, case.version) == case.data


@pytest.mark.parametrize("case", VALID, ids=name_of)
def test_decodes_what_it_encodes(case: Case) -> None:
    assert case.packet is not None
    encoded = encode(case.packet, case.version)
    assert decode_frame(encoded, case.version, case.from_client) == case.packet


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_prefix_of_the_bytes_wants_more(case: Case) -> None:
    for length in range(len(case.data)):
        reader = FrameReader(268_435_460)
        reader.feed(case.data[:length])
        assert not reader.next()


@pytest.mark.parametrize("case", VALID, ids=name_of)
def test_every_shorter_body_is_a_packet_or_a_violation(case: Case) -> None:
    """The bytes of the rest are there, as if they were the next packet: they must not be read."""
    reader = FrameReader(268_435_460)
    reader.feed(case.data)
    assert reader.next()
    buffer, start = reader.buffer, reader.start
    for end in range(start, reader.end):
        in_place = outcome(buffer, reader.first, start, end, case)
        assert in_place == outcome(buffer[:end], reader.first, start, end, case)


def outcome(data: bytes, first: int, start: int, end: int, case: Case) -> object:
    try:
        return decode(data, first, start, end, case.version, case.from_client)
    except ProtocolViolation as error:
        return error.reason, str(error)


@pytest.mark.parametrize("case", VALID, ids=name_of)
def test_position_in_the_buffer_does_not_matter(case: Case) -> None:
    before, after = b"\xff" * 300, b"\x00" * 300
    header = 3 if len(case.data) > 129 else 2
    packet = decode(
        before + case.data + after,
        case.data[0],
        len(before) + header,
        len(before) + len(case.data),
        case.version,
        case.from_client,
    )
    assert packet == case.packet


@pytest.mark.parametrize("each", PROPERTIES, ids=lambda each: each.identifier)
def test_property_in_a_packet_where_it_does_not_belong(each: Property) -> None:
    for letter, (first, before, after, from_client) in PROPERTY_CARRIERS.items():
        if letter not in each.packets:
            data = pkt(first, before, props(each.encoded), after)
            with pytest.raises(MalformedPacket):
                decode_frame(data, 5, from_client)


@pytest.mark.parametrize("each", PROPERTIES, ids=lambda each: each.identifier)
def test_property_twice(each: Property) -> None:
    for letter in each.packets:
        first, before, after, from_client = PROPERTY_CARRIERS[letter]
        twice = props(each.encoded, each.encoded)
        data = pkt(first, before, twice, after)
        repeatable = each.identifier == 38 or (each.identifier == 11 and letter == "P")
        if repeatable and letter != "H":
            decode_frame(data, 5, from_client)
            continue
        with pytest.raises(ProtocolViolation) as raised:
            decode_frame(data, 5, from_client)
        assert raised.value.reason == PROTOCOL


def test_decode_ack_agrees_with_decode() -> None:
    for case in VALID:
        if isinstance(case.packet, Ack):
            ack = decode_ack(case.data, case.data[0], 2, len(case.data), case.version)
            assert ack == case.packet


def test_decode_publish_agrees_with_decode() -> None:
    for case in VALID:
        if isinstance(case.packet, Publish):
            start = 3 if len(case.data) > 129 else 2
            publish = decode_publish(
                case.data, case.data[0], start, len(case.data), case.version, case.from_client
            )
            assert publish == case.packet


def test_more_filters_than_the_limit() -> None:
    for first, one in ((0x82, text("f") + b"\x00"), (0xA2, text("f"))):
        body = b"\x00\x01" + one * (FILTERS_MAX + 1)
        with pytest.raises(ProtocolViolation) as raised:
            decode_frame(bytes((first,)) + varint(len(body)) + body, 4, CLIENT)
        assert raised.value.reason == 0x97
        body = body[: -len(one)]
        decode_frame(bytes((first,)) + varint(len(body)) + body, 4, CLIENT)


def test_byte_order_mark_is_kept() -> None:
    """[MQTT-1.5.4-3]"""
    data = pkt(0xA2, b"\x00\x01", text(b"\xef\xbb\xbfa"))
    assert decode_frame(data, 4, CLIENT).filters == ["\ufeffa"]  # type: ignore[union-attr]
