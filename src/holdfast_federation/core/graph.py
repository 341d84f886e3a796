"""Members of a federation, their links, and the tree of a topic, as the admin port shows them."""

from msgspec import Struct


class Mesh(Struct, frozen=True):
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


class GraphMember(Struct):
    """A member as it last announced itself."""

    id: str
    name: str
    """The name of its site; empty if it is not known here."""
    address: str
    leaving: bool
    filters: int
    """The topic filters that it wants."""
    queued: int
    """The messages that wait here for it."""


class GraphLink(Struct):
    """A link between two members, `a` before `b`."""

    a: str
    b: str
    mutual: bool
    """Whether both announce it. Only then messages take it."""


class FederationGraph(Struct):
    """The members of a federation, and their links."""

    id: str
    """The member that replies."""
    members: list[GraphMember]
    links: list[GraphLink]
