"""Graph of a federation under measurement: members, links, publisher and subscribers."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

LAN_EDGES: Final = (
    "0-1 0-2 0-3 0-11 1-2 1-4 1-6 1-7 2-3 2-4 2-5 3-5 4-6 5-7 6-8 7-8 7-9 7-10 8-9 9-10 10-11"
)
"""Twelve members as the published algorithm joins them. Member 11 is one hop from 0 and three from
5."""
Edges = list[tuple[int, int]]


def edges_of(text: str) -> Edges:
    """Returns the links of a text such as "0-1 1-2". Raises ValueError if it is no such text."""
    return [(int(a), int(b)) for a, b in (edge.split("-") for edge in text.split())]


@dataclass(frozen=True)
class Layout:
    """The links of a federation, and where its clients are. Members are numbered from 0."""

    edges: tuple[tuple[int, int], ...]
    publisher: int
    subscribers: tuple[int, ...]

    @property
    def members(self) -> int:
        """Returns the number of members."""
        return 1 + max(max(edge) for edge in self.edges)

    def parents(self) -> dict[int, int]:
        """Returns the shortest-path tree from the publisher, as the parent of each member."""
        return shortest_path_tree(self.edges, self.publisher)

    def hops(self, member: int) -> int:
        """Returns the links between the publisher and a member."""
        return len(path(self.parents(), member)) - 1

    def copies_least(self) -> int:
        """Returns the least copies of a message: one for each link of the tree that leads to a
        subscriber."""
        return len(branches(self.parents(), self.subscribers))

    def degree(self, member: int) -> int:
        """Returns the number of links of a member."""
        return sum(member in edge for edge in self.edges)


LAN = Layout(tuple(edges_of(LAN_EDGES)), publisher=11, subscribers=(0, 5))


def layout_of(text: str, publisher: int, subscribers: Iterable[int]) -> Layout:
    """Returns the layout of a text such as "0-1 1-2".

    Raises ValueError if it is no connected graph with these members.
    """
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
    """Returns the neighbours of each member, in order."""
    found: dict[int, list[int]] = {}
    for one, other in edges:
        found.setdefault(one, []).append(other)
        found.setdefault(other, []).append(one)
    return {member: sorted(near) for member, near in found.items()}


def shortest_path_tree(edges: Iterable[tuple[int, int]], root: int) -> dict[int, int]:
    """Returns the next member toward the root, for every other member.

    Of several neighbours it is the one that comes first by distance, then by number.
    """
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
    """Returns the members from one to the root, both included."""
    found = [member]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


def branches(parents: Mapping[int, int], members: Iterable[int]) -> set[tuple[int, int]]:
    """Returns the links of the tree, each as parent and child, that lead to one of `members`."""
    return {(parents[each], each) for member in members for each in path(parents, member)[:-1]}
