"""Objects that all components of one federation member share."""

from collections import Counter
from dataclasses import dataclass, field

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import Effect
from holdfast_federation.core.identity import Identity


@dataclass(frozen=True, slots=True)
class MemberContext:
    """The identity and the settings of a member, and the two outputs of all its components.

    Effects are carried out in the order in which components append them, so all append to one
    list.
    """

    identity: Identity
    config: FederationConfig
    counts: Counter[str] = field(default_factory=Counter)
    """The frames and messages that were not sent on, by reason."""
    effects: list[Effect] = field(default_factory=list)

    @property
    def node(self) -> bytes:
        """The id of this member."""
        return self.identity.node
