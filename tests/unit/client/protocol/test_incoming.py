"""Messages to the client, and its subscriptions."""

import pytest

from holdfast.client.protocol.effects import Message, Received, Subscribed
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import encode_publish
from tests.support.client_server import (
    connected,
    reason_of,
)

# Receiving


@pytest.mark.parametrize("level", [3, 4, 5])
def test_receive_qos_0_1_2(level: int) -> None:
    server = connected(level)
    effects = server.send(
        server.message("zero"), server.message("one", 1, 7), server.message("two", 2, 8)
    )
    topics = [one.message.topic for one in effects if isinstance(one, Received)]
    assert topics == ["zero", "one", "two"]
    assert server.sent() == [pk.Ack(pk.PUBACK, 7, 0), pk.Ack(pk.PUBREC, 8, 0)]
    server.ack(pk.PUBREL, 8)
    assert server.sent() == [pk.Ack(pk.PUBCOMP, 8, 0)]


def test_qos_2_is_delivered_once_also_over_a_reconnect() -> None:
    """[MQTT-4.3.3-10] [MQTT-4.3.3-11]"""
    server = connected(session_expiry_s=60)
    assert len(server.send(server.message("t", 2, 8))) == 1
    assert server.send(server.message("t", 2, 8)) == []
    assert server.sent() == [pk.Ack(pk.PUBREC, 8, 0)] * 2
    server.core.handle_closed(1.0)
    server.accept(session_present=True)
    assert server.send(server.message("t", 2, 8, dup=True)) == []
    server.ack(pk.PUBREL, 8)
    server.sent()
    # [MQTT-4.3.3-12]: after the release the id is a new message's.
    assert len(server.send(server.message("t", 2, 8))) == 1
    server.ack(pk.PUBREL, 9)
    assert server.sent()[-1] == pk.Ack(pk.PUBCOMP, 9, reasons.PACKET_IDENTIFIER_NOT_FOUND)


def test_a_session_that_is_older_than_it_was_uses_ids_anew() -> None:
    """As of a server that was killed and has loaded what it saved some time before."""
    server = connected(session_expiry_s=60)
    for packet_id in (8, 9):
        server.send(server.message("t", 2, packet_id))
    server.core.handle_closed(1.0)
    server.accept(session_present=True)
    server.sent()
    assert len(server.send(server.message("new", 2, 8))) == 1
    assert server.sent() == [pk.Ack(pk.PUBREC, 8, 0)]
    # From here on it is an id of this connection.
    assert server.send(server.message("new", 2, 8)) == []
    assert server.send(server.message("t", 2, 9, dup=True)) == []
    assert server.send(server.message("t", 2, 9, dup=True)) == []


def test_lost_session_forgets_received_ids() -> None:
    """[MQTT-3.2.2-5]"""
    server = connected(session_expiry_s=60)
    server.send(server.message("t", 2, 8))
    server.core.handle_closed(1.0)
    server.accept(session_present=False)
    assert len(server.send(server.message("t", 2, 8))) == 1


def test_manual_acknowledgements_leave_in_order() -> None:
    """[MQTT-4.6.0-2] [MQTT-4.6.0-3]"""
    server = connected(manual_acknowledge=True)
    core = server.core
    server.send(*(server.message("t", 1 + i % 2, i) for i in (1, 2, 3)))
    assert server.sent() == []
    core.acknowledge(3, 0.0)
    core.acknowledge(2, 0.0)
    assert server.sent() == []
    # Repeated before it was acknowledged: neither delivered nor answered.
    assert server.send(server.message("t", 2, 1)) == []
    core.acknowledge(1, 0.0)
    assert server.sent() == [
        pk.Ack(pk.PUBREC, 1, 0),
        pk.Ack(pk.PUBACK, 2, 0),
        pk.Ack(pk.PUBREC, 3, 0),
    ]
    core.acknowledge(77, 0.0)
    assert server.sent() == []


