"""The client library against Holdfast and against Mosquitto: the same calls, the same results."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.client.client import Client
from holdfast.client.errors import ClientError, ConnectionRefused
from holdfast.client.options import Options
from holdfast.client.scram import ScramAuthentication
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import Properties, SubscriptionRequest, Will
from tests.e2e.brokers import SOURCE, Broker, Holdfast

TIMEOUT_S = 40
LEVELS = pytest.mark.parametrize("level", [3, 4, 5])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def new_client(broker: Broker, name: str, level: int = 5, **options: object) -> Client:
    chosen = replace(Options(level=level, client_id=name), **options)  # type: ignore[arg-type]
    return Client("127.0.0.1", broker.port, options=chosen)


async def payloads(client: Client, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = await client.receive()
        assert message is not None
        found.append(message.payload)
    return found


@LEVELS
def test_every_qos_in_order(broker: Broker, unique: str, level: int) -> None:
    name = f"q{level}"

    async def test() -> None:
        async with (
            new_client(broker, f"{name}-sub", level) as subscriber,
            new_client(broker, f"{name}-pub", level) as publisher,
        ):
            assert await subscriber.subscribe((f"{unique}/#", 2)) == [2]
            for qos in (0, 1, 2):
                sent = [b"%d:%d" % (qos, number) for number in range(50)]
                for payload in sent:
                    await publisher.submit(f"{unique}/t", payload, qos=qos)
                await publisher.flush()
                assert await payloads(subscriber, len(sent)) == sent
            await subscriber.unsubscribe(f"{unique}/#")
            await publisher.publish(f"{unique}/t", b"unheard", qos=1)
            await subscriber.subscribe((f"{unique}/#", 1))
            await publisher.publish(f"{unique}/t", b"heard", qos=1)
            assert await payloads(subscriber, 1) == [b"heard"]

    run(test)


@pytest.mark.parametrize("level", [4, 5])
def test_session_resumes_with_what_was_missed(broker: Broker, unique: str, level: int) -> None:
    name = f"resume{level}"

    async def test() -> None:
        subscriber = new_client(
            broker, name, level, clean_start=False, session_expiry_s=60 if level == 5 else 0
        )
        assert await subscriber.connect() is False
        await subscriber.subscribe((f"{unique}/#", 2))
        await subscriber.disconnect()
        async with new_client(broker, f"{name}-pub", level) as publisher:
            for number in range(20):
                await publisher.publish(f"{unique}/t", b"%d" % number, qos=1 + number % 2)
        assert await subscriber.connect() is True
        assert sorted(map(int, await payloads(subscriber, 20))) == list(range(20))
        await subscriber.disconnect()

    run(test)


def test_unacknowledged_messages_come_again(broker: Broker, unique: str) -> None:
    async def test() -> None:
        subscriber = new_client(
            broker, "manual", session_expiry_s=60, clean_start=False, manual_acknowledge=True
        )
        await subscriber.connect()
        await subscriber.subscribe((f"{unique}/#", 1))
        async with new_client(broker, "manual-pub") as publisher:
            for payload in (b"1", b"2", b"3"):
                await publisher.publish(f"{unique}/t", payload, qos=1)
        first = await subscriber.receive()
        assert first is not None
        subscriber.acknowledge(first)
        assert await payloads(subscriber, 2) == [b"2", b"3"]
        await subscriber.disconnect()
        assert await subscriber.connect() is True
        again = [await subscriber.receive() for _ in range(2)]
        assert [(one.payload, one.dup) for one in again if one] == [(b"2", True), (b"3", True)]
        await subscriber.disconnect()

    run(test)


@LEVELS
def test_retained_and_will(broker: Broker, unique: str, level: int) -> None:
    async def test() -> None:
        async with new_client(broker, f"r{level}", level) as watcher:
            await watcher.publish(f"{unique}/{level}/kept", b"kept", qos=1, retain=True)
            await watcher.subscribe((f"{unique}/{level}/#", 1))
            kept = await watcher.receive()
            assert kept is not None
            assert (kept.payload, kept.retain) == (b"kept", True)
            dying = new_client(
                broker, f"d{level}", level, will=Will(f"{unique}/{level}/w", b"gone", 1, False)
            )
            await dying.connect()
            assert dying._transport is not None
            dying._transport.abort()
            assert await payloads(watcher, 1) == [b"gone"]

    run(test)


def test_properties_travel(broker: Broker, unique: str) -> None:
    sent: Properties = {
        pr.CONTENT_TYPE: "text/plain",
        pr.RESPONSE_TOPIC: "answers",
        pr.CORRELATION_DATA: b"\0\xff",
        pr.USER_PROPERTY: [("a", "1"), ("a", "2")],
    }

    async def test() -> None:
        async with new_client(broker, "props", topic_alias_max=5) as client:
            await client.subscribe(
                SubscriptionRequest(f"{unique}/#", 1, retain_as_published=True), subscription_id=77
            )
            for _ in range(3):
                await client.publish(f"{unique}/t", b"x", qos=1, properties=sent, topic_alias=1)
                message = await client.receive()
                assert message is not None
                assert message.topic == f"{unique}/t"
                received = dict(message.properties)
                received.pop(pr.TOPIC_ALIAS, None)
                assert received == {**sent, pr.SUBSCRIPTION_IDENTIFIER: [77]}

    run(test)


def test_takeover_is_told(holdfast_broker: Holdfast) -> None:
    async def test() -> None:
        first = new_client(holdfast_broker, "twin")
        await first.connect()
        async with new_client(holdfast_broker, "twin"):
            error = await first.wait_closed()
            assert isinstance(error, ClientError)
            assert error.reason == reasons.SESSION_TAKEN_OVER

    run(test)


def test_scram_sha_256(tmp_path: Path) -> None:
    """Both the right and a wrong password, and authentication again on the live connection."""
    credentials = tmp_path / "scram"
    subprocess.run(
        [
            *[sys.executable, "-m", "holdfast.cli.main", "passwd", "--scram", "-b", "-c"],
            *[str(credentials), "ann", "secret"],
        ],
        env={"PYTHONPATH": str(SOURCE)},
        check=True,
        timeout=TIMEOUT_S,
    )
    broker = Holdfast(tmp_path, {"security": {"scram_file": str(credentials)}})
    broker.start()

    async def test() -> None:
        def options(password: str) -> Options:
            return Options(authentication=lambda: ScramAuthentication("ann", password))

        async with Client("127.0.0.1", broker.port, options=options("secret")) as client:
            await client.publish("t", b"x", qos=1)
            await client.reauthenticate()
            await client.publish("t", b"x", qos=1)
        with pytest.raises(ConnectionRefused) as caught:
            await Client("127.0.0.1", broker.port, options=options("wrong")).connect()
        assert caught.value.reason == reasons.NOT_AUTHORIZED
        with pytest.raises(ConnectionRefused):
            await Client("127.0.0.1", broker.port).connect()

    try:
        run(test)
    finally:
        broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]
