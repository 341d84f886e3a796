"""How long lists of 100,000 sessions, and a scrape of the metrics, hold the broker's event loop.

    python -m bench.admin_lists [--json PATH] [--sessions N] [--pages N]

A broker with this many durable sessions that are away, in one process. Pages of 1,000 are read in
three orders, and one search that matches nothing; then `/metrics` is read over HTTP. Another task
wakes up in each turn of the loop and notes the thread's CPU time, so that other processes on the
machine do not count. The targets are a maximum of 10 ms for the longest turn of a list, and of 50
ms for a scrape, the median of ten. About 30 s.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from bench.options import new_parser, write_json
from holdfast.api.views.sessions import SessionQuery, SessionScan
from holdfast.api.views.slices import Slices
from holdfast.config.listener import Listener
from holdfast.config.schema import Admin, Config, Sys
from holdfast.config.schema import Node as NodeSettings
from holdfast.io.event_loop.loop import spare_the_collector
from holdfast.node.node_state import NodeState
from holdfast.node.session.session import Session
from holdfast.process.server import Server

TARGET_MS: Final = 10.0
SCRAPE_TARGET_MS: Final = 50.0
SCRAPES: Final = 10
PAGE: Final = 1000
SORTS: Final = ("client", "log_lag", "subscriptions")


def fill(state: NodeState, count: int) -> None:
    """Add durable sessions, each with a position of its own."""
    for number in range(count):
        client_id = f"device-{number * 7919 % count:07d}"
        session = Session(client_id)
        session.expiry_s = 86_400
        session.username = f"site-{number % 100}"
        session.positions = [number % 50] * state.config.partitions
        state.sessions[client_id] = session


class Turns:
    """The longest turn of the loop in CPU seconds while the block runs."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Turns":
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - before)
            before = now


async def read_all(state: NodeState, query: SessionQuery, pages_max: int) -> tuple[int, float]:
    """Read pages to the end. Returns their number and the seconds of the slowest one."""
    slices = Slices()
    pages, slowest_s = 0, 0.0
    while pages < pages_max:
        began = time.perf_counter()
        scan = SessionScan(state, list(state.sessions.values()), query, "n1", lambda _: True)
        await slices.run(scan.steps())
        slowest_s = max(slowest_s, time.perf_counter() - began)
        pages += 1
        if len(scan.rows) < query.limit:
            break
        last = scan.rows[-1]
        key = getattr(last, query.sort)
        query = SessionQuery(sort=query.sort, limit=query.limit, after=(key, last.client))
    return pages, slowest_s


async def measure_lists(state: NodeState, pages_max: int) -> dict[str, dict[str, float]]:
    """The figures of each list."""
    queries = {sort: SessionQuery(sort=sort, limit=PAGE) for sort in SORTS}
    queries["search"] = SessionQuery(search="no such client", limit=PAGE)
    found: dict[str, dict[str, float]] = {}
    for name, query in queries.items():
        async with Turns() as turns:
            pages, slowest_s = await read_all(state, query, pages_max)
        found[name] = {
            "pages": pages,
            "page_ms_max": round(slowest_s * 1000, 1),
            "turn_ms_max": round(turns.longest_s * 1000, 2),
        }
    return found


async def read_metrics(port: int) -> bytes:
    """The body of one scrape."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    reply = await reader.read(-1)
    writer.close()
    return reply.partition(b"\r\n\r\n")[2]


async def measure_scrapes(server: Server, sessions: int) -> dict[str, float]:
    """The figures of scrapes. The first one is not counted, because a thread has yet to start."""
    assert server.admin is not None
    await server.admin.census.take()
    seconds: list[float] = []
    async with Turns() as turns:
        for _ in range(SCRAPES + 1):
            began = time.perf_counter()
            text = await read_metrics(server.admin_port)
            seconds.append(time.perf_counter() - began)
            if f'holdfast_sessions_away{{node="n1"}} {float(sessions)}'.encode() not in text:
                raise SystemExit("the scrape does not count the sessions")
    return {
        "scrape_ms_median": round(median(seconds[1:]) * 1000, 1),
        "scrape_ms_max": round(max(seconds[1:]) * 1000, 1),
        "turn_ms_max": round(turns.longest_s * 1000, 2),
    }


async def measure(
    directory: Path, sessions: int, pages_max: int
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The figures of the lists and of the scrapes, at a broker of their own."""
    config = Config(
        node=NodeSettings(data=str(directory / "data")),
        listeners=[Listener(port=0)],
        admin=Admin(port=0, open=["health", "metrics"]),
        sys=Sys(interval_s=0),
    )
    server = Server(config)
    await server.start()
    assert server.broker is not None
    state = server.broker.node.state
    try:
        fill(state, sessions)
        spare_the_collector()
        return await measure_lists(state, pages_max), await measure_scrapes(server, sessions)
    finally:
        state.sessions.clear()
        await server.stop()


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and return 1 if a target is missed."""
    parser = new_parser("bench.admin_lists", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=10, help="the most pages of each list")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        work = measure(Path(directory), arguments.sessions, arguments.pages)
        lists, scrapes = asyncio.run(work)
    print(
        f"{arguments.sessions} sessions, pages of {PAGE}; targets: no turn of a list above"
        f" {TARGET_MS:g} ms, a scrape below {SCRAPE_TARGET_MS:g} ms"
    )
    for name, figures in lists.items():
        print(
            f"  {name:14} {figures['pages']:4.0f} pages, slowest {figures['page_ms_max']:7.1f} ms,"
            f" longest turn {figures['turn_ms_max']:6.2f} ms"
        )
    print(
        f"  {'/metrics':14} median {scrapes['scrape_ms_median']:.1f} ms, slowest"
        f" {scrapes['scrape_ms_max']:.1f} ms, longest turn {scrapes['turn_ms_max']:.2f} ms"
    )
    if arguments.json is not None:
        found = {"sessions": arguments.sessions, "lists": lists, "scrapes": scrapes}
        write_json(arguments.json, found)
    is_missed = any(figures["turn_ms_max"] > TARGET_MS for figures in lists.values())
    return int(is_missed or scrapes["scrape_ms_median"] >= SCRAPE_TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
