"""The asyncio client with a list of servers and reconnect, against brokers that do what the test
says."""

import asyncio
import base64
import hashlib
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trustme

from holdfast.client import (
    AuthenticationFailed,
    Client,
    ClientError,
    ConnectionLost,
    ConnectionRefused,
    Message,
    NotConnected,
    Options,
    PublishRefused,
    Reconnect,
    Server,
)
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.publish import encode_publish
from tests.support.client_broker import Peer, ScriptedBroker
from tests.support.ports import free_port

TIMEOUT_S = 30
QUICK = Reconnect(first_delay_s=0.005, delay_max_s=0.02)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), TIMEOUT_S)
        # A client leaves no task behind.
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(bounded())


@pytest.fixture
def closed_port() -> int:
    return free_port()


async def serve(peer: Peer) -> None:
    """Acknowledges everything, until the client leaves."""
    await peer.accept()
    await acknowledge(peer)


async def acknowledge(peer: Peer) -> None:
    while (packet := await peer.receive()) is not None:
        match packet:
            case pk.Publish(qos=1):
                await peer.send(encode_ack(pk.PUBACK, packet.packet_id, 0, 5))
            case pk.Publish(qos=2):
                await peer.send(encode_ack(pk.PUBREC, packet.packet_id, 0, 5))
            case pk.Ack(kind=pk.PUBREL):
                await peer.send(encode_ack(pk.PUBCOMP, packet.packet_id, 0, 5))
            case pk.Subscribe():
                codes = [one.qos for one in packet.subscriptions]
                await peer.send(pk.Suback(packet.packet_id, codes))
            case pk.Unsubscribe():
                await peer.send(pk.Unsuback(packet.packet_id, [0] * len(packet.filters)))
            case pk.Disconnect():
                return


async def expect(peer: Peer, kind: type[pk.Packet]) -> pk.Packet:
    packet = await peer.receive()
    assert isinstance(packet, kind), packet
    return packet


def cut(peer: Peer) -> None:
    peer.writer.transport.abort()


async def cut_at_once(peer: Peer) -> None:
    await peer.accept()
    cut(peer)


# Publishing


def test_a_future_outlives_the_connection_and_has_the_acknowledgement_that_comes_in_the_end() -> (
    None
):
    async def first(peer: Peer) -> None:
        await peer.accept()
        assert isinstance(await peer.receive(), pk.Publish)
        cut(peer)

    async def second(peer: Peer) -> None:
        connect = await peer.receive()
        assert isinstance(connect, pk.Connect)
        assert not connect.clean_start
        await peer.send(pk.Connack(True, 0))
        for number in range(3):
            publish = await peer.receive()
            assert isinstance(publish, pk.Publish)
            assert (publish.payload, publish.dup) == (b"%d" % number, number == 0)
        cut(peer)

    async def third(peer: Peer) -> None:
        await peer.receive()
        await peer.send(pk.Connack(False, 0))
        for number in range(3):
            publish = await peer.receive()
            assert isinstance(publish, pk.Publish)
            assert (publish.payload, publish.dup) == (b"%d" % number, False)
            reason = reasons.NO_MATCHING_SUBSCRIBERS if number else reasons.QUOTA_EXCEEDED
            await peer.send(encode_ack(pk.PUBACK, publish.packet_id, reason, 5))
        await peer.receive()

    async def test() -> None:
        options = Options(client_id="c", session_expiry_s=60)
        async with (
            ScriptedBroker(first, second, third) as broker,
            Client("127.0.0.1", broker.port, reconnect=QUICK, options=options) as client,
        ):
            futures = [await client.submit("t", b"0", qos=1)]
            while client.connections < 2:
                await asyncio.sleep(0)
                assert not futures[0].done()
            futures += [await client.submit("t", b"%d" % n, qos=1) for n in (1, 2)]
            with pytest.raises(PublishRefused):
                await futures[0]
            assert [(await one).reason for one in futures[1:]] == [0x10, 0x10]
            await client.flush()
            assert client.connections == 3

    run(test)


