"""Estimates round trips of links, from those measured."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from holdfast.federation.manager.graph.graph import Link, link_of

UNKNOWN_MS: Final = 10_000.0
"""The round trip of a member that could not be measured. It is chosen last."""


def measured_ms(value: float | None) -> float | None:
    """Returns the value, or None if it is no measurement: absent, negative, infinite, or the mean
    of nothing."""
    return value if value is not None and isfinite(value) and value >= 0 else None


@dataclass
class RoundTrips:
    """The newest round trips, in milliseconds."""

    of_members: dict[int, float] = field(default_factory=dict)
    """From the manager through the member's broker and back."""
    of_links: dict[Link, float] = field(default_factory=dict)
    """The round trips that the members report."""

    def latency(self, node: int) -> float:
        return self.of_members.get(node, UNKNOWN_MS)

    def cost(self, one: int, other: int) -> float:
        """Returns the cost of a link. Without a measurement it is the way over the manager, an
        upper bound."""
        known = self.of_links.get(link_of(one, other))
        return self.latency(one) + self.latency(other) if known is None else known

    def add_measurement(self, node: int, round_trip_ms: float | None) -> None:
        known = measured_ms(round_trip_ms)
        if known is None:
            self.of_members.pop(node, None)
        else:
            self.of_members[node] = known

    def link_measured(self, one: int, other: int, round_trip_ms: float | None) -> None:
        known = measured_ms(round_trip_ms)
        if known is not None and one != other:
            self.of_links[link_of(one, other)] = known

    def forget(self, node: int) -> None:
        self.of_members.pop(node, None)
        for link in [link for link in self.of_links if node in link]:
            del self.of_links[link]
