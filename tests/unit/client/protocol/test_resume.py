"""What the client core does for a connection that is made again: silence found out, subscriptions
said again, messages that the new server does not take."""

import pytest

from holdfast.client.errors import ConnectionLost, ConnectionRefused, QueueFull, SubscribeRefused
from holdfast.client.options import Options
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.effects import Acknowledged, Closed, Connected, Effect, Subscribed
from holdfast.client.protocol.sender import CLOSED, CONNECTED
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import FILTERS_MAX
from holdfast.protocol.mqtt.packets import Packet, SubscriptionRequest
from tests.support.client_server import Server, closing_error, connected, publishes


def tick(server: Server, now: float) -> list[Effect]:
    server.now = now
    server.core.handle_timer(now)
    return server.core.effects()


def names(packets: list[Packet]) -> list[str]:
    return [type(one).__name__ for one in packets]


# Silence


def test_a_server_that_owes_an_answer_is_asked_half_way_and_lost_at_the_end() -> None:
    server = connected(response_timeout_s=2.0, keep_alive_s=0)
    core = server.core
    assert core.timer() is None
    core.publish("t", b"", 1, False, 10.0)
    assert core.timer() == 11.0
    assert tick(server, 10.9) == []
    assert tick(server, 11.0) == []
    assert names(server.sent()) == ["Publish", "Pingreq"]
    assert core.timer() == 12.0
    error = closing_error(tick(server, 12.0))
    assert isinstance(error, ConnectionLost)
    assert error.reason == reasons.KEEP_ALIVE_TIMEOUT
    assert core.timer() is None


def test_any_word_of_the_server_counts_but_only_from_when_it_owes() -> None:
    server = connected(response_timeout_s=2.0, keep_alive_s=0)
    core = server.core
    # Long idle before: the time runs from the question.
    core.subscribe([SubscriptionRequest("a", 0)], 100.0)
    assert core.timer() == 101.0
    # A second question does not put off the answer to the first.
    core.publish("t", b"", 1, False, 100.8)
    assert core.timer() == 101.0
    tick(server, 101.0)
    server.now = 101.5
    server.send(pk.Pingresp())
    assert core.state == CONNECTED
    assert core.timer() == 102.5
    server.now = 101.6
    server.send(server.message("x"))
    assert core.timer() == 102.6
    server.now = 102.0
    server.send(pk.Suback(1, [0]))
    server.ack(pk.PUBACK, 2)
    assert core.timer() is None


def test_a_slow_disk_is_no_dead_server() -> None:
    """As long as it answers pings, the acknowledgement may take for ever."""
    server = connected(response_timeout_s=2.0, keep_alive_s=0)
    server.core.publish("t", b"", 1, False, 0.0)
    now = 0.0
    for _ in range(20):
        when = server.core.timer()
        assert when is not None
        now = when
        assert tick(server, now) == []
        if "Pingreq" in names(server.sent()):
            server.send(pk.Pingresp())
    assert now > 10
    assert server.core.state == CONNECTED


def test_bytes_that_leave_and_reading_that_is_paused_are_no_silence() -> None:
    server = connected(response_timeout_s=2.0, keep_alive_s=0)
    core = server.core
    core.publish("t", b"", 1, False, 0.0)
    tick(server, 1.0)
    core.handle_progress(1.9)
    assert core.timer() == 3.9
    core.handle_reading(True, 2.0)
    assert core.timer() is None
    assert tick(server, 50.0) == []
    core.handle_reading(False, 50.0)
    assert core.timer() == 52.0
    assert isinstance(closing_error(tick(server, 52.0)), ConnectionLost)


def test_a_listener_pings_and_finds_a_silent_server() -> None:
    server = connected(response_timeout_s=1.0, keep_alive_s=600, ping_interval_s=0.5)
    assert server.core.timer() == 0.5
    server.now = 0.4
    server.send(server.message("x"))
    assert server.core.timer() == pytest.approx(0.9)
    assert tick(server, 0.9) == []
    assert names(server.sent()) == ["Pingreq"]
    assert server.core.timer() == pytest.approx(1.9)
    assert isinstance(closing_error(tick(server, 1.9)), ConnectionLost)


def test_without_a_response_timeout_only_the_keep_alive_counts() -> None:
    server = connected(response_timeout_s=None, keep_alive_s=60)
    server.core.publish("t", b"", 1, False, 0.0)
    assert server.core.timer() == 60.0


