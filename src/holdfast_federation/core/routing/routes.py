"""Shortest paths over the links that both ends announce.

Of several shortest paths each member takes the one whose next hop has the lowest id. So the paths
from an origin are the lexicographically lowest ones and form one tree with the origin as its root.
Members with equal databases compute the same tree, without any exchange of messages.

For redundancy there are further paths from an origin to a destination. Each avoids the members and
links of those before it, as far as the graph allows. Every member computes these alike, too.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

from holdfast_federation.core.frames import PATHS_MAX
from holdfast_federation.core.messages.custody import PathChanges
from holdfast_federation.core.routing.link_state import LinkStateDatabase

PATHS_KEPT_MAX: Final = 4096
"""The most pairs of origin and destination whose paths are kept."""

Path = tuple[bytes, ...]
"""The members of a path, from the origin to the destination."""


class Tree:
    """The shortest paths from `root` to all members that it reaches."""

    def __init__(self, root: bytes, graph: dict[bytes, list[bytes]]) -> None:
        self.root = root
        self.parents: dict[bytes, bytes] = {}
        self.depths: dict[bytes, int] = {root: 0}
        queue = deque([root])
        # Neighbours are in order of ids, so paths of one length are in lexicographic order in the
        # queue. The first path that reaches a member is therefore the lowest one.
        while queue:
            node = queue.popleft()
            for neighbour in graph.get(node, ()):
                if neighbour not in self.depths:
                    self.depths[neighbour] = self.depths[node] + 1
                    self.parents[neighbour] = node
                    queue.append(neighbour)

    @property
    def depth(self) -> int:
        """The number of hops to the farthest member."""
        return max(self.depths.values())

    def first_hops(self) -> dict[bytes, bytes]:
        """Returns, for every other member, the neighbour of the root on the way to it."""
        hops: dict[bytes, bytes] = {}
        for node, parent in self.parents.items():
            hops[node] = node if parent == self.root else hops[parent]
        return hops

    def path_to(self, node: bytes) -> Path | None:
        """Returns the path to a member, or None without one."""
        if node not in self.depths:
            return None
        path = [node]
        while path[-1] != self.root:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def pruned(self, members: set[bytes]) -> dict[bytes, bytes]:
        """Returns the parents of the members on the paths to `members`. A message has one copy per
        entry."""
        edges: dict[bytes, bytes] = {}
        for member in members:
            node = member
            while node in self.parents and node not in edges:
                edges[node] = self.parents[node]
                node = self.parents[node]
        return edges


class Routes:
    """The paths of this member, by the current graph. They are computed when the graph has changed
    and a path is requested."""

    def __init__(self, own: bytes, database: LinkStateDatabase) -> None:
        self._own = own
        self._database = database
        self._version = -1
        self._graph: dict[bytes, list[bytes]] = {}
        self._tree = Tree(own, {})
        self._hops: dict[bytes, bytes] = {}
        self._paths: dict[tuple[bytes, bytes], list[Path]] = {}
        # By member: the neighbours on a shortest path to it. Empty until it is needed.
        self._ways: dict[bytes, frozenset[bytes]] = {}
        # Members to which the path has changed, and those to which it has lost a link.
        self._moved: set[bytes] = set()
        self._broken: set[bytes] = set()

    def take_changes(self) -> PathChanges:
        """Returns the destinations whose paths have changed or lost a link since the last call."""
        self._refresh()
        changes = PathChanges(frozenset(self._moved), frozenset(self._broken))
        self._moved.clear()
        self._broken.clear()
        return changes

    def next_hop(self, node: bytes) -> bytes | None:
        """Returns the neighbour on the way to a member, or None without a path."""
        self._refresh()
        return self._hops.get(node)

    def depth(self) -> int:
        """Returns the number of hops to the farthest member."""
        self._refresh()
        return self._tree.depth

    def distance(self, node: bytes) -> int | None:
        """Returns the number of hops to a member, or None without a path."""
        self._refresh()
        return self._tree.depths.get(node)

    def reached(self) -> set[bytes]:
        """Returns the members to which there is a path."""
        self._refresh()
        return set(self._tree.parents)

    def leads(self, peer: bytes, node: bytes) -> bool:
        """True if the peer is on any shortest path to the member. The way back may be another
        shortest path than the way there, so the tree alone does not decide."""
        self._refresh()
        if not self._ways:
            self._ways = _ways(self._tree, self._graph)
        ways = self._ways.get(node)
        return ways is not None and peer in ways

    def is_before(self, peer: bytes, path: int, origin: bytes, node: bytes) -> bool:
        """True if a message from `origin` to `node` arrives here from the peer, on this path."""
        if path:
            paths = self.paths(origin, node)
            if path < len(paths) and self._own in paths[path][1:]:
                return paths[path][paths[path].index(self._own) - 1] == peer
        return self.leads(peer, origin)

    def tree(self, root: bytes) -> Tree:
        """Returns the tree of another member."""
        self._refresh()
        return Tree(root, self._graph)

    def paths(self, origin: bytes, node: bytes) -> list[Path]:
        """Returns different paths, at most PATHS_MAX. The first is the shortest one, that of the
        tree."""
        self._refresh()
        found = self._paths.get((origin, node))
        if found is None:
            if len(self._paths) >= PATHS_KEPT_MAX:
                self._paths.clear()
            found = disjoint_paths(self._graph, origin, node)
            self._paths[origin, node] = found
        return found

    def hop_on(self, path: int, origin: bytes, node: bytes) -> bytes | None:
        """Returns the next member on a path. If this member is not on it, the next one toward its
        end."""
        if path:
            paths = self.paths(origin, node)
            if path < len(paths) and self._own in paths[path][:-1]:
                return paths[path][paths[path].index(self._own) + 1]
        return self.next_hop(node)

    def _refresh(self) -> None:
        if self._version == self._database.graph_version:
            return
        self._version = self._database.graph_version
        self._graph = self._database.graph()
        before = self._tree
        self._tree = Tree(self._own, self._graph)
        self._compare(before.parents, self._tree.parents)
        self._hops = self._tree.first_hops()
        self._paths.clear()
        self._ways = {}

    def _compare(self, before: dict[bytes, bytes], after: dict[bytes, bytes]) -> None:
        """Notes the paths that have changed. Parents precede their children in both maps."""
        broken: set[bytes] = set()
        for node, parent in before.items():
            if parent in broken or node not in self._graph.get(parent, ()):
                broken.add(node)
        moved: set[bytes] = set()
        for node, parent in after.items():
            if parent in moved or before.get(node) != parent:
                moved.add(node)
        self._broken |= broken
        self._moved |= moved


def _ways(tree: Tree, graph: dict[bytes, list[bytes]]) -> dict[bytes, frozenset[bytes]]:
    """Returns, for each member, the neighbours of the root on a shortest path to it.

    Depths are in order, so a member comes after all members that are nearer to the root.
    """
    depths = tree.depths
    ways: dict[bytes, frozenset[bytes]] = {tree.root: frozenset()}
    for node, depth in depths.items():
        for neighbour in graph.get(node, ()):
            if depths[neighbour] == depth + 1:
                through = frozenset((neighbour,)) if node == tree.root else ways[node]
                ways[neighbour] = ways.get(neighbour, frozenset()) | through
    return ways


def disjoint_paths(graph: dict[bytes, list[bytes]], origin: bytes, node: bytes) -> list[Path]:
    """Returns up to PATHS_MAX paths that share as few members and links as the graph allows."""
    first = Tree(origin, graph).path_to(node)
    if first is None or origin == node:
        return []
    paths = [first]
    while len(paths) < PATHS_MAX:
        found = _least_shared(graph, origin, node, paths)
        if found in paths:
            break
        paths.append(found)
    return paths


def _least_shared(
    graph: dict[bytes, list[bytes]], origin: bytes, node: bytes, others: list[Path]
) -> Path:
    """Returns the path with the fewest members and links of `others`. Of several the shortest, and
    of those the lexicographically lowest. There is a path."""
    used_nodes = {member for path in others for member in path[1:-1]}
    used_links = {link for path in others for link in pairwise(path)}
    heap: list[tuple[int, int, Path]] = [(0, 0, (origin,))]
    done: set[bytes] = set()
    while True:
        shared, length, path = heappop(heap)
        at = path[-1]
        if at == node:
            return path
        if at in done:
            continue
        done.add(at)
        for neighbour in graph[at]:
            if neighbour not in done:
                cost = (neighbour in used_nodes) + ((at, neighbour) in used_links)
                heappush(heap, (shared + cost, length + 1, (*path, neighbour)))
