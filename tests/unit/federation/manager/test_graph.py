"""Components, articulation points, distances; and the fewest links that repair."""

import random
from itertools import combinations

import pytest

from holdfast_federation.manager.graph.graph import (
    Graph,
    diameter,
    graph_of,
    link_of,
    links_of,
    structure_of,
)
from holdfast_federation.manager.graph.placement import rebalance, within_rules
from holdfast_federation.manager.graph.repair import GraphRules, links_lacking, repair

TWELVE = [
    (0, 1), (0, 2), (0, 3), (0, 11), (1, 2), (1, 4), (1, 6), (1, 7), (2, 3), (2, 4), (2, 5),
    (3, 5), (4, 6), (5, 7), (6, 8), (7, 8), (7, 9), (7, 10), (8, 9), (9, 10), (10, 11),
]  # fmt: skip
"""A graph that the published join algorithm made of twelve members."""


def flat(one: int, other: int) -> float:
    return 1.0


def random_graph(rng: random.Random, nodes: int, links: int) -> Graph:
    pairs = list(combinations(range(nodes), 2))
    return graph_of(range(nodes), rng.sample(pairs, min(links, len(pairs))))


def reached(graph: Graph, without: int | None = None) -> int:
    left = [node for node in graph if node != without]
    seen, border = {left[0]}, [left[0]]
    while border:
        for other in graph[border.pop()]:
            if other not in seen and other != without:
                seen.add(other)
                border.append(other)
    return len(seen)


def test_articulation_points_are_those_whose_removal_cuts() -> None:
    rng = random.Random(5)
    for _ in range(300):
        graph = random_graph(rng, rng.randrange(3, 9), rng.randrange(2, 14))
        found = structure_of(graph)
        assert (len(found.components) == 1) == (reached(graph) == len(graph))
        if len(found.components) == 1:
            cut = {node for node in graph if reached(graph, node) < len(graph) - 1}
            assert found.articulation_points == cut
        assert sorted(node for part in found.components for node in part) == sorted(graph)


def test_blocks_of_two_triangles_that_share_a_member() -> None:
    found = structure_of(graph_of(range(5), [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)]))
    assert sorted(map(sorted, found.blocks)) == [[0, 1, 2], [2, 3, 4]]
    assert found.articulation_points == {2}


def test_a_long_chain_needs_no_recursion() -> None:
    graph = graph_of(range(5000), [(node, node + 1) for node in range(4999)])
    found = structure_of(graph)
    assert len(found.articulation_points) == 4998
    assert links_lacking(found) == 1


def test_the_published_twelve() -> None:
    graph = graph_of(range(12), TWELVE)
    found = structure_of(graph)
    assert found.is_two_connected
    assert diameter(graph) == 3
    assert repair(graph, GraphRules(lambda node: 5), flat).added == frozenset()


def test_a_graph_in_pieces_has_no_diameter() -> None:
    assert diameter(graph_of(range(4), [(0, 1), (2, 3)])) is None
    assert diameter({}) == 0


def fewest(graph: Graph) -> int:
    """By trying."""
    absent = [pair for pair in combinations(sorted(graph), 2) if pair[1] not in graph[pair[0]]]
    for count in range(len(absent) + 1):
        for chosen in combinations(absent, count):
            if structure_of(graph_of(graph, links_of(graph) | set(chosen))).is_two_connected:
                return count
    raise AssertionError("a full graph is two-connected")


def test_repair_adds_the_fewest_links_there_can_be() -> None:
    rng = random.Random(11)
    for _ in range(120):
        graph = random_graph(rng, rng.randrange(3, 7), rng.randrange(0, 8))
        found = repair(graph, GraphRules(lambda node: 99), flat)
        assert not found.problems
        assert not found.removed
        assert len(found.added) == fewest(graph), graph


def test_of_equally_few_links_the_nearest_are_taken() -> None:
    chain = graph_of(range(4), [(0, 1), (1, 2), (2, 3)])
    ring = graph_of(range(6), [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (3, 5)])

    def near(one: int, other: int) -> float:
        return 1.0 if (one, other) == (1, 4) else 50.0

    assert repair(chain, GraphRules(lambda node: 3), near).added == {(0, 3)}
    assert repair(ring, GraphRules(lambda node: 5), near).added == {(1, 4)}


def test_links_are_given_up_only_where_limits_leave_no_other_way() -> None:
    full = list(combinations(range(4), 2))
    graph = graph_of(range(8), [*full, *((one + 4, other + 4) for one, other in full)])
    roomy = repair(graph, GraphRules(lambda node: 4), flat)
    assert len(roomy.added) == 2
    assert not roomy.removed
    tight = repair(graph, GraphRules(lambda node: 3), flat)
    assert not tight.problems
    assert tight.removed
    after = graph_of(graph, tight.links)
    assert structure_of(after).is_two_connected
    assert max(len(others) for others in after.values()) <= 3


def test_what_is_impossible_is_said() -> None:
    rules = GraphRules(lambda node: 5)
    assert "one member" in repair({0: set()}, rules, flat).problems[0]
    two = repair({3: set(), 8: set()}, rules, flat)
    assert two.links == {(3, 8)}
    assert "a third makes it safe" in two.problems[0]
    assert repair({}, rules, flat).problems == ()
    forbidden = frozenset({(0, 1), (0, 2)})
    star = repair(graph_of(range(4), [(0, 3), (1, 3), (2, 3)]),
                  GraphRules(lambda node: 5, forbidden=forbidden), flat)  # fmt: skip
    assert star.problems == ("the forbidden and pinned links leave no way around the members 3",)
    alone = frozenset(link_of(0, other) for other in range(1, 4))
    apart = repair(graph_of(range(4), []), GraphRules(lambda node: 5, forbidden=alone), flat)
    assert "forbidden links leave 2 parts" in apart.problems[0]


@pytest.mark.parametrize("seed", range(30))
def test_rules_hold_after_a_change_of_them(seed: int) -> None:
    rng = random.Random(seed)
    graph = graph_of(range(12), TWELVE)
    pairs = rng.sample(list(combinations(range(12), 2)), 5)
    rules = GraphRules(lambda node: 5, frozenset(pairs[:2]), frozenset(pairs[2:]))
    found = within_rules(graph, rules, flat)
    assert not found.problems
    assert rules.pinned <= found.links
    assert not rules.forbidden & found.links
    after = graph_of(graph, found.links)
    assert structure_of(after).is_two_connected
    assert max(len(others) for others in after.values()) <= 5


def test_rebalance_lowers_the_price_and_keeps_the_invariants() -> None:
    def distance(one: int, other: int) -> float:
        return 40.0 * abs(one - other)

    graph = graph_of(range(12), TWELVE)
    found = rebalance(graph, GraphRules(lambda node: 5), distance)
    after = graph_of(graph, found.links)
    assert structure_of(after).is_two_connected
    assert max(len(others) for others in after.values()) <= 5
    assert len(found.links) == len(TWELVE)
    assert sum(distance(*link) for link in found.links) < sum(distance(*link) for link in TWELVE)
    again = rebalance(after, GraphRules(lambda node: 5), distance)
    assert sum(distance(*link) for link in again.links) <= sum(
        distance(*link) for link in found.links
    )
