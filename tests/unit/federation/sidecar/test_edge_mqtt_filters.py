"""The filters to subscribe to: against all topics of a small world."""

import itertools
import random

import pytest

from holdfast.protocol.topics.names import matches
from holdfast_federation.sidecar.edge_mqtt.subscriptions import (
    FILTERS_MAX,
    WILDCARDS_MAX,
    covers,
    intersection,
    joined,
    subscription_set,
    within,
)

LEVELS = ["a", "b", ""]
TOPICS = [
    "/".join(levels) for count in (1, 2, 3, 4) for levels in itertools.product(LEVELS, repeat=count)
][1:]
FILTERS = sorted(
    {
        "/".join(levels)
        for count in (1, 2, 3)
        for levels in itertools.product([*LEVELS, "+", "#"], repeat=count)
        if "#" not in levels[:-1] and "/".join(levels)
    }
)


def matched(filter: str) -> set[str]:
    return {topic for topic in TOPICS if matches(filter, topic)}


MATCHED = {filter: matched(filter) for filter in FILTERS}


def test_every_pair() -> None:
    for one, other in itertools.product(FILTERS, repeat=2):
        both = MATCHED[one] & MATCHED[other]
        common = intersection(one, other)
        assert (set() if common is None else matched(common)) == both, (one, other)
        if covers(one, other):
            assert MATCHED[other] <= MATCHED[one], (one, other)
        assert MATCHED[one] | MATCHED[other] <= matched(joined(one, other)), (one, other)


def test_no_topic_is_matched_twice() -> None:
    choose = random.Random(7)
    for _ in range(300):
        wanted = choose.sample(FILTERS, choose.randint(0, 6))
        allowed = choose.choice([["#"], choose.sample(FILTERS, 2)])
        exact = within(wanted, allowed)
        chosen = subscription_set(exact)
        for topic in TOPICS:
            hits = sum(matches(filter, topic) for filter in chosen)
            is_wanted = any(matches(one, topic) for one in wanted)
            is_allowed = any(matches(one, topic) for one in allowed)
            assert hits <= 1, (wanted, chosen, topic)
            assert hits or not (is_wanted and is_allowed), (wanted, allowed, chosen, topic)


def test_exact_where_nothing_overlaps() -> None:
    wanted = {"a/+", "b/#", "c", "d/+/e"}
    assert subscription_set(wanted) == wanted
    assert subscription_set({"a/#", "a/b", "a/+/c"}) == {"a/#"}
    assert subscription_set({"a/+", "+/b"}) == {"+/+"}


def test_bounded() -> None:
    names = {f"t/{number}" for number in range(2 * FILTERS_MAX)}
    assert subscription_set(names) == {"t/#"}
    wild = {f"t/{number}/+" for number in range(2 * WILDCARDS_MAX)}
    assert subscription_set(wild | {"x"}) == {"t/#", "x"}


@pytest.mark.parametrize("filter", ["#", "+/a", "+"])
def test_dollar_topics_are_not_met(filter: str) -> None:
    common = intersection(filter, "$SYS/a")
    assert common is None or not matches(filter, "$SYS/a")
