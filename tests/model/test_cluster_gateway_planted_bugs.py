"""The simulator finds planted mistakes of feeds, as `tests/unit/node/feeds/test_feeds.py` does."""

from dataclasses import replace
from typing import Any

import pytest

from holdfast.log.batch import Batch
from holdfast.node.feeds.server import Feed, FeedServer
from tests.sim.casts import LOG
from tests.sim.faults import KILL, RESET
from tests.sim.plans import settings_for
from tests.sim.schedule import Violation
from tests.sim.world import World

SEEDS = range(9, 24)
WANTED = FeedServer._wanted


def _no_third_topic(server: FeedServer, batch: Batch, begin: int, end: int) -> list[Any]:
    found: list[Any] = WANTED(server, batch, begin, end)
    topics, _ = batch.topics()
    for at in range(end - begin):
        if topics[begin - batch.base_offset + at] == b"t/2":
            found[at] = ()
    return found


PLANTED: dict[str, tuple[type, str, Any]] = {
    "a mark passes a message": (FeedServer, "_wanted", _no_third_topic),
    "the end of a forwarded record is not sent": (
        Feed, "is_own", lambda feed, batch, index, ticket: False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, planted = PLANTED[name]
    monkeypatch.setattr(owner, method, planted)
    for seed in SEEDS:
        settings = settings_for(seed, 3, (KILL, RESET), 3.0, (LOG,), gateways=1)
        world = World(seed, replace(settings, mean_s=0.3, settled_within_s=8.0))
        try:
            world.run()
        except (Violation, AssertionError):
            return
    pytest.fail("no run goes wrong")
