"""Places a newcomer: links to two members that have room, so that no single failure cuts it off.

They are the members with the lowest round trips from the newcomer, plus a cost for each hop to the
farthest member.

If fewer than two members have room, the newcomer is placed between two linked ones. Their link is
replaced by one from each to the newcomer. That keeps the invariants and the number of neighbours of
both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from holdfast_federation.manager.graph.graph import (
    Graph,
    GraphView,
    Link,
    diameter,
    distances,
    link_of,
    links_of,
    structure_of,
)
from holdfast_federation.manager.graph.repair import Cost, GraphRules, Repaired, repair

Latency: TypeAlias = Callable[[int], float]
"""Returns the latency of a member in milliseconds; finite."""

NEIGHBOURS: Final = 2
"""The number of neighbours of a newcomer."""
HOP_COST_MS: Final = 5.0
"""The cost in milliseconds of one more hop to the farthest member: approximately the time that a
broker needs to forward a message."""


@dataclass(frozen=True)
class Placement:
    """The neighbours of a newcomer, and the links that it replaces."""

    neighbours: tuple[int, ...]
    removed: frozenset[Link] = frozenset()


def place(graph: GraphView, rules: GraphRules, latency: Latency, cost: Cost) -> Placement:
    """Returns the placement of a newcomer.

    `latency` is that from the newcomer to each member, and `cost` that of a link. It may name fewer
    than two neighbours, if all members have got lower limits. `repair` then makes room.
    """
    free = [node for node in sorted(graph) if len(graph[node]) < rules.limit(node)]
    if len(free) < min(NEIGHBOURS, len(graph)):
        between = _between(graph, rules, latency, cost)
        if between is not None:
            return Placement(between, frozenset({between}))
    return Placement(_nearest(graph, free, latency))


def _between(graph: GraphView, rules: GraphRules, latency: Latency, cost: Cost) -> Link | None:
    """Returns the link whose replacement costs least."""
    return min(
        links_of(graph) - rules.pinned,
        key=lambda link: (latency(link[0]) + latency(link[1]) - cost(*link), link),
        default=None,
    )


def _nearest(graph: GraphView, free: list[int], latency: Latency) -> tuple[int, ...]:
    chosen: list[int] = []
    nearest: dict[int, int] = {}
    while len(chosen) < NEIGHBOURS and free:
        best: tuple[float, int, int] | None = None
        best_hops: dict[int, int] = {}
        for node in free:
            hops = distances(graph, node)
            merged = {far: min(hop, nearest.get(far, hop)) for far, hop in hops.items()}
            price = latency(node) + HOP_COST_MS * max(merged.values())
            rank = (price, len(graph[node]), node)
            if best is None or rank < best:
                best, best_hops = rank, merged
        assert best is not None
        chosen.append(best[2])
        free = [node for node in free if node != best[2]]
        nearest = best_hops
    return tuple(chosen)


SWAPS_MAX: Final = 16
"""Links exchanged by one rebalance."""
LINKS_TRIED: Final = 24
REPLACEMENTS_TRIED: Final = 6
DIAMETER_NODES_MAX: Final = 100
"""The size above which only the round trips are looked at."""


def within_rules(graph: GraphView, rules: GraphRules, cost: Cost) -> Repaired:
    """Returns the links after a change of rules or limits.

    Pinned links are added, forbidden ones removed, and the most expensive links beyond a limit
    removed. Then the graph is repaired.
    """
    before = links_of(graph)
    work: Graph = {node: set(neighbours) for node, neighbours in graph.items()}
    for one, other in rules.pinned:
        work[one].add(other)
        work[other].add(one)
    for one, other in rules.forbidden:
        _cut(work, (one, other))
    for node in sorted(work):
        spare = [link for link in (link_of(node, other) for other in work[node])
                 if link not in rules.pinned]  # fmt: skip
        spare.sort(key=lambda link: (cost(*link), link))
        while len(work[node]) > rules.limit(node) and spare:
            _cut(work, spare.pop())
    repaired = repair(work, rules, cost)
    problems = repaired.problems + tuple(
        f"member {node} has more pinned links than its limit of {rules.limit(node)}"
        for node in sorted(work)
        if sum(node in link for link in rules.pinned) > rules.limit(node)
    )
    after = repaired.links
    return Repaired(after, frozenset(after - before), frozenset(before - after), problems)


def rebalance(graph: GraphView, rules: GraphRules, cost: Cost) -> Repaired:
    """Returns the links after exchanges of expensive links for cheap ones, one end at a time, as
    long as that lowers the cost."""
    before = links_of(graph)
    start = within_rules(graph, rules, cost)
    if start.problems:
        return start
    work: Graph = {node: set() for node in graph}
    for one, other in start.links:
        work[one].add(other)
        work[other].add(one)
    for _ in range(SWAPS_MAX):
        if not _swap(work, rules, cost):
            break
    after = links_of(work)
    return Repaired(frozenset(after), frozenset(after - before), frozenset(before - after))


def _price(graph: Graph, cost: Cost) -> float:
    total = sum(cost(*link) for link in links_of(graph))
    if len(graph) > DIAMETER_NODES_MAX:
        return total
    return total + HOP_COST_MS * len(graph) * (diameter(graph) or 0)


def _swap(graph: Graph, rules: GraphRules, cost: Cost) -> bool:
    price = _price(graph, cost)
    dearest = sorted(links_of(graph) - rules.pinned, key=lambda link: (-cost(*link), link))
    for link in dearest[:LINKS_TRIED]:
        for other in _replacements(graph, link, rules, cost):
            _cut(graph, link)
            _join(graph, other)
            if structure_of(graph).is_two_connected and _price(graph, cost) < price:
                return True
            _cut(graph, other)
            _join(graph, link)
    return False


def _replacements(graph: Graph, link: Link, rules: GraphRules, cost: Cost) -> Iterator[Link]:
    """Returns the links from either end to a node that has room, the cheapest first."""
    others = [
        link_of(end, node)
        for end in link
        for node in graph
        if node not in link and node not in graph[end] and len(graph[node]) < rules.limit(node)
    ]
    allowed = [other for other in others if other not in rules.forbidden]
    allowed.sort(key=lambda other: (cost(*other), other))
    return iter(allowed[:REPLACEMENTS_TRIED])


def _cut(graph: Graph, link: Link) -> None:
    graph[link[0]].discard(link[1])
    graph[link[1]].discard(link[0])


def _join(graph: Graph, link: Link) -> None:
    graph[link[0]].add(link[1])
    graph[link[1]].add(link[0])
