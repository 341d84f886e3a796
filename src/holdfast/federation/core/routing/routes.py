"""Shortest paths over the links that both ends announce.

Of several shortest paths each member takes the one whose next hop has the lowest id. The paths
from an origin are then the lexicographically lowest ones, so they form one tree rooted at it,
and members with equal databases agree on it without a word.

For redundancy there are further paths from an origin to a destination, each keeping off the members
and links of those before it as far as the graph allows; these, too, every member computes alike.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

from holdfast.federation.core.frames import PATHS_MAX
from holdfast.federation.core.messages.custody import PathChanges
from holdfast.federation.core.routing.link_state import LinkStateDatabase

PATHS_KEPT_MAX: Final = 4096
"""Pairs of origin and destination whose paths are remembered."""

Path = tuple[bytes, ...]
"""Members, from the origin to the destination."""


class Tree:
    """All members reachable from `root`."""

    def __init__(self, root: bytes, graph: dict[bytes, list[bytes]]) -> None:
        self.root = root
        self.parents: dict[bytes, bytes] = {}
        self.depths: dict[bytes, int] = {root: 0}
        queue = deque([root])
        # Neighbours are in order of ids, and so are paths of one length in the queue.
        while queue:
            node = queue.popleft()
            for neighbour in graph.get(node, ()):
                if neighbour not in self.depths:
                    self.depths[neighbour] = self.depths[node] + 1
                    self.parents[neighbour] = node
                    queue.append(neighbour)

    @property
    def depth(self) -> int:
        return max(self.depths.values())

    def first_hops(self) -> dict[bytes, bytes]:
        """To every other member: the neighbour of the root on the way."""
        hops: dict[bytes, bytes] = {}
        for node, parent in self.parents.items():
            hops[node] = node if parent == self.root else hops[parent]
        return hops

    def path_to(self, node: bytes) -> Path | None:
        if node not in self.depths:
            return None
        path = [node]
        while path[-1] != self.root:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def pruned(self, members: set[bytes]) -> dict[bytes, bytes]:
        """Child -> parent of what is needed to reach `members`; as many entries as copies."""
        edges: dict[bytes, bytes] = {}
        for member in members:
            node = member
            while node in self.parents and node not in edges:
                edges[node] = self.parents[node]
                node = self.parents[node]
        return edges


class Routes:
    def __init__(self, own: bytes, database: LinkStateDatabase) -> None:
        self._own = own
        self._database = database
        self._version = -1
        self._graph: dict[bytes, list[bytes]] = {}
        self._tree = Tree(own, {})
        self._hops: dict[bytes, bytes] = {}
        self._paths: dict[tuple[bytes, bytes], list[Path]] = {}
        # By member: the neighbours on a shortest path to it. Empty: to be computed.
        self._ways: dict[bytes, frozenset[bytes]] = {}
        # Members to whom the path has become another, or lost a link.
        self._moved: set[bytes] = set()
        self._broken: set[bytes] = set()

    def take_changes(self) -> PathChanges:
        self._refresh()
        changes = PathChanges(frozenset(self._moved), frozenset(self._broken))
        self._moved.clear()
        self._broken.clear()
        return changes

    def next_hop(self, node: bytes) -> bytes | None:
        """None: there is no path."""
        self._refresh()
        return self._hops.get(node)

    def depth(self) -> int:
        """To the farthest member that can be reached."""
        self._refresh()
        return self._tree.depth

    def distance(self, node: bytes) -> int | None:
        self._refresh()
        return self._tree.depths.get(node)

    def reached(self) -> set[bytes]:
        """The members to which there is a path."""
        self._refresh()
        return set(self._tree.parents)

    def leads(self, peer: bytes, node: bytes) -> bool:
        """Is the peer a neighbour on a shortest path to the node? Of several shortest paths any
        one: the way back from there may be another one than the way to it."""
        self._refresh()
        if not self._ways:
            self._ways = _ways(self._tree, self._graph)
        ways = self._ways.get(node)
        return ways is not None and peer in ways

    def is_before(self, peer: bytes, path: int, origin: bytes, node: bytes) -> bool:
        """Does a message from `origin` to `node` come here from the peer, on this path?"""
        if path:
            paths = self.paths(origin, node)
            if path < len(paths) and self._own in paths[path][1:]:
                return paths[path][paths[path].index(self._own) - 1] == peer
        return self.leads(peer, origin)

    def tree(self, root: bytes) -> Tree:
        self._refresh()
        return Tree(root, self._graph)

    def paths(self, origin: bytes, node: bytes) -> list[Path]:
        """Different ones, at most PATHS_MAX; the first is the shortest, that of the tree."""
        self._refresh()
        found = self._paths.get((origin, node))
        if found is None:
            if len(self._paths) >= PATHS_KEPT_MAX:
                self._paths.clear()
            found = disjoint_paths(self._graph, origin, node)
            self._paths[origin, node] = found
        return found

    def hop_on(self, path: int, origin: bytes, node: bytes) -> bytes | None:
        """The next one from here on a path; where we are not on it, toward its end."""
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
        """Parents come before their children in both."""
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
    """Depths are in order: each member comes after all that are nearer to the root."""
    depths = tree.depths
    ways: dict[bytes, frozenset[bytes]] = {tree.root: frozenset()}
    for node, depth in depths.items():
        for neighbour in graph.get(node, ()):
            if depths[neighbour] == depth + 1:
                through = frozenset((neighbour,)) if node == tree.root else ways[node]
                ways[neighbour] = ways.get(neighbour, frozenset()) | through
    return ways


def disjoint_paths(graph: dict[bytes, list[bytes]], origin: bytes, node: bytes) -> list[Path]:
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
    """Of the paths with the fewest members and links of others the shortest, and of these the
    lexicographically lowest. There is a path."""
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