def test_publishing_without_a_connection_waits_in_a_bounded_queue() -> None:
    arrived: list[bytes] = []
    is_up = asyncio.Event()

    async def back(peer: Peer) -> None:
        await peer.accept()
        for _ in range(5):
            publish = await expect(peer, pk.Publish)
            assert isinstance(publish, pk.Publish)
            arrived.append(publish.payload)
            if publish.qos:
                await peer.send(encode_ack(pk.PUBACK, publish.packet_id, 0, 5))
        await peer.receive()

    async def refuse(peer: Peer) -> None:
        await peer.receive()
        if is_up.is_set():
            await peer.send(pk.Connack(False, 0))
            cut(peer)
            return
        await peer.send(pk.Connack(False, reasons.SERVER_UNAVAILABLE))

    async def test() -> None:
        options = Options(queue_messages_max=2)
        lost = asyncio.Event()
        async with ScriptedBroker(cut_at_once, *[refuse] * 1000) as broker:
            client = Client(
                "127.0.0.1",
                broker.port,
                reconnect=QUICK,
                options=options,
                on_connection_lost=lambda error: lost.set(),
            )
            await client.connect()
            await lost.wait()
            queued = [await client.submit("t", b"%d" % number, qos=1) for number in range(2)]
            waiting: list[asyncio.Task[Any]] = [
                asyncio.create_task(client.publish("t", b"2", qos=1)),
                asyncio.create_task(client.publish("t", b"3", qos=1)),
                asyncio.create_task(client.publish("t", b"zero", qos=0)),
                asyncio.create_task(client.subscribe("t")),
                asyncio.create_task(client.flush()),
            ]
            await asyncio.sleep(0.05)
            assert len(client.core.outgoing) == 2
            assert not any(one.done() for one in [*queued, *waiting])
            waiting.pop(3).cancel()
            broker._scripts[:] = [back]
            await asyncio.gather(*queued, *waiting)
            await client.disconnect()
        assert sorted(arrived) == [b"0", b"1", b"2", b"3", b"zero"]
        assert [one for one in arrived if one in (b"0", b"1")] == [b"0", b"1"]

    run(test)


def test_what_is_subscribed_is_said_again_and_messages_go_on() -> None:
    async def first(peer: Peer) -> None:
        await peer.accept()
        subscribe = await expect(peer, pk.Subscribe)
        assert isinstance(subscribe, pk.Subscribe)
        await peer.send(
            pk.Suback(subscribe.packet_id, [1]),
            encode_publish(b"a/1", b"before", 0, False, False, 0, b"", 5),
        )
        # The second one is never answered.
        await expect(peer, pk.Subscribe)
        cut(peer)

    async def second(peer: Peer) -> None:
        await peer.accept()
        for wanted in ("a/#", "b"):
            subscribe = await expect(peer, pk.Subscribe)
            assert isinstance(subscribe, pk.Subscribe)
            assert [one.filter for one in subscribe.subscriptions] == [wanted]
            await peer.send(pk.Suback(subscribe.packet_id, [1]))
        await peer.send(encode_publish(b"b", b"after", 0, False, False, 0, b"", 5))
        assert isinstance(await peer.receive(), pk.Disconnect)

    async def test() -> None:
        async with (
            ScriptedBroker(first, second) as broker,
            Client("127.0.0.1", broker.port, reconnect=QUICK) as client,
        ):
            assert await client.subscribe(("a/#", 1)) == [1]
            assert await client.subscribe(("b", 1)) == [1]
            messages = client.messages()
            assert [(await anext(messages)).payload for _ in range(2)] == [b"before", b"after"]
            await client.disconnect()
            assert [one async for one in messages] == []

    run(test)


