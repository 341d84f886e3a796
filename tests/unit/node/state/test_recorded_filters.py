"""The filters of recorded sessions: each topic is matched as by a look at all of them."""

import random

import pytest

from holdfast.node.state.replicated import RecordedFilters
from holdfast.protocol.topics.names import is_shared, matches

FILTERS = ("a", "a/b", "a/+", "+/b", "#", "a/#", "$share/g/a", "$SYS/#", "é/+")
TOPICS = ("a", "a/b", "b", "$SYS/x", "é/b", "c/d/e")


@pytest.mark.parametrize("seed", range(20))
def test_it_matches_what_a_session_has(seed: int) -> None:
    chance = random.Random(seed)
    filters = RecordedFilters()
    present: list[str] = []
    for _ in range(60):
        if present and chance.random() < 0.5:
            filter = present.pop(chance.randrange(len(present)))
            filters.change(filter, -1)
        else:
            filter = chance.choice(FILTERS)
            present.append(filter)
            filters.change(filter, 1)
        for topic in TOPICS:
            plain = [each for each in present if not is_shared(each)]
            assert filters.match(topic) == any(matches(each, topic) for each in plain)
    for filter in present:
        filters.change(filter, -1)
    filters.check(())
