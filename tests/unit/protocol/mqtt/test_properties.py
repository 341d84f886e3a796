import re

import pytest

from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    Properties,
)
from tests.data.packets import MALFORMED, PROPERTIES, PROTOCOL, USER, Property

LETTERS: dict[str, tuple[int, ...]] = {
    "C": (CONNECT,),
    "w": (p.WILL,),
    "K": (CONNACK,),
    "P": (PUBLISH,),
    "A": (PUBACK, PUBREC, PUBREL, PUBCOMP),
    "S": (SUBSCRIBE,),
    "s": (SUBACK,),
    "U": (UNSUBSCRIBE,),
    "u": (UNSUBACK,),
    "D": (DISCONNECT,),
    "H": (AUTH,),
}


def test_table_is_that_of_the_specification() -> None:
    assert sorted(p.TABLE) == [each.identifier for each in PROPERTIES]
    for each in PROPERTIES:
        expected = {kind for letter in each.packets for kind in LETTERS[letter]}
        assert set(p.TABLE[each.identifier].packet_types) == expected


def test_names_are_the_constants() -> None:
    for identifier, info in p.TABLE.items():
        constant = re.sub("-", "_", info.name).upper()
        assert getattr(p, constant) == identifier


@pytest.mark.parametrize("each", PROPERTIES, ids=lambda each: each.identifier)
def test_each_property(each: Property) -> None:
    kind = LETTERS[each.packets[0]][0]
    decoded = {each.identifier: each.value}
    encoded = bytes((len(each.encoded),)) + each.encoded
    assert p.encode_properties(decoded) == encoded
    assert p.encode_block(decoded) == each.encoded
    after = 1 + len(encoded)
    assert p.decode_properties(b"?" + encoded + b"?", 1, after, kind) == (decoded, after)
    assert p.decode_block(each.encoded, 0, len(each.encoded), kind) == decoded


@pytest.mark.parametrize("each", PROPERTIES, ids=lambda each: each.identifier)
def test_each_property_cut_short(each: Property) -> None:
    kind = LETTERS[each.packets[0]][0]
    for end in range(1, len(each.encoded)):
        with pytest.raises(MalformedPacket):
            p.decode_block(each.encoded, 0, end, kind)
        # As long as the packet goes on, it is the block that ends too early.
        whole = bytes((end,)) + each.encoded
        with pytest.raises(MalformedPacket):
            p.decode_properties(whole, 0, len(whole), kind)


def test_no_properties() -> None:
    """[MQTT-2.2.2-1]"""
    assert p.encode_properties({}) == b"\x00"
    assert p.decode_properties(b"\x00", 0, 1, CONNECT) == ({}, 1)


def test_many_properties() -> None:
    properties: Properties = {38: [("k", str(index)) for index in range(100)]}
    encoded = p.encode_properties(properties)
    assert p.decode_properties(encoded, 0, len(encoded), PUBLISH) == (properties, len(encoded))


def test_repeated_properties_keep_their_order() -> None:
    block = b"\x26\0\1b\0\0" + b"\x0b\x02" + b"\x26\0\1a\0\0" + b"\x0b\x01"
    assert p.decode_block(block, 0, len(block), PUBLISH) == {
        38: [("b", ""), ("a", "")],
        11: [2, 1],
    }


@pytest.mark.parametrize(
    ("block", "kind", "reason"),
    [
        (b"\x21\x00\x00", CONNECT, PROTOCOL),
        (b"\x27\x00\x00\x00\x00", CONNECT, PROTOCOL),
        (b"\x0b\x00", SUBSCRIBE, PROTOCOL),
        (b"\x23\x00\x00", PUBLISH, 0x94),
        (b"\x01\x02", PUBLISH, PROTOCOL),
        (b"\x17\x02", CONNECT, PROTOCOL),
        (b"\x19\xff", CONNECT, PROTOCOL),
        (b"\x24\x02", CONNACK, PROTOCOL),
        (b"\x25\x02", CONNACK, PROTOCOL),
        (b"\x28\x02", CONNACK, PROTOCOL),
        (b"\x29\x02", CONNACK, PROTOCOL),
        (b"\x2a\x02", CONNACK, PROTOCOL),
        (b"\x08\x00\x01+", p.WILL, PROTOCOL),
        (b"\x08\x00\x00", p.WILL, PROTOCOL),
        (b"\x03\x00\x01\xff", p.WILL, MALFORMED),
        (b"\x26\x00\x01\xff\x00\x00", CONNECT, MALFORMED),
        (b"\x00", CONNECT, MALFORMED),
        (b"\x2b\x00", CONNECT, MALFORMED),
        (b"\xa6\x00", CONNECT, MALFORMED),
        (b"\xff\xff\xff\xff", CONNECT, MALFORMED),
    ],
)
def test_values_that_are_not_allowed(block: bytes, kind: int, reason: int) -> None:
    """[MQTT-3.3.2-8] [MQTT-3.3.2-14] and the protocol errors of the properties' sections"""
    with pytest.raises(ProtocolViolation) as raised:
        p.decode_block(block, 0, len(block), kind)
    assert hex(raised.value.reason) == hex(reason)


def test_repeats_are_bounded() -> None:
    for one in (USER, b"\x0b\x01"):
        most = one * p.REPEATS_MAX
        p.decode_block(most, 0, len(most), PUBLISH)
        more = most + one
        with pytest.raises(ProtocolViolation) as raised:
            p.decode_block(more, 0, len(more), PUBLISH)
        assert raised.value.reason == 0x97


@pytest.mark.parametrize(
    "properties",
    [
        {7: 1},
        {300: 1},
        {1: 256},
        {1: "x"},
        {2: -1},
        {2: 1 << 32},
        {33: 65_536},
        {3: 5},
        {3: b"x"},
        {9: "x"},
        {11: [-1]},
        {11: [268_435_456]},
        {11: [("k", "v")]},
        {38: [1]},
        {38: [("k", "\0")]},
        {31: "x" * 65_536},
    ],
)
def test_what_has_no_encoding(properties: Properties) -> None:
    with pytest.raises(ValueError):
        p.encode_properties(properties)


def test_expiry_of() -> None:
    assert p.expiry_of(b"") == -1
    assert p.expiry_of(b"\x02\x00\x00\x01\x00") == 256
    # Behind each other kind of property, and not found within their values.
    for each in PROPERTIES:
        expected = 65538 if each.identifier == 2 else 7
        assert p.expiry_of(each.encoded + b"\x02\x00\x00\x00\x07") == expected
    assert p.expiry_of(b"\x03\x00\x05\x02\x00\x00\x00\x01") == -1


@pytest.mark.parametrize("block", [b"\x02\x00", b"\x07\x00", b"\x03\x00", b"\xff"])
def test_expiry_of_what_is_no_block(block: bytes) -> None:
    with pytest.raises(MalformedPacket):
        p.expiry_of(block)
