"""The reconnecting client through what cuts, kills and stops: nothing accepted is lost, nothing
acknowledged is sent again, order holds, QoS 2 arrives once, subscriptions stay."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

import pytest

from holdfast.client import Client, Options, Reconnect
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt.packets import Packet
from tests.e2e.brokers import Broker, Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.support.cutting_proxy import CuttingProxy

TIMEOUT_S = 90
QUICK = Reconnect(
    first_delay_s=0.005,
    delay_max_s=0.1,
    stable_after_s=0,
    stagger_s=0.1,
    connack_timeout_s=0.2,
)
KEPT = Options(clean_start=False, session_expiry_s=600, inflight_max=16, response_timeout_s=10)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


class Sent:
    """Watches the packets that leave: what is acknowledged must not leave again."""

    def __init__(self) -> None:
        self.acknowledged: set[bytes] = set()
        self.repeated: list[bytes] = []

    def trace(self, sent: bool, packet: Packet) -> None:
        if sent and isinstance(packet, pk.Publish) and packet.payload in self.acknowledged:
            self.repeated.append(packet.payload)

    async def publish(self, client: Client, topic: str, count: int, qos: int) -> None:
        """Publishes the numbers below `count`, and waits until all are acknowledged."""
        futures = []
        for number in range(count):
            payload = b"%d" % number
            future = await client.submit(topic, payload, qos=qos)
            future.add_done_callback(lambda done, payload=payload: self._settle(done, payload))  # type: ignore[misc]
            futures.append(future)
        for future in futures:
            assert (await future).reason < 0x80

    def _settle(self, done: "asyncio.Future[object]", payload: bytes) -> None:
        if done.exception() is None:
            assert payload not in self.acknowledged
            self.acknowledged.add(payload)


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.005)


async def hear(client: Client, payload: bytes) -> None:
    while (message := await client.receive()) is not None:
        if message.payload == payload:
            return
    raise AssertionError("the client has ended")


async def collect(client: Client, count: int) -> list[int]:
    """Receives until all numbers below `count` have come; in the order they came, repeated ones
    included."""
    found: list[int] = []
    while len(set(found)) < count:
        message = await client.receive()
        assert message is not None
        found.append(int(message.payload))
    return found


def assert_delivered(found: list[int], count: int, qos: int) -> None:
    assert list(dict.fromkeys(found)) == list(range(count))
    if qos == 2:
        assert found == list(range(count))


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_connections_cut_at_any_byte(broker: Holdfast, qos: int, seed: int) -> None:
    """Both the publisher's and the subscriber's, in both directions."""
    count = 600
    random = Random(seed)

    def cut_after() -> tuple[int | None, int | None]:
        # Soon enough to hit CONNECT and CONNACK, often late enough for progress.
        bound = random.choice((100, 1000, 5000))
        return random.randrange(1, bound), random.randrange(1, bound)

    async def test() -> None:
        sent = Sent()
        async with (
            CuttingProxy(broker.port, cut_after) as publisher_side,
            CuttingProxy(broker.port, cut_after) as subscriber_side,
            Client(
                "127.0.0.1",
                subscriber_side.port,
                reconnect=QUICK,
                options=replace(KEPT, client_id="subscriber"),
            ) as subscriber,
            Client(
                "127.0.0.1",
                publisher_side.port,
                reconnect=QUICK,
                options=replace(KEPT, client_id="publisher"),
                on_trace=sent.trace,
            ) as publisher,
        ):
            await subscriber.subscribe(("t", qos))
            collecting = asyncio.create_task(collect(subscriber, count))
            await sent.publish(publisher, "t", count, qos)
            found = await collecting
            assert publisher_side.cuts >= 1
            assert subscriber_side.cuts >= 1
            assert publisher_side.cuts + subscriber_side.cuts >= 6
            await publisher.disconnect()
            await subscriber.disconnect()
        assert sent.repeated == []
        assert_delivered(found, count, qos)

    run(test)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_broker_killed_and_started_again(broker: Holdfast, qos: int) -> None:
    count = 1500

    async def test() -> None:
        sent = Sent()
        async with (
            Client(
                "127.0.0.1",
                broker.port,
                reconnect=QUICK,
                options=replace(KEPT, client_id="subscriber"),
            ) as subscriber,
            Client(
                "127.0.0.1",
                broker.port,
                reconnect=QUICK,
                options=replace(KEPT, client_id="publisher", queue_messages_max=50),
                on_trace=sent.trace,
            ) as publisher,
        ):
            await subscriber.subscribe(("t", qos))
            collecting = asyncio.create_task(collect(subscriber, count))
            publishing = asyncio.create_task(sent.publish(publisher, "t", count, qos))
            for kill in range(3):
                enough = (kill + 1) * count // 5
                await until(lambda enough=enough: len(sent.acknowledged) >= enough)  # type: ignore[misc]
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
            await publishing
            found = await collecting
            # One may not have come back before the next kill.
            assert all(2 <= one.connections <= 4 for one in (publisher, subscriber))
        assert sent.repeated == []
        assert_delivered(found, count, qos)

    run(test)


def test_a_stopped_broker_is_left_and_a_killed_one_is_replaced(
    start_holdfast: StartHoldfast,
) -> None:
    """SIGSTOP: its kernel goes on accepting sockets and bytes."""
    first, second = start_holdfast(), start_holdfast()

    async def test() -> None:
        servers = [f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"]
        options = Options(response_timeout_s=0.5, ping_interval_s=0.3)
        async with (
            Client(servers=servers, reconnect=QUICK, options=options) as publisher,
            Client(servers=servers, reconnect=QUICK, options=options) as listener,
        ):
            await listener.subscribe("t")
            await publisher.publish("t", b"1", qos=1)
            assert publisher.server == publisher.servers[0]
            assert first.process is not None
            os.kill(first.process.pid, signal.SIGSTOP)
            try:
                await publisher.publish("t", b"2", qos=1)
                assert publisher.server == publisher.servers[1]
                await until(lambda: listener.server == listener.servers[1])
                # A newcomer, too, is not held up by the first of its list.
                async with Client(servers=servers, reconnect=QUICK, options=options) as newcomer:
                    assert newcomer.server == newcomer.servers[1]
                    await newcomer.publish("t", b"3", qos=1)
            finally:
                os.kill(first.process.pid, signal.SIGCONT)
            await asyncio.to_thread(second.kill)
            await publisher.publish("t", b"4", qos=1)
            assert publisher.server == publisher.servers[0]
            # The subscription was said again to each, whenever the listener has come over.
            hearing = asyncio.create_task(hear(listener, b"4"))
            while not hearing.done():
                await publisher.publish("t", b"4", qos=1)
                await asyncio.wait([hearing], timeout=0.1)
            await hearing

    run(test)


def test_mosquitto_that_forgets_everything(mosquitto: Broker) -> None:
    """Its sessions end with it: subscriptions are said again, messages sent as new ones."""
    count = 300

    async def test() -> None:
        sent = Sent()
        async with (
            Client(
                "127.0.0.1",
                mosquitto.port,
                reconnect=QUICK,
                options=replace(KEPT, client_id="subscriber"),
            ) as subscriber,
            Client(
                "127.0.0.1",
                mosquitto.port,
                reconnect=QUICK,
                options=replace(KEPT, client_id="publisher", level=4),
                on_trace=sent.trace,
            ) as publisher,
        ):
            await subscriber.subscribe(("t/#", 1))
            await sent.publish(publisher, "t/1", count, 1)
            await collect(subscriber, count)
            await asyncio.to_thread(mosquitto.kill)
            queued = [await publisher.submit("t/2", b"queued", qos=1) for _ in range(9)]
            await asyncio.to_thread(mosquitto.start)
            await asyncio.gather(*queued)
            await until(lambda: subscriber.connections == 2)
            # Whether the subscriber was back in time for those is chance; for these it is not.
            await subscriber.publish("t/3", b"here", qos=1)
            await publisher.publish("t/3", b"end", qos=1)
            received: list[bytes] = []
            while not received or received[-1] != b"end":
                message = await subscriber.receive()
                assert message is not None
                received.append(message.payload)
            assert received[-2:] == [b"here", b"end"]
        assert sent.repeated == []

    run(test)


def test_nobody_there_costs_no_more_than_the_back_off_allows(broker: Holdfast) -> None:
    failures: list[float] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()
        client = Client(
            "127.0.0.1",
            broker.port,
            reconnect=Reconnect(first_delay_s=0.05, delay_max_s=0.2, multiplier=2),
            on_connect_failed=lambda error, server: failures.append(loop.time()),
        )
        async with client:
            await asyncio.to_thread(broker.kill)
            begin = loop.time()
            await asyncio.sleep(1)
            passed_s = loop.time() - begin
            # Each delay is at least half of 50, 100, 200, 200... ms.
            assert 1 <= len(failures) <= 3 + passed_s / 0.1
            await asyncio.to_thread(broker.start)
            await client.publish("t", b"", qos=1)

    run(test)
