"""Federations of the published protocol under crashes, partitions, loss and reordering: see
tests/support/sim_paper.py for what is checked; and what a calm one costs, how it heals."""

import random

import pytest

from bench.paper.config import PaperConfig
from tests.support.paper_worlds import calm_world, grid_edges, lan, rough_world, settled
from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_federation import LAN_EDGES, edges_of, random_edges
from tests.support.sim_paper import TOPIC, PaperWorld, Weather

SEEDS = 24
"""How many worlds; a failure names its seed."""
BLOCKS = 4
INTERVALS = 10
GRAPHS = {
    "lan": (12, edges_of(LAN_EDGES), (0, 5)),
    "grid 3": (9, grid_edges(3), (3, 7, 8)),
    "grid 6": (36, grid_edges(6), (3, 7, 20, 35)),
    "ring": (7, [(number, (number + 1) % 7) for number in range(7)], (2, 5)),
    "random": (20, random_edges(20, random.Random(3)), (1, 4, 9, 16, 19)),
}


def world_of(graph: str, redundancy: int, seed: int = 1) -> PaperWorld:
    count, edges, subscribers = GRAPHS[graph]
    return PaperWorld(
        count,
        edges,
        seed,
        {number: [TOPIC] for number in subscribers},
        config=PaperConfig(redundancy=redundancy),
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_meshes_form_again_and_nothing_comes_twice(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), rough_world)


def test_a_seed_says_everything() -> None:
    worlds = [rough_world(5, 20.0) for _ in range(2)]
    assert worlds[0].arrivals == worlds[1].arrivals
    assert worlds[0].sent == worlds[1].sent


def test_the_worlds_are_rough() -> None:
    """Publications come twice, from stale parents, find no root; and still much arrives."""
    counts: dict[str, int] = {}
    arrived = 0
    for seed in range(8):
        world = rough_world(seed, 30.0)
        arrived += sum(len(arrivals) for arrivals in world.arrivals.values())
        for member in world.members:
            for reason, count in member.member.counts.items():
                counts[reason] = counts.get(reason, 0) + count
    assert arrived > 500
    for reason in ("duplicate", "nobody to route to", "higher root", "old announcement"):
        assert counts[reason] > 10, counts


