"""A scrape looks at no session, and a census at a bounded number in one turn of the loop."""

import asyncio
from collections.abc import ValuesView
from pathlib import Path

from holdfast.api.admin import AdminServer
from holdfast.api.census import SLICE_SESSIONS
from holdfast.node.config import NodeConfig
from holdfast.node.session.session import Session, Subscription
from holdfast.security.http.server import listen
from tests.support.broker_in_process import loop_broker
from tests.support.fake_cluster import FakeServer

SESSIONS = 20 * SLICE_SESSIONS
PARTITIONS = 64


class CountedSessions(dict[str, Session]):
    """A table of sessions that counts how often all of them are listed."""

    listed = 0

    def values(self) -> "ValuesView[Session]":
        self.listed += 1
        return super().values()


class Turns:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1


async def scrape(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = await reader.read(-1)
    writer.close()
    return text


def test_a_scrape_is_short_and_a_census_leaves_turns(tmp_path: Path) -> None:
    async def measure() -> None:
        config = NodeConfig(partitions=PARTITIONS, sys_interval_s=0)
        async with loop_broker(tmp_path, config) as loop_site:
            state = loop_site.broker.node.state
            sessions = state.sessions = CountedSessions()
            for number in range(SESSIONS):
                name = f"device-{number}"
                session = Session(name)
                session.expiry_s, session.tailing = 3600, False
                session.positions = [0] * PARTITIONS
                session.subscriptions = {"t": Subscription(session, "t", 1, False, False, 0, 0)}
                sessions[name] = session
            server = FakeServer(loop_site.membership.operations)
            server.broker = loop_site.broker
            admin = AdminServer(server, listen("127.0.0.1", 0))
            admin.start()
            turns = Turns()
            watching = asyncio.create_task(turns.run())
            await admin.census.take()
            assert turns.count >= SESSIONS // SLICE_SESSIONS
            listed = sessions.listed
            text = await scrape(admin.port)
            assert f'holdfast_sessions_away{{node="n1"}} {SESSIONS}.0'.encode() in text
            assert sessions.listed == listed > 0
            watching.cancel()
            sessions.clear()
            await admin.stop()

    asyncio.run(measure())
