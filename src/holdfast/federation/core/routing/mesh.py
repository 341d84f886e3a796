"""The mesh of a topic, in the words of the federation papers: a view, computed when asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    topic: str
    root: bytes | None
    """The interested member with the lowest id (the papers' core); None when nobody is."""
    members: tuple[bytes, ...]
    parents: dict[bytes, bytes]
    """Of each member and relay but the root: the next one toward the root."""
    children: dict[bytes, tuple[bytes, ...]]


def children_of(parents: dict[bytes, bytes]) -> dict[bytes, tuple[bytes, ...]]:
    children: dict[bytes, list[bytes]] = {}
    for child in sorted(parents):
        children.setdefault(parents[child], []).append(child)
    return {node: tuple(below) for node, below in children.items()}