def test_an_acknowledgement_for_an_earlier_connection_is_nothing() -> None:
    """Its packet id may belong to another message by now."""
    may_cut = asyncio.Event()

    async def first(peer: Peer) -> None:
        await peer.accept()
        await peer.send(encode_publish(b"t", b"old", 1, False, False, 5, b"", 5))
        await may_cut.wait()
        cut(peer)

    async def second(peer: Peer) -> None:
        await peer.accept()
        await peer.send(encode_publish(b"t", b"new", 1, False, False, 5, b"", 5))
        await peer.send(encode_publish(b"t", b"next", 1, False, False, 6, b"", 5))
        acknowledged = [await expect(peer, pk.Ack) for _ in range(2)]
        assert [one.packet_id for one in acknowledged if isinstance(one, pk.Ack)] == [5, 6]
        await peer.receive()

    async def test() -> None:
        options = Options(manual_acknowledge=True)
        lost = asyncio.Event()
        async with (
            ScriptedBroker(first, second) as broker,
            Client(
                "127.0.0.1",
                broker.port,
                reconnect=QUICK,
                options=options,
                on_connection_lost=lambda error: lost.set(),
            ) as client,
        ):
            old = await client.receive()
            assert old is not None
            may_cut.set()
            await lost.wait()
            client.acknowledge(old)
            new, following = await client.receive(), await client.receive()
            assert new is not None
            assert following is not None
            client.acknowledge(old)
            client.acknowledge(following)
            assert client.core.incoming.arrive(5, 1, False) != 0
            client.acknowledge(new)
            await asyncio.sleep(0)

    run(test)


# Ends


def test_disconnect_ends_everything_that_waits(closed_port: int) -> None:
    async def test() -> None:
        lost = asyncio.Event()
        async with ScriptedBroker(cut_at_once) as broker:
            client = Client(
                servers=[f"127.0.0.1:{broker.port}", f"127.0.0.1:{closed_port}"],
                reconnect=Reconnect(first_delay_s=100, delay_max_s=100),
                on_connection_lost=lambda error: lost.set(),
            )
            await client.connect()
            await lost.wait()
            future = await client.submit("t", b"", qos=1)
            waiting: list[asyncio.Task[Any]] = [
                asyncio.create_task(client.publish("t", b"")),
                asyncio.create_task(client.subscribe("t")),
                asyncio.create_task(client.flush()),
                asyncio.create_task(client.reauthenticate()),
            ]
            receiving = asyncio.create_task(client.receive())
            closing = asyncio.create_task(client.wait_closed())
            await asyncio.sleep(0)
            assert client.server is None
            await client.disconnect()
            for one in (future, *waiting):
                with pytest.raises(NotConnected):
                    await one
            assert await receiving is None
            assert await closing is None
            with pytest.raises(NotConnected):
                await client.submit("t", b"", qos=1)
            # What was accepted is still there for another connect.
            assert len(client.core.outgoing) == 1
            broker._scripts[:] = [serve]
            await client.connect()
            await client.flush()
            await client.disconnect()

    run(test)


def test_a_refusal_for_good_ends_everything_that_waits() -> None:
    async def refuse(peer: Peer) -> None:
        await peer.receive()
        await peer.send(pk.Connack(False, reasons.NOT_AUTHORIZED, {pr.REASON_STRING: "no more"}))
        await peer.receive()

    async def lose_a_publish(peer: Peer) -> None:
        await peer.accept()
        await expect(peer, pk.Publish)
        cut(peer)

    async def test() -> None:
        async with ScriptedBroker(lose_a_publish, refuse) as broker:
            client = Client("127.0.0.1", broker.port, reconnect=QUICK)
            await client.connect()
            receiving = asyncio.create_task(client.receive())
            with pytest.raises(ConnectionRefused, match="no more") as caught:
                await client.publish("t", b"", qos=1)
            with pytest.raises(ConnectionRefused):
                await receiving
            assert await client.wait_closed() is caught.value
            with pytest.raises(ConnectionRefused):
                await client.publish("t", b"")
            assert client.server is None
            await client.disconnect()

    run(test)


def test_giving_up(closed_port: int) -> None:
    async def test() -> None:
        failures: list[ClientError] = []
        client = Client(
            "127.0.0.1",
            closed_port,
            reconnect=Reconnect(attempts_max=3, delay_max_s=0.02),
            on_connect_failed=lambda error, server: failures.append(error),
        )
        with pytest.raises(ConnectionLost, match=str(closed_port)):
            await client.connect()
        await asyncio.sleep(0)
        assert len(failures) == 3
        client = Client(
            "127.0.0.1", closed_port, reconnect=Reconnect(give_up_after_s=0.1, delay_max_s=0.02)
        )
        with pytest.raises(ConnectionLost, match=r"no connection in 0\.1 s; .*Connect call failed"):
            await client.connect()

    run(test)


