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
