"""The longest call of a cluster node's core with many sessions and many filters.

    python -m bench.longest_call [--quick] [--json PATH] [--sessions 1000000] [--filters 300000]
                                 [--only TEXT]

Simulated nodes (tests/sim) run the production cores, and the CPU time of each call is measured. A
call longer than `suspect_s` (0.5 s) makes the other nodes take a node for dead.

Each row plays what makes one entry of the core expensive (`bench.entries`). It shows the longest
call, its CPU time and the time on the clock, and the CPU time of all calls until nothing is left to
do. Ends with 1 if a call takes more CPU time than LIMIT_MS and the modules are compiled. It ends
with an error if an entry has no row.

Then the CPU time passes as time of the cluster, and a node with a tenth of the sessions loses
power: how long it takes until all are closed, and how many nodes are wrongly suspected.

Interpreted Python unless `make compile` was run. `--quick`: 20,000 sessions and filters, a minute.
"""

import sys
import time
from typing import Final

from bench.entries import Clock, play_all, process_of, started, watch
from bench.options import new_parser, write_json
from holdfast.io.event_loop.loop import COLLECTOR
from holdfast.log.record import SESSION, Record
from holdfast.node import node_state as state
from holdfast.node.session.session import Session
from holdfast.node.state.session_records import encode_session, open_record
from tests.sim.world import World

LIMIT_MS: Final = 20.0
SETTLE_S: Final = 60.0
Figures = dict[str, object]


def open_sessions(world: World, count: int) -> None:
    """Gives n2 this many sessions, in the replicated state of each node."""
    for name in world.hosts:
        images = process_of(world, name).images
        for number in range(count):
            session = Session(f"client-{number}")
            session.epoch = 1
            session.expiry_s = 3600
            home = images.home(session.client_id)
            payload = encode_session(open_record(session, False, "n2"))
            images.apply(Record(home, SESSION, client_id=session.key, sequence=1, payload=payload))


def left(world: World) -> int:
    sessions = process_of(world, "n1").images.state.sessions.values()
    return sum(session.owner == "n2" for session in sessions)


def node_death(count: int) -> Figures:
    """The longest calls of the survivors, and the seconds of virtual time until all is closed."""
    world = started(4)
    world.cpu_clock = time.thread_time
    open_sessions(world, count)
    COLLECTOR.start()
    clock = Clock()
    for name in ("n1", "n3"):
        watch(process_of(world, name), clock)
    events: list[str] = []
    world.schedule.on_trace = events.append
    world.hosts["n2"].kill(power=True)
    begun = world.schedule.now
    while left(world) and world.schedule.now < begun + SETTLE_S:
        world.schedule.run(0.1)
    assert not left(world), f"{left(world)} sessions of n2 are still open"
    suspected = [event for event in events if "node_suspected" in event and "'n2'" not in event]
    return {
        "longest_ms": round(max(clock.longest.values())[0] * 1e3, 1),
        "closed_after_s": round(world.schedule.now - begun, 1),
        "wrongly_suspected": len(suspected),
    }


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.longest_call", __doc__, "--quick")
    parser.add_argument("--sessions", type=int, default=1_000_000, help="that are recorded")
    parser.add_argument("--filters", type=int, default=300_000, help="of each of two nodes")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name contains this")
    arguments = parser.parse_args(argv)
    sessions, filters = arguments.sessions, arguments.filters
    if arguments.quick:
        sessions, filters = 20_000, 20_000
    is_compiled = str(state.__file__).endswith(".so")
    figures: Figures = {"compiled": is_compiled}
    longest_ms = 0.0
    head = f"{'':46} {'CPU, ms':>8} {'wall, ms':>9}  {'longest call':28} {'all, ms':>8}"
    print(head, flush=True)
    for row in play_all(sessions, filters, arguments.only):
        figures[row.name] = {
            "longest_ms": row.longest_ms,
            "wall_ms": row.wall_ms,
            "sum_ms": row.sum_ms,
        }
        longest_ms = max(longest_ms, row.longest_ms)
        times = f"{row.longest_ms:>8.1f} {row.wall_ms:>9.1f}"
        print(f"{row.name:46} {times}  {row.entry:28} {row.sum_ms:>8,}", flush=True)
    if not arguments.only:
        figures["node death"] = death = node_death(sessions // 10)
        print(f"\na node with {sessions // 10:,} sessions dies: {death}", flush=True)
    write_json(arguments.json, figures)
    return 1 if is_compiled and longest_ms > LIMIT_MS else 0


if __name__ == "__main__":
    sys.exit(main())