@pytest.mark.parametrize(
    "wrong", [{"response_timeout_s": 0}, {"response_timeout_s": -1}, {"ping_interval_s": -1}]
)
def test_impossible_times(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"response timeout|ping interval"):
        ClientProtocol(Options(**wrong))  # type: ignore[arg-type]


# Subscriptions


def resubscribing(**options: object) -> Server:
    server = Server(ClientProtocol(Options(client_id="c", **options), resubscribe=True))  # type: ignore[arg-type]
    server.accept()
    return server


def subscribe(server: Server, *filters: str, codes: list[int] | None = None, id: int = 0) -> None:
    properties: pk.Properties = {pr.SUBSCRIPTION_IDENTIFIER: [id]} if id else {}
    requests = [SubscriptionRequest(one, 1) for one in filters]
    packet_id = server.core.subscribe(requests, server.now, properties)
    server.send(pk.Suback(packet_id, codes if codes is not None else [1] * len(filters)))
    server.sent()


def unsubscribe(server: Server, *filters: str, codes: list[int] | None = None) -> None:
    packet_id = server.core.unsubscribe(list(filters), server.now)
    server.send(pk.Unsuback(packet_id, codes if codes is not None else [0] * len(filters)))
    server.sent()


def come_back(server: Server, session_present: bool = False) -> list[Packet]:
    """What is sent after CONNACK on the next connection."""
    server.core.handle_closed(server.now)
    server.core.effects()
    server.accept(session_present)
    return server.sent()


def said(packets: list[Packet]) -> list[list[str]]:
    return [[s.filter for s in p.subscriptions] for p in packets if isinstance(p, pk.Subscribe)]


def test_granted_filters_are_said_again_before_any_message() -> None:
    server = resubscribing(session_expiry_s=60)
    subscribe(server, "a", "b", "no", codes=[1, 0, reasons.NOT_AUTHORIZED])
    subscribe(server, "c/#", "gone", id=7)
    subscribe(server, "a")
    unsubscribe(server, "gone")
    unsubscribe(server, "b", codes=[reasons.NOT_AUTHORIZED])
    server.core.publish("t", b"", 1, False, server.now)
    assert come_back(server, session_present=True)[0].__class__ is pk.Publish
    packets = come_back(server)
    assert names(packets) == ["Subscribe", "Subscribe", "Publish"]
    assert said(packets) == [["a", "b"], ["c/#"]]
    second = packets[1]
    assert isinstance(second, pk.Subscribe)
    assert second.properties == {pr.SUBSCRIPTION_IDENTIFIER: [7]}
    assert second.subscriptions[0].qos == 1


def test_nobody_is_told_of_answers_to_what_the_core_said_again() -> None:
    server = resubscribing()
    subscribe(server, "a")
    (packet,) = come_back(server)
    assert isinstance(packet, pk.Subscribe)
    assert server.send(pk.Suback(packet.packet_id, [1])) == []
    # What was asked but not answered before the cut is not said again by the core.
    server.core.subscribe([SubscriptionRequest("b", 0)], server.now)
    assert said(come_back(server)) == [["a"]]


def test_without_reconnect_nothing_is_said_again() -> None:
    server = connected()
    subscribe(server, "a")
    assert come_back(server) == []


@pytest.mark.parametrize("level", [3, 4, 5])
def test_a_refusal_of_what_is_said_again_ends_the_connection(level: int) -> None:
    server = Server(ClientProtocol(Options(client_id="c", level=level), resubscribe=True))
    server.accept()
    subscribe(server, "a", "b")
    (packet,) = come_back(server)
    assert isinstance(packet, pk.Subscribe)
    effects = server.send(pk.Suback(packet.packet_id, [1, 0x80]))
    error = closing_error(effects)
    assert isinstance(error, SubscribeRefused)
    assert "'b'" in str(error)
    assert names(server.sent()) == ["Disconnect"]
    assert said(come_back(server)) == [["a", "b"]]


