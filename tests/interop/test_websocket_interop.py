"""MQTT over WebSocket between what others made and what we made: paho and our client, each with our
broker and with Mosquitto's."""

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trustme

from holdfast.client.client import Client
from holdfast.client.errors import ClientError
from holdfast.client.options import Options
from tests.e2e.brokers import MOSQUITTO, START_S, Broker, Mosquitto
from tests.e2e.websocket_wire import websocket_broker
from tests.interop.paho_client import Paho
from tests.support.ports import free_port

LEVELS = pytest.mark.parametrize("level", [3, 4, 5])


class Place:
    """A broker and its two ports."""

    def __init__(self, broker: Broker, websocket_port: int) -> None:
        self.broker = broker
        self.port = broker.port
        self.websocket_port = websocket_port
        self.url = f"ws://127.0.0.1:{websocket_port}/mqtt"


LARGE_PACKETS = {"limits": {"packet_bytes": 8 << 20}}


@pytest.fixture(scope="module", params=["holdfast", "mosquitto"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "holdfast":
        with websocket_broker(directory, LARGE_PACKETS) as broker:
            yield Place(broker, broker.websocket_port)
        return
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    mosquitto = Mosquitto(directory, f"listener {port} 127.0.0.1\nprotocol websockets")
    mosquitto.start()
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert time.monotonic() < deadline, mosquitto.log_text()
    yield Place(mosquitto, port)
    mosquitto.kill()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 40)

    asyncio.run(bounded())


def new_client(place: Place, name: str, level: int = 5) -> Client:
    return Client(servers=[place.url], options=Options(level=level, client_id=name))


async def payloads(client: Client, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = await client.receive()
        assert message is not None
        found.append(message.payload)
    return found


@LEVELS
def test_paho(place: Place, unique: str, level: int) -> None:
    with (
        Paho(place.websocket_port, f"{unique}-s", level, transport="websockets") as subscriber,
        Paho(place.websocket_port, f"{unique}-p", level, transport="websockets") as publisher,
    ):
        subscriber.subscribe(f"{unique}/#", 2)
        for qos in (0, 1, 2):
            sent = [b"%d:%d" % (qos, number) for number in range(30)]
            sent.append(b"large" * 2_000)
            for payload in sent:
                publisher.publish(f"{unique}/t", payload, qos)
            assert subscriber.payloads(len(sent)) == sent


@LEVELS
def test_our_client(place: Place, unique: str, level: int) -> None:
    """[MQTT-6.0.0-3]"""

    async def test() -> None:
        async with (
            new_client(place, f"{unique}-s", level) as subscriber,
            new_client(place, f"{unique}-p", level) as publisher,
        ):
            assert await subscriber.subscribe((f"{unique}/#", 2)) == [2]
            for qos in (0, 1, 2):
                sent = [b"%d:%d" % (qos, number) for number in range(200)]
                for payload in sent:
                    await publisher.submit(f"{unique}/t", payload, qos=qos)
                await publisher.flush()
                assert await payloads(subscriber, len(sent)) == sent

    run(test)


def test_five_megabytes(place: Place, unique: str) -> None:
    """Mosquitto 2.0.11 sends some 40 kB a second over WebSocket, to whatever client: what it takes
    in is read over TCP."""

    async def test() -> None:
        reader = Client("127.0.0.1", place.port, client_id=f"{unique}-s")
        async with reader, new_client(place, f"{unique}-p") as publisher:
            await reader.subscribe((unique, 1))
            for number in range(3):
                large = bytes([number]) * 5_000_000
                await publisher.publish(unique, large, qos=1)
                assert await payloads(reader, 1) == [large]

    run(test)


def test_five_megabytes_to_readers_over_websocket(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with websocket_broker(tmp_path_factory.mktemp("large"), LARGE_PACKETS) as broker:
        place = Place(broker, broker.websocket_port)
        large = bytes(range(250)) * 20_000

        async def test() -> None:
            async with new_client(place, "reader") as reader:
                await reader.subscribe(("large", 1))
                with Paho(place.websocket_port, "paho", transport="websockets") as paho:
                    paho.subscribe("large", 1)
                    await reader.publish("large", large, qos=1)
                    assert await payloads(reader, 1) == [large]
                    assert await asyncio.to_thread(paho.payloads, 1) == [large]

        run(test)


def test_our_client_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("localhost")
    server.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    server.cert_chain_pems[0].write_to_path(str(tmp_path / "chain.pem"))
    listener = {"certificate": str(tmp_path / "chain.pem"), "key": str(tmp_path / "key.pem")}
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with websocket_broker(tmp_path, listener=listener) as broker:

        async def test() -> None:
            url = f"wss://localhost:{broker.websocket_port}/mqtt"
            large = bytes(range(200)) * 10_000
            async with Client(servers=[url], tls=context) as client:
                await client.subscribe(("secret", 2))
                for qos in (0, 1, 2):
                    await client.publish("secret", large, qos=qos)
                    assert await payloads(client, 1) == [large]
            with pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"):
                await Client(servers=[url]).connect()

        run(test)


def test_wrong_path_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    with websocket_broker(tmp_path_factory.mktemp("path")) as broker:

        async def test() -> None:
            client = Client(servers=[f"ws://127.0.0.1:{broker.websocket_port}/elsewhere"])
            with pytest.raises(ClientError, match=r"HTTP 404 Not Found.*is at /mqtt"):
                await client.connect()

        run(test)


def test_tcp_listener_is_no_websocket(tmp_path_factory: pytest.TempPathFactory) -> None:
    with websocket_broker(tmp_path_factory.mktemp("tcp")) as broker:

        async def test() -> None:
            client = Client(servers=[f"ws://127.0.0.1:{broker.port}"])
            with pytest.raises(ClientError, match="before the WebSocket was open"):
                await client.connect()

        run(test)
