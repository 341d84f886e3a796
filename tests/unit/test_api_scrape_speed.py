"""A scrape with 100,000 sessions takes less than 50 ms, and no turn of the loop takes 10 ms.

The best of some attempts counts, because other processes share the machine.
"""

import asyncio
import time
from pathlib import Path

import pytest

from holdfast.api.admin import AdminServer
from holdfast.node.config import NodeConfig
from holdfast.node.session.session import Session, Subscription
from holdfast.security.http.server import listen
from tests.support.broker_in_process import loop_broker
from tests.support.fake_cluster import FakeServer

SESSIONS = 100_000
PARTITIONS = 64
SCRAPE_S = 0.05
TURN_S = 0.01
ATTEMPTS = 8


class TurnWatch:
    """Measures how long the loop goes without a turn for this task."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now


async def scrape(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = await reader.read(-1)
    writer.close()
    return text


@pytest.mark.long
def test_a_scrape_is_short_and_holds_no_turn(tmp_path: Path) -> None:
    async def measure() -> None:
        config = NodeConfig(partitions=PARTITIONS, sys_interval_s=0)
        async with loop_broker(tmp_path, config) as loop_site:
            state = loop_site.broker.node.state
            for number in range(SESSIONS):
                name = f"device-{number}"
                session = Session(name)
                session.expiry_s, session.tailing = 3600, False
                session.positions = [0] * PARTITIONS
                session.subscriptions = {"t": Subscription(session, "t", 1, False, False, 0, 0)}
                state.sessions[name] = session
            server = FakeServer(loop_site.membership.operations)
            server.broker = loop_site.broker
            admin = AdminServer(server, listen("127.0.0.1", 0))
            admin.start()
            scrapes, turns, censuses = [], [], []
            for _ in range(ATTEMPTS):
                watch = TurnWatch()
                watching = asyncio.create_task(watch.run())
                began = time.perf_counter()
                text = await scrape(admin.port)
                scrapes.append(time.perf_counter() - began)
                turns.append(watch.longest_s)
                watch.longest_s = 0.0
                await admin.census.take()
                censuses.append(watch.longest_s)
                watching.cancel()
            assert f'holdfast_sessions_away{{node="n1"}} {SESSIONS}.0'.encode() in text
            assert min(scrapes) < SCRAPE_S, scrapes
            assert min(turns) < TURN_S, turns
            assert min(censuses) < TURN_S, censuses
            print(f"scrape {min(scrapes):.4f} turn {min(turns):.4f} census {min(censuses):.4f}")
            state.sessions.clear()
            await admin.stop()

    asyncio.run(measure())