def test_many_filters_are_said_again_in_packets_the_server_takes() -> None:
    server = resubscribing()
    wanted = [f"{'x' * 50}/{number}" for number in range(1000)]
    for start in range(0, 1000, 10):
        subscribe(server, *wanted[start : start + 10])
    server.core.handle_closed(server.now)
    server.accept(properties={pr.MAXIMUM_PACKET_SIZE: 2000})
    data = server.core.data_to_send()
    server.core._out.append(data)
    packets = server.sent()
    assert [one for batch in said(packets) for one in batch] == wanted
    assert len(data) / len(packets) <= 2000
    assert len(packets) < 60


def test_the_filters_remembered_are_bounded() -> None:
    server = resubscribing()
    for start in range(0, 50_000, FILTERS_MAX):
        subscribe(server, *(str(number) for number in range(start, start + FILTERS_MAX)))
    with pytest.raises(QueueFull, match="50000"):
        server.core.subscribe([SubscriptionRequest("more", 0)], server.now)
    subscribe(server, "1")
    unsubscribe(server, "1")
    subscribe(server, "more")


def test_an_answer_of_the_other_kind_breaks_the_protocol() -> None:
    server = resubscribing()
    packet_id = server.core.subscribe([SubscriptionRequest("a", 0)], server.now)
    server.send(pk.Unsuback(packet_id, [0]))
    assert server.core.state == CLOSED


# Messages


def test_what_the_new_server_does_not_take_is_refused_here() -> None:
    """It would disconnect us for each of them, and again after we came back."""
    core = ClientProtocol(Options(client_id="c"))
    server = Server(core)
    server.accept()
    core.handle_closed(0.0)
    core.effects()
    big = core.publish("t", b"x" * 200, 1, False, 0.0)
    fine = core.publish("t", b"", 1, False, 0.0)
    kept = core.publish("t", b"", 1, True, 0.0)
    exactly = core.publish("t", b"", 2, False, 0.0)
    effects = server.accept(
        properties={pr.MAXIMUM_PACKET_SIZE: 100, pr.MAXIMUM_QOS: 1, pr.RETAIN_AVAILABLE: 0}
    )
    refused = {one.handle: one.reason for one in effects if isinstance(one, Acknowledged)}
    assert refused == {
        big: reasons.PACKET_TOO_LARGE,
        kept: reasons.RETAIN_NOT_SUPPORTED,
        exactly: reasons.QOS_NOT_SUPPORTED,
    }
    assert publishes(server.sent()) == [(1, False, b"t")]
    (done,) = server.ack(pk.PUBACK, 1)
    assert isinstance(done, Acknowledged)
    assert done.handle == fine


def test_the_id_of_a_refused_qos_2_message_is_not_given_to_another() -> None:
    server = connected(session_expiry_s=60)
    core = server.core
    core.publish("t", b"x" * 200, 2, False, 0.0)
    core.publish("t", b"x" * 200, 1, False, 0.0)
    server.sent()
    core.handle_closed(0.0)
    core.effects()
    server.accept(True, {pr.MAXIMUM_PACKET_SIZE: 100})
    assert len(core.outgoing) == 0
    assert core._ids.used == {1}


def test_a_repeated_release_that_the_server_has_forgotten_is_done() -> None:
    server = connected(session_expiry_s=60)
    core = server.core
    handle = core.publish("t", b"", 2, False, 0.0)
    server.sent()
    server.ack(pk.PUBREC, 1)
    server.sent()
    core.handle_closed(0.0)
    core.effects()
    server.accept(True)
    assert names(server.sent()) == ["Ack"]
    (effect,) = server.ack(pk.PUBCOMP, 1, reasons.PACKET_IDENTIFIER_NOT_FOUND)
    assert effect == Acknowledged(handle, reasons.SUCCESS, {})


def test_server_references_reach_the_errors() -> None:
    server = connected()
    effects = server.send(
        pk.Disconnect(reasons.USE_ANOTHER_SERVER, {pr.SERVER_REFERENCE: "b:1883"})
    )
    error = closing_error(effects)
    assert isinstance(error, ConnectionLost)
    assert error.server_reference == "b:1883"
    server.core.connect(0.0)
    effects = server.send(pk.Connack(False, reasons.SERVER_MOVED, {pr.SERVER_REFERENCE: "c"}))
    error = closing_error(effects)
    assert isinstance(error, ConnectionRefused)
    assert error.server_reference == "c"
    assert not [one for one in effects if isinstance(one, Connected | Subscribed)]
    assert isinstance(effects[-1], Closed)
