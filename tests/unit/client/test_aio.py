"""The asyncio client over real sockets, against a broker that does what the test says."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from holdfast.client.client import Client
from holdfast.client.errors import (
    ConnectionLost,
    ConnectionRefused,
    NotConnected,
    PublishRefused,
    SubscribeRefused,
    TimedOut,
)
from holdfast.client.options import Options
from holdfast.client.protocol.effects import Message
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import Packet
from holdfast.protocol.mqtt.publish import encode_publish
from tests.support.client_broker import Peer, ScriptedBroker
from tests.support.ports import free_port

TIMEOUT_S = 20


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


async def echo(peer: Peer) -> None:
    """Accepts everything and acknowledges it, until the client leaves."""
    await peer.accept()
    while (packet := await peer.receive()) is not None:
        if isinstance(packet, pk.Publish) and packet.qos == 1:
            await peer.send(encode_ack(pk.PUBACK, packet.packet_id, 0, 5))
        elif isinstance(packet, pk.Publish) and packet.qos == 2:
            await peer.send(encode_ack(pk.PUBREC, packet.packet_id, 0, 5))
        elif isinstance(packet, pk.Ack) and packet.kind == pk.PUBREL:
            await peer.send(encode_ack(pk.PUBCOMP, packet.packet_id, 0, 5))
        elif isinstance(packet, pk.Subscribe):
            codes = [one.qos for one in packet.subscriptions]
            await peer.send(pk.Suback(packet.packet_id, codes))
        elif isinstance(packet, pk.Unsubscribe):
            await peer.send(pk.Unsuback(packet.packet_id, [0] * len(packet.filters)))
        elif isinstance(packet, pk.Disconnect):
            return


def test_publish_subscribe_unsubscribe() -> None:
    async def test() -> None:
        async with ScriptedBroker(echo) as broker, Client("127.0.0.1", broker.port) as client:
            assert client.is_connected
            for qos in (0, 1, 2):
                result = await client.publish("t", "text", qos=qos)
                assert result.reason == reasons.SUCCESS
            assert await client.subscribe("a", ("b", 2), pk.SubscriptionRequest("c", 1)) == [
                0,
                2,
                1,
            ]
            assert await client.unsubscribe("a", "b") == [0, 0]
            pending = [await client.submit("t", b"x", qos=1 + i % 2) for i in range(3000)]
            await client.flush()
            assert all(one.done() for one in pending)

    run(test)


def test_nobody_listens(unused_tcp_port: int) -> None:
    async def test() -> None:
        with pytest.raises(ConnectionLost) as caught:
            await Client("127.0.0.1", unused_tcp_port).connect()
        assert f"127.0.0.1:{unused_tcp_port}" in str(caught.value)

    run(test)


@pytest.fixture
def unused_tcp_port() -> int:
    return free_port()


def test_refused_silent_and_leaving_servers() -> None:
    async def refuse(peer: Peer) -> None:
        await peer.receive()
        await peer.send(pk.Connack(False, reasons.BANNED, {pr.REASON_STRING: "go away"}))
        assert await peer.receive() is None

    async def silent(peer: Peer) -> None:
        await peer.receive()
        assert await peer.receive() is None

    async def leave(peer: Peer) -> None:
        await peer.receive()

    async def test() -> None:
        async with ScriptedBroker(refuse, silent, leave) as broker:
            options = Options(connect_timeout_s=0.1)
            with pytest.raises(ConnectionRefused, match="Banned: go away") as caught:
                await Client("127.0.0.1", broker.port).connect()
            assert caught.value.reason == reasons.BANNED
            with pytest.raises(TimedOut):
                await Client("127.0.0.1", broker.port, options=options).connect()
            with pytest.raises(ConnectionLost):
                await Client("127.0.0.1", broker.port).connect()

    run(test)


def test_refused_message_and_subscription() -> None:
    async def refuse(peer: Peer) -> None:
        await peer.accept()
        publish = await peer.receive()
        assert isinstance(publish, pk.Publish)
        await peer.send(
            pk.Ack(pk.PUBACK, publish.packet_id, reasons.QUOTA_EXCEEDED, {pr.REASON_STRING: "full"})
        )
        subscribe = await peer.receive()
        assert isinstance(subscribe, pk.Subscribe)
        await peer.send(pk.Suback(subscribe.packet_id, [1, reasons.NOT_AUTHORIZED]))
        await peer.receive()

    async def test() -> None:
        async with ScriptedBroker(refuse) as broker, Client("127.0.0.1", broker.port) as client:
            with pytest.raises(PublishRefused, match="full") as refused:
                await client.publish("t", b"", qos=1)
            assert refused.value.reason == reasons.QUOTA_EXCEEDED
            with pytest.raises(SubscribeRefused, match="'b'") as denied:
                await client.subscribe(("a", 1), ("b", 1))
            assert denied.value.reasons == [1, reasons.NOT_AUTHORIZED]

    run(test)


def test_request_without_answer_times_out() -> None:
    async def mute(peer: Peer) -> None:
        await peer.accept()
        while await peer.receive() is not None:
            pass

    async def test() -> None:
        async with (
            ScriptedBroker(mute) as broker,
            Client("127.0.0.1", broker.port, request_timeout_s=0.05) as client,
        ):
            with pytest.raises(TimedOut, match="SUBACK"):
                await client.subscribe("a")

    run(test)


def test_lost_connection_fails_waiters_and_resumes() -> None:
    """What was not acknowledged is sent again by the next connect, with DUP."""

    async def cut(peer: Peer) -> None:
        await peer.accept()
        assert isinstance(await peer.receive(), pk.Publish)
        peer.writer.transport.abort()

    async def resume(peer: Peer) -> None:
        connect = await peer.receive()
        assert isinstance(connect, pk.Connect)
        assert not connect.clean_start
        await peer.send(pk.Connack(True, 0))
        publish = await peer.receive()
        assert isinstance(publish, pk.Publish)
        assert (publish.dup, publish.payload) == (True, b"precious")
        await peer.send(encode_ack(pk.PUBACK, publish.packet_id, 0, 5))
        assert isinstance(await peer.receive(), pk.Disconnect)

    async def test() -> None:
        options = Options(client_id="c", session_expiry_s=60)
        async with ScriptedBroker(cut, resume) as broker:
            client = Client("127.0.0.1", broker.port, options=options)
            await client.connect()
            with pytest.raises(ConnectionLost):
                await client.publish("t", b"precious", qos=1)
            with pytest.raises(ConnectionLost):
                await client.publish("t", b"")
            with pytest.raises(ConnectionLost):
                await client.receive()
            assert await client.connect() is True
            await client.flush()
            await client.disconnect()
            with pytest.raises(NotConnected):
                await client.publish("t", b"")
            assert await client.receive() is None

    run(test)


def test_server_disconnect_reaches_the_reader_after_the_messages() -> None:
    async def shut_down(peer: Peer) -> None:
        await peer.accept()
        await peer.send(
            encode_publish(b"t", b"1", 0, False, False, 0, b"", 5),
            encode_publish(b"t", b"2", 0, False, False, 0, b"", 5),
            pk.Disconnect(reasons.SERVER_SHUTTING_DOWN),
        )

    async def test() -> None:
        async with ScriptedBroker(shut_down) as broker:
            client = Client("127.0.0.1", broker.port)
            await client.connect()
            messages = client.messages()
            assert [(await anext(messages)).payload for _ in range(2)] == [b"1", b"2"]
            with pytest.raises(ConnectionLost, match="shutting down") as caught:
                await anext(messages)
            assert caught.value.reason == reasons.SERVER_SHUTTING_DOWN
            error = await client.wait_closed()
            assert error is caught.value

    run(test)


def test_the_last_packets_reach_a_server_that_sends_much() -> None:
    """The client reads until the server closes. A reset would let the server drop what it has not
    read: acknowledgements, and messages of QoS 0."""

    async def test() -> None:
        leaves = asyncio.Event()

        async def busy(peer: Peer) -> None:
            await peer.accept()
            message = encode_publish(b"t", bytes(10_000), 0, False, False, 0, b"", 5)
            await peer.send(message)
            await leaves.wait()
            for _ in range(100):
                await peer.send(message)
                await asyncio.sleep(0)
            last = await peer.receive()
            assert isinstance(last, pk.Publish)
            assert last.payload == b"last"
            assert isinstance(await peer.receive(), pk.Disconnect)
            assert await peer.receive() is None

        async with ScriptedBroker(busy) as broker:
            client = Client("127.0.0.1", broker.port)
            await client.connect()
            await client.publish("t", b"last", qos=0)
            leaving = asyncio.create_task(client.disconnect())
            await asyncio.sleep(0)
            leaves.set()
            await leaving

    run(test)


def test_a_reset_right_after_the_servers_disconnect() -> None:
    """The end of the connection is reported, and by what the server said."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", free_port())) as listener:
            listener.setblocking(False)
            accepted: list[socket.socket] = []

            def reset(sent: bool, packet: object) -> None:
                if not sent and isinstance(packet, pk.Disconnect):
                    accepted[0].setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    accepted[0].close()

            client = Client("127.0.0.1", listener.getsockname()[1], on_trace=reset)
            connecting = asyncio.create_task(client.connect())
            accepted.append((await loop.sock_accept(listener))[0])
            await loop.sock_recv(accepted[0], 1000)
            await loop.sock_sendall(accepted[0], b"\x20\x03\x00\x00\x00")
            await connecting
            await loop.sock_sendall(accepted[0], b"\xe0\x02\x8b\x00")
            error = await client.wait_closed()
        assert isinstance(error, ConnectionLost)
        assert error.reason == reasons.SERVER_SHUTTING_DOWN

    run(test)


