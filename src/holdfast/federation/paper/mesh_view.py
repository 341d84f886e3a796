"""The mesh of a topic: what one member knows of it, and all of it where all can be asked."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TopicView:
    """Of one member."""

    topic: str
    root: int | None
    """The papers' core; None: no root that counts is known."""
    distance: int | None
    """Hops to the root."""
    is_member: bool
    has_subscriber: bool
    parents: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class PaperMesh:
    topic: str
    root: int | None
    """The one that all who know one agree on; None where they do not."""
    members: tuple[int, ...]
    """With subscribers, or others below them."""
    parents: dict[int, tuple[int, ...]]
    """Of each member but the root."""
    children: dict[int, tuple[int, ...]]
    """Of each member that has some."""


def mesh(topic: str, views: Mapping[int, TopicView]) -> PaperMesh:
    """From the views of all members, by their ids, at one moment."""
    roots = {view.root for view in views.values() if view.root is not None}
    inside = {id: view for id, view in sorted(views.items()) if view.is_member}
    return PaperMesh(
        topic,
        roots.pop() if len(roots) == 1 else None,
        tuple(inside),
        {id: view.parents for id, view in inside.items() if view.parents},
        {id: view.children for id, view in inside.items() if view.children},
    )
