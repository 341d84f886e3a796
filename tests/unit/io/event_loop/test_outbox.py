"""A client that reads gets all that waits for it, however small the outbox is and however much the
system's own buffer takes."""

import asyncio
from pathlib import Path

import pytest

from holdfast.node.config import NodeConfig
from tests.e2e import wire
from tests.support.broker_in_process import LoopBroker

COUNT = 60


def retained_of(port: int, qos: int) -> int:
    with wire.Wire(port) as publisher, wire.Wire(port) as subscriber:
        publisher.connect("pub")
        for number in range(COUNT):
            publisher.publish(f"r/{number}", b"x" * 1000, qos=1, retain=True)
        subscriber.connect("sub")
        subscriber.subscribe(("r/#", qos))
        return sum(len(subscriber.message().payload) == 1000 for _ in range(COUNT))


@pytest.mark.parametrize("qos", [0, 1])
def test_retained_messages_above_the_outbox(tmp_path: Path, qos: int) -> None:
    async def run() -> int:
        config = NodeConfig(partitions=2, sys_interval_s=0, outbox_bytes=4096)
        broker = LoopBroker(tmp_path, config)
        await broker.start()
        found = await asyncio.to_thread(retained_of, broker.port, qos)
        await broker.stop()
        return found

    assert asyncio.run(run()) == COUNT