def test_disconnects_from_a_server_that_does_not_close() -> None:
    async def test() -> None:
        over = asyncio.Event()

        async def stubborn(peer: Peer) -> None:
            await peer.accept()
            await over.wait()

        async with ScriptedBroker(stubborn) as broker:
            client = Client("127.0.0.1", broker.port)
            await client.connect()
            await client.disconnect()
            assert not client.is_connected
            over.set()

    run(test)


def test_slow_reader_stops_the_server() -> None:
    """The queue stays near its bound although the server has far more to send, and nothing is
    lost or out of order."""
    count = 20_000
    sent = 0

    async def flood(peer: Peer) -> None:
        nonlocal sent
        await peer.accept()
        for number in range(count):
            await peer.send(encode_publish(b"t", b"%200d" % number, 0, False, False, 0, b"", 5))
            sent += 1
        await peer.receive()

    async def test() -> None:
        async with (
            ScriptedBroker(flood) as broker,
            Client("127.0.0.1", broker.port, messages_max=10) as client,
        ):
            longest = 0
            for number in range(count):
                message = await client.receive()
                assert message is not None
                assert int(message.payload) == number
                longest = max(longest, len(client._received))
                if number % 500 == 0:
                    await asyncio.sleep(0)
            # One read of the socket may come on top: 256 KiB of messages of 208 bytes.
            assert longest <= 10 + 262_144 // 208
            assert sent == count

    run(test)


