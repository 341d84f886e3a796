"""Computes the filters to subscribe to, from those wanted and those allowed.

No two of them match the same topic, because a broker may send a message once per matching
subscription or once for all. Where wanted filters overlap, the set is therefore wider.
"""

from collections.abc import Iterable
from typing import Final

from holdfast.federation.core.routing.interest import generalised
from holdfast.protocol.topics.intersection import intersection
from holdfast.protocol.topics.names import has_wildcard
from holdfast.protocol.topics.trie import SubscriptionTrie

FILTERS_MAX: Final = 10_000
WILDCARDS_MAX: Final = 256
"""The most filters with wildcards; each is compared with each.

More are cut to fewer levels, ending in `#`.
"""


def covers(one: str, other: str) -> bool:
    """Returns whether `one` matches everything that `other` matches."""
    return intersection(one, other) == other


def overlaps(one: str, other: str) -> bool:
    return intersection(one, other) is not None


def joined(one: str, other: str) -> str:
    """Returns a filter that matches everything either one does, and possibly more."""
    left = one.split("/")
    right = other.split("/")
    levels: list[str] = []
    for index in range(max(len(left), len(right))):
        if index >= len(left) or index >= len(right) or "#" in (left[index], right[index]):
            return "/".join([*levels, "#"])
        levels.append(left[index] if left[index] == right[index] else "+")
    return "/".join(levels)


def within(filters: Iterable[str], allowed: Iterable[str]) -> set[str]:
    """Returns the allowed part of the filters."""
    bounds = set(allowed)
    if "#" in bounds:
        return set(filters)
    found = (intersection(filter, bound) for filter in filters for bound in bounds)
    return {filter for filter in found if filter is not None}


def subscription_set(wanted: Iterable[str]) -> frozenset[str]:
    """Returns at most FILTERS_MAX disjoint filters that match everything wanted."""
    filters = generalised(wanted, FILTERS_MAX)
    wild = generalised((one for one in filters if has_wildcard(one)), WILDCARDS_MAX)
    disjoint: list[str] = []
    for filter in sorted(wild):
        grown = filter
        while (met := next((one for one in disjoint if overlaps(one, grown)), None)) is not None:
            disjoint.remove(met)
            grown = (
                grown if covers(grown, met) else met if covers(met, grown) else joined(met, grown)
            )
        disjoint.append(grown)
    trie = SubscriptionTrie()
    for filter in disjoint:
        trie.add(filter, None, True)
    names = (one for one in filters if not has_wildcard(one) and not trie.match(one))
    return frozenset((*disjoint, *names))
