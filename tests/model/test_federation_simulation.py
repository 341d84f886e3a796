"""Federations under crashes, power cuts, cut links, partitions, loss and reordering: see
tests/support/sim_federation.py for what is checked; and what a calm one costs, how it heals."""

import random
from collections import Counter

import pytest

from holdfast_federation.core.identity import MessageId
from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_federation import (
    LAN_EDGES,
    World,
    edges_of,
    node_id,
    random_edges,
    rough_world,
)

SEEDS = 8
"""How many worlds; a failure names its seed."""
BLOCKS = 4
MANY = 60


def lan(**options: object) -> World:
    """The twelve members of the published experiment, linked and agreed."""
    world = World(12, edges_of(LAN_EDGES), 1, **options)  # type: ignore[arg-type]
    world.run_until(world.is_stable, 10.0)
    world.run(1.0)
    return world


def published(world: World, number: int, topic: str, qos: int = 1) -> MessageId:
    id = world.publish(number, topic, qos)
    assert id is not None
    return id


def seconds_until_delivered(world: World, id: MessageId) -> float:
    return world.run_until(lambda: id in world.promised and not world.missing(), 10.0)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_was_stored_arrives_once_and_in_order(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), rough_world)


def test_a_seed_says_everything() -> None:
    worlds = [rough_world(3, 5.0) for _ in range(2)]
    assert worlds[0].arrivals == worlds[1].arrivals
    assert worlds[0].now == worlds[1].now


def test_the_worlds_are_rough() -> None:
    """Messages take detours in them, come twice, find no path; and still much arrives."""
    worlds = [rough_world(seed, 10.0) for seed in range(0, 40, 10)]
    counts: Counter[str] = Counter()
    for world in worlds:
        for member in world.members:
            counts += member.member.counts
    assert sum(len(world.promised) for world in worlds) > 200
    assert counts["duplicate"] > 20
    assert counts["no path"] > 10
    assert max(max(world.hops) for world in worlds) > 3


def test_a_message_crosses_each_link_of_its_tree_once() -> None:
    world = lan(subscriptions={0: ["t/#"], 5: ["t/#"]})
    for qos in (0, 1, 2):
        id = published(world, 11, "t/1", qos)
        world.run(1.0)
        assert sorted(world.arrivals[id]) == [0, 5]
        assert world.copies[id] == 3
    assert set(world.hops) == {1, 3}


def test_copies_are_the_tree_pruned_to_the_interested_in_any_graph() -> None:
    rng = random.Random(7)
    for seed in range(4):
        count = rng.randint(5, 30)
        wanting = set(rng.sample(range(count), 4))
        world = World(
            count,
            random_edges(count, rng),
            seed,
            subscriptions={number: ["t"] for number in wanting},
        )
        world.run_until(world.is_stable, 20.0)
        for number in range(count):
            id = world.publish(number, "t")
            world.run(1.0)
            if id is not None:
                tree = world.members[number].member.routes.tree(node_id(number))
                members = {node_id(other) for other in wanting - {number}}
                assert world.copies[id] == len(tree.pruned(members))
                assert set(world.arrivals[id]) == wanting - {number}


@pytest.mark.parametrize("topics", [1, 1_000, 10_000])
def test_control_traffic_does_not_depend_on_the_number_of_topics(topics: int) -> None:
    world = lan(subscriptions={5: [f"t/{number}" for number in range(topics)]})
    before = world.control_frames
    world.run(10.0)
    assert (world.control_frames - before) / 10.0 <= 21.0
    id = published(world, 11, f"t/{topics - 1}")
    world.run(1.0)
    assert list(world.arrivals[id]) == [5]


@pytest.mark.parametrize("seed", range(5))
def test_a_dead_relay_is_healed_within_three_seconds(seed: int) -> None:
    """Its host is gone: nobody closes a connection."""
    world = lan(subscriptions={5: ["t"]})
    world.run(0.4 * seed)
    world.crash(2, is_silent=True)
    id = published(world, 11, "t")
    assert seconds_until_delivered(world, id) < 3.0


def test_a_closed_link_is_healed_within_half_a_second() -> None:
    world = lan(subscriptions={5: ["t"]})
    world.kill_link(2, 5)
    id = published(world, 11, "t")
    assert seconds_until_delivered(world, id) < 0.5


def test_databases_agree_within_three_seconds_of_a_heal() -> None:
    world = lan(subscriptions={5: ["t"]})
    world.partition(set(range(6)))
    world.run(20.0)
    assert not world.is_agreed()
    id = published(world, 11, "t")
    world.heal()
    assert world.run_until(world.is_agreed, 3.0) <= 3.0
    seconds_until_delivered(world, id)


def test_two_stopped_members_leave_the_others_linked() -> None:
    """The published cloud run: members 0 and 7 stop, and whoever has too few links dials."""
    world = World(9, edges_of("0-1 0-2 1-2 1-3 2-3 3-4 4-5 5-6 6-7 0-8 7-8"), 1)
    world.run_until(world.is_stable, 10.0)
    world.crash(0)
    world.crash(7)

    def is_whole() -> bool:
        alive = [member for member in world.members if member.core is not None]
        return all(
            len(member.member.links.usable(world.now)) >= 2
            and all(member.member.routes.distance(other.node) is not None for other in alive)
            for member in alive
        )

    assert world.run_until(is_whole, 5.0) < 3.0


@pytest.mark.timeout(900)
def test_many_members() -> None:
    everywhere = {number: ["t"] for number in range(0, MANY, 10)}
    world = World(MANY, random_edges(MANY, random.Random(1)), 1, subscriptions=everywhere)
    world.run_until(world.is_stable, 10.0)
    before = world.control_frames
    world.run(4.0)
    assert (world.control_frames - before) / 4.0 <= len(world.edges) + 1
    id = published(world, MANY - 1, "t")
    seconds_until_delivered(world, id)
    tree = world.members[MANY - 1].member.routes.tree(node_id(MANY - 1))
    assert world.copies[id] == len(tree.pruned({node_id(number) for number in everywhere}))
