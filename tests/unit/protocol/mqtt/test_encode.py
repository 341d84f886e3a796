from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import PINGREQ_BYTES, PINGRESP_BYTES, encode, encode_ack
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import (
    AUTH,
    CONNACK,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
    Will,
)
from holdfast.protocol.mqtt.reasons import ALLOWED
from tests.data.packets import PROPERTIES

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
IDS = st.integers(1, 65_535)
QOS = st.integers(0, 2)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3)


def properties(letter: str) -> st.SearchStrategy[dict[int, Any]]:
    """Any that the packet may carry, authentication apart."""
    optional: dict[int, st.SearchStrategy[Any]] = {}
    for each in PROPERTIES:
        if letter in each.packets and each.identifier not in (21, 22):
            optional[each.identifier] = PAIRS if each.identifier == 38 else st.just(each.value)
    return st.fixed_dictionaries({}, optional=optional)


def reasons(kind: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(ALLOWED[kind]))


WILLS = st.builds(Will, TEXT, st.binary(max_size=50), QOS, st.booleans(), properties("w"))
CONNECTS_5 = st.builds(
    Connect,
    st.just(5),
    st.booleans(),
    st.integers(0, 65_535),
    TEXT,
    st.none() | WILLS,
    st.none() | TEXT,
    st.none() | st.binary(max_size=50),
    properties("C"),
)
REQUESTS_5 = st.builds(
    SubscriptionRequest, TEXT, QOS, st.booleans(), st.booleans(), st.integers(0, 2)
)
ACKS_5 = st.sampled_from([PUBACK, PUBREC, PUBREL, PUBCOMP]).flatmap(
    lambda kind: st.builds(Ack, st.just(kind), IDS, reasons(kind), properties("A"))
)
AUTHS = st.builds(
    lambda reason, data, other: Auth(reason, {21: "method", 22: data, **other}),
    reasons(AUTH),
    st.binary(max_size=20),
    properties("H"),
)
CLIENT_PACKETS_5: st.SearchStrategy[Packet] = st.one_of(
    CONNECTS_5,
    ACKS_5,
    st.builds(Subscribe, IDS, st.lists(REQUESTS_5, min_size=1, max_size=4), properties("S")),
    st.builds(Unsubscribe, IDS, st.lists(TEXT, min_size=1, max_size=4), properties("U")),
    st.builds(Disconnect, reasons(DISCONNECT), properties("D")),
    AUTHS,
    st.just(Pingreq()),
)
SERVER_PACKETS_5: st.SearchStrategy[Packet] = st.one_of(
    st.builds(
        lambda reason, present, other: Connack(present and reason == 0, reason, other),
        reasons(CONNACK),
        st.booleans(),
        properties("K"),
    ),
    ACKS_5,
    st.builds(Suback, IDS, st.lists(reasons(SUBACK), min_size=1, max_size=4), properties("s")),
    st.builds(Unsuback, IDS, st.lists(reasons(UNSUBACK), min_size=1), properties("u")),
    AUTHS,
    st.just(Pingresp()),
)


def decode_frame(data: bytes, version: int, from_client: bool) -> Packet:
    reader = FrameReader(268_435_460)
    reader.feed(data)
    assert reader.next()
    assert reader.end == len(data)
    return decode(reader.buffer, reader.first, reader.start, reader.end, version, from_client)


@settings(max_examples=200)
@given(CLIENT_PACKETS_5)
def test_client_round_trip(packet: Packet) -> None:
    assert decode_frame(encode(packet, 5), 5, True) == packet


@settings(max_examples=200)
@given(SERVER_PACKETS_5)
def test_server_round_trip(packet: Packet) -> None:
    assert decode_frame(encode(packet, 5), 5, False) == packet


@given(CONNECTS_5, st.integers(3, 4))
def test_connect_of_mqtt_3_round_trip(packet: Connect, level: int) -> None:
    packet.protocol_level = level
    if packet.username is None:
        packet.password = None
    expected = encode(packet, level)
    packet.properties = {}
    if packet.will is not None:
        packet.will.properties = {}
    # Properties were left out.
    assert encode(packet, level) == expected
    assert decode_frame(expected, level, True) == packet


