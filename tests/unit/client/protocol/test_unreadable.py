"""A message that a server passes on although it is against the rules, and a client that passes it
over."""

import pytest

from holdfast.client.protocol.effects import Closed, Received
from holdfast.protocol.mqtt import packets as pk
from tests.support.client_server import connected

EMPTY_RESPONSE_TOPIC = b"\x08\x00\x00"
WILDCARD = "a/#"


@pytest.mark.parametrize("level", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_it_is_acknowledged_in_order_and_passed_over(level: int, qos: int) -> None:
    told: list[str] = []
    server = connected(level, on_unreadable=told.append, manual_acknowledge=True)
    bad = server.message(WILDCARD, qos, 2 if qos else 0)
    effects = server.send(
        server.message("t", qos, 1 if qos else 0), bad, server.message("t", qos, 3 if qos else 0)
    )
    assert [one.message.topic for one in effects if isinstance(one, Received)] == ["t", "t"]
    assert len(told) == 1
    assert "wildcards" in told[0]
    if not qos:
        return
    kind = pk.PUBACK if qos == 1 else pk.PUBREC
    assert server.sent() == []
    for packet_id in (3, 1):
        server.core.acknowledge(packet_id, 0.0)
    assert [(ack.kind, ack.packet_id) for ack in server.sent()] == [
        (kind, number) for number in (1, 2, 3)
    ]
    if qos == 2:
        # What is sent again is told of again, and not held back.
        assert server.send(bad) == []
        assert [ack.packet_id for ack in server.sent()] == [2]
        server.ack(pk.PUBREL, 2)
        assert server.sent() == [pk.Ack(pk.PUBCOMP, 2, 0)]


def test_properties_beyond_the_rules() -> None:
    told: list[str] = []
    server = connected(on_unreadable=told.append)
    assert server.send(server.message("t", 1, 7, EMPTY_RESPONSE_TOPIC)) == []
    assert server.sent() == [pk.Ack(pk.PUBACK, 7, 0)]
    assert told == ["an empty response topic"]


@pytest.mark.parametrize(
    "frame",
    [
        b"\x36\x05\x00\x01t\x00\x01",  # QoS 3
        b"\x32\x04\x00\x09t\x00",  # the topic is longer than the packet
        b"\x32\x05\x00\x01#\x00\x00",  # packet id 0
        b"\x32\x03\x00\x01#",  # no packet id
    ],
)
def test_a_packet_without_an_id_ends_the_connection(frame: bytes) -> None:
    told: list[str] = []
    server = connected(4, on_unreadable=told.append)
    effects = server.send(frame)
    assert isinstance(effects[-1], Closed)
    assert effects[-1].error is not None
    assert told == []


def test_without_the_option_it_ends_the_connection() -> None:
    server = connected()
    effects = server.send(server.message(WILDCARD, 1, 7))
    assert isinstance(effects[-1], Closed)


def test_other_packets_end_the_connection() -> None:
    server = connected(on_unreadable=[].append)
    effects = server.send(b"\x40\x01\x00")
    assert isinstance(effects[-1], Closed)
