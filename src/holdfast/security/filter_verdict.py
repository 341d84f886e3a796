"""Decides whether a client's rules allow all topics of a filter, none, or a part."""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from holdfast.protocol.topics.intersection import has_common_topic
from holdfast.protocol.topics.names import covers, has_wildcard
from holdfast.security.acl import DENY, AccessRule, OrderedRule

ALLOWED: Final = "allowed"
DENIED: Final = "denied"
PARTLY: Final = "partly"
RULES_SHOWN: Final = 20
"""The most rules that are named for one verdict."""
WIDE_MAX: Final = 100
"""The most filters with wildcards that a later rule is compared with."""


class FilterVerdict(Struct, frozen=True):
    """A verdict, and the first of the rules that lead to it, in the order in which they decide."""

    verdict: str
    rules: tuple[AccessRule, ...] = ()


def verdict_on_filter(rules: Iterable[OrderedRule], filter: str) -> FilterVerdict:
    """The verdict of rules on a plain filter. The first rule about a topic decides on it, and what
    no rule is about is denied.

    A rule whose topics are all decided by one rule before it counts for nothing. Several rules
    together that decide all of them are not recognised: then the verdict may be `partly` where it
    is whole.
    """
    named: list[AccessRule] = []
    wide: list[str] = []
    signs: set[bool] = set()
    is_decided = False
    for about, rule in rules:
        if not has_common_topic(about, filter):
            continue
        is_allowing = rule.access != DENY
        if is_allowing not in signs and any(covers(before, about) for before in wide):
            continue
        signs.add(is_allowing)
        if len(named) < RULES_SHOWN:
            named.append(rule)
        if covers(about, filter):
            is_decided = True
            break
        if len(signs) == 2 and len(named) >= RULES_SHOWN:
            break
        if has_wildcard(about) and len(wide) < WIDE_MAX:
            wide.append(about)
    if not is_decided:
        signs.add(False)
    if len(signs) == 2:
        return FilterVerdict(PARTLY, tuple(named))
    return FilterVerdict(ALLOWED if True in signs else DENIED, tuple(named))
