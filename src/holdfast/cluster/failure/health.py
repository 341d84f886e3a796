"""What a node knows about the others right now: from the detector to the controller."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Presence:
    """Who a connected node says it is (its part of the handshake)."""

    incarnation: str
    peer_address: str
    client_address: str = ""
    admin_address: str = ""
    features: str = ""
    """See PeerIdentity."""


@dataclass(frozen=True)
class Health:
    present: Mapping[str, Presence] = field(default_factory=dict)
    """Nodes that are connected and heard, ourselves included."""
    suspected: frozenset[str] = frozenset()
    """Nodes that we do not hear, whatever others say."""
    dead: frozenset[str] = frozenset()
    """Suspected, and another node says so too."""
    leaving: frozenset[str] = frozenset()
    """Present, and about to stop in good order."""
    stalled: frozenset[str] = frozenset()
    """Present, and says that its disk does not answer: it can promise nothing."""
    damaged: frozenset[str] = frozenset()
    """Present, and says that its disk has lost, or changed, what was on it."""
    full: frozenset[str] = frozenset()
    """Present, and says that its disk has no room for more of the log."""

    @property
    def ill(self) -> frozenset[str]:
        """Whose disk cannot be counted on."""
        return self.stalled | self.damaged | self.full