def test_cancelled_connect_leaves_nothing(closed_port: int) -> None:
    async def never(peer: Peer) -> None:
        await peer.receive()
        assert await peer.receive() is None

    async def test() -> None:
        async with ScriptedBroker(never, serve) as broker:
            servers = [f"127.0.0.1:{closed_port}", f"127.0.0.1:{broker.port}"]
            client = Client(servers=servers, reconnect=QUICK)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.connect(), 0.2)
            with pytest.raises(NotConnected):
                await client.publish("t", b"")
            async with client:
                assert client.server == Server("mqtt", "127.0.0.1", broker.port)
                with pytest.raises(ValueError, match="already connected"):
                    await client.connect()

    run(test)


def test_abort_gives_no_goodbye() -> None:
    async def serve_and_see(peer: Peer) -> None:
        await peer.accept()
        try:
            assert await peer.receive() is None
        except ConnectionResetError:
            pass

    async def test() -> None:
        async with ScriptedBroker(serve_and_see) as broker:
            client = Client("127.0.0.1", broker.port, reconnect=QUICK)
            await client.connect()
            client.abort()
            assert not client.is_connected
            assert await client.wait_closed() is None
            client.abort()

    run(test)


# Which server


def test_without_reconnect_the_list_is_walked_once(closed_port: int) -> None:
    async def busy(peer: Peer) -> None:
        await peer.receive()
        await peer.send(pk.Connack(False, reasons.SERVER_BUSY))
        await peer.receive()

    async def test() -> None:
        async with ScriptedBroker(busy, busy, cut_at_once) as broker, ScriptedBroker(serve) as good:
            addresses = [f"127.0.0.1:{port}" for port in (closed_port, broker.port, good.port)]
            client = Client(servers=addresses)
            await client.connect()
            assert client.server == client.servers[2]
            await client.publish("t", b"", qos=1)
            await client.disconnect()
            assert client.server is None
            client = Client(servers=addresses[:2])
            with pytest.raises(ConnectionLost) as caught:
                await client.connect()
            assert "no server could be reached" in str(caught.value)
            assert f":{closed_port}: Connect call failed" in str(caught.value)
            assert f":{broker.port}: connection refused: Server busy" in str(caught.value)
            # A lost connection is the end.
            await client.connect()
            with pytest.raises(ConnectionLost):
                await client.receive()
            assert client.server is None

    run(test)