def test_callbacks_see_messages_and_packets() -> None:
    async def one_message(peer: Peer) -> None:
        await peer.accept()
        await peer.send(encode_publish(b"t", b"x", 1, False, False, 9, b"", 5))
        assert isinstance(await peer.receive(), pk.Ack)
        assert isinstance(await peer.receive(), pk.Disconnect)

    async def test() -> None:
        seen: list[str] = []
        arrived = asyncio.Event()

        def on_message(message: Message) -> None:
            seen.append(message.topic)
            arrived.set()

        def on_trace(sent: bool, packet: Packet) -> None:
            seen.append(f"{'>' if sent else '<'} {type(packet).__name__}")

        async with ScriptedBroker(one_message) as broker:
            client = Client("127.0.0.1", broker.port, on_message=on_message, on_trace=on_trace)
            async with client:
                await arrived.wait()
        assert seen == ["> Connect", "< Connack", "< Publish", "> Ack", "t", "> Disconnect"]

    run(test)


def test_cancelled_wait_does_not_take_the_message_back() -> None:
    released = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await peer.accept()
        publish = await peer.receive()
        assert isinstance(publish, pk.Publish)
        await released.wait()
        await peer.send(encode_ack(pk.PUBACK, publish.packet_id, 0, 5))
        await peer.receive()

    async def test() -> None:
        async with ScriptedBroker(slow) as broker, Client("127.0.0.1", broker.port) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.publish("t", b"", qos=1), 0.05)
            assert len(client.core.outgoing) == 1
            released.set()
            await client.flush()

    run(test)


def test_second_connect_is_a_mistake() -> None:
    async def test() -> None:
        async with ScriptedBroker(echo) as broker, Client("127.0.0.1", broker.port) as client:
            with pytest.raises(ValueError, match="already connected"):
                await client.connect()

    run(test)


def test_full_queue_waits_for_acknowledgements() -> None:
    options = Options(inflight_max=1, queue_messages_max=2)

    async def test() -> None:
        async with (
            ScriptedBroker(echo) as broker,
            Client("127.0.0.1", broker.port, options=options) as client,
        ):
            for _ in range(200):
                await client.submit("t", b"", qos=1)
                assert len(client.core.outgoing) <= 3
            await client.flush()

    run(test)
