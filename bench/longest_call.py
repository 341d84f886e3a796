"""The longest call of a cluster node's core with many sessions and many filters.

    python -m bench.longest_call [--quick] [--json PATH] [--sessions 100000] [--filters 300000]

Three simulated nodes (tests/sim) run the production cores. Time is virtual, and the CPU time of
each call is measured and passes on its node. The sessions belong to n2, which loses power. Then n1
and n3 close them, lead its partitions and apply the committed batches. After that a peer with the
filters connects, announces them and is disconnected. A call longer than `suspect_s` (0.5 s) makes
the other nodes take a node for dead. Interpreted Python unless `make compile` was run. `--quick`:
20,000 of each, about 20 s.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Final

from msgspec import json

from bench.options import new_parser, write_json
from holdfast.broker.recovery.session_records import encode_session, open_record
from holdfast.broker.session.session import Session
from holdfast.cluster.frame_kinds import INTEREST
from holdfast.cluster.interest_frames import Interest
from holdfast.cluster.qos0_routing import ANNOUNCED_MAX
from holdfast.storage.record import SESSION, Record
from tests.sim.process import Process
from tests.sim.world import Settings, World

SETTLE_S: Final = 60.0
Figures = dict[str, float]


class Clock:
    """The longest call of each kind, in seconds."""

    def __init__(self) -> None:
        self.longest: Figures = {}

    def measure(self, name: str, call: Callable[[], object]) -> None:
        begun = time.thread_time()
        call()
        took = time.thread_time() - begun
        self.longest[name] = max(took, self.longest.get(name, 0.0))


def watch(process: Process, clock: Clock) -> None:
    """Measures the turns and the frames of a process from now on."""
    turn, handle_frame = process.runtime.turn, process.runtime.handle_frame
    process.runtime.turn = lambda: clock.measure("turn", turn)  # type: ignore[method-assign]

    def frame(node: str, kind: int, payload: bytes, now: float) -> None:
        clock.measure("frame", lambda: handle_frame(node, kind, payload, now))

    process.runtime.handle_frame = frame  # type: ignore[method-assign]


def freeze() -> None:
    """Excludes the objects so far from garbage collections, with the thresholds of the server
    (server/event_loop/loop.py)."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def process_of(world: World, name: str) -> Process:
    process = world.hosts[name].process
    assert process is not None
    return process


def started() -> World:
    """A cluster of three nodes without clients that works."""
    world = World(1, Settings(casts=()))
    world.cpu_clock = time.thread_time
    for host in world.hosts.values():
        host.start()
    world._wait(10.0, world._not_ready, "not ready")
    world.schedule.run(2.0)
    return world


def open_sessions(world: World, count: int) -> None:
    """Gives n2 this many sessions, in the replicated state of each node."""
    for name in world.hosts:
        images = process_of(world, name).images
        images.on_applied = None
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
    world = started()
    open_sessions(world, count)
    freeze()
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
    figures = {f"death_{name}_ms": round(s * 1e3, 1) for name, s in clock.longest.items()}
    suspected = [event for event in events if "node_suspected" in event and "'n2'" not in event]
    return figures | {
        "death_closed_after_s": round(world.schedule.now - begun, 1),
        "death_wrongly_suspected": len(suspected),
    }


def interest(count: int) -> Figures:
    """The longest calls when the filters of a peer come and go."""
    world = started()
    process = process_of(world, "n1")
    clock = Clock()
    watch(process, clock)
    filters = [f"site/{number % 100}/device/{number}" for number in range(count)]
    freeze()
    for at in range(0, count, ANNOUNCED_MAX):
        payload = json.encode(Interest(0, at == 0, filters[at : at + ANNOUNCED_MAX], []))
        process.runtime.handle_frame("n2", INTEREST, payload, world.hosts["n1"].clock())
    world.schedule.run(5.0)
    clock.measure("disconnect", lambda: process.close("n2"))
    world.schedule.run(5.0)
    return {f"interest_{name}_ms": round(s * 1e3, 1) for name, s in clock.longest.items()}


def main(argv: list[str] | None = None) -> int:
    parser = new_parser("bench.longest_call", __doc__, "--quick")
    parser.add_argument("--sessions", type=int, default=100_000, help="of the node that dies")
    parser.add_argument("--filters", type=int, default=300_000, help="of the peer")
    arguments = parser.parse_args(argv)
    sessions, filters = arguments.sessions, arguments.filters
    if arguments.quick:
        sessions, filters = 20_000, 20_000
    figures = node_death(sessions) | interest(filters)
    for name, value in figures.items():
        print(f"  {name:28}{value:>12,}")
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
