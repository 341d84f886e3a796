"""The client core: connecting, keep alive, authentication, robustness."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.errors import AuthenticationFailed, ConnectionRefused, TimedOut
from holdfast.client.options import Options
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.effects import Closed, Connected, Effect, Reauthenticated, Traced
from holdfast.client.protocol.sender import CLOSED, CONNECTED
from holdfast.client.scram import ScramAuthentication
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.security.scram import ScramServer
from holdfast.security.scram_file import make_credentials
from tests.support.client_server import (
    Server,
    closing_error,
    connected,
    reason_of,
)

# Connecting


@pytest.mark.parametrize("level", [3, 4, 5])
def test_connect_says_what_the_options_say(level: int) -> None:
    will = pk.Will("w", b"bye", 1, True)
    core = ClientProtocol(
        Options(
            level=level,
            client_id="me",
            clean_start=False,
            session_expiry_s=9,
            keep_alive_s=33,
            username="u",
            password=b"p",
            will=will,
            topic_alias_max=4,
            properties={pr.RECEIVE_MAXIMUM: 7},
        )
    )
    server = Server(core)
    core.connect(0.0)
    (connect,) = server.sent()
    assert isinstance(connect, pk.Connect)
    assert (connect.protocol_level, connect.client_id, connect.clean_start) == (level, "me", False)
    assert (connect.username, connect.password, connect.will) == ("u", b"p", will)
    assert connect.keep_alive_s == 33
    if level == 5:
        assert connect.properties == {
            pr.SESSION_EXPIRY_INTERVAL: 9,
            pr.TOPIC_ALIAS_MAXIMUM: 4,
            pr.RECEIVE_MAXIMUM: 7,
        }


def test_refusal_carries_reason_and_reason_string() -> None:
    core = ClientProtocol(Options(client_id="c"))
    server = Server(core)
    core.connect(0.0)
    effects = server.send(pk.Connack(False, reasons.NOT_AUTHORIZED, {pr.REASON_STRING: "not you"}))
    error = closing_error(effects)
    assert isinstance(error, ConnectionRefused)
    assert (error.reason, error.detail) == (reasons.NOT_AUTHORIZED, "not you")
    assert core.state == CLOSED


def test_refusal_of_mqtt_3_is_translated() -> None:
    core = ClientProtocol(Options(level=4))
    core.connect(0.0)
    core.handle_data(b"\x20\x02\x00\x05", 0.0)
    assert reason_of(core.effects()) == reasons.NOT_AUTHORIZED


def test_assigned_client_id_is_kept_for_the_next_connection() -> None:
    """[MQTT-3.1.3-7]"""
    core = ClientProtocol(Options(session_expiry_s=60))
    server = Server(core)
    server.accept(properties={pr.ASSIGNED_CLIENT_IDENTIFIER: "srv-1"})
    core.handle_closed(1.0)
    core.connect(2.0)
    (connect,) = server.sent()
    assert isinstance(connect, pk.Connect)
    assert (connect.client_id, connect.clean_start) == ("srv-1", False)


@pytest.mark.parametrize(
    "options",
    [
        Options(level=3),
        Options(level=4, clean_start=False),
        Options(level=4, password=b"p"),
        Options(level=2),
        Options(keep_alive_s=70_000),
        Options(client_id="x" * 70_000),
        Options(username="\ud800"),
    ],
)
def test_impossible_options_are_refused_before_connecting(options: Options) -> None:
    with pytest.raises(ValueError):
        ClientProtocol(options)


def test_no_connack_in_time() -> None:
    core = ClientProtocol(Options(connect_timeout_s=5))
    core.connect(10.0)
    assert core.timer() == 15.0
    core.handle_timer(14.9)
    assert core.effects() == []
    core.handle_timer(15.0)
    assert isinstance(closing_error(core.effects()), TimedOut)


@pytest.mark.parametrize("frame", [b"\xd0\x00", b"\x90\x04\x00\x01\x00\x00", b"\x30\x03\x00\x01a"])
def test_nothing_may_come_before_connack(frame: bytes) -> None:
    """[MQTT-3.2.0-1]"""
    core = ClientProtocol(Options(level=4))
    core.connect(0.0)
    core.handle_data(frame, 0.0)
    assert reason_of(core.effects()) == reasons.PROTOCOL_ERROR


def test_an_admin_port_is_told() -> None:
    core = ClientProtocol(Options())
    core.connect(0.0)
    core.handle_data(b"HTTP/1.1 400 Bad Request\r\n\r\n", 0.0)
    assert "give the address of an MQTT listener" in str(closing_error(core.effects()))


def test_second_connack_and_packets_of_clients_are_errors() -> None:
    """[MQTT-3.2.0-2]"""
    assert reason_of(connected().send(pk.Connack(False, 0))) == reasons.PROTOCOL_ERROR
    server = connected()
    assert reason_of(server.send(pk.Pingreq())) == reasons.PROTOCOL_ERROR
    (goodbye,) = server.sent()
    assert isinstance(goodbye, pk.Disconnect)
    assert goodbye.reason == reasons.PROTOCOL_ERROR


def test_session_after_a_clean_start_is_an_error() -> None:
    """[MQTT-3.2.2-4]"""
    server = Server(ClientProtocol(Options(client_id="c")))
    assert reason_of(server.accept(session_present=True)) == reasons.PROTOCOL_ERROR


def test_disconnect_by_us_and_by_the_server() -> None:
    server = connected()
    server.core.disconnect(0.0, reasons.DISCONNECT_WITH_WILL_MESSAGE)
    assert server.sent() == [pk.Disconnect(reasons.DISCONNECT_WITH_WILL_MESSAGE, {})]
    assert closing_error(server.core.effects()) is None
    server.core.handle_closed(1.0)
    assert server.core.effects() == []
    server = connected()
    effects = server.send(pk.Disconnect(reasons.SESSION_TAKEN_OVER))
    assert reason_of(effects) == reasons.SESSION_TAKEN_OVER


# Keep alive


def test_ping_when_idle_and_give_up_without_answer() -> None:
    """[MQTT-3.1.2-20]"""
    server = connected(keep_alive_s=30, ping_timeout_s=5)
    core = server.core
    assert core.timer() == 30.0
    core.handle_timer(30.0)
    assert server.sent() == [pk.Pingreq()]
    assert core.timer() == 35.0
    server.now = 31.0
    server.send(pk.Pingresp())
    assert core.timer() == 60.0
    core.handle_timer(60.0)
    server.sent()
    core.handle_timer(65.0)
    assert reason_of(core.effects()) == reasons.KEEP_ALIVE_TIMEOUT


def test_traffic_one_way_does_not_hide_a_dead_server() -> None:
    server = connected(keep_alive_s=30)
    for now in (10.0, 20.0):
        server.core.publish("t", b"", 0, False, now)
    assert server.core.timer() == 30.0


def test_while_we_do_not_read_silence_is_our_own() -> None:
    server = connected(keep_alive_s=30, ping_timeout_s=5)
    core = server.core
    core.handle_timer(30.0)
    core.handle_reading(True, 31.0)
    core.handle_timer(100.0)
    assert core.state == CONNECTED
    core.handle_reading(False, 101.0)
    assert core.timer() == 106.0
    core.handle_timer(106.0)
    assert core.state == CLOSED


def test_server_keep_alive_goes_before_ours() -> None:
    """[MQTT-3.2.2-21]"""
    server = connected(properties={pr.SERVER_KEEP_ALIVE: 10}, keep_alive_s=100)
    assert server.core.timer() == 10.0
    assert connected(keep_alive_s=0).core.timer() is None


# Enhanced authentication


def scram_server(password: str) -> ScramServer:
    credentials = make_credentials(password, iterations=4096)
    return ScramServer(lambda name: credentials, lambda: "server-nonce")


def scram_handshake(core: ClientProtocol, exchange: ScramServer) -> list[Effect]:
    server = Server(core)
    core.connect(0.0)
    (connect,) = server.sent()
    assert isinstance(connect, pk.Connect)
    assert connect.properties[pr.AUTHENTICATION_METHOD] == "SCRAM-SHA-256"
    first = connect.properties[pr.AUTHENTICATION_DATA]
    assert isinstance(first, bytes)
    server.send(auth(reasons.CONTINUE_AUTHENTICATION, exchange.start(first)))
    (answer,) = server.sent()
    assert isinstance(answer, pk.Auth)
    final = answer.properties[pr.AUTHENTICATION_DATA]
    assert isinstance(final, bytes)
    verifier = exchange.finish(final)
    return server.send(
        pk.Connack(
            False,
            0,
            {pr.AUTHENTICATION_METHOD: "SCRAM-SHA-256", pr.AUTHENTICATION_DATA: verifier},
        )
    )


def auth(reason: int, data: bytes) -> pk.Auth:
    return pk.Auth(
        reason, {pr.AUTHENTICATION_METHOD: "SCRAM-SHA-256", pr.AUTHENTICATION_DATA: data}
    )


def test_scram_handshake_and_reauthentication() -> None:
    """[MQTT-4.12.0-3] [MQTT-4.12.0-5] [MQTT-4.12.1-1]"""
    options = Options(authentication=lambda: ScramAuthentication("ann", "secret"))
    core = ClientProtocol(options)
    effects = scram_handshake(core, scram_server("secret"))
    assert isinstance(effects[0], Connected)
    server = Server(core)
    exchange = scram_server("secret")
    core.reauthenticate(0.0)
    (again,) = server.sent()
    assert isinstance(again, pk.Auth)
    assert again.reason == reasons.REAUTHENTICATE
    data = again.properties[pr.AUTHENTICATION_DATA]
    assert isinstance(data, bytes)
    server.send(auth(reasons.CONTINUE_AUTHENTICATION, exchange.start(data)))
    (answer,) = server.sent()
    assert isinstance(answer, pk.Auth)
    data = answer.properties[pr.AUTHENTICATION_DATA]
    assert isinstance(data, bytes)
    effects = server.send(auth(reasons.SUCCESS, exchange.finish(data)))
    assert effects == [Reauthenticated()]


def test_server_that_cannot_prove_itself_is_left() -> None:
    core = ClientProtocol(Options(authentication=lambda: ScramAuthentication("ann", "secret")))
    server = Server(core)
    core.connect(0.0)
    server.sent()
    effects = server.send(
        pk.Connack(
            False,
            0,
            {pr.AUTHENTICATION_METHOD: "SCRAM-SHA-256", pr.AUTHENTICATION_DATA: b"v=AAAA"},
        )
    )
    assert isinstance(closing_error(effects), AuthenticationFailed)
    assert core.state == CLOSED


def test_auth_packet_without_an_exchange() -> None:
    server = connected()
    effects = server.send(auth(reasons.CONTINUE_AUTHENTICATION, b""))
    assert reason_of(effects) == reasons.PROTOCOL_ERROR


# Everything


def test_trace_shows_packets_in_order() -> None:
    server = connected(trace=True)
    server.core.publish("t", b"", 1, False, 0.0)
    effects = server.ack(pk.PUBACK, 1)
    names = [
        (one.sent, type(one.packet).__name__) if isinstance(one, Traced) else type(one).__name__
        for one in effects
    ]
    assert names == [(True, "Publish"), (False, "Ack"), "Acknowledged"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([3, 4, 5]), st.booleans())
def test_any_bytes_close_or_are_understood(data: bytes, level: int, accepted: bool) -> None:
    core = ClientProtocol(Options(level=level, client_id="c"))
    server = Server(core)
    core.connect(0.0)
    if accepted:
        server.send(pk.Connack(False, 0))
    core.handle_data(data, 0.0)
    closed = [one for one in core.effects() if isinstance(one, Closed)]
    assert len(closed) == (core.state == CLOSED)