def test_a_server_that_accepts_and_says_nothing_is_left_for_another() -> None:
    """As a stopped process does whose kernel still accepts."""

    async def mute(peer: Peer) -> None:
        try:
            while await peer.receive() is not None:
                pass
        except ConnectionResetError:
            pass

    async def stall(peer: Peer) -> None:
        await peer.accept()
        await mute(peer)

    async def test() -> None:
        options = Options(response_timeout_s=0.1, keep_alive_s=0)
        async with (
            ScriptedBroker(stall, mute, mute) as first,
            ScriptedBroker(cut_at_once, serve) as second,
        ):
            client = Client(
                servers=[f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"],
                reconnect=Reconnect(
                    first_delay_s=0.005, delay_max_s=0.02, stagger_s=0.02, connack_timeout_s=0.05
                ),
                options=options,
            )
            await client.connect()
            assert client.server == client.servers[0]
            # Silence, a cut, and no CONNACK: the acknowledgement comes from the second one.
            await client.publish("t", b"", qos=1)
            assert client.server == client.servers[1]
            assert client.connections == 3
            await client.disconnect()

    run(test)


def test_a_server_may_name_another() -> None:
    async def test() -> None:
        async with ScriptedBroker(serve) as target:
            reference = f"127.0.0.1:{target.port}"

            async def hand_over(peer: Peer) -> None:
                await peer.accept()
                await expect(peer, pk.Publish)
                await peer.send(
                    pk.Disconnect(reasons.USE_ANOTHER_SERVER, {pr.SERVER_REFERENCE: reference})
                )

            async def refer(peer: Peer) -> None:
                await peer.receive()
                await peer.send(
                    pk.Connack(False, reasons.SERVER_MOVED, {pr.SERVER_REFERENCE: middle_name})
                )

            async with ScriptedBroker(hand_over) as middle, ScriptedBroker(refer) as first:
                middle_name = f"127.0.0.1:{middle.port}"
                async with Client("127.0.0.1", first.port, reconnect=QUICK) as client:
                    await client.publish("t", b"", qos=1)
                    assert client.server == Server("mqtt", "127.0.0.1", target.port)

    run(test)


def test_tls_and_plain_servers_in_one_list(closed_port: int) -> None:
    authority = trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(served)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def test() -> None:
        async with ScriptedBroker(serve, tls=served) as secure, ScriptedBroker(serve) as plain:
            servers = [f"mqtt://127.0.0.1:{closed_port}", f"mqtts://localhost:{secure.port}"]
            async with Client(servers=servers, tls=trusting) as client:
                assert client.server == Server("mqtts", "localhost", secure.port)
                await client.publish("t", b"", qos=1)
            # The system's certificates do not know this authority: the next server is taken.
            failures: list[ClientError] = []
            servers = [f"mqtts://localhost:{secure.port}", f"mqtt://127.0.0.1:{plain.port}"]
            async with Client(
                servers=servers,
                # A handshake may take its time here; the next server is not to be tried beside it.
                reconnect=Reconnect(stagger_s=TIMEOUT_S),
                on_connect_failed=lambda error, server: failures.append(error),
            ) as client:
                assert client.server == Server("mqtt", "127.0.0.1", plain.port)
                await client.publish("t", b"", qos=1)
            assert "certificate" in str(failures[0])

    run(test)


def test_an_old_socket_that_closes_late_does_not_touch_the_new_connection() -> None:
    """It still has bytes that nobody takes, when the server says goodbye."""
    is_sending, may_go = asyncio.Event(), asyncio.Event()

    async def leave(peer: Peer) -> None:
        await peer.accept()
        await is_sending.wait()
        await peer.send(pk.Disconnect(reasons.SERVER_SHUTTING_DOWN))
        await may_go.wait()
        cut(peer)

    async def test() -> None:
        async with ScriptedBroker(leave, serve) as broker:
            client = Client("127.0.0.1", broker.port, reconnect=QUICK)
            await client.connect()
            old = client._transport
            assert old is not None
            future = await client.submit("t", b"x" * 20_000_000, qos=1)
            is_sending.set()
            await future
            assert client.connections == 2
            assert not old.closed.is_set()
            may_go.set()
            await old.closed.wait()
            await client.publish("t", b"", qos=1)
            assert client.connections == 2
            await client.disconnect()

    run(test)


def test_a_websocket_that_opens_too_late_is_closed() -> None:
    may_open = asyncio.Event()
    ended = asyncio.Event()

    async def upgrade_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        await may_open.wait()
        (key,) = re.findall(rb"Sec-WebSocket-Key: (\S+)", request)
        accepted = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Protocol: mqtt\r\nSec-WebSocket-Accept: "
            + base64.b64encode(accepted)
            + b"\r\n\r\n"
        )
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
        ended.set()
        writer.close()

    async def test() -> None:
        late = await asyncio.start_server(upgrade_late, "127.0.0.1", 0)
        async with late, ScriptedBroker(serve) as broker:
            port = late.sockets[0].getsockname()[1]
            client = Client(
                servers=[f"ws://127.0.0.1:{port}/mqtt", f"127.0.0.1:{broker.port}"],
                reconnect=Reconnect(stagger_s=0.05),
            )
            await client.connect()
            assert client.server == client.servers[1]
            may_open.set()
            await ended.wait()
            await client.publish("t", b"", qos=1)
            await client.disconnect()

    run(test)


