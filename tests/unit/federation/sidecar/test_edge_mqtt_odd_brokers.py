"""The edge beside brokers that do not do as they are asked."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast.client import Client, Options, Reconnect
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge_mqtt.edge import MqttEdge
from holdfast_federation.sidecar.edge_mqtt.interest_sources import SourceSettings
from holdfast_federation.sidecar.edge_mqtt.loopback_probe import EdgeRefused
from holdfast_federation.sidecar.edge_mqtt.settings import EdgeSettings
from tests.support.edge_host import ScriptedHost, until
from tests.support.odd_broker import OddBroker

QUIET = SourceSettings(hears_beacons=False, hears_words=False, reads_log=False)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 110))


@asynccontextmanager
async def edge_at(
    broker: OddBroker, directory: Path, host: ScriptedHost, level: int = 5, **values: object
) -> AsyncIterator[MqttEdge]:
    settings = EdgeSettings(
        servers=(f"mqtt://127.0.0.1:{broker.port}",),
        directory=directory,
        level=level,
        sources=QUIET,
        wait_s=40.0,
        reconnect=Reconnect(delay_max_s=0.1),
        **values,  # type: ignore[arg-type]
    )
    edge = MqttEdge(settings)
    await edge.start(host)
    try:
        yield edge
    finally:
        await edge.stop()


def give(edge: MqttEdge, undone: dict[int, Message]) -> None:
    for number, message in list(undone.items()):
        delivery = DeliverLocally(MessageId(b"N" * 16, 1, number), message, number, 1)
        edge.deliver(delivery, partial(undone.__delitem__, number))


def counts(edge: MqttEdge) -> dict[str, int]:
    found = edge.status()["counts"]
    assert isinstance(found, dict)
    return found


def messages(count: int, qos: int = 1) -> dict[int, Message]:
    return {number: Message("t/x", b"%d" % number, qos) for number in range(1, count + 1)}


def test_311_that_echoes_is_refused_unless_nothing_meets(tmp_path: Path) -> None:
    async def test() -> None:
        async with OddBroker(echoes=True) as broker:
            host = ScriptedHost()
            async with edge_at(broker, tmp_path / "a", host, 4) as edge:
                refusal = await edge.failed()
                assert isinstance(refusal, EdgeRefused)
                assert "--protocol 5" in str(refusal)
                assert "'#' out and '#' in" in str(refusal)
                assert not host.ups
            filters = {"export_filters": ("up/#",), "import_filters": ("down/#", "t/#")}
            async with edge_at(broker, tmp_path / "b", host, 4, **filters) as edge:
                edge.set_wanted_filters(frozenset({"#"}))
                await until(lambda: host.is_up, "up")
                await until(lambda: edge.status()["export_filters"] == ["up/#"], "subscribed")
                undone = messages(3)
                give(edge, undone)
                await until(lambda: not undone, "delivered")
            assert not host.published

    run(test)


def test_mqtt_5_without_no_local_is_told_by_the_mark(tmp_path: Path) -> None:
    async def test() -> None:
        async with OddBroker(echoes=True) as broker:
            host = ScriptedHost()
            async with edge_at(broker, tmp_path, host) as edge:
                edge.set_wanted_filters(frozenset({"t/#"}))
                await until(lambda: edge.status()["is_settled"] is True, "settled")
                undone = messages(3)
                give(edge, undone)
                await until(lambda: not undone, "delivered")
                await until(lambda: counts(edge)["echo"] == 3, "all came back")
                assert not host.published
            broker.strips = True
            async with edge_at(broker, tmp_path, host) as edge:
                assert "nothing tells" in str(await edge.failed())

    run(test)


def test_a_broker_that_knows_no_bridges(tmp_path: Path) -> None:
    """Its replays of retained messages are told by the flag, and it must not echo."""

    async def test() -> None:
        async with OddBroker(refuses_bridges=True, echoes=True) as broker:
            host = ScriptedHost()
            filters = {"export_filters": ("up/#",), "import_filters": ("down/#",)}
            async with edge_at(broker, tmp_path, host, 4, **filters) as edge:
                edge.set_wanted_filters(frozenset({"up/#"}))
                await until(lambda: edge.status()["is_settled"] is True, "settled")
                assert broker.bridges == 2
                options = Options(level=4)
                async with Client("127.0.0.1", broker.port, options=options) as user:
                    await user.publish("up/1", b"replayed", qos=1, retain=True)
                    await user.publish("up/1", b"new", qos=1)
                await until(lambda: host.payloads() == [b"new"], "exported")

    run(test)


def test_refused_for_now_is_sent_again_and_nothing_overtakes(tmp_path: Path) -> None:
    async def test() -> None:
        async with OddBroker() as broker:
            host = ScriptedHost()
            async with edge_at(broker, tmp_path, host, inflight_messages=1) as edge:
                edge.set_wanted_filters(frozenset())
                await until(lambda: host.is_up, "up")
                broker.refusals = [0, 0, reasons.QUOTA_EXCEEDED]
                undone = messages(5)
                give(edge, undone)
                await until(lambda: len(host.downs) == 1, "down")
                assert "quota" in host.downs[0].lower()
                await until(lambda: host.is_up, "up again")
                give(edge, undone)
                await until(lambda: not undone, "all delivered")
            assert [payload for _, payload, _ in broker.stored] == [b"1", b"2", b"3", b"4", b"5"]

    run(test)


def test_refused_for_good_is_dropped_and_counted(tmp_path: Path) -> None:
    async def test() -> None:
        limits: pr.Properties = {pr.MAXIMUM_PACKET_SIZE: 500, pr.MAXIMUM_QOS: 1}
        async with OddBroker(connack=limits) as broker:
            host = ScriptedHost()
            async with edge_at(broker, tmp_path, host) as edge:
                edge.set_wanted_filters(frozenset())
                await until(lambda: host.is_up, "up")
                broker.refusals = [reasons.NOT_AUTHORIZED]
                undone = messages(2, qos=2)
                undone[3] = Message("t/x", b"x" * 1000, 1)
                undone[4] = Message("t/+", b"no topic", 1)
                undone[5] = Message("t/x", b"bad properties", 1, properties=b"\xff")
                undone[6] = Message("t/x", b"expired", 1, expiry_s=0.0)
                undone[7] = Message("t/x", b"last", 0)
                give(edge, undone)
                await until(lambda: not undone, "all done")
                assert counts(edge) == {"refused by the broker": 4, "expired": 1, "imported": 2}
                assert host.is_up
            assert broker.stored == [("t/x", b"2", 1), ("t/x", b"last", 0)]

    run(test)


def test_a_refused_subscription_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with OddBroker(refused_filters=frozenset({"no/#"})) as broker:
            host = ScriptedHost()
            async with edge_at(broker, tmp_path, host) as edge:
                edge.set_wanted_filters(frozenset({"no/#", "yes/#"}))
                await until(lambda: edge.status()["is_settled"] is True, "settled")
                assert edge.status()["refused_filters"] == ["no/#"]
                assert edge.status()["export_filters"] == ["yes/#"]
                async with Client("127.0.0.1", broker.port) as user:
                    await user.publish("yes/1", b"x", qos=1)
                await until(lambda: host.payloads() == [b"x"], "exported")
        assert "access list" in caplog.text

    run(test)


def test_a_broken_state_file_says_what_to_do(tmp_path: Path) -> None:
    from holdfast_federation.sidecar.edge_mqtt.state import BadState

    async def test() -> None:
        (tmp_path / "edge.json").write_bytes(b"{broken")
        async with OddBroker() as broker:
            with pytest.raises(BadState, match="delete it"):
                async with edge_at(broker, tmp_path, ScriptedHost()):
                    pass

    run(test)
