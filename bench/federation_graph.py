"""Which members a federation under measurement has, which are linked, and who says what to whom."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.support.sim_federation import LAN_EDGES, edges_of

Edges = list[tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """Members are numbered from 0."""

    edges: tuple[tuple[int, int], ...]
    publisher: int
    subscribers: tuple[int, ...]

    @property
    def members(self) -> int:
        return 1 + max(max(edge) for edge in self.edges)

    def parents(self) -> dict[int, int]:
        return shortest_path_tree(self.edges, self.publisher)

    def hops(self, member: int) -> int:
        return len(path(self.parents(), member)) - 1

    def copies_least(self) -> int:
        """Of a message: one for each link of the tree that leads to a subscriber."""
        return len(branches(self.parents(), self.subscribers))

    def degree(self, member: int) -> int:
        return sum(member in edge for edge in self.edges)


LAN = Layout(tuple(edges_of(LAN_EDGES)), publisher=11, subscribers=(0, 5))


def layout_of(text: str, publisher: int, subscribers: Iterable[int]) -> Layout:
    """`text`: links, as "0-1 1-2". Raises ValueError when it is no connected graph with these
    members."""
    edges = tuple(edges_of(text))
    if not edges:
        raise ValueError("a federation has at least one link: write them as '0-1 1-2'")
    layout = Layout(edges, publisher, tuple(subscribers))
    members = set(range(layout.members))
    named = {publisher, *layout.subscribers}
    if not layout.subscribers or not named <= members or publisher in layout.subscribers:
        raise ValueError(
            f"publisher {publisher} and subscribers {list(layout.subscribers)}: choose different"
            f" ones from 0 to {layout.members - 1}"
        )
    reached = {publisher, *layout.parents()}
    if reached != members:
        raise ValueError(f"no way from {publisher} to {sorted(members - reached)}")
    return layout


def neighbours(edges: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for one, other in edges:
        found.setdefault(one, []).append(other)
        found.setdefault(other, []).append(one)
    return {member: sorted(near) for member, near in found.items()}


def shortest_path_tree(edges: Iterable[tuple[int, int]], root: int) -> dict[int, int]:
    """Of each member but the root: the next one toward it; of several the one that was nearest to
    the root by the lowest numbers."""
    near = neighbours(edges)
    parents: dict[int, int] = {}
    waiting = deque([root])
    while waiting:
        member = waiting.popleft()
        for other in near.get(member, []):
            if other != root and other not in parents:
                parents[other] = member
                waiting.append(other)
    return parents


def path(parents: Mapping[int, int], member: int) -> list[int]:
    """From the member to the root, both included."""
    found = [member]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


def branches(parents: Mapping[int, int], members: Iterable[int]) -> set[tuple[int, int]]:
    """The tree's links, each as parent and child, that lead to one of `members`."""
    return {(parents[each], each) for member in members for each in path(parents, member)[:-1]}
