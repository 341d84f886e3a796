"""Members of a federation and their links, as the admin port shows them."""

from msgspec import Struct


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
