"""Repairs the graph: the fewest links with which the members survive the loss of any one of them.

The bound of Eswaran and Tarjan (Augmentation Problems, 1976) gives the number of links that a graph
lacks. Each added link is the cheapest of those that lower the bound most. If the limits of
neighbours permit no such link, the graph is built again around a ring that uses existing links.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, TypeAlias

from holdfast_federation.manager.graph.graph import (
    Graph,
    GraphView,
    Link,
    Structure,
    link_of,
    links_of,
    structure_of,
)

Cost: TypeAlias = Callable[[int, int], float]
"""Returns the cost of a link: its round trip in milliseconds; finite."""
Limit: TypeAlias = Callable[[int], int]
"""Returns the most neighbours of a node, at least 2."""

LEAVES_COMPARED: Final = 10
"""The number of end blocks whose pairs are compared. A graph that lacks many links has too many for
all pairs."""
RING_STARTS: Final = 16
"""The number of nodes from which a ring is tried."""


@dataclass(frozen=True)
class GraphRules:
    """The limits of neighbours, and the links that must or must not exist."""

    limit: Limit
    pinned: Set[Link] = frozenset()
    forbidden: Set[Link] = frozenset()


@dataclass(frozen=True)
class Repaired:
    """The links after a repair, and the changes."""

    links: frozenset[Link]
    added: frozenset[Link]
    removed: frozenset[Link]
    problems: tuple[str, ...] = field(default=())
    """The reasons why the members cannot survive a loss; empty if they can."""


def repair(graph: GraphView, rules: GraphRules, cost: Cost) -> Repaired:
    """Returns the desired links. A link is removed only if the limits permit no other way."""
    before = links_of(graph)
    if len(graph) < 3:
        return _repair_few(graph, before, rules)
    work: Graph = {node: set(neighbours) for node, neighbours in graph.items()}
    found = structure_of(work)
    while not found.is_two_connected:
        link = _best_link(work, found, rules, cost)
        if link is None:
            ring = _around_a_ring(graph, rules, cost)
            if ring is None:
                return _repaired(before, links_of(work), (_no_way(found),))
            return _repaired(before, ring)
        work[link[0]].add(link[1])
        work[link[1]].add(link[0])
        found = structure_of(work)
    return _repaired(before, links_of(work))


def _repair_few(graph: GraphView, before: set[Link], rules: GraphRules) -> Repaired:
    if not graph:
        return _repaired(before, before)
    if len(graph) == 1:
        return _repaired(before, before, ("there is one member: it has no other to be linked to",))
    one, other = sorted(graph)
    problem = "there are two members: when one fails, the other is alone; a third makes it safe"
    if (one, other) in rules.forbidden:
        problem = f"the link of {one} and {other}, the only members, is forbidden"
        return _repaired(before, set(), (problem,))
    return _repaired(before, {(one, other)}, (problem,))


def _repaired(before: set[Link], after: set[Link], problems: tuple[str, ...] = ()) -> Repaired:
    return Repaired(
        frozenset(after), frozenset(after - before), frozenset(before - after), problems
    )


def _no_way(found: Structure) -> str:
    if len(found.components) > 1:
        return f"the forbidden links leave {len(found.components)} parts that cannot be linked"
    points = ", ".join(str(point) for point in sorted(found.articulation_points))
    return f"the forbidden and pinned links leave no way around the members {points}"


def links_lacking(found: Structure) -> int:
    """Returns a lower bound of the number of links that are missing until no single node separates
    the graph."""
    if found.is_two_connected:
        return 0
    ends, alone = 0, 0
    blocks_at: dict[int, int] = {}
    for block in found.blocks:
        points = block & found.articulation_points
        if len(points) == 1:
            ends += 1
        elif not points:
            alone += 1
        for point in points:
            blocks_at[point] = blocks_at.get(point, 0) + 1
    parts = max(blocks_at.values(), default=1) + len(found.components) - 1
    return max(parts - 1, (ends + 1) // 2 + alone)


def _best_link(graph: Graph, found: Structure, rules: GraphRules, cost: Cost) -> Link | None:
    best: tuple[int, float, Link] | None = None
    for one, other in _pairs_of_ends(found):
        link = _cheapest(graph, one, other, rules, cost)
        if link is None:
            continue
        graph[link[0]].add(link[1])
        graph[link[1]].add(link[0])
        rank = (links_lacking(structure_of(graph)), cost(*link), link)
        graph[link[0]].discard(link[1])
        graph[link[1]].discard(link[0])
        if best is None or rank < best:
            best = rank
    return None if best is None else best[2]


def _pairs_of_ends(found: Structure) -> Iterator[tuple[set[int], set[int]]]:
    """Returns the pairs of nodes that a new link may join: nodes of two end blocks except
    articulation points, in different components as long as there are several."""
    component_of = {node: number for number, nodes in enumerate(found.components) for node in nodes}
    ends = [
        (component_of[next(iter(block))], block - found.articulation_points)
        for block in found.blocks
        if len(block & found.articulation_points) <= 1
    ]
    ends.sort(key=lambda end: (len(end[1]), min(end[1])))
    is_split = len(found.components) > 1
    compared = ends[:LEAVES_COMPARED]
    if is_split and len({component for component, _ in compared}) == 1:
        compared.append(next(end for end in ends if end[0] != compared[0][0]))
    for (one, nodes), (other, others) in combinations(compared, 2):
        if not is_split or one != other:
            yield nodes, others


def _cheapest(
    graph: Graph, nodes: set[int], others: set[int], rules: GraphRules, cost: Cost
) -> Link | None:
    best: tuple[float, int, Link] | None = None
    free = [node for node in others if len(graph[node]) < rules.limit(node)]
    for node in nodes:
        if len(graph[node]) >= rules.limit(node):
            continue
        for other in free:
            link = link_of(node, other)
            if other not in graph[node] and link not in rules.forbidden:
                rank = (cost(*link), len(graph[node]) + len(graph[other]), link)
                if best is None or rank < best:
                    best = rank
    return None if best is None else best[2]


def _around_a_ring(graph: GraphView, rules: GraphRules, cost: Cost) -> set[Link] | None:
    """Returns a ring through all nodes, and those of the other links for which the limits have
    room."""
    best: tuple[int, float, set[Link]] | None = None
    before = links_of(graph)
    for start in sorted(graph)[:RING_STARTS]:
        ring = _ring(graph, start, rules, cost)
        chosen = None if ring is None else _with_room(graph, ring, rules, cost)
        if chosen is not None:
            rank = (len(chosen - before), sum(cost(*link) for link in chosen), chosen)
            if best is None or rank[:2] < best[:2]:
                best = rank
    return None if best is None else best[2]


def _ring(graph: GraphView, start: int, rules: GraphRules, cost: Cost) -> set[Link] | None:
    """Returns the nodes in the order of a ring: after each node the cheapest one that is linked to
    it and still free."""
    left = set(graph) - {start}
    ring: set[Link] = set()
    here = start
    while left:
        allowed = [node for node in left if link_of(here, node) not in rules.forbidden]
        if not allowed:
            return None
        ahead = min(
            allowed,
            key=lambda node: (
                link_of(here, node) not in rules.pinned, node not in graph[here],
                cost(*link_of(here, node)), node,
            ),
        )  # fmt: skip
        ring.add(link_of(here, ahead))
        left.discard(ahead)
        here = ahead
    last = link_of(here, start)
    if last in rules.forbidden:
        return None
    return ring | {last}


def _with_room(
    graph: GraphView, ring: set[Link], rules: GraphRules, cost: Cost
) -> set[Link] | None:
    """Returns the links within the limits, or None if the pinned links do not all fit."""
    chosen = ring | rules.pinned
    degree = dict.fromkeys(graph, 0)
    for link in chosen:
        for node in link:
            degree[node] += 1
    if any(count > rules.limit(node) for node, count in degree.items()):
        return None
    for link in sorted(links_of(graph) - chosen, key=lambda link: (cost(*link), link)):
        if link not in rules.forbidden and all(degree[node] < rules.limit(node) for node in link):
            chosen.add(link)
            for node in link:
                degree[node] += 1
    return chosen
