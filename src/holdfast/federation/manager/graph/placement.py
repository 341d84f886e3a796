"""Places a newcomer: links to two members that have room, so that no single failure cuts it off.

- `paper`: the member with the lowest latency, and of the others the one with the fewest neighbours.
- `default`: the members with the lowest round trips from the newcomer, plus a cost for each hop to
  the farthest member.

If fewer than two members have room, the newcomer is placed between two linked ones. Their link is
replaced by one from each to the newcomer. That keeps the invariants and the number of neighbours of
both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.federation.manager.graph.graph import GraphView, Link, distances, links_of
from holdfast.federation.manager.graph.repair import Cost, GraphRules

Strategy: TypeAlias = Literal["default", "paper"]
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


def place(
    graph: GraphView, rules: GraphRules, strategy: Strategy, latency: Latency, cost: Cost
) -> Placement:
    """Returns the placement of a newcomer.

    `latency` is that from the newcomer to each member (strategy `paper`: from the manager), and
    `cost` that of a link. It may name fewer than two neighbours, if all members have got lower
    limits. `repair` then makes room.
    """
    free = [node for node in sorted(graph) if len(graph[node]) < rules.limit(node)]
    if len(free) < min(NEIGHBOURS, len(graph)):
        between = _between(graph, rules, latency, cost)
        if between is not None:
            return Placement(between, frozenset({between}))
    choose = _paper if strategy == "paper" else _default
    return Placement(choose(graph, free, latency))


def _between(graph: GraphView, rules: GraphRules, latency: Latency, cost: Cost) -> Link | None:
    """Returns the link whose replacement costs least."""
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
