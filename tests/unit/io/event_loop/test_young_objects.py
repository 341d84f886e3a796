"""The collections of a serving process: all garbage is found, and no collection takes long."""

import asyncio
import gc
import random
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.io.event_loop.loop import (
    BURSTS_MAX,
    COLLECTOR,
    LONG_S,
    MIDDLE_EVERY,
    OLD_EVERY,
    TRAVERSED_MAX,
    YOUNG_MAX,
    Collector,
    count_objects,
)
from holdfast.node import node_state
from holdfast.node.node_state import LARGE_LIST
from tests.e2e import wire
from tests.support.broker_in_process import LoopBroker

COUNT = 20_000


class Traversals:
    """Counts the objects that each collection traverses."""

    def __init__(self) -> None:
        self.most = 0

    def measure(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            traversed = range(info["generation"] + 1)
            self.most = max(self.most, sum(len(gc.get_objects(each)) for each in traversed))


class Node:
    """An object of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    gc.disable()
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def collector() -> Collector:
    collector = Collector()
    collector.start()
    return collector


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


def test_a_collection_leaves_no_young_objects(collector: Collector) -> None:
    table = replaced()
    collector.collect()
    assert young() < COUNT // 10
    assert len(table) == COUNT


def test_those_that_a_collection_has_left_are_bounded_too(collector: Collector) -> None:
    table = replaced()
    for _ in range(MIDDLE_EVERY):
        collector.collect()
    assert len(gc.get_objects(generation=1)) < COUNT // 10
    assert len(table) == COUNT


def test_a_program_without_a_broker_keeps_its_own_collections() -> None:
    table = replaced()
    COLLECTOR.collect()
    assert young() > COUNT // 2
    assert len(table) == COUNT


def test_a_count_disturbs_no_thread() -> None:
    failures: list[SystemError] = []
    is_over = threading.Event()

    def build() -> None:
        try:
            while not is_over.is_set():
                tuple(each for each in range(12))
        except SystemError as error:
            failures.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.freeze()
    threads = [threading.Thread(target=build) for _ in range(4)]
    for each in threads:
        each.start()
    try:
        for _ in range(30_000):
            count_objects(1)
    finally:
        is_over.set()
        for each in threads:
            each.join()
        sys.setswitchinterval(interval_s)
        gc.unfreeze()
    assert not failures


def test_turns_collect(tmp_path: Path) -> None:
    async def run() -> None:
        broker = LoopBroker(tmp_path)
        await broker.start()
        COLLECTOR.start()
        table = replaced()
        with await asyncio.to_thread(wire.Wire, broker.port) as client:
            await asyncio.to_thread(client.connect, "c")
            # Each ping takes a turn, and some turn is late enough for a collection.
            for _ in range(10_000):
                if young() < COUNT // 2:
                    break
                await asyncio.to_thread(client.ping)
        assert young() < COUNT // 2
        assert len(table) == COUNT
        await broker.stop()

    try:
        asyncio.run(run())
    finally:
        COLLECTOR.is_active = False


def test_a_turn_makes_large_lists_permanent(tmp_path: Path) -> None:
    """A collection would visit each element, and the elements are old."""

    async def run() -> None:
        broker = LoopBroker(tmp_path)
        await broker.start()
        COLLECTOR.start()
        state = broker.broker.node.state
        with await asyncio.to_thread(wire.Wire, broker.port) as client:
            for length in (LARGE_LIST, LARGE_LIST + 1):
                large = [None] * length
                state.note_list(length)
                await asyncio.to_thread(client.connect if length == LARGE_LIST else client.ping)
                is_permanent = not any(each is large for each in gc.get_objects())
                assert is_permanent == (length > LARGE_LIST)
        assert not state.has_large_list
        await broker.stop()

    try:
        asyncio.run(run())
    finally:
        COLLECTOR.is_active = False


def test_large_lists_of_sessions_are_noted() -> None:
    sources = Path(node_state.__file__).parent.rglob("*.py")
    listing = re.compile(r"\b(list|sorted)\((self\.)?(_?state\.)?sessions\.values\(\)\)")
    found = [path.name for path in sources if listing.search(path.read_text())]
    assert found == ["node_state.py"]


@pytest.mark.parametrize("seed", range(2))
def test_no_collection_traverses_too_many_objects(seed: int, collector: Collector) -> None:
    """Bursts of objects stay, replace others, or become garbage. A turn allocates less than the
    largest burst in `COLLECT_S`."""
    gc.enable()
    draw = random.Random(seed)
    kept: list[list[list[int]]] = []
    traversals = Traversals()
    gc.callbacks.append(traversals.measure)
    for _ in range(40):
        burst = [[number] for number in range(draw.choice((10, 1000, 10_000, 300_000)))]
        match draw.randrange(6):
            case 0 | 1 | 2:
                kept.append(burst)
            case 3 if kept:
                kept[draw.randrange(len(kept))] = burst
            case 4 if kept:
                kept.pop(draw.randrange(len(kept)))
        for each in burst[:100]:
            each.append(each)  # type: ignore[arg-type]
        del burst
        collector.collect()
    gc.callbacks.remove(traversals.measure)
    assert traversals.most <= TRAVERSED_MAX + (BURSTS_MAX + MIDDLE_EVERY) * YOUNG_MAX
    assert sum(map(len, kept)) > TRAVERSED_MAX


def test_after_a_slow_collection_objects_become_permanent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other work on the machine an object takes long, and so does one with many elements."""
    now_s = 0.0
    took_s = 2 * LONG_S

    def pass_time(phase: str, info: dict[str, int]) -> None:
        nonlocal now_s
        now_s += took_s if phase == "stop" else 0.0

    def traverses() -> bool:
        """Whether the next collections traverse old objects."""
        kept = [[number] for number in range(2000)]
        before = gc.get_freeze_count()
        for _ in range(MIDDLE_EVERY):
            collector.collect()
        return gc.get_freeze_count() < before + len(kept)

    monkeypatch.setattr("time.thread_time", lambda: now_s)
    gc.callbacks.append(pass_time)
    try:
        assert traverses()
        assert not traverses()
        took_s = 0.0
        assert any(traverses() for _ in range(100)), "the slow one is not forgotten"
    finally:
        gc.callbacks.remove(pass_time)


def test_old_garbage_is_found_while_a_process_has_few_objects(collector: Collector) -> None:
    """Cycles that became garbage when they were old."""
    nodes = [Node() for _ in range(1000)]
    gone = [weakref.ref(node) for node in nodes]
    gc.collect(1)
    assert any(each is nodes[0] for each in gc.get_objects(generation=2))
    nodes.clear()
    for _ in range(OLD_EVERY):
        collector.collect()
    assert not any(each() for each in gone)