def test_server_may_not_exceed_our_receive_maximum() -> None:
    """[MQTT-3.3.4-9]"""
    server = connected(receive_maximum=2)
    server.send(server.message("t", 2, 1), server.message("t", 2, 2))
    effects = server.send(server.message("t", 2, 3))
    assert reason_of(effects) == reasons.RECEIVE_MAXIMUM_EXCEEDED
    goodbye = server.sent()[-1]
    assert isinstance(goodbye, pk.Disconnect)
    assert goodbye.reason == reasons.RECEIVE_MAXIMUM_EXCEEDED


def test_topic_aliases_from_the_server() -> None:
    """[MQTT-3.1.2-26] [MQTT-3.3.2-7]"""

    def alias(number: int) -> bytes:
        return bytes((pr.TOPIC_ALIAS, 0, number))

    server = connected(topic_alias_max=2, session_expiry_s=60)
    raw = encode_publish(b"", b"x", 0, False, False, 0, alias(1), 5)
    effects = server.send(server.message("long/topic", properties=alias(1)), raw)
    messages = [one.message for one in effects if isinstance(one, Received)]
    assert [one.topic for one in messages] == ["long/topic"] * 2
    assert messages[1].properties == {pr.TOPIC_ALIAS: 1}
    server.core.handle_closed(1.0)
    server.core.effects()
    server.accept(session_present=True)
    assert reason_of(server.send(raw)) == reasons.PROTOCOL_ERROR
    server = connected(topic_alias_max=2)
    effects = server.send(server.message("t", properties=alias(3)))
    assert reason_of(effects) == reasons.TOPIC_ALIAS_INVALID


def test_message_properties_are_decoded() -> None:
    server = connected()
    properties = pr.encode_block(
        {
            pr.USER_PROPERTY: [("a", "1"), ("a", "2")],
            pr.SUBSCRIPTION_IDENTIFIER: [3, 300],
            pr.CONTENT_TYPE: "text/plain",
        }
    )
    (received,) = server.send(server.message("t", properties=properties))
    assert received == Received(
        Message(
            "t",
            b"x",
            0,
            False,
            False,
            0,
            {
                pr.USER_PROPERTY: [("a", "1"), ("a", "2")],
                pr.SUBSCRIPTION_IDENTIFIER: [3, 300],
                pr.CONTENT_TYPE: "text/plain",
            },
        )
    )


def test_packet_larger_than_we_accept() -> None:
    server = connected(packet_bytes_max=64)
    effects = server.send(encode_publish(b"t", bytes(100), 0, False, False, 0, b"", 5))
    assert reason_of(effects) == reasons.PACKET_TOO_LARGE


# Subscribing


def test_subscribe_and_unsubscribe() -> None:
    server = connected()
    core = server.core
    request = pk.SubscriptionRequest("a/#", 2, True, True, 1)
    first = core.subscribe([request], 0.0, {pr.SUBSCRIPTION_IDENTIFIER: [5]})
    second = core.unsubscribe(["b", "c"], 0.0)
    assert server.sent() == [
        pk.Subscribe(first, [request], {pr.SUBSCRIPTION_IDENTIFIER: [5]}),
        pk.Unsubscribe(second, ["b", "c"], {}),
    ]
    assert server.send(pk.Suback(first, [2])) == [Subscribed(first, [2], {})]
    assert server.send(pk.Unsuback(second, [0, 17])) == [Subscribed(second, [0, 17], {})]
    assert server.send(pk.Suback(99, [0])) == []


def test_answer_with_the_wrong_number_of_reasons() -> None:
    server = connected()
    packet_id = server.core.subscribe([pk.SubscriptionRequest("a", 0)], 0.0)
    assert reason_of(server.send(pk.Suback(packet_id, [0, 0]))) == reasons.PROTOCOL_ERROR


def test_refused_request_gives_its_packet_id_back() -> None:
    server = connected()
    for _ in range(3):
        with pytest.raises(ValueError):
            server.core.subscribe([pk.SubscriptionRequest("x" * 70_000, 0)], 0.0)
    assert server.core.subscribe([pk.SubscriptionRequest("a", 0)], 0.0) == 4
    assert server.core._ids.used == {4}
