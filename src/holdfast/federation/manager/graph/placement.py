"""Where a newcomer is linked: two members that have room, so that no single failure cuts it off.

- `paper`: the member of the lowest latency, and of the others the one with the fewest neighbours.
- `default`: the lowest round trips from the newcomer, and a price for each hop to the farthest
  member.

Where fewer than two members have room, the newcomer is put between two linked ones: their link is
given up for one from each to the newcomer. That keeps the invariants and everybody's degree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.federation.manager.graph.graph import GraphView, Link, distances, links_of
from holdfast.federation.manager.graph.repair import Cost, GraphRules

Strategy: TypeAlias = Literal["default", "paper"]
Latency: TypeAlias = Callable[[int], float]
"""Of a member, in milliseconds; finite."""

NEIGHBOURS: Final = 2
HOP_COST_MS: Final = 5.0
"""What a hop more to the farthest member may cost in round trip time: about what a broker takes
to hand a message on."""


@dataclass(frozen=True)
class Placement:
    neighbours: tuple[int, ...]
    removed: frozenset[Link] = frozenset()


def place(
    graph: GraphView, rules: GraphRules, strategy: Strategy, latency: Latency, cost: Cost
) -> Placement:
    """`latency` is that of the newcomer to each member (strategy `paper`: of each member to the
    manager), `cost` that of the links there are. There may be no member with room, if they were
    all given lower limits; repair then makes some."""
    free = [node for node in sorted(graph) if len(graph[node]) < rules.limit(node)]
    if len(free) < min(NEIGHBOURS, len(graph)):
        between = _between(graph, rules, latency, cost)
        if between is not None:
            return Placement(between, frozenset({between}))
    choose = _paper if strategy == "paper" else _default
    return Placement(choose(graph, free, latency))


def _between(graph: GraphView, rules: GraphRules, latency: Latency, cost: Cost) -> Link | None:
    """The link that is the least loss."""
    return min(
        links_of(graph) - rules.pinned,
        key=lambda link: (latency(link[0]) + latency(link[1]) - cost(*link), link),
        default=None,
    )


def _paper(graph: GraphView, free: list[int], latency: Latency) -> tuple[int, ...]:
    if not free:
        return ()
    first = min(free, key=lambda node: (latency(node), node))
    rest = [node for node in free if node != first]
    return (first, *sorted(rest, key=lambda node: (len(graph[node]), node))[:1])


def _default(graph: GraphView, free: list[int], latency: Latency) -> tuple[int, ...]:
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
