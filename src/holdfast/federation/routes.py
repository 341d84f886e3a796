"""Shortest paths over the links that both ends announce.

Of several shortest paths each member takes the one whose next hop has the lowest id. The paths
from an origin are then the lexicographically lowest ones, so they form one tree rooted at it,
and members with equal databases agree on it without a word.
"""

from collections import deque

from holdfast.federation.link_state import LinkStateDatabase


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

    def tree(self, root: bytes) -> Tree:
        self._refresh()
        return Tree(root, self._graph)

    def _refresh(self) -> None:
        if self._version == self._database.graph_version:
            return
        self._version = self._database.graph_version
        self._graph = self._database.graph()
        self._tree = Tree(self._own, self._graph)
        self._hops = self._tree.first_hops()
