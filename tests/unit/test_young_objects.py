"""The collections of young objects between turns, which Python's own count does not bound."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.io.event_loop.loop import COLLECTOR, MIDDLE_EVERY
from tests.e2e import wire
from tests.support.broker_in_process import LoopBroker

COUNT = 20_000


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    """The collector of a serving process, with objects that Python's own collections leave."""
    gc.disable()
    COLLECTOR.is_active = True
    yield
    COLLECTOR.is_active = False
    gc.enable()


def young() -> int:
    return len(gc.get_objects(generation=0))


def replaced() -> dict[int, list[int]]:
    """Old objects, each replaced by a young one."""
    table = {number: [number] for number in range(COUNT)}
    gc.collect()
    for number in range(COUNT):
        table[number] = [number]
    assert young() > COUNT // 2
    return table


def test_a_collection_leaves_no_young_objects() -> None:
    table = replaced()
    COLLECTOR.collect()
    assert young() < COUNT // 10
    assert len(table) == COUNT


def test_those_that_a_collection_has_left_are_bounded_too() -> None:
    table = replaced()
    for _ in range(MIDDLE_EVERY):
        COLLECTOR.collect()
    assert len(gc.get_objects(generation=1)) < COUNT // 10
    assert len(table) == COUNT


def test_another_program_keeps_its_own_collections() -> None:
    COLLECTOR.is_active = False
    table = replaced()
    COLLECTOR.collect()
    assert young() > COUNT // 2
    assert len(table) == COUNT


def test_turns_collect(tmp_path: Path) -> None:
    async def run() -> None:
        broker = LoopBroker(tmp_path)
        await broker.start()
        table = replaced()
        with await asyncio.to_thread(wire.Wire, broker.port) as client:
            await asyncio.to_thread(client.connect, "c")
        assert young() < COUNT // 2
        assert len(table) == COUNT
        await broker.stop()

    asyncio.run(run())
