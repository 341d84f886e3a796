"""How long a list of 100,000 sessions over the admin API holds the broker's event loop.

    python -m bench.admin_lists [--json PATH] [--sessions N] [--pages N]

A node with this many durable sessions that are away, in one process and without sockets. Pages of
1,000 are read in three orders, and one search that matches nothing. Another task wakes up in each
turn of the loop and notes the thread's CPU time, so that other processes on the machine do not
count. The target is a maximum of 10 ms for the longest turn. About 30 s.
"""

import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.options import new_parser, write_json
from holdfast.api.routes.session_routes import CHOICES
from holdfast.api.views.sessions import SessionQuery, SessionScan
from holdfast.api.views.slices import Slices
from holdfast.broker.config import NodeConfig
from holdfast.broker.node import Node
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState
from holdfast.server.disk.storage import Storage

TARGET_MS: Final = 10.0
PAGE: Final = 1000
SORTS: Final = ("client", "log_lag", "subscriptions")


def fill(state: NodeState, count: int) -> None:
    """Add durable sessions, each with a position of its own."""
    for number in range(count):
        client_id = f"device-{number * 7919 % count:07d}"
        session = Session(client_id, client_id.encode())
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
        scan = SessionScan(state, list(state.sessions.values()), query, "n1", CHOICES["all"])
        await slices.run(scan.steps())
        slowest_s = max(slowest_s, time.perf_counter() - began)
        pages += 1
        if len(scan.rows) < query.limit:
            break
        last = scan.rows[-1]
        key = getattr(last, query.sort)
        query = SessionQuery(sort=query.sort, limit=query.limit, after=(key, last.client))
    return pages, slowest_s


async def measure(state: NodeState, pages_max: int) -> dict[str, dict[str, float]]:
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


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and return 1 if the target is missed."""
    parser = new_parser("bench.admin_lists", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--pages", type=int, default=10, help="the most pages of each list")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        config = NodeConfig(sys_interval_s=0)
        storage = Storage.open(Path(directory) / "data", "n1", config.partitions, 1 << 20)
        node = Node(config, storage.journal)
        node.tick(time.monotonic(), time.time_ns() // 1000)
        fill(node.state, arguments.sessions)
        gc.collect()
        gc.freeze()
        found = asyncio.run(measure(node.state, arguments.pages))
        storage.close()
    print(f"{arguments.sessions} sessions, pages of {PAGE}; target: no turn above {TARGET_MS:g} ms")
    for name, figures in found.items():
        print(
            f"  {name:14} {figures['pages']:4.0f} pages, slowest {figures['page_ms_max']:7.1f} ms,"
            f" longest turn {figures['turn_ms_max']:6.2f} ms"
        )
    if arguments.json is not None:
        write_json(arguments.json, {"sessions": arguments.sessions, "lists": found})
    return int(any(figures["turn_ms_max"] > TARGET_MS for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
