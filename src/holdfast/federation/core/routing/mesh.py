"""Shows the mesh of a topic in the words of the federation papers. It is a view, computed on
request.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The tree on which the messages of a topic travel between the interested members."""

    topic: str
    root: bytes | None
    """The interested member with the lowest id (the papers' core); None without an interested
    member."""
    members: tuple[bytes, ...]
    parents: dict[bytes, bytes]
    """The next member toward the root, for each member and relay except the root."""
    children: dict[bytes, tuple[bytes, ...]]


def children_of(parents: dict[bytes, bytes]) -> dict[bytes, tuple[bytes, ...]]:
    """Returns the members below each member, in order of ids."""
    children: dict[bytes, list[bytes]] = {}
    for child in sorted(parents):
        children.setdefault(parents[child], []).append(child)
    return {node: tuple(below) for node, below in children.items()}
