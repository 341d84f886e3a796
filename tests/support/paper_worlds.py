"""Federations of the published protocol to try: as in the papers, calm ones, and rough ones."""

import random
from typing import Any

from bench.paper.config import PaperConfig
from tests.support.sim_federation import LAN_EDGES, edges_of, random_edges
from tests.support.sim_paper import TOPIC, PaperWorld, Weather


def lan(seed: int = 1, **options: Any) -> PaperWorld:
    """The twelve members of the published experiment; subscribers at 0 and 5."""
    options = {"subscribers": {0: [TOPIC], 5: [TOPIC]}, **options}
    return PaperWorld(12, edges_of(LAN_EDGES), seed, **options)


def settled(world: PaperWorld) -> PaperWorld:
    """With a root that everybody knows, and the mesh that belongs to it."""
    config = world.config
    world.run(2 * config.core_ann_interval_s + config.beacon_interval_s)
    world.run_until(world.is_true, config.core_ann_interval_s)
    return world


def grid_edges(side: int) -> list[tuple[int, int]]:
    count = side * side
    across = [(number, number + 1) for number in range(count) if (number + 1) % side]
    return across + [(number, number + side) for number in range(count - side)]


def calm_world(seed: int, redundancy: int = 1, publications: int = 1000) -> PaperWorld:
    """Publishing from all sides, while nothing fails; but messages take as long as they like."""
    rng = random.Random(seed)
    count = rng.randint(8, 16)
    world = PaperWorld(
        count,
        random_edges(count, rng, degree_max=4),
        seed,
        {number: [TOPIC] for number in rng.sample(range(count), 3)},
        Weather((0.0, 0.01), reorders=True),
        PaperConfig(redundancy, core_ann_interval_s=0.25, beacon_interval_s=0.25),
    )
    # A root is elected, and answers of the time before are forgotten.
    world.run(10.0)
    for _ in range(publications):
        world.publish(rng.randrange(count))
        world.run(rng.uniform(0.0, 0.02))
    world.run(1.0)
    return world


FAULTS = ("crash", "end", "restart", "restart", "cut", "partition", "heal", "heal")


def rough_world(seed: int, duration_s: float = 60.0) -> PaperWorld:
    """Publishing from all sides, while links and members come and go."""
    rng = random.Random(seed)
    count = rng.choice((4, 6, 9, 12))
    edges = {12: edges_of(LAN_EDGES), 9: grid_edges(3)}.get(count) or random_edges(count, rng)
    interval_s = rng.choice((1.0, 2.0))
    config = PaperConfig(
        redundancy=rng.choice((1, 2, 3)),
        core_ann_interval_s=interval_s,
        beacon_interval_s=rng.choice((1.0, 2.0)),
        reply_delay_s=rng.choice((0.0, 0.05)),
        hops_max=2 * count,
    )
    weather = Weather(
        delay_s=(0.001, rng.choice((0.005, 0.1))),
        loss=rng.choice((0.0, 0.0, 0.05)),
        reorders=rng.random() < 0.3,
    )
    subscribers = {
        number: rng.choice((["a"], ["a/b"], ["a", "a/b"]))
        for number in rng.sample(range(count), min(5, count - 1))
    }
    world = PaperWorld(count, edges, seed, subscribers, weather, config)
    is_managed = rng.random() < 0.5
    end = world.now + duration_s
    while world.now < end:
        for _ in range(rng.randint(0, 3)):
            number = rng.randrange(count)
            if world.members[number].core is not None:
                world.publish(number, rng.choice(("a", "a/b", "nobody's")))
        if rng.random() < 0.1:
            happen(world, rng, is_managed)
        world.run(rng.choice((0.002, 0.05, 0.5)))
    world.settle()
    return world


def happen(world: PaperWorld, rng: random.Random, is_managed: bool) -> None:
    kind = rng.choice(FAULTS)
    if kind in ("crash", "end"):
        number = rng.randrange(len(world.members))
        world.crash(number, 3.0 if is_managed else None)
        wanted = world.members[number].wanted
        if kind == "end" and all(len(world.subscribers(topic)) > 2 for topic in wanted):
            # Its clients do not come back with it.
            wanted.clear()
    elif kind == "restart":
        for member in world.members:
            if rng.random() < 0.5:
                world.restart(member.id)
    elif kind == "cut":
        world.cut.add(rng.choice(world.edges))
    elif kind == "partition":
        size = rng.randint(1, len(world.members) - 1)
        world.partition(set(rng.sample(range(len(world.members)), size)))
    else:
        world.heal()
