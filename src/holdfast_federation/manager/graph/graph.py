"""Graphs of members: components, blocks, articulation points and distances.

A graph maps each node to the set of its neighbours, in both directions. All functions are linear in
the size of the graph, except `diameter`.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeAlias

Graph: TypeAlias = dict[int, set[int]]
GraphView: TypeAlias = Mapping[int, Set[int]]
Link: TypeAlias = tuple[int, int]
"""A link between two members, the smaller id first."""


def link_of(one: int, other: int) -> Link:
    return (one, other) if one < other else (other, one)


def graph_of(nodes: Iterable[int], links: Iterable[Link]) -> Graph:
    graph: Graph = {node: set() for node in nodes}
    for one, other in links:
        graph[one].add(other)
        graph[other].add(one)
    return graph


def links_of(graph: GraphView) -> set[Link]:
    return {
        (node, neighbour) for node, others in graph.items() for neighbour in others
        if node < neighbour
    }  # fmt: skip


@dataclass
class Structure:
    """The components, blocks and articulation points of a graph."""

    components: list[list[int]] = field(default_factory=list)
    blocks: list[set[int]] = field(default_factory=list)
    """The maximal sets of nodes that no single failure within them separates. A node without links
    is one, too."""
    articulation_points: set[int] = field(default_factory=set)

    @property
    def is_two_connected(self) -> bool:
        """True if the graph is connected and stays so without any one node. One node, or two linked
        nodes, count as such."""
        return len(self.components) <= 1 and not self.articulation_points


def structure_of(graph: GraphView) -> Structure:
    """Returns the structure of a graph, by Tarjan's search for blocks. It does not recurse, because
    a chain of members may be long."""
    found = Structure()
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    for root in graph:
        if root in index:
            continue
        before = len(index)
        _search(graph, root, index, low, found)
        component = list(index)[before:] if before else list(index)
        found.components.append(component)
        if len(component) == 1:
            found.blocks.append({root})
    return found


def _search(
    graph: GraphView, root: int, index: dict[int, int], low: dict[int, int], found: Structure
) -> None:
    index[root] = low[root] = len(index)
    unplaced = [root]
    is_root_in_block = False
    stack: list[tuple[int, int, Iterator[int]]] = [(root, root, iter(graph[root]))]
    while stack:
        node, parent, neighbours = stack[-1]
        for neighbour in neighbours:
            if neighbour not in index:
                index[neighbour] = low[neighbour] = len(index)
                unplaced.append(neighbour)
                stack.append((neighbour, node, iter(graph[neighbour])))
                break
            if neighbour != parent and index[neighbour] < low[node]:
                low[node] = index[neighbour]
        else:
            stack.pop()
            if node == root:
                continue
            low[parent] = min(low[parent], low[node])
            if low[node] < index[parent]:
                continue
            block = {parent}
            while node not in block:
                block.add(unplaced.pop())
            found.blocks.append(block)
            if parent != root or is_root_in_block:
                found.articulation_points.add(parent)
            is_root_in_block = is_root_in_block or parent == root


def distances(graph: GraphView, start: int) -> dict[int, int]:
    """Returns the hops from one node to every node that it reaches, itself included."""
    hops = {start: 0}
    border = [start]
    while border:
        ahead: list[int] = []
        for node in border:
            for neighbour in graph[node]:
                if neighbour not in hops:
                    hops[neighbour] = hops[node] + 1
                    ahead.append(neighbour)
        border = ahead
    return hops


def diameter(graph: GraphView) -> int | None:
    """Returns the hops between the two nodes that are farthest apart; None if the graph is not
    connected."""
    widest = 0
    for node in graph:
        hops = distances(graph, node)
        if len(hops) < len(graph):
            return None
        widest = max(widest, max(hops.values()))
    return widest
