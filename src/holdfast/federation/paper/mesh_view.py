"""Views of a topic's mesh: one member's view, and the whole mesh when all members' are known."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TopicView:
    """One member's view of the mesh of a topic."""

    topic: str
    root: int | None
    """The root, in the papers the core. None: no root that counts is known."""
    distance: int | None
    """The number of hops to the root."""
    is_member: bool
    has_subscriber: bool
    parents: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class PaperMesh:
    """The whole mesh of a topic at one moment."""

    topic: str
    root: int | None
    """The root if all members that know one agree; None if they differ."""
    members: tuple[int, ...]
    """The members in the mesh: those with subscribers or with children."""
    parents: dict[int, tuple[int, ...]]
    """The parents of each member except the root."""
    children: dict[int, tuple[int, ...]]
    """The children of each member that has any."""


def mesh(topic: str, views: Mapping[int, TopicView]) -> PaperMesh:
    """Builds the mesh from the views of all members at one moment, by member id."""
    roots = {view.root for view in views.values() if view.root is not None}
    inside = {id: view for id, view in sorted(views.items()) if view.is_member}
    return PaperMesh(
        topic,
        roots.pop() if len(roots) == 1 else None,
        tuple(inside),
        {id: view.parents for id, view in inside.items() if view.parents},
        {id: view.children for id, view in inside.items() if view.children},
    )
