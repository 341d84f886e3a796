"""examples/home_assistant.py: what Home Assistant finds, also after a broker that was killed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from examples.home_assistant import discovery, run
from holdfast.testing import Broker
from tests.e2e import wire

REQUIRED = {"unique_id", "state_topic", "device", "availability_topic", "value_template"}
"""What a sensor needs to be one entity of a device, by the format of MQTT discovery."""


async def two_readings() -> AsyncIterator[dict[str, float]]:
    yield {"power": 1.5, "energy": 0.25}
    yield {"power": 2.5, "energy": 0.5}


def found(port: int, count: int) -> dict[str, Any]:
    """The retained messages that Home Assistant gets when it starts, by topic."""
    with wire.Wire(port) as client:
        client.connect("home-assistant")
        client.subscribe(("homeassistant/#", 1), ("meter-1/#", 1))
        messages = [client.message() for _ in range(count)]
    assert all(message.retain for message in messages)
    return {message.topic: message.payload for message in messages}


def test_it_is_found_after_a_restart(tmp_path: Path) -> None:
    with Broker(data=tmp_path / "data") as broker:
        asyncio.run(run(broker.url, "meter-1", two_readings()))
        broker.kill()
        broker.start()
        there = found(broker.port, 4)
    for topic, config in discovery("meter-1").items():
        seen = json.loads(there.pop(topic))
        assert seen == config
        assert set(seen) >= REQUIRED
        assert topic.split("/")[:2] == ["homeassistant", "sensor"]
        assert seen["state_topic"] in there
        assert seen["availability_topic"] in there
    # Home Assistant's defaults of payload_available and payload_not_available.
    assert there.pop("meter-1/available") == b"offline"
    assert json.loads(there.pop("meter-1/state")) == {"power": 2.5, "energy": 0.5}
    assert not there


def test_a_meter_that_is_cut_off(tmp_path: Path) -> None:
    """The broker publishes the will."""

    async def cut_off(broker: Broker) -> dict[str, Any]:
        published = asyncio.Event()

        async def one_reading() -> AsyncIterator[dict[str, float]]:
            yield {"power": 1.5, "energy": 0.25}
            published.set()
            await asyncio.sleep(60)

        meter = asyncio.create_task(run(broker.url, "meter-1", one_reading()))
        await published.wait()
        there = await asyncio.to_thread(found, broker.port, 4)
        assert there["meter-1/available"] == b"online"
        # The broker closes a client's connection with its will when another has its name.
        with wire.Wire(broker.port) as other, wire.Wire(broker.port) as watcher:
            await asyncio.to_thread(watcher.connect, "watcher")
            await asyncio.to_thread(watcher.subscribe, ("meter-1/available", 1))
            assert (await asyncio.to_thread(watcher.message)).payload == b"online"
            await asyncio.to_thread(other.connect, "meter-1")
            assert (await asyncio.to_thread(watcher.message)).payload == b"offline"
        meter.cancel()
        await asyncio.gather(meter, return_exceptions=True)
        return await asyncio.to_thread(found, broker.port, 4)

    with Broker(data=tmp_path / "data") as broker:
        assert asyncio.run(cut_off(broker))["meter-1/available"] == b"offline"


def test_a_meter_that_comes_back(tmp_path: Path) -> None:
    """A restart of the broker publishes the will of the meter that was connected."""

    async def restarted(broker: Broker) -> dict[str, Any]:
        published, again = asyncio.Event(), asyncio.Event()

        async def readings() -> AsyncIterator[dict[str, float]]:
            yield {"power": 1.5, "energy": 0.25}
            published.set()
            await again.wait()
            yield {"power": 2.5, "energy": 0.5}
            published.set()
            await asyncio.sleep(60)

        meter = asyncio.create_task(run(broker.url, "meter-1", readings()))
        await published.wait()
        published.clear()
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        again.set()
        await published.wait()
        there = await asyncio.to_thread(found, broker.port, 4)
        meter.cancel()
        await asyncio.gather(meter, return_exceptions=True)
        return there

    with Broker(data=tmp_path / "data") as broker:
        there = asyncio.run(restarted(broker))
    assert json.loads(there["meter-1/state"]) == {"power": 2.5, "energy": 0.5}
    assert there["meter-1/available"] == b"online"
