"""`python -m bench.federation_scale`: what a federation says to itself, by members and by topics.

The members are the production cores in the simulator's virtual time, so seconds of the federation
do not depend on this machine; only the CPU column does. Links take 1 to 5 ms. A line by members:

- `agreed`: from the start of all members at once until all know all of one another.
- `link lost`: from a cut link that both ends see until all know; `frames` is what it cost.
- `delivered`: from publishing while that link is being lost, across it, until all have it.
- `control`: frames of control a second when nothing changes; E HELLOs for E links, by design.
"""

import random
import time
from dataclasses import asdict, dataclass

from bench.options import new_parser, write_json
from tests.support.sim_federation import (
    LAN_EDGES,
    World,
    Wrong,
    edges_of,
    node_id,
    pair,
    random_edges,
)

STEP_S = 0.005
LIMIT_S = 30.0
STEADY_S = 10.0
MEMBERS = (12, 50, 100, 200, 500)
TOPICS = (1, 1_000, 10_000)
BY_MEMBERS = "{:>8} {:>6} {:>7} {:>9} {:>10} {:>7} {:>11} {:>10} {:>7}"
BY_TOPICS = "{:>8} {:>9} {:>10} {:>13} {:>7}"


@dataclass
class Size:
    members: int
    links: int
    depth: int
    agreed_s: float
    link_lost_s: float
    link_lost_frames: int
    delivered_s: float
    control_per_s: float
    cpu_s: float


@dataclass
class Topics:
    topics: int
    known_s: float
    """From their subscription until all members know of it."""
    control_per_s: float
    retained_per_s: float
    """Frames that compare what is retained; one message is, of each topic."""
    cpu_s: float


def until(world: World, is_so: object) -> float:
    """Seconds of the federation. `is_so` is called every STEP_S."""
    assert callable(is_so)
    begin = world.now
    while not is_so():
        if world.now - begin > LIMIT_S:
            raise Wrong(f"not within {LIMIT_S} s")
        world.run(STEP_S)
    return world.now - begin


def steady_per_s(world: World) -> float:
    before = world.control_frames
    world.run(STEADY_S)
    return (world.control_frames - before) / STEADY_S


def by_members(count: int, seed: int = 1) -> Size:
    began = time.process_time()
    edges = edges_of(LAN_EDGES) if count == 12 else random_edges(count, random.Random(seed))
    subscriptions = {number: ["t/#"] for number in range(0, count, 5)}
    world = World(count, edges, seed, subscriptions=subscriptions)
    agreed_s = until(world, world.is_stable)
    world.run(3.0)
    control = steady_per_s(world)
    hop = world.members[0].member.routes.next_hop(node_id(count - 1))
    assert hop is not None
    lost = int.from_bytes(hop, "big")
    before = world.control_frames
    begin = world.now
    world.cut.add(pair(node_id(0), hop))
    world.kill_link(0, lost)
    world.publish(0, "t/1")
    delivered_s = link_lost_s = 0.0
    while not delivered_s or not link_lost_s:
        world.run(STEP_S)
        passed = world.now - begin
        if not delivered_s and world.promised and not world.missing():
            delivered_s = passed
        if not link_lost_s and passed > 2 * STEP_S and _know_of_loss(world, node_id(0), hop):
            link_lost_s = passed
        if passed > LIMIT_S:
            raise Wrong(f"not within {LIMIT_S} s")
    hellos = control * link_lost_s
    return Size(
        count,
        len(edges),
        world.members[0].member.routes.depth(),
        agreed_s,
        link_lost_s,
        round(world.control_frames - before - hellos),
        delivered_s,
        control,
        time.process_time() - began,
    )


def _know_of_loss(world: World, one: bytes, other: bytes) -> bool:
    return world.is_agreed() and all(
        other not in member.member.database.entries[one].links for member in world.members
    )


def by_topics(count: int, seed: int = 1) -> Topics:
    began = time.process_time()
    world = World(12, edges_of(LAN_EDGES), seed)
    world.run_until(world.is_stable, LIMIT_S)
    subscriber = world.members[5]
    filters = [f"t/{number}" for number in range(count)]
    subscriber.filters.extend(filters)
    subscriber.call(lambda core, now: core.local_interest(filters, [], now))
    known_s = until(world, lambda: _know_filters(world, subscriber.node, count))
    for filter in filters:
        world.publish(11, filter, 1, b"x", is_retained=True)
    world.run_until(lambda: len(world.arrivals) == count, LIMIT_S)
    world.run(10.0)
    retained = world.frames[6] + world.frames[7] + world.frames[9]
    before = world.frames[1] + world.frames[2] + world.frames[3]
    world.run(60.0)
    return Topics(
        count,
        known_s,
        (world.frames[1] + world.frames[2] + world.frames[3] - before) / 60.0,
        (world.frames[6] + world.frames[7] + world.frames[9] - retained) / 60.0,
        time.process_time() - began,
    )


def _know_filters(world: World, node: bytes, count: int) -> bool:
    return all(
        len(member.member.database.entries[node].filters) == count for member in world.members
    )


def main(argv: list[str] | None = None) -> None:
    parser = new_parser("bench.federation_scale", __doc__)
    parser.add_argument("--members", type=int, nargs="+", default=list(MEMBERS))
    parser.add_argument("--topics", type=int, nargs="+", default=list(TOPICS))
    options = parser.parse_args(argv)
    print(
        BY_MEMBERS.format(
            *("members", "links", "depth", "agreed", "link lost", "frames"),
            *("delivered", "control/s", "CPU s"),
        ),
        flush=True,
    )
    sizes = []
    for count in options.members:
        size = by_members(count)
        sizes.append(size)
        print(
            BY_MEMBERS.format(
                size.members,
                size.links,
                size.depth,
                f"{size.agreed_s:.2f} s",
                f"{size.link_lost_s * 1e3:.0f} ms",
                size.link_lost_frames,
                f"{size.delivered_s * 1e3:.0f} ms",
                f"{size.control_per_s:.1f}",
                f"{size.cpu_s:.1f}",
            ),
            flush=True,
        )
    print()
    print(BY_TOPICS.format("topics", "known", "control/s", "retained/s", "CPU s"), flush=True)
    topics = []
    for count in options.topics:
        found = by_topics(count)
        topics.append(found)
        print(
            BY_TOPICS.format(
                f"{found.topics:,}",
                f"{found.known_s:.2f} s",
                f"{found.control_per_s:.1f}",
                f"{found.retained_per_s:.2f}",
                f"{found.cpu_s:.1f}",
            ),
            flush=True,
        )
    found_all = {"members": list(map(asdict, sizes)), "topics": list(map(asdict, topics))}
    write_json(options.json, found_all)


if __name__ == "__main__":
    main()
