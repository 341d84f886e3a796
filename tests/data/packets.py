"""Packets as bytes with what they mean: all kinds, all properties, all ways to be wrong.

Bytes are put together by hand here, without the encoder, so that they check it. A case is either
valid (`packet`) or not (`reason`). `canonical`: encoding the packet gives these very bytes.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.protocol.mqtt.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
    Will,
)

CLIENT = True
SERVER = False

MALFORMED = 0x81
PROTOCOL = 0x82
UNSUPPORTED = 0x84
ALIAS_INVALID = 0x94


@dataclass
class Case:
    name: str
    version: int
    from_client: bool
    data: bytes
    packet: Packet | None = None
    reason: int = 0
    canonical: bool = True
    novel_from: int = 0
    """What is before this position is the same as in other cases."""


def pkt(first: int, *parts: bytes) -> bytes:
    """A packet with a remaining length of one byte."""
    body = b"".join(parts)
    assert len(body) < 128
    return bytes((first, len(body))) + body


def text(value: str | bytes) -> bytes:
    """A string or binary field."""
    data = value if isinstance(value, bytes) else value.encode()
    return bytes((len(data) >> 8, len(data) & 255)) + data


def props(*parts: bytes) -> bytes:
    """A property block behind a length of one byte."""
    block = b"".join(parts)
    assert len(block) < 128
    return bytes((len(block),)) + block


USER = b"\x26\x00\x01k\x00\x01v"
MQTT = b"\x00\x04MQTT"
MQISDP = b"\x00\x06MQIsdp"


def message(
    topic: bytes,
    payload: bytes = b"",
    qos: int = 0,
    *,
    retain: bool = False,
    dup: bool = False,
    packet_id: int = 0,
    properties: bytes = b"",
    alias: int = 0,
    expiry_s: int = -1,
    ids: list[int] | None = None,
) -> Publish:
    publish = Publish(topic, payload, qos, retain, dup, packet_id, properties, alias, expiry_s)
    publish.subscription_ids = ids
    return publish


@dataclass
class Property:
    """`packets`: letters of the packets that may carry it, see PROPERTY_CARRIERS."""

    identifier: int
    encoded: bytes
    value: Any
    packets: str


# Section 2.2.2.2, table 2-4. C CONNECT, w will, K CONNACK, P PUBLISH, A PUBACK and its like,
# S SUBSCRIBE, s SUBACK, U UNSUBSCRIBE, u UNSUBACK, D DISCONNECT, H AUTH.
PROPERTIES = [
    Property(1, b"\x01\x01", 1, "Pw"),
    Property(2, b"\x02\x00\x01\x00\x02", 65538, "Pw"),
    Property(3, b"\x03\x00\x04text", "text", "Pw"),
    Property(8, b"\x08\x00\x03a/b", "a/b", "Pw"),
    Property(9, b"\x09\x00\x02\x00\xff", b"\x00\xff", "Pw"),
    Property(11, b"\x0b\x80\x01", [128], "PS"),
    Property(17, b"\x11\xff\xff\xff\xff", 0xFFFFFFFF, "CKD"),
    Property(18, b"\x12\x00\x02id", "id", "K"),
    Property(19, b"\x13\x00\x3c", 60, "K"),
    Property(21, b"\x15\x00\x05PLAIN", "PLAIN", "CKH"),
    Property(22, b"\x16\x00\x01\x80", b"\x80", "CKH"),
    Property(23, b"\x17\x00", 0, "C"),
    Property(24, b"\x18\x00\x00\x00\x05", 5, "w"),
    Property(25, b"\x19\x01", 1, "C"),
    Property(26, b"\x1a\x00\x02r/", "r/", "K"),
    Property(28, b"\x1c\x00\x04host", "host", "KD"),
    Property(31, b"\x1f\x00\x03why", "why", "KAsuDH"),
    Property(33, b"\x21\x00\x0a", 10, "CK"),
    Property(34, b"\x22\x00\x00", 0, "CK"),
    Property(35, b"\x23\x00\x07", 7, "P"),
    Property(36, b"\x24\x00", 0, "K"),
    Property(37, b"\x25\x01", 1, "K"),
    Property(38, USER, [("k", "v")], "CwKPASsUuDH"),
    Property(39, b"\x27\x00\x00\x10\x00", 4096, "CK"),
    Property(40, b"\x28\x00", 0, "K"),
    Property(41, b"\x29\x01", 1, "K"),
    Property(42, b"\x2a\x01", 1, "K"),
]

# letter: first byte, what is before the properties, what is after them, from a client
PROPERTY_CARRIERS: dict[str, tuple[int, bytes, bytes, bool]] = {
    "C": (0x10, MQTT + b"\x05\x02\x00\x3c", text("c"), CLIENT),
    "w": (0x10, MQTT + b"\x05\x06\x00\x3c\x00" + text("c"), text("w") + text("x"), CLIENT),
    "K": (0x20, b"\x00\x00", b"", SERVER),
    "P": (0x32, text("t") + b"\x00\x01", b"payload", SERVER),
    "A": (0x40, b"\x00\x01\x00", b"", CLIENT),
    "S": (0x82, b"\x00\x01", text("f") + b"\x01", CLIENT),
    "s": (0x90, b"\x00\x01", b"\x01", SERVER),
    "U": (0xA2, b"\x00\x01", text("f"), CLIENT),
    "u": (0xB0, b"\x00\x01", b"\x00", SERVER),
    "D": (0xE0, b"\x00", b"", CLIENT),
    "H": (0xF0, b"\x18", b"", CLIENT),
}

CONNECTS = [
    Case(
        "connect 3.1",
        3,
        CLIENT,
        pkt(0x10, MQISDP, b"\x03\x02\x00\x0a", text("old")),
        Connect(3, True, 10, "old"),
    ),
    Case(
        "connect 3.1, user name flag without user name",
        3,
        CLIENT,
        pkt(0x10, MQISDP, b"\x03\xc2\x00\x0a", text("old")),
        Connect(3, True, 10, "old"),
        canonical=False,
    ),
    Case(
        "connect 3.1, client id of more than 23 characters",
        3,
        CLIENT,
        pkt(0x10, MQISDP, b"\x03\x00\x00\x00", text("x" * 24)),
        Connect(3, False, 0, "x" * 24),
    ),
    Case(
        "connect 3.1.1",
        4,
        CLIENT,
        b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01c",
        Connect(4, True, 60, "c"),
    ),
    Case(
        "connect 3.1.1, empty client id",
        4,
        CLIENT,
        b"\x10\x0c\x00\x04MQTT\x04\x02\xff\xff\x00\x00",
        Connect(4, True, 65535, ""),
    ),
    Case(
        "connect 3.1.1, a bridge",
        4,
        CLIENT,
        b"\x10\x0d\x00\x04MQTT\x84\x00\x00\x3c\x00\x01b",
        Connect(4, False, 60, "b", is_bridge=True),
    ),
    Case(
        "connect 3.1.1, all there is",
        4,
        CLIENT,
        pkt(
            0x10,
            MQTT,
            b"\x04\xec\x00\x00",
            text("id"),
            text("will/topic"),
            text(b"\x00\xff"),
            text("user"),
            text(b"p\x00\x80"),
        ),
        Connect(4, False, 0, "id", Will("will/topic", b"\x00\xff", 1, True), "user", b"p\x00\x80"),
    ),
    Case(
        "connect 5",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x02\x00\x3c\x00", text("c")),
        Connect(5, True, 60, "c"),
    ),
    Case(
        "connect 5, all there is",
        5,
        CLIENT,
        pkt(
            0x10,
            MQTT,
            b"\x05\xf4\x00\x3c",
            props(b"\x11\x00\x00\x00\x0a", b"\x21\x00\x14", USER, b"\x26\x00\x01k\x00\x01w"),
            text("clïent"),
            props(b"\x18\x00\x00\x00\x05", b"\x01\x00"),
            text("w"),
            text(""),
            text(""),
            text(""),
        ),
        Connect(
            5,
            False,
            60,
            "clïent",
            Will("w", b"", 2, True, {24: 5, 1: 0}),
            "",
            b"",
            {17: 10, 33: 20, 38: [("k", "v"), ("k", "w")]},
        ),
    ),
    Case(
        "connect 5, password without user name",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x42\x00\x00\x00", text("c"), text("token")),
        Connect(5, True, 0, "c", None, None, b"token"),
    ),
    Case(
        "connect 5, enhanced authentication",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x02\x00\x00", props(b"\x15\x00\x01m", b"\x16\x00\x01d"), text("c")),
        Connect(5, True, 0, "c", properties={21: "m", 22: b"d"}),
    ),
]

BAD_CONNECTS = [
    Case(
        "wrong protocol name",
        4,
        CLIENT,
        pkt(0x10, text("MQTTX"), b"\x04\x02\0\0\0\0"),
        None,
        UNSUPPORTED,
    ),
    Case("level 6", 5, CLIENT, pkt(0x10, MQTT, b"\x06\x02\0\0\0\0\0"), None, UNSUPPORTED),
    Case("level 3 of MQTT", 4, CLIENT, pkt(0x10, MQTT, b"\x03\x02\0\0\0\0"), None, UNSUPPORTED),
    Case("level 4 of MQIsdp", 3, CLIENT, pkt(0x10, MQISDP, b"\x04\x02\0\0\0\0"), None, UNSUPPORTED),
    Case(
        "bridge level of MQTT 5",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x85\x02\0\0\0\0\0"),
        None,
        UNSUPPORTED,
    ),
    Case("level 6 and nothing else", 5, CLIENT, pkt(0x10, MQTT, b"\x06"), None, UNSUPPORTED),
    Case(
        "protocol name not UTF-8",
        4,
        CLIENT,
        pkt(0x10, text(b"MQ\xff"), b"\x04\x02\0\0\0\0"),
        None,
        MALFORMED,
    ),
    Case(
        "connect flags of the fixed header",
        4,
        CLIENT,
        pkt(0x11, MQTT, b"\x04\x02\0\0", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "connect reserved flag",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x03\0\0", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "will QoS 3",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x1e\0\0", text("c"), text("w"), text("")),
        None,
        MALFORMED,
    ),
    Case(
        "will QoS without will",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x0a\0\0", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "will retain without will",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x22\0\0\0", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "will flag without will",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x06\0\0", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "will without payload",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x06\0\0", text("c"), text("w")),
        None,
        MALFORMED,
    ),
    Case(
        "will topic not UTF-8",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x06\0\0", text("c"), text(b"\xc3"), text("")),
        None,
        MALFORMED,
    ),
    Case(
        "password without user name",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x42\0\0", text("c"), text("p")),
        None,
        MALFORMED,
    ),
    Case(
        "user name flag without user name",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x82\0\0", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "user name without flag",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x02\0\0", text("c"), text("u")),
        None,
        MALFORMED,
    ),
    Case(
        "password flag without password",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\xc2\0\0", text("c"), text("u")),
        None,
        MALFORMED,
    ),
    Case(
        "password without flag",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x82\0\0", text("c"), text("u"), text("p")),
        None,
        MALFORMED,
    ),
    Case(
        "user name not UTF-8",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x82\0\0", text("c"), text(b"\xed\xa0\x80")),
        None,
        MALFORMED,
    ),
    Case(
        "client id with U+0000",
        4,
        CLIENT,
        pkt(0x10, MQTT, b"\x04\x02\0\0", text("a\0b")),
        None,
        MALFORMED,
    ),
    Case(
        "client id with a surrogate",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x02\0\0\0", text(b"\xed\xbf\xbf")),
        None,
        MALFORMED,
    ),
    Case("no client id", 4, CLIENT, pkt(0x10, MQTT, b"\x04\x02\0\0"), None, MALFORMED),
    Case(
        "connect without properties", 5, CLIENT, pkt(0x10, MQTT, b"\x05\x02\0\0"), None, MALFORMED
    ),
    Case(
        "connect with long properties",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x02\0\0\x20", text("c")),
        None,
        MALFORMED,
    ),
    Case(
        "authentication data without method",
        5,
        CLIENT,
        pkt(0x10, MQTT, b"\x05\x02\0\0", props(b"\x16\0\x01d"), text("c")),
        None,
        PROTOCOL,
    ),
    Case(
        "connect from a server",
        4,
        SERVER,
        pkt(0x10, MQTT, b"\x04\x02\0\0", text("c")),
        None,
        PROTOCOL,
    ),
    Case("empty connect", 4, CLIENT, b"\x10\x00", None, MALFORMED),
]

CONNACKS = [
    Case("connack 3.1", 3, SERVER, b"\x20\x02\x00\x00", Connack(False, 0)),
    Case(
        "connack 3.1, reserved byte",
        3,
        SERVER,
        b"\x20\x02\x17\x00",
        Connack(False, 0),
        canonical=False,
    ),
    Case("connack 3.1.1", 4, SERVER, b"\x20\x02\x01\x00", Connack(True, 0)),
    Case("connack 3.1.1, version", 4, SERVER, b"\x20\x02\x00\x01", Connack(False, 0x84)),
    Case("connack 3.1.1, client id", 4, SERVER, b"\x20\x02\x00\x02", Connack(False, 0x85)),
    Case("connack 3.1.1, unavailable", 4, SERVER, b"\x20\x02\x00\x03", Connack(False, 0x88)),
    Case("connack 3.1.1, password", 4, SERVER, b"\x20\x02\x00\x04", Connack(False, 0x86)),
    Case("connack 3.1.1, not authorized", 4, SERVER, b"\x20\x02\x00\x05", Connack(False, 0x87)),
    Case("connack 5", 5, SERVER, b"\x20\x03\x01\x00\x00", Connack(True, 0)),
    Case("connack 5, not authorized", 5, SERVER, b"\x20\x03\x00\x87\x00", Connack(False, 0x87)),
    Case(
        "connack 5, refused by an older server",
        5,
        SERVER,
        b"\x20\x02\x00\x01",
        Connack(False, 0x84),
        canonical=False,
    ),
    Case(
        "connack 5, all properties",
        5,
        SERVER,
        pkt(
            0x20,
            b"\x00\x00",
            props(*(each.encoded for each in PROPERTIES if "K" in each.packets)),
        ),
        Connack(
            False, 0, {each.identifier: each.value for each in PROPERTIES if "K" in each.packets}
        ),
    ),
    Case("connack with session and error", 4, SERVER, b"\x20\x02\x01\x05", None, PROTOCOL),
    Case("connack with unknown return code", 4, SERVER, b"\x20\x02\x00\x06", None, PROTOCOL),
    Case("connack with reserved flags", 4, SERVER, b"\x20\x02\x02\x00", None, MALFORMED),
    Case("connack with unknown reason", 5, SERVER, b"\x20\x03\x00\x8e\x00", None, PROTOCOL),
    Case("connack 5 without properties", 5, SERVER, b"\x20\x02\x00\x00", None, MALFORMED),
    Case("connack too short", 4, SERVER, b"\x20\x01\x00", None, MALFORMED),
    Case("connack too long", 4, SERVER, b"\x20\x03\x00\x00\x00", None, MALFORMED),
    Case("connack with flags", 4, SERVER, b"\x21\x02\x00\x00", None, MALFORMED),
    Case("connack from a client", 4, CLIENT, b"\x20\x02\x00\x00", None, PROTOCOL),
]

PUBLISHES = [
    Case("publish 3.1.1", 4, CLIENT, pkt(0x30, text("a/b"), b"hello"), message(b"a/b", b"hello")),
    Case(
        "publish, empty payload, retain",
        4,
        CLIENT,
        pkt(0x31, text("a")),
        message(b"a", retain=True),
    ),
    Case(
        "publish QoS 1",
        4,
        CLIENT,
        pkt(0x32, text("a"), b"\x00\x01x"),
        message(b"a", b"x", 1, packet_id=1),
    ),
    Case(
        "publish QoS 2, dup, retain",
        4,
        CLIENT,
        pkt(0x3D, text("a"), b"\xff\xffx"),
        message(b"a", b"x", 2, retain=True, dup=True, packet_id=65535),
    ),
    Case(
        "publish 3.1, dup with QoS 0",
        3,
        CLIENT,
        pkt(0x38, text("a")),
        message(b"a"),
        canonical=False,
    ),
    Case(
        "publish, topic to be checked later",
        4,
        CLIENT,
        pkt(0x30, text(b"\xff\0")),
        message(b"\xff\0"),
    ),
    Case(
        "publish with two bytes of length",
        4,
        SERVER,
        b"\x30\x83\x01" + text("t") + b"x" * 128,
        message(b"t", b"x" * 128),
    ),
    Case("publish 5", 5, CLIENT, pkt(0x30, text("a"), b"\x00x"), message(b"a", b"x")),
    Case(
        "publish 5 QoS 1 with properties",
        5,
        CLIENT,
        pkt(
            0x32,
            text("a"),
            b"\x00\x02",
            props(
                b"\x01\x01",
                b"\x02\x00\x00\x00\x3c",
                b"\x03\x00\x01j",
                b"\x08\x00\x01r",
                b"\x09\x00\x01\xff",
                USER,
                USER,
            ),
            b"x",
        ),
        message(
            b"a",
            b"x",
            1,
            packet_id=2,
            properties=b"\x01\x01\x02\x00\x00\x00\x3c\x03\x00\x01j\x08\x00\x01r\x09\x00\x01\xff"
            + USER
            + USER,
            expiry_s=60,
        ),
    ),
    Case(
        "publish 5 with alias",
        5,
        CLIENT,
        pkt(0x30, text(""), props(b"\x23\x00\x05"), b"x"),
        message(b"", b"x", alias=5),
    ),
    Case(
        "publish 5, alias between others",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(USER, b"\x23\x01\x00", b"\x01\x00"), b"x"),
        message(b"a", b"x", properties=USER + b"\x01\x00", alias=256),
        canonical=False,
    ),
    Case(
        "publish 5, subscription identifiers",
        5,
        SERVER,
        pkt(0x30, text("a"), props(b"\x01\x00", b"\x0b\x01", b"\x0b\xff\xff\xff\x7f"), b"x"),
        message(b"a", b"x", properties=b"\x01\x00", ids=[1, 268435455]),
    ),
    Case(
        "publish 5, expiry 0",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x02\0\0\0\0")),
        message(b"a", properties=b"\x02\0\0\0\0", expiry_s=0),
    ),
    Case("publish QoS 3", 4, CLIENT, pkt(0x36, text("a"), b"\0\1"), None, MALFORMED),
    Case("publish dup with QoS 0", 4, CLIENT, pkt(0x38, text("a")), None, MALFORMED),
    Case("publish packet id 0", 4, CLIENT, pkt(0x32, text("a"), b"\0\0"), None, PROTOCOL),
    Case("publish without packet id", 4, CLIENT, pkt(0x32, text("a"), b"\0"), None, MALFORMED),
    Case("publish, long topic", 4, CLIENT, pkt(0x30, b"\0\5abcd"), None, MALFORMED),
    Case("publish, half a topic length", 4, CLIENT, pkt(0x30, b"\0"), None, MALFORMED),
    Case("publish, nothing", 4, CLIENT, b"\x30\0", None, MALFORMED),
    Case("publish 5 without properties", 5, CLIENT, pkt(0x30, text("a")), None, MALFORMED),
    Case(
        "publish 5, long properties",
        5,
        CLIENT,
        pkt(0x30, text("a"), b"\x03\x01\x01"),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, property length of five bytes",
        5,
        CLIENT,
        pkt(0x30, text("a"), b"\x80\x80\x80\x80\x01"),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, property length longer than needed",
        5,
        CLIENT,
        pkt(0x30, text("a"), b"\x80\x00"),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, property beyond its block",
        5,
        CLIENT,
        pkt(0x30, text("a"), b"\x03\x02\0\0\0\0"),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, alias 0",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x23\0\0")),
        None,
        ALIAS_INVALID,
    ),
    Case(
        "publish 5, alias twice",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x23\0\1\x23\0\1")),
        None,
        PROTOCOL,
    ),
    Case(
        "publish 5, identifier from a client",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x0b\x01")),
        None,
        PROTOCOL,
    ),
    Case(
        "publish 5, identifier 0",
        5,
        SERVER,
        pkt(0x30, text("a"), props(b"\x0b\x00")),
        None,
        PROTOCOL,
    ),
    Case(
        "publish 5, response topic with wildcard",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x08\0\3a/#")),
        None,
        PROTOCOL,
    ),
    Case(
        "publish 5, empty response topic",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x08\0\0")),
        None,
        PROTOCOL,
    ),
    Case(
        "publish 5, response topic not UTF-8",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x08\0\1\xff")),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, content type not UTF-8",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x03\0\1\xff")),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, user property not UTF-8",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x26\0\1k\0\1\xff")),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, user property with U+0000",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x26\0\1\0\0\1v")),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, payload format 2",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x01\x02")),
        None,
        PROTOCOL,
    ),
    Case(
        "publish 5, unknown property",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x07\x02")),
        None,
        MALFORMED,
    ),
    Case(
        "publish 5, unknown property of two bytes",
        5,
        CLIENT,
        pkt(0x30, text("a"), props(b"\x81\x01\x02")),
        None,
        MALFORMED,
    ),
]

ACKS = [
    Case("puback", 4, CLIENT, b"\x40\x02\x00\x01", Ack(4, 1)),
    Case("pubrec", 4, SERVER, b"\x50\x02\xff\xff", Ack(5, 65535)),
    Case("pubrel", 4, CLIENT, b"\x62\x02\x00\x01", Ack(6, 1)),
    Case("pubrel 3.1, dup", 3, CLIENT, b"\x6a\x02\x00\x01", Ack(6, 1), canonical=False),
    Case("pubcomp", 4, CLIENT, b"\x70\x02\x01\x00", Ack(7, 256)),
    Case("puback 5", 5, CLIENT, b"\x40\x02\x00\x01", Ack(4, 1)),
    Case(
        "puback 5, success spelt out",
        5,
        CLIENT,
        b"\x40\x03\x00\x01\x00",
        Ack(4, 1),
        canonical=False,
    ),
    Case("puback 5, no subscribers", 5, SERVER, b"\x40\x03\x00\x01\x10", Ack(4, 1, 0x10)),
    Case("pubrec 5, quota", 5, SERVER, b"\x50\x03\x00\x01\x97", Ack(5, 1, 0x97)),
    Case("pubrel 5, not found", 5, CLIENT, b"\x62\x03\x00\x01\x92", Ack(6, 1, 0x92)),
    Case(
        "pubcomp 5, empty properties",
        5,
        CLIENT,
        b"\x70\x04\x00\x01\x92\x00",
        Ack(7, 1, 0x92),
        canonical=False,
    ),
    Case(
        "pubcomp 5, properties",
        5,
        CLIENT,
        pkt(0x70, b"\x00\x01\x00", props(USER)),
        Ack(7, 1, 0, {38: [("k", "v")]}),
    ),
    Case("puback with flags", 4, CLIENT, b"\x42\x02\x00\x01", None, MALFORMED),
    Case("pubrel without its flags", 4, CLIENT, b"\x60\x02\x00\x01", None, MALFORMED),
    Case("puback packet id 0", 4, CLIENT, b"\x40\x02\x00\x00", None, PROTOCOL),
    Case("puback too short", 4, CLIENT, b"\x40\x01\x00", None, MALFORMED),
    Case("puback too long", 4, CLIENT, b"\x40\x03\x00\x01\x00", None, MALFORMED),
    Case("puback unknown reason", 5, CLIENT, b"\x40\x03\x00\x01\x92", None, PROTOCOL),
    Case("pubrel unknown reason", 5, CLIENT, b"\x62\x03\x00\x01\x10", None, PROTOCOL),
    Case(
        "puback bytes after properties", 5, CLIENT, b"\x40\x05\x00\x01\x00\x00\x00", None, MALFORMED
    ),
]

SUBSCRIPTIONS = [
    Case(
        "subscribe",
        4,
        CLIENT,
        pkt(0x82, b"\x00\x01", text("a/+"), b"\x00", text("#"), b"\x02"),
        Subscribe(1, [SubscriptionRequest("a/+", 0), SubscriptionRequest("#", 2)]),
    ),
    Case(
        "subscribe 3.1, dup",
        3,
        CLIENT,
        pkt(0x8A, b"\0\1", text("a"), b"\1"),
        Subscribe(1, [SubscriptionRequest("a", 1)]),
        canonical=False,
    ),
    Case(
        "subscribe 5",
        5,
        CLIENT,
        pkt(0x82, b"\x00\x01", props(b"\x0b\x07", USER), text("a"), b"\x2d", text("b"), b"\x12"),
        Subscribe(
            1,
            [
                SubscriptionRequest("a", 1, True, True, 2),
                SubscriptionRequest("b", 2, False, False, 1),
            ],
            {11: [7], 38: [("k", "v")]},
        ),
    ),
    Case(
        "subscribe with wrong flags",
        4,
        CLIENT,
        pkt(0x80, b"\0\1", text("a"), b"\0"),
        None,
        MALFORMED,
    ),
    Case(
        "subscribe with packet id 0",
        4,
        CLIENT,
        pkt(0x82, b"\0\0", text("a"), b"\0"),
        None,
        PROTOCOL,
    ),
    Case("subscribe to nothing", 4, CLIENT, pkt(0x82, b"\0\1"), None, PROTOCOL),
    Case("subscribe without QoS", 4, CLIENT, pkt(0x82, b"\0\1", text("a")), None, MALFORMED),
    Case("subscribe with QoS 3", 4, CLIENT, pkt(0x82, b"\0\1", text("a"), b"\3"), None, MALFORMED),
    Case(
        "subscribe with options in MQTT 3",
        4,
        CLIENT,
        pkt(0x82, b"\0\1", text("a"), b"\4"),
        None,
        MALFORMED,
    ),
    Case(
        "subscribe with reserved options",
        5,
        CLIENT,
        pkt(0x82, b"\0\1\0", text("a"), b"\x41"),
        None,
        MALFORMED,
    ),
    Case(
        "subscribe 5 with QoS 3", 5, CLIENT, pkt(0x82, b"\0\1\0", text("a"), b"\3"), None, PROTOCOL
    ),
    Case(
        "subscribe with retain handling 3",
        5,
        CLIENT,
        pkt(0x82, b"\0\1\0", text("a"), b"\x31"),
        None,
        PROTOCOL,
    ),
    Case(
        "subscribe with two identifiers",
        5,
        CLIENT,
        pkt(0x82, b"\0\1", props(b"\x0b\1\x0b\2"), text("a"), b"\0"),
        None,
        PROTOCOL,
    ),
    Case(
        "subscribe with identifier 0",
        5,
        CLIENT,
        pkt(0x82, b"\0\1", props(b"\x0b\0"), text("a"), b"\0"),
        None,
        PROTOCOL,
    ),
    Case(
        "subscribe, filter not UTF-8",
        4,
        CLIENT,
        pkt(0x82, b"\0\1", text(b"\xc0\x80"), b"\0"),
        None,
        MALFORMED,
    ),
    Case(
        "subscribe from a server", 4, SERVER, pkt(0x82, b"\0\1", text("a"), b"\0"), None, PROTOCOL
    ),
    Case("suback", 4, SERVER, b"\x90\x06\x00\x01\x00\x01\x02\x80", Suback(1, [0, 1, 2, 0x80])),
    Case(
        "suback 5",
        5,
        SERVER,
        pkt(0x90, b"\0\1", props(b"\x1f\0\1r"), b"\2\x9e\x8f"),
        Suback(1, [2, 0x9E, 0x8F], {31: "r"}),
    ),
    Case("suback without code", 4, SERVER, b"\x90\x02\x00\x01", None, PROTOCOL),
    Case("suback with unknown code", 4, SERVER, b"\x90\x03\x00\x01\x03", None, PROTOCOL),
    Case("suback 3 with a code of 5", 4, SERVER, b"\x90\x03\x00\x01\x87", None, PROTOCOL),
    Case("suback 5 with unknown code", 5, SERVER, b"\x90\x04\x00\x01\x00\x11", None, PROTOCOL),
    Case("suback from a client", 4, CLIENT, b"\x90\x03\x00\x01\x00", None, PROTOCOL),
    Case(
        "unsubscribe",
        4,
        CLIENT,
        pkt(0xA2, b"\0\1", text("a"), text("b/#")),
        Unsubscribe(1, ["a", "b/#"]),
    ),
    Case(
        "unsubscribe 5",
        5,
        CLIENT,
        pkt(0xA2, b"\0\1", props(USER), text("a")),
        Unsubscribe(1, ["a"], {38: [("k", "v")]}),
    ),
    Case("unsubscribe with wrong flags", 4, CLIENT, pkt(0xA0, b"\0\1", text("a")), None, MALFORMED),
    Case("unsubscribe from nothing", 4, CLIENT, pkt(0xA2, b"\0\1"), None, PROTOCOL),
    Case("unsubscribe with packet id 0", 4, CLIENT, pkt(0xA2, b"\0\0", text("a")), None, PROTOCOL),
    Case(
        "unsubscribe, filter not UTF-8",
        4,
        CLIENT,
        pkt(0xA2, b"\0\1", text(b"\xff")),
        None,
        MALFORMED,
    ),
    Case("unsubscribe from a server", 4, SERVER, pkt(0xA2, b"\0\1", text("a")), None, PROTOCOL),
    Case("unsuback", 4, SERVER, b"\xb0\x02\x00\x01", Unsuback(1)),
    Case("unsuback 5", 5, SERVER, b"\xb0\x05\x00\x01\x00\x00\x11", Unsuback(1, [0, 0x11])),
    Case("unsuback with codes in MQTT 3", 4, SERVER, b"\xb0\x03\x00\x01\x00", None, MALFORMED),
    Case("unsuback 5 without codes", 5, SERVER, b"\xb0\x03\x00\x01\x00", None, PROTOCOL),
    Case("unsuback 5 with unknown code", 5, SERVER, b"\xb0\x04\x00\x01\x00\x01", None, PROTOCOL),
    Case("unsuback from a client", 4, CLIENT, b"\xb0\x02\x00\x01", None, PROTOCOL),
]

OTHERS = [
    Case("pingreq", 4, CLIENT, b"\xc0\x00", Pingreq()),
    Case("pingresp", 5, SERVER, b"\xd0\x00", Pingresp()),
    Case("pingreq with flags", 4, CLIENT, b"\xc1\x00", None, MALFORMED),
    Case("pingreq with a body", 4, CLIENT, b"\xc0\x01\x00", None, MALFORMED),
    Case("pingreq from a server", 4, SERVER, b"\xc0\x00", None, PROTOCOL),
    Case("pingresp with flags", 4, SERVER, b"\xd8\x00", None, MALFORMED),
    Case("pingresp from a client", 4, CLIENT, b"\xd0\x00", None, PROTOCOL),
    Case("disconnect", 4, CLIENT, b"\xe0\x00", Disconnect()),
    Case("disconnect 5", 5, CLIENT, b"\xe0\x00", Disconnect()),
    Case("disconnect 5 with will", 5, CLIENT, b"\xe0\x01\x04", Disconnect(4)),
    Case(
        "disconnect 5, success spelt out",
        5,
        CLIENT,
        b"\xe0\x02\x00\x00",
        Disconnect(),
        canonical=False,
    ),
    Case(
        "disconnect 5, session expiry",
        5,
        CLIENT,
        pkt(0xE0, b"\0", props(b"\x11\0\0\0\5")),
        Disconnect(0, {17: 5}),
    ),
    Case(
        "disconnect 5 from a server",
        5,
        SERVER,
        pkt(0xE0, b"\x9d", props(b"\x1f\0\1r", b"\x1c\0\1h")),
        Disconnect(0x9D, {31: "r", 28: "h"}),
    ),
    Case("disconnect with flags", 4, CLIENT, b"\xe2\x00", None, MALFORMED),
    Case("disconnect with a reason in MQTT 3", 4, CLIENT, b"\xe0\x01\x00", None, MALFORMED),
    Case("disconnect from a server in MQTT 3", 4, SERVER, b"\xe0\x00", None, PROTOCOL),
    Case("disconnect unknown reason", 5, CLIENT, b"\xe0\x01\x01", None, PROTOCOL),
    Case(
        "disconnect, session expiry from a server",
        5,
        SERVER,
        pkt(0xE0, b"\0", props(b"\x11\0\0\0\5")),
        None,
        PROTOCOL,
    ),
    Case(
        "auth",
        5,
        CLIENT,
        pkt(0xF0, b"\x18", props(b"\x15\0\1m", b"\x16\0\1d")),
        Auth(0x18, {21: "m", 22: b"d"}),
    ),
    Case("auth, empty", 5, SERVER, b"\xf0\x00", Auth()),
    Case("auth again", 5, CLIENT, pkt(0xF0, b"\x19", props(b"\x15\0\1m")), Auth(0x19, {21: "m"})),
    Case("auth without method", 5, CLIENT, pkt(0xF0, b"\x18", props(b"\x16\0\1d")), None, PROTOCOL),
    Case("auth without properties", 5, CLIENT, b"\xf0\x01\x18", None, MALFORMED),
    Case(
        "auth with unknown reason",
        5,
        CLIENT,
        pkt(0xF0, b"\x01", props(b"\x15\0\1m")),
        None,
        PROTOCOL,
    ),
    Case("auth with flags", 5, CLIENT, pkt(0xF1, b"\x18", props(b"\x15\0\1m")), None, MALFORMED),
    Case("auth in MQTT 3", 4, CLIENT, b"\xf0\x00", None, MALFORMED),
    Case("packet type 0", 5, CLIENT, b"\x00\x00", None, MALFORMED),
]


def _property_cases() -> list[Case]:
    """Each property alone in each packet that may carry it. Those of authentication, which are
    not allowed alone, have cases of their own."""
    cases = []
    for letter, make in PROPERTY_PACKETS.items():
        first, before, after, from_client = PROPERTY_CARRIERS[letter]
        for each in PROPERTIES:
            if letter in each.packets and each.identifier not in (21, 22):
                data = pkt(first, before, props(each.encoded), after)
                name = f"property {each.identifier} in {letter}"
                case = Case(name, 5, from_client, data, make(each))
                case.novel_from = 2 + len(before)
                cases.append(case)
    return cases


def _publish_with(each: Property) -> Publish:
    kept = b"" if each.identifier in (11, 35) else each.encoded
    publish = message(b"t", b"payload", 1, packet_id=1, properties=kept)
    if each.identifier == 11:
        publish.subscription_ids = each.value
    elif each.identifier == 35:
        publish.topic_alias = each.value
    elif each.identifier == 2:
        publish.expiry_s = each.value
    return publish


PROPERTY_PACKETS: dict[str, Any] = {
    "C": lambda p: Connect(5, True, 60, "c", properties={p.identifier: p.value}),
    "w": lambda p: Connect(5, True, 60, "c", Will("w", b"x", 0, False, {p.identifier: p.value})),
    "K": lambda p: Connack(False, 0, {p.identifier: p.value}),
    "P": _publish_with,
    "A": lambda p: Ack(4, 1, 0, {p.identifier: p.value}),
    "S": lambda p: Subscribe(1, [SubscriptionRequest("f", 1)], {p.identifier: p.value}),
    "s": lambda p: Suback(1, [1], {p.identifier: p.value}),
    "U": lambda p: Unsubscribe(1, ["f"], {p.identifier: p.value}),
    "u": lambda p: Unsuback(1, [0], {p.identifier: p.value}),
    "D": lambda p: Disconnect(0, {p.identifier: p.value}),
}

CASES = CONNECTS + BAD_CONNECTS + CONNACKS + PUBLISHES + ACKS + SUBSCRIPTIONS + OTHERS
CASES += _property_cases()
VALID = [case for case in CASES if case.packet is not None]
INVALID = [case for case in CASES if case.packet is None]
