"""Messages from the client: QoS flows, the window, sessions that outlive a connection."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.errors import ConnectionLost, NotConnected, PublishRefused, QueueFull
from holdfast.client.options import Options
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.effects import Acknowledged
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.topics.names import InvalidTopic
from tests.support.client_server import (
    Server,
    closing_error,
    connected,
    publishes,
)

# Publishing


@pytest.mark.parametrize("level", [3, 4, 5])
def test_qos_0_1_2(level: int) -> None:
    server = connected(level)
    core = server.core
    core.publish("zero", b"0", 0, False, 0.0)
    one = core.publish("one", b"1", 1, True, 0.0)
    two = core.publish("two", b"2", 2, False, 0.0)
    assert publishes(server.sent()) == [(0, False, b"zero"), (1, False, b"one"), (2, False, b"two")]
    assert server.ack(pk.PUBACK, 1) == [Acknowledged(one, 0, {})]
    assert server.ack(pk.PUBREC, 2) == []
    assert server.sent() == [pk.Ack(pk.PUBREL, 2, 0)]
    assert server.ack(pk.PUBCOMP, 2) == [Acknowledged(two, 0, {})]
    assert len(core.outgoing) == 0


def test_failing_pubrec_ends_the_exchange() -> None:
    """[MQTT-4.3.3-4]"""
    server = connected()
    handle = server.core.publish("t", b"", 2, False, 0.0)
    server.sent()
    assert server.ack(pk.PUBREC, 1, reasons.QUOTA_EXCEEDED) == [
        Acknowledged(handle, reasons.QUOTA_EXCEEDED, {})
    ]
    assert server.sent() == []


def test_unknown_acknowledgements() -> None:
    server = connected()
    assert server.ack(pk.PUBACK, 9) == []
    assert server.ack(pk.PUBCOMP, 9) == []
    server.ack(pk.PUBREC, 9)
    assert server.sent() == [pk.Ack(pk.PUBREL, 9, reasons.PACKET_IDENTIFIER_NOT_FOUND)]
    server.core.publish("t", b"", 1, False, 0.0)
    assert server.ack(pk.PUBCOMP, 1) == []
    assert len(server.core.outgoing) == 1


def test_window_and_queue_are_bounded() -> None:
    """[MQTT-3.3.4-7] [MQTT-4.9.0-2] [MQTT-4.9.0-3]"""
    server = connected(properties={pr.RECEIVE_MAXIMUM: 2}, queue_messages_max=3)
    core = server.core
    for index in range(5):
        core.publish(f"t{index}", b"", 1 + index % 2, False, 0.0)
    with pytest.raises(QueueFull):
        core.publish("t", b"", 1, False, 0.0)
    core.publish("zero", b"", 0, False, 0.0)
    assert [topic for _, _, topic in publishes(server.sent())] == [b"t0", b"t1", b"zero"]
    server.ack(pk.PUBREC, 2)
    assert publishes(server.sent()) == []
    server.ack(pk.PUBCOMP, 2)
    assert publishes(server.sent()) == [(3, False, b"t2")]
    server.ack(pk.PUBACK, 1)
    assert publishes(server.sent()) == [(4, False, b"t3")]


def test_packet_ids_in_use_are_not_given_again() -> None:
    """[MQTT-2.2.1-3]"""
    server = connected()
    core = server.core
    core.publish("stays", b"", 1, False, 0.0)
    for _ in range(65_540):
        core.publish("t", b"", 1, False, 0.0)
        (sent,) = publishes(server.sent())[-1:]
        assert sent[0] != 1 or sent[2] == b"stays"
        server.ack(pk.PUBACK, sent[0])


@pytest.mark.parametrize(
    ("announced", "qos", "retain", "payload", "reason"),
    [
        ({pr.MAXIMUM_QOS: 1}, 2, False, b"", reasons.QOS_NOT_SUPPORTED),
        ({pr.RETAIN_AVAILABLE: 0}, 0, True, b"", reasons.RETAIN_NOT_SUPPORTED),
        ({pr.MAXIMUM_PACKET_SIZE: 50}, 1, False, bytes(60), reasons.PACKET_TOO_LARGE),
    ],
)
def test_announced_limits_are_kept(
    announced: Properties, qos: int, retain: bool, payload: bytes, reason: int
) -> None:
    """[MQTT-3.2.2-11] [MQTT-3.2.2-14] [MQTT-3.2.2-15]"""
    server = connected(properties=announced)
    with pytest.raises(PublishRefused) as caught:
        server.core.publish("t", payload, qos, retain, 0.0)
    assert caught.value.reason == reason
    assert server.sent() == []


@pytest.mark.parametrize("topic", ["", "a/#", "+", "a\0", "x" * 70_000])
def test_what_is_no_topic_name_is_not_sent(topic: str) -> None:
    """[MQTT-3.3.2-2]"""
    server = connected()
    with pytest.raises(InvalidTopic):
        server.core.publish(topic, b"", 1, False, 0.0)
    assert len(server.core.outgoing) == 0


def test_without_connection_only_acknowledged_messages_wait() -> None:
    core = ClientProtocol(Options(client_id="c"))
    with pytest.raises(NotConnected):
        core.publish("t", b"", 0, False, 0.0)
    core.publish("t", b"", 1, False, 0.0)
    server = Server(core)
    server.accept()
    assert publishes(server.sent()) == [(1, False, b"t")]


def test_topic_alias_towards_the_server() -> None:
    """[MQTT-3.3.2-9] [MQTT-3.2.2-17]"""
    server = connected(properties={pr.TOPIC_ALIAS_MAXIMUM: 2})
    core = server.core
    for topic in ("a", "a", "b"):
        core.publish(topic, b"", 0, False, 0.0, topic_alias=2)
    sent = [one for one in server.sent() if isinstance(one, pk.Publish)]
    assert [(one.topic, one.topic_alias) for one in sent] == [(b"a", 2), (b"", 2), (b"b", 2)]
    with pytest.raises(PublishRefused):
        core.publish("a", b"", 0, False, 0.0, topic_alias=3)


# Sessions


def test_resume_repeats_in_order_with_dup() -> None:
    """[MQTT-4.4.0-1] [MQTT-3.3.1-1] [MQTT-4.6.0-1]"""
    server = connected(session_expiry_s=60)
    core = server.core
    handles = [core.publish(f"t{index}", b"", 2 - index % 2, False, 0.0) for index in range(4)]
    server.sent()
    server.ack(pk.PUBREC, 1)
    core.handle_closed(1.0)
    assert isinstance(closing_error(core.effects()), ConnectionLost)
    late = core.publish("late", b"", 1, False, 1.0)
    effects = server.accept(session_present=True)
    assert len(effects) == 1
    again = server.sent()
    assert again[0] == pk.Ack(pk.PUBREL, 1, 0)
    assert publishes(again) == [
        (2, True, b"t1"),
        (3, True, b"t2"),
        (4, True, b"t3"),
        (5, False, b"late"),
    ]
    assert server.ack(pk.PUBCOMP, 1) == [Acknowledged(handles[0], 0, {})]
    assert server.ack(pk.PUBACK, 5) == [Acknowledged(late, 0, {})]


def test_lost_session_sends_again_as_new() -> None:
    server = connected(session_expiry_s=60)
    core = server.core
    released = core.publish("released", b"", 2, False, 0.0)
    core.publish("open", b"", 2, False, 0.0)
    server.sent()
    server.ack(pk.PUBREC, 1)
    core.handle_closed(1.0)
    core.effects()
    effects = server.accept(session_present=False)
    assert Acknowledged(released, 0, {}) in effects
    ((_, dup, topic),) = publishes(server.sent())
    assert (dup, topic) == (False, b"open")


def test_smaller_window_after_resume() -> None:
    server = connected(session_expiry_s=60)
    core = server.core
    for index in range(4):
        core.publish(f"t{index}", b"", 1, False, 0.0)
    server.sent()
    core.handle_closed(1.0)
    server.accept(session_present=True, properties={pr.RECEIVE_MAXIMUM: 1})
    order = []
    sent = publishes(server.sent())
    while sent:
        assert len(sent) == 1
        order.append(sent[0])
        server.ack(pk.PUBACK, sent[0][0])
        sent = publishes(server.sent())
    assert order == [(i + 1, True, f"t{i}".encode()) for i in range(4)]


class Pipe:
    """A network between a core and a model of a broker that loses connections at will."""

    def __init__(self, core: ClientProtocol) -> None:
        self.core = core
        self.server = Server(core)
        self.known: set[int] = set()
        self.got: list[bytes] = []
        self.answers: deque[bytes] = deque()
        self.has_session = False

    def reconnect(self) -> None:
        self.core.handle_closed(0.0)
        self.core.effects()
        self.answers.clear()
        self.server.accept(session_present=self.has_session)
        self.has_session = True
        self.take()

    def take(self) -> None:
        """The broker reads what was sent and prepares its answers."""
        for packet in self.server.sent():
            if isinstance(packet, pk.Publish):
                if packet.qos == 2 and packet.packet_id not in self.known:
                    self.known.add(packet.packet_id)
                    self.got.append(packet.payload)
                elif packet.qos == 1:
                    self.got.append(packet.payload)
                kind = pk.PUBACK if packet.qos == 1 else pk.PUBREC
                self.answers.append(encode_ack(kind, packet.packet_id, 0, 5))
            elif isinstance(packet, pk.Ack):
                self.known.discard(packet.packet_id)
                self.answers.append(encode_ack(pk.PUBCOMP, packet.packet_id, 0, 5))

    def answer(self) -> None:
        if self.answers:
            self.core.handle_data(self.answers.popleft(), 0.0)
            self.take()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["publish1", "publish2", "answer", "cut"]), max_size=60))
def test_nothing_is_lost_and_qos_2_comes_once(steps: list[str]) -> None:
    core = ClientProtocol(Options(client_id="c", session_expiry_s=60, inflight_max=3))
    pipe = Pipe(core)
    pipe.reconnect()
    payloads: dict[int, list[bytes]] = {1: [], 2: []}
    for number, step in enumerate(steps):
        if step == "answer":
            pipe.answer()
        elif step == "cut":
            pipe.reconnect()
        else:
            qos = int(step[-1])
            payloads[qos].append(b"%d:%d" % (qos, number))
            core.publish("t", payloads[qos][-1], qos, False, 0.0)
            pipe.take()
    for _ in range(10 * len(steps) + 10):
        pipe.answer()
    assert len(core.outgoing) == 0
    assert [one for one in pipe.got if one.startswith(b"2:")] == payloads[2]
    assert set(payloads[1]) <= set(pipe.got)