def test_a_failure_for_good_in_the_middle_of_a_round_leaves_nothing() -> None:
    """The CONNECT for the second server cannot be made, while the third is about to be tried."""
    second_is_open = asyncio.Event()

    async def busy_later(peer: Peer) -> None:
        await peer.receive()
        await second_is_open.wait()
        await peer.send(pk.Connack(False, reasons.SERVER_BUSY))

    async def note(peer: Peer) -> None:
        second_is_open.set()
        await gone(peer)

    async def gone(peer: Peer) -> None:
        try:
            assert await peer.receive() is None
        except ConnectionResetError:
            pass

    class Once:
        method = "once"

        def __init__(self) -> None:
            if second_is_open.is_set():
                raise AuthenticationFailed("only once")

        def start(self) -> bytes:
            return b""

        def step(self, data: bytes | None) -> bytes:
            return b""

        def finish(self, data: bytes | None) -> None:
            pass

    async def test() -> None:
        async with (
            ScriptedBroker(busy_later) as first,
            ScriptedBroker(note) as second,
            ScriptedBroker(gone) as third,
        ):
            client = Client(
                servers=[f"127.0.0.1:{one.port}" for one in (first, second, third)],
                reconnect=Reconnect(stagger_s=0.3, connack_timeout_s=20),
                options=Options(authentication=Once),
            )
            with pytest.raises(AuthenticationFailed, match="only once"):
                await client.connect()
            assert client._dialing._attempts == {}

    run(test)


# Callbacks


def test_callbacks_are_told_and_what_they_raise_hurts_nobody() -> None:
    async def first(peer: Peer) -> None:
        await peer.accept()
        await expect(peer, pk.Publish)
        cut(peer)

    async def busy(peer: Peer) -> None:
        await peer.receive()
        await peer.send(pk.Connack(False, reasons.SERVER_BUSY))

    async def resumed(peer: Peer) -> None:
        await peer.receive()
        await peer.send(pk.Connack(True, 0))
        await acknowledge(peer)

    async def test() -> None:
        told: list[object] = []
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: reported.append(context.get("exception"))
        )

        def on_connect(session_present: bool, server: Server) -> None:
            told.append((session_present, server.port == broker.port))
            raise KeyError("mine")

        options = Options(client_id="c", session_expiry_s=60)
        async with (
            ScriptedBroker(first, busy, resumed) as broker,
            Client(
                "127.0.0.1",
                broker.port,
                reconnect=QUICK,
                options=options,
                on_connect=on_connect,
                on_connect_failed=lambda error, server: told.append(error.reason),
                on_connection_lost=lambda error: told.append(type(error)),
            ) as client,
        ):
            await client.publish("t", b"", qos=1)
        assert told == [(False, True), ConnectionLost, reasons.SERVER_BUSY, (True, True)]
        assert [type(one) for one in reported] == [KeyError, KeyError]

    run(test)


def test_a_slow_reader_still_stops_the_server_after_a_reconnect() -> None:
    count = 3000
    sent = 0

    async def flood(peer: Peer) -> None:
        nonlocal sent
        await peer.accept()
        try:
            for number in range(count):
                await peer.send(
                    encode_publish(b"t", b"%1000d" % number, 0, False, False, 0, b"", 5)
                )
                sent += 1
            await peer.receive()
        except ConnectionResetError:
            pass

    async def test() -> None:
        async with (
            ScriptedBroker(cut_at_once, flood) as broker,
            Client("127.0.0.1", broker.port, reconnect=QUICK, messages_max=5) as client,
        ):
            longest = 0
            for number in range(count):
                message: Message | None = await client.receive()
                assert message is not None
                assert int(message.payload) == number
                longest = max(longest, len(client._received))
            assert longest <= 5 + 262_144 // 1000
            assert sent == count

    run(test)


def test_a_client_that_cannot_be_made() -> None:
    wrong: list[dict[str, Any]] = [{}, {"host": "a", "servers": ["b"]}, {"servers": ["http://a"]}]
    for arguments in wrong:
        with pytest.raises(ValueError):
            Client(**arguments)
