"""Computes the even share of each node in the replicas, or in the leaderships, of all partitions.

Shares are proportional to the capacities, as far as zones permit. Of a partition, one node has at
most one replica, and one zone at most `NodeShares.zone_limit`: one, if there are as many zones as
replicas. A node without a zone is a zone of its own.

The shares can be met whatever the zones: no zone has a share above what its limit permits.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from math import ceil, floor, lcm

from holdfast.node.metadata.model import NodeTraits


class NodeShares:
    """The shares of the nodes. Excesses are whole numbers, in units of `1 / unit` partitions."""

    def __init__(
        self,
        nodes: Iterable[str],
        partitions: int,
        copies: int,
        traits: Mapping[str, NodeTraits],
    ) -> None:
        known = {node: traits.get(node) or NodeTraits(node) for node in nodes}
        self.zones = {node: known[node].zone or f"node {node}" for node in known}
        """The zone of each node."""
        self.zone_limit = zone_limit(self.zones.values(), copies)
        """The most replicas of one partition in one zone."""
        capacity = {node: known[node].capacity for node in known}
        found = self._divide(capacity, partitions, partitions * copies)
        self.unit = lcm(*(share.denominator for share in found.values()))
        self._scaled = {node: int(share * self.unit) for node, share in found.items()}
        self.least = {node: floor(share) for node, share in found.items()}
        self.most = {node: ceil(share) for node, share in found.items()}
        """The share of each node, rounded up; `least`: rounded down."""

    def excess(self, node: str, load: int) -> int:
        """The difference between a load and the node's share."""
        return load * self.unit - self._scaled[node]

    def is_crowded(self, replicas: Iterable[str]) -> bool:
        """Whether one zone has more of the replicas than it must. Nodes without a share do not
        count."""
        counts = Counter(self.zones[node] for node in replicas if node in self.zones)
        return any(count > self.zone_limit for count in counts.values())

    def _divide(
        self, capacity: Mapping[str, int], partitions: int, total: int
    ) -> dict[str, Fraction]:
        """The shares. A zone whose part would exceed its limit gets the limit, and its nodes divide
        that. The part of the others then rises, so one that is limited stays so."""
        shares: dict[str, Fraction] = {}
        limit = self.zone_limit * partitions
        while True:
            rest = {node: each for node, each in capacity.items() if node not in shares}
            divided = _even(rest, partitions, total - sum(shares.values()))
            sums: dict[str, Fraction] = {}
            for node, share in divided.items():
                sums[self.zones[node]] = sums.get(self.zones[node], Fraction(0)) + share
            full = next((zone for zone in sorted(sums) if sums[zone] > limit), None)
            if full is None:
                return shares | divided
            inside = {node: rest[node] for node in rest if self.zones[node] == full}
            shares |= _even(inside, partitions, Fraction(limit))


def zone_limit(zones: Collection[str], copies: int) -> int:
    """The most replicas of one partition that one zone must have. `zones`: that of each node."""
    sizes = Counter(zones).values()
    for limit in range(1, copies):
        if sum(min(size, limit) for size in sizes) >= copies:
            return limit
    return max(1, copies)


def _even(weights: Mapping[str, int], most: int, total: Fraction | int) -> dict[str, Fraction]:
    """The total, divided by the weights, with at most `most` for each."""
    shares: dict[str, Fraction] = {}
    while True:
        rest = {node: weight for node, weight in weights.items() if node not in shares}
        left = Fraction(total - sum(shares.values()))
        whole = sum(rest.values())
        full = [node for node, weight in rest.items() if left * weight > most * whole]
        if not full:
            return shares | {node: left * weight / whole for node, weight in rest.items()}
        shares |= dict.fromkeys(full, Fraction(most))