@pytest.mark.parametrize("redundancy", [1, 2, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_calm_mesh_costs_what_the_formulas_say(graph: str, redundancy: int) -> None:
    """Per interval 2E - N + 1 announcements and an answer for each link of the mesh."""
    world = settled(world_of(graph, redundancy))
    world.run(3 * world.config.core_ann_interval_s)
    links = sum(len(parents) for parents in world.true_parents().values())
    world.sent.clear()
    world.run(INTERVALS * world.config.core_ann_interval_s)
    assert world.sent == {
        "core_ann": INTERVALS * (2 * len(world.edges) - len(world.members) + 1),
        "memb_ann": INTERVALS * links,
    }


@pytest.mark.parametrize("redundancy", [1, 2, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_publication_costs_what_the_formula_says(graph: str, redundancy: int) -> None:
    """2L - (m - 1) copies in a mesh of m members and L links; from outside of it, those on their
    way to it as well."""
    world = settled(world_of(graph, redundancy))
    world.run(3 * world.config.core_ann_interval_s)
    mesh = world.mesh()
    links = sum(len(parents) for parents in mesh.parents.values())
    within = 2 * links - (len(mesh.members) - 1)
    for member in world.members:
        payload = world.publish(member.id)
        world.run(1.0)
        assert not world.missing(payload)
        if member.id in mesh.members:
            assert world.copies[payload] == within
        else:
            assert world.copies[payload] > within


@pytest.mark.parametrize("seed", range(8))
def test_jitter_costs_no_more_answers(seed: int) -> None:
    """Whichever copy of an announcement comes first; only nearer ones that come late are passed on
    once more."""
    world = lan(seed, weather=Weather((0.005, 0.008)))
    world.run(40.0)
    world.sent.clear()
    world.run(INTERVALS * world.config.core_ann_interval_s)
    assert world.sent["memb_ann"] == INTERVALS * 4
    assert INTERVALS * 31 <= world.sent["core_ann"] <= INTERVALS * 31 * 1.1


@pytest.mark.parametrize("redundancy", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_where_nothing_fails(seed: int, redundancy: int) -> None:
    """Also not while an announcement spreads, whose copies come in any order."""
    world = calm_world(seed, redundancy)
    assert [payload for payload in world.published if world.missing(payload)] == []


def test_a_mesh_is_what_the_graph_says() -> None:
    world = lan(config=PaperConfig(redundancy=3))
    world.subscribe(9, TOPIC)
    settled(world)
    # Answers count for three intervals; those of the election are over then.
    world.run(3 * world.config.core_ann_interval_s)
    mesh = world.mesh()
    (root,) = world.roots()
    assert root in (0, 5, 9)
    assert mesh.root == root
    assert mesh.members == tuple(sorted({*mesh.parents, root}))
    assert {0, 5, 9} <= set(mesh.members)
    for member, parents in mesh.parents.items():
        assert len(parents) <= 3
        assert all(member in mesh.children[parent] for parent in parents)
    assert all(parent in mesh.parents[child] for parent in mesh.children
               for child in mesh.children[parent])  # fmt: skip


def recovery_s(world: PaperWorld, publisher: int) -> float:
    """Until all subscribers have what is published once a tenth of a second."""

    def is_delivered() -> bool:
        payload = world.publish(publisher)
        world.run(0.1)
        return not world.missing(payload)

    return world.run_until(is_delivered, 1000.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_dead_root_is_replaced_within_four_intervals(seed: int) -> None:
    config = PaperConfig(core_ann_interval_s=10.0, beacon_interval_s=5.0)
    world = lan(seed, config=config)
    world.subscribe(9, TOPIC)
    settled(world)
    world.run(2.3 * seed)
    (root,) = world.roots()
    assert root is not None
    world.crash(root)
    world.members[root].wanted.clear()
    took_s = recovery_s(world, 11 if root != 11 else 10)
    # The second half: no interval is lost with members who believe in the dead one for longer.
    assert took_s <= 3 * config.core_ann_interval_s + config.beacon_interval_s + 0.5


@pytest.mark.parametrize("seed", range(6))
def test_partitions_agree_on_one_root_within_an_interval_of_the_heal(seed: int) -> None:
    world = lan(seed, config=PaperConfig(core_ann_interval_s=10.0, beacon_interval_s=5.0))
    for number in (3, 8):
        world.subscribe(number, TOPIC)
    settled(world)
    world.partition({0, 1, 2, 3, 4, 11})
    world.run(60.0)
    roots = world.roots()
    assert len(roots) == 2
    world.heal()
    assert world.run_until(world.is_agreed, 20.0) <= 10.0 + 0.1
    assert world.roots() == {min(root for root in roots if root is not None)}
    assert recovery_s(world, 11) <= 0.5


def test_a_dead_relay_costs_nothing_where_there_is_another_way() -> None:
    """Redundancy 3: 5 has 2, 3 and 7 nearer to the root, 7 of which leads around."""
    world = lan(config=PaperConfig(redundancy=3))
    settled(world)
    (root,) = world.roots()
    assert world.mesh().parents[5 if root == 0 else 0] == (2, 3)
    world.crash(2)
    payload = world.publish(11)
    world.run(0.5)
    assert not world.missing(payload)


def test_the_topology_managers_word_heals_faster_than_expiry() -> None:
    """What is removed is no parent any more; the next announcement finds other ones."""
    world = lan(config=PaperConfig(redundancy=1))
    settled(world)
    (root,) = world.roots()
    (relay,) = world.mesh().parents[5 if root == 0 else 0]
    world.crash(relay, detected_s=1.0)
    took_s = recovery_s(world, 11)
    assert took_s <= 1.0 + world.config.core_ann_interval_s + 0.5


def test_who_stops_wanting_is_left_alone_after_a_while() -> None:
    world = settled(lan())
    (root,) = world.roots()
    other = 5 if root == 0 else 0
    world.members[other].wanted.clear()
    config = world.config
    world.run(3 * (config.core_ann_interval_s + config.beacon_interval_s))
    world.run(config.core_ann_interval_s)
    payload = world.publish(11)
    world.run(1.0)
    assert set(world.arrivals[payload]) == {root}
    assert world.mesh().members == (root,)


def test_a_topic_that_nobody_wants_is_forgotten_everywhere() -> None:
    world = settled(lan())
    for member in world.members:
        member.wanted.clear()
    config = world.config
    world.run(7 * config.core_ann_interval_s + 3 * config.beacon_interval_s)
    assert all(not member.member.topics for member in world.members)
    world.sent.clear()
    world.run(100.0)
    assert not world.sent


def test_control_grows_with_the_topics() -> None:
    """That is the protocol's: 17.5 messages a second and topic, with the paper's intervals."""
    config = PaperConfig(core_ann_interval_s=2.0, beacon_interval_s=2.0)
    topics = [f"t/{number}" for number in range(20)]
    world = PaperWorld(
        12, edges_of(LAN_EDGES), 1, {0: topics, 5: topics}, Weather((0.001, 0.001)), config
    )
    world.run(30.0)
    world.sent.clear()
    world.run(10.0)
    # Of answers there are 4 where 0 is the root, and 4 where 5 is.
    assert world.sent["core_ann"] + world.sent["memb_ann"] == 20 * 10.0 * 35 / 2
