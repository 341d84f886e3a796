"""Retained messages in a rough federation: see sim_federation for the world.

- After calm the brokers of all members that want a topic have the same retained, or all nothing.
- It is a version not older than any that its origin or one of these members has stored: nothing
  newer was overwritten, and nothing that was removed came back. A QoS 0 message that its origin
  lost in a crash may be at members that do not want the topic any more; nobody hears of it there.
- What is published where a version is known is newer than that, whatever clocks say.
- A replay is no publication: no message is delivered twice, and nothing is sent that nobody
  published (the world checks both).
"""

import random

from holdfast.protocol.topics.names import matches
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.retained.clock import Version
from tests.support.sim_federation import (
    World,
    Wrong,
    happen,
    number_of,
    plain_filters,
    random_edges,
    random_weather,
)

TOPICS = ("a/1", "a/2", "b/1", "b/2", "c")
FILTERS = ("#", "a/#", "+/1", "a/1", "b/+")
QUICK = FederationConfig(retained_check_s=2.0)


def wanting(world: World, topic: str) -> list[int]:
    return [
        member.number
        for member in world.members
        if any(matches(filter, topic) for filter in plain_filters(member))
    ]


def newest_stored(world: World, topic: str, wanting: list[int]) -> Version | None:
    """The newest version that its origin or a member that wants it has stored."""
    return max(
        (
            version
            for version, numbers in world.stored_versions.get(topic, {}).items()
            if numbers & {number_of(version[1]), *wanting}
        ),
        default=None,
    )


def what_is_wrong(world: World) -> str | None:
    for topic in TOPICS:
        numbers = wanting(world, topic)
        newest = newest_stored(world, topic, numbers)
        if newest is None or not numbers:
            continue
        brokers = {world.members[number].broker.get(topic) for number in numbers}
        if len(brokers) > 1:
            return f"{topic}: {brokers} at {numbers}"
        for number in numbers:
            held = world.members[number].member.retained.store.get(topic)
            payload = held.payload or None if held is not None else None
            if held is None or held.version < newest:
                return f"{topic}: {number} has {held}, not {newest}"
            if payload != world.members[number].broker.get(topic):
                return f"{topic}: {number} holds {payload!r}, its broker another"
    return None


def is_quiet(world: World) -> bool:
    """Who wants what has changed, so what was to arrive where is not asked."""
    return world.is_agreed() and not any(len(member.member.custody) for member in world.members)


def settle(world: World, limit_s: float) -> None:
    world.calm()
    end = world.now + limit_s
    world.run_until(lambda: is_quiet(world), limit_s)
    while (wrong := what_is_wrong(world)) is not None:
        if world.now > end:
            raise Wrong(wrong)
        world.run(0.2)
    # And it stays so.
    world.run(3.0)
    wrong = what_is_wrong(world)
    if wrong is not None:
        raise Wrong(wrong)


def rough_retained_world(seed: int, duration_s: float = 15.0, settle_s: float = 40.0) -> World:
    rng = random.Random(seed)
    count = rng.choice((3, 4, 6, 8))
    subscriptions = {
        number: [rng.choice(FILTERS)] for number in rng.sample(range(count), rng.randint(1, 3))
    }
    weather = random_weather(rng)
    world = World(count, random_edges(count, rng), seed, weather, QUICK, subscriptions)
    for member in world.members:
        member.skew_s = rng.choice((0.0, -30.0, 30.0))
    for number in range(count):
        world.crash(number)
        world.restart(number)
    world.run_until(world.is_stable, 60.0)
    numbers = iter(range(1_000_000))
    end = world.now + duration_s
    while world.now < end:
        number = rng.randrange(count)
        member = world.members[number]
        if member.core is not None and rng.random() < 0.6:
            payload = b"" if rng.random() < 0.3 else b"%d" % next(numbers)
            topic, qos = rng.choice(TOPICS), rng.choice((0, 1, 1, 2))
            publish(world, number, topic, qos, payload)
        if member.core is not None and rng.random() < 0.1:
            change_interest(world, number, rng)
        if rng.random() < 0.1:
            happen(world, rng)
        world.run(rng.choice((0.002, 0.05, 0.2)))
    settle(world, settle_s)
    return world


def publish(world: World, number: int, topic: str, qos: int, payload: bytes) -> None:
    store = world.members[number].member.retained.store
    before = store.get(topic)
    world.publish(number, topic, qos, payload, is_retained=True)
    after = store.get(topic)
    if after is None or (before is not None and after.version <= before.version):
        raise Wrong(f"{topic}: published at {number} after {before}, and is {after}")


def change_interest(world: World, number: int, rng: random.Random) -> None:
    member = world.members[number]
    if len(member.filters) > 1 and rng.random() < 0.5:
        member.unsubscribe(rng.choice(member.filters))
    else:
        filter = rng.choice(FILTERS)
        if filter not in member.filters:
            member.subscribe(filter)
