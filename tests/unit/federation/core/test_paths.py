"""Further paths, for redundancy."""

import random
from itertools import pairwise

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.frames import PATHS_MAX
from holdfast_federation.core.routing.routes import disjoint_paths
from tests.support.sim_federation import (
    LAN_EDGES,
    Weather,
    World,
    edges_of,
    node_id,
    random_edges,
)
from tests.unit.federation.core.test_state import graph_of


def lan(redundancy: int, weather: Weather | None = None) -> World:
    config = FederationConfig(redundancy=redundancy)
    world = World(12, edges_of(LAN_EDGES), 1, weather, config, {0: ["t"], 5: ["t"]})
    world.run_until(world.is_stable, 20.0)
    return world


def test_the_second_path_shares_no_member_with_the_first_where_there_is_one() -> None:
    graph = graph_of(edges_of(LAN_EDGES))
    for origin in graph:
        for node in graph:
            if origin == node:
                continue
            paths = disjoint_paths(graph, origin, node)
            assert 2 <= len(paths) <= PATHS_MAX
            assert len(set(paths)) == len(paths)
            assert not set(paths[0][1:-1]) & set(paths[1][1:-1])
            for path in paths:
                assert path[0] == origin
                assert path[-1] == node
                assert len(set(path)) == len(path)
                assert all(b in graph[a] for a, b in pairwise(path))


def test_paths_are_the_same_whoever_computes_them_and_end_where_there_is_no_other() -> None:
    for seed in range(5):
        graph = graph_of(random_edges(20, random.Random(seed)))
        again = {node: list(peers) for node, peers in reversed(graph.items())}
        for node in list(graph)[1:]:
            origin = next(iter(graph))
            assert disjoint_paths(graph, origin, node) == disjoint_paths(again, origin, node)
    chain = graph_of(edges_of("0-1 1-2"))
    assert len(disjoint_paths(chain, node_id(0), node_id(2))) == 1
    assert disjoint_paths(chain, node_id(0), node_id(9)) == []


def test_copies_grow_with_redundancy_and_each_is_delivered_once() -> None:
    copies = {}
    for redundancy in (1, 2, 3):
        world = lan(redundancy)
        for qos in (0, 1, 2):
            id = world.publish(11, "t", qos)
            assert id is not None
            world.run(0.5)
            assert sorted(world.arrivals[id]) == [0, 5]
            copies[redundancy] = world.copies[id]
    assert copies[1] == 3
    assert copies[1] < copies[2] < copies[3] <= 3 * 12


def delivered(redundancy: int) -> int:
    """Of 200 messages of QoS 0 to each of two members, over links that lose one frame in ten."""
    world = lan(redundancy)
    world.weather.loss = 0.1
    for _ in range(200):
        world.publish(11, "t", 0)
        world.run(0.02)
    world.run(1.0)
    return sum(len(numbers) for numbers in world.arrivals.values())


def test_redundancy_delivers_what_links_lose() -> None:
    single, double, triple = delivered(1), delivered(2), delivered(3)
    assert single < 340
    assert double > single + 30
    assert triple > double


def test_a_dead_relay_costs_nothing_with_two_paths() -> None:
    """It has not been noticed yet, and QoS 0 is not sent again."""
    world = lan(2)
    path = world.members[11].member.routes.paths(node_id(11), node_id(5))[0]
    world.crash(int.from_bytes(path[1], "big"), is_silent=True)
    id = world.publish(11, "t", 0)
    assert id is not None
    world.run(0.5)
    assert 5 in world.arrivals[id]
