"""Shared subscriptions in a rough federation: see sim_federation for the world.

- Of a group that always has a member, somebody's clients get each message whose publisher has the
  acknowledgement, whatever dies, and whoever else joins the group or leaves it.
- Plain subscribers get each message once, group or not (the world checks it).
"""

import random
from dataclasses import replace

from holdfast.protocol.topics.names import matches
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.routing.interest import plain_of
from tests.support.sim_federation import World, Wrong, happen, random_edges, random_weather

GROUPS = ("$share/g/a/#", "$share/g/+/1", "$share/h/a/1")
TOPICS = ("a/1", "a/2", "b/1")
QUICK = FederationConfig(group_reassign_s=3.0)


def lacking(world: World, permanent: dict[str, int]) -> list[tuple[bytes, str]]:
    return [
        (message.payload, group)
        for id, (_, message) in world.published.items()
        for group in permanent
        if id in world.promised
        and matches(plain_of(group), message.topic)
        and not world.group_arrivals[message.payload, group]
    ]


def settle(world: World, permanent: dict[str, int], limit_s: float) -> None:
    world.calm()
    end = world.now + limit_s
    while not world.is_agreed() or world.missing() or lacking(world, permanent):
        if world.now > end:
            raise Wrong(f"{len(world.missing())} missing, {lacking(world, permanent)[:3]} lacking")
        world.run(0.1)
    world.run_until(
        lambda: not any(len(member.member.custody) for member in world.members), limit_s
    )


def rough_groups_world(seed: int, duration_s: float = 15.0, settle_s: float = 40.0) -> World:
    rng = random.Random(seed)
    count = rng.choice((3, 4, 6, 8))
    permanent = {group: rng.randrange(count) for group in GROUPS}
    subscriptions: dict[int, list[str]] = {rng.randrange(count): ["a/#"]}
    for group, number in permanent.items():
        subscriptions.setdefault(number, []).append(group)
    weather = random_weather(rng)
    config = replace(QUICK, redundancy=rng.choice((1, 1, 2, 3)))
    world = World(count, random_edges(count, rng), seed, weather, config, subscriptions)
    world.run_until(world.is_stable, 60.0)
    end = world.now + duration_s
    serial = 0
    while world.now < end:
        member = world.members[rng.randrange(count)]
        if member.core is not None and rng.random() < 0.6:
            serial += 1
            topic = rng.choice(TOPICS)
            world.publish(member.number, topic, rng.choice((0, 1, 2)), b"%d" % serial)
        if rng.random() < 0.2:
            change_group(world, permanent, rng)
        if rng.random() < 0.1:
            happen(world, rng)
        world.run(rng.choice((0.002, 0.05, 0.2)))
    settle(world, permanent, settle_s)
    return world


def change_group(world: World, permanent: dict[str, int], rng: random.Random) -> None:
    member = rng.choice(world.members)
    group = rng.choice(GROUPS)
    if permanent[group] == member.number:
        return
    if group in member.filters:
        member.unsubscribe(group)
    else:
        member.subscribe(group)
