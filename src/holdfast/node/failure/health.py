"""One node's present view of the other nodes, from the detector to the controller."""

from collections.abc import Mapping

from msgspec import Struct, field

from holdfast.node.metadata.model import CAPACITY_DEFAULT


class Presence(Struct, frozen=True):
    """The description that a connected node gives of itself in the handshake."""

    incarnation: str
    peer_address: str
    client_address: str = ""
    admin_address: str = ""
    features: str = ""
    """The optional protocol features of the node; see PeerIdentity."""
    version: str = ""
    """The version of its program, for people; "": one that does not announce it."""
    zone: str = ""
    capacity: int = CAPACITY_DEFAULT
    """The zone and the capacity of the node; see `metadata.model.NodeTraits`."""


class Health(Struct, frozen=True):
    """The health of all nodes as one node sees it. A dead node is always suspected too."""

    present: Mapping[str, Presence] = field(default_factory=dict)
    """Nodes that are connected and heard, this node included."""
    suspected: frozenset[str] = frozenset()
    """Nodes that this node does not hear, whatever others report."""
    dead: frozenset[str] = frozenset()
    """Suspected nodes that another node suspects too."""
    leaving: frozenset[str] = frozenset()
    """Nodes that are about to stop in good order, or have closed their link to do so and are not
    suspected yet."""
    stalled: frozenset[str] = frozenset()
    """Present nodes whose disk does not respond, so they can promise nothing."""
    damaged: frozenset[str] = frozenset()
    """Present nodes whose disk has lost or changed data."""
    full: frozenset[str] = frozenset()
    """Present nodes whose disk has no room for more of the log."""
    incomplete: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Per present node the partitions of which it may lack acknowledged records; nodes without one
    are not in it."""
    asking: frozenset[str] = frozenset()
    """Present nodes that will stop as soon as the others can do without them."""
    unmet: frozenset[str] = frozenset()
    """Nodes that this node has not heard since its start, for `start_alone_after_s`."""

    @property
    def unhealthy(self) -> frozenset[str]:
        """Nodes whose disk cannot be relied on."""
        return self.stalled | self.damaged | self.full
