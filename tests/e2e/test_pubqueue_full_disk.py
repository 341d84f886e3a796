"""A publish queue at a broker whose disk fills up: it waits, then goes on where it was refused."""

import asyncio
from pathlib import Path

import pytest

from holdfast.client.client import Client
from holdfast.client.pubqueue.queue import PublishQueue
from tests.e2e import test_full_disk, wire
from tests.e2e.conftest import StartHoldfast

small_disk = test_full_disk.small_disk
WAIT_S = 90.0
MESSAGES = 600
PAYLOAD_BYTES = 32 << 10


@pytest.mark.parametrize("window", [1, 32])
def test_full_disk_keeps_order(
    start_holdfast: StartHoldfast, small_disk: Path, window: int
) -> None:
    broker = start_holdfast(test_full_disk.settings(4 << 20), data=small_disk / "data")
    reader = wire.Wire(broker.port)
    reader.connect("reader", expiry_s=3600)
    reader.subscribe(("q/#", 1))

    async def publish() -> None:
        async with (
            Client("127.0.0.1", broker.port) as client,
            PublishQueue(client, window=window) as queue,
        ):
            filling = asyncio.create_task(fill(queue))
            while queue.counts.resent < 3:
                assert not filling.done() or queue.length, "the disk was never full"
                await asyncio.sleep(0.01)
            assert queue.length
            (small_disk / "ballast").unlink()
            await filling
            await queue.flush()
            assert queue.counts.overtaken == queue.counts.refused == 0

    async def fill(queue: PublishQueue) -> None:
        for number in range(MESSAGES):
            await queue.put(f"q/{number % 3}", b"%08d" % number + bytes(PAYLOAD_BYTES))

    asyncio.run(asyncio.wait_for(publish(), WAIT_S))
    with reader:
        received = [int(reader.message().payload[:8]) for _ in range(MESSAGES)]
    by_topic = [[number for number in received if number % 3 == topic] for topic in range(3)]
    assert by_topic == [list(range(topic, MESSAGES, 3)) for topic in range(3)]