@pytest.mark.parametrize("version", [3, 4])
def test_mqtt_3_leaves_out_what_it_does_not_have(version: int) -> None:
    """[MQTT3-3.9.3-2]"""
    user: Any = {38: [("k", "v")]}
    assert encode(Connack(False, 0x87, {31: "r"}), version) == b"\x20\x02\x00\x05"
    assert encode(Ack(PUBREC, 1, 0x97, user), version) == b"\x50\x02\x00\x01"
    assert encode(Suback(1, [2, 0x87, 0xA2, 0x80], user), version) == b"\x90\x06\0\1\2\x80\x80\x80"
    assert encode(Unsuback(1, [0, 0x11], user), version) == b"\xb0\x02\x00\x01"
    assert encode(Disconnect(0x8E, {31: "r"}), version) == b"\xe0\x00"
    request = SubscriptionRequest("f", 1, True, True, 2)
    assert encode(Subscribe(1, [request], user), version) == b"\x82\x06\x00\x01\x00\x01f\x01"
    assert encode(Unsubscribe(1, ["f"], user), version) == b"\xa2\x05\x00\x01\x00\x01f"
    with pytest.raises(ValueError, match="AUTH"):
        encode(Auth(), version)


def test_session_present_only_with_success() -> None:
    """[MQTT-3.2.2-6] [MQTT3-3.2.2-4]"""
    assert encode(Connack(True, 0x87), 4) == b"\x20\x02\x00\x05"
    assert encode(Connack(True, 0x87), 5) == b"\x20\x03\x00\x87\x00"
    assert encode(Connack(True, 0), 4) == b"\x20\x02\x01\x00"
    # MQTT 3.1 has no such flag.
    assert encode(Connack(True, 0), 3) == b"\x20\x02\x00\x00"


@pytest.mark.parametrize("kind", [PUBACK, PUBREC, PUBREL, PUBCOMP])
def test_encode_ack(kind: int) -> None:
    """[MQTT-2.2.1-5] [MQTT-3.6.1-1]"""
    for reason in sorted(ALLOWED[kind]):
        for packet_id in (1, 255, 256, 65_535):
            for version in (3, 4, 5):
                data = encode_ack(kind, packet_id, reason, version)
                expected = Ack(kind, packet_id, reason if version == 5 else 0)
                assert decode_frame(data, version, True) == expected
                assert len(data) == (5 if version == 5 and reason else 4)
                assert data == encode(expected, version)


def test_pings() -> None:
    assert encode(Pingreq(), 4) == PINGREQ_BYTES == b"\xc0\x00"
    assert encode(Pingresp(), 5) == PINGRESP_BYTES == b"\xd0\x00"


@pytest.mark.parametrize(
    "packet",
    [
        Connect(6, True, 0, "c"),
        Connect(2, True, 0, "c"),
        Connect(5, True, 65_536, "c"),
        Connect(5, True, -1, "c"),
        Connect(5, True, 0, "a\0b"),
        Connect(5, True, 0, "c" * 65_536),
        Connect(4, True, 0, "c", None, None, b"p"),
        Connect(4, True, 0, "c", Will("t", b"", 3, False)),
        Connect(4, True, 0, "c", Will("t", bytes(65_536), 0, False)),
        Ack(PUBACK, 0),
        Ack(PUBACK, 65_536),
        Ack(PUBACK, 1, 256),
        Ack(PUBACK, 0, 0, {31: "r"}),
        Subscribe(1, []),
        Subscribe(0, [SubscriptionRequest("f", 0)]),
        Subscribe(1, [SubscriptionRequest("f", 3)]),
        Subscribe(1, [SubscriptionRequest("f", 0, False, False, 3)]),
        Subscribe(1, [SubscriptionRequest("\ud800", 0)]),
        Unsubscribe(1, []),
        Unsubscribe(70_000, ["f"]),
        Suback(1, [256]),
        Disconnect(0x80, {31: 5}),
    ],
)
def test_what_has_no_encoding(packet: Packet) -> None:
    """[MQTT-2.2.1-3] [MQTT-3.1.2-12] [MQTT3-3.1.2-22] [MQTT-3.8.3-2] [MQTT-3.10.3-2]"""
    with pytest.raises(ValueError):
        encode(packet, 5)
