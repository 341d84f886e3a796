"""The simulator of the published protocol finds what it is there to find: published mistakes and
others, each made in the production code for the length of a test."""

from collections import OrderedDict
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import pytest

from bench.paper.effects import Outbox, PublishToNeighbour
from bench.paper.messages import CORE_ANN
from bench.paper.topic import OtherRoot, OwnRoot, Topic
from holdfast_federation.core.messages.duplicates import Duplicates, Freshness
from tests.sim.schedule import Wrong
from tests.support.paper_worlds import calm_world, rough_world
from tests.support.planted import Plant, Planted, changed
from tests.support.sim_paper import PaperWorld


def no_dedup() -> AbstractContextManager[object]:
    return changed(Duplicates, "add", lambda core, id, now: Freshness.NEW)


def a_cache_that_forgets() -> AbstractContextManager[object]:
    seen: OrderedDict[object, None] = OrderedDict()

    def take(core: Duplicates, message: Any, now: float) -> Freshness:
        key = (id(core), message)
        if key in seen:
            return Freshness.SEEN
        seen[key] = None
        while len(seen) > 20:
            seen.popitem(last=False)
        return Freshness.NEW

    return changed(Duplicates, "add", take)


def restart_without_an_epoch() -> AbstractContextManager[object]:
    start = PaperWorld.restart

    def same_epoch(world: PaperWorld, number: int) -> None:
        world.epoch_step = 0
        start(world, number)

    return changed(PaperWorld, "restart", same_epoch)


def a_root_that_hears_no_answers() -> AbstractContextManager[object]:
    answered = Topic.handle_reply

    def ignore(topic: Topic, message: Any, now: float) -> Any:
        return None if isinstance(topic.root, OwnRoot) else answered(topic, message, now)

    return changed(Topic, "handle_reply", ignore)


def relays_that_do_not_join() -> AbstractContextManager[object]:
    answered = Topic.handle_reply

    def keep_to_oneself(topic: Topic, message: Any, now: float) -> Any:
        with changed(Topic, "_reply", lambda topic, root: None):
            result = answered(topic, message, now)
        if isinstance(topic.root, OtherRoot):
            topic.root.is_joined = False
        return result

    return changed(Topic, "handle_reply", keep_to_oneself)


def two_counts_per_hop() -> AbstractContextManager[object]:
    follow = Topic._follow

    def count_again(topic: Topic, root: OtherRoot, message: Any, now: float) -> None:
        root.distance += 1
        follow(topic, root, message, now)

    return changed(Topic, "_follow", count_again)


def farther_neighbours_as_parents() -> AbstractContextManager[object]:
    again = Topic._handle_repeated

    def any_distance(topic: Topic, root: OtherRoot, message: Any, now: float) -> Any:
        if message.number == root.number and message.distance + 1 > root.distance:
            return topic._another_parent(root, message.sender, now)
        return again(topic, root, message, now)

    return changed(Topic, "_handle_repeated", any_distance)


def a_root_that_gives_way_to_nobody() -> AbstractContextManager[object]:
    gives_way = Topic._gives_way

    def never(topic: Topic, other: int, now: float) -> bool:
        return not isinstance(topic.root, OwnRoot) and gives_way(topic, other, now)

    return changed(Topic, "_gives_way", never)


def retained_announcements() -> AbstractContextManager[object]:
    def retain(voice: Outbox, neighbour: int, topic: str, payload: bytes) -> None:
        voice._effects.append(
            PublishToNeighbour(neighbour, topic, payload, 2, topic.startswith(CORE_ANN))
        )

    return changed(Outbox, "send", retain)


def removed_neighbours_stay_parents() -> AbstractContextManager[object]:
    return changed(Topic, "neighbour_removed", lambda topic, neighbour: None)


def a_dead_root_is_believed_for_ever() -> AbstractContextManager[object]:
    until = Topic._root_until

    def for_ever(topic: Topic, root: OwnRoot | OtherRoot) -> float:
        return inf if isinstance(root, OtherRoot) else until(topic, root)

    return changed(Topic, "_root_until", for_ever)


def the_first_copy_shows_the_way() -> AbstractContextManager[object]:
    return changed(OtherRoot, "next_hops", lambda root: tuple(root.parents))


@pytest.mark.parametrize(
    "plant",
    [
        no_dedup,
        a_cache_that_forgets,
        restart_without_an_epoch,
        a_root_that_hears_no_answers,
        relays_that_do_not_join,
        two_counts_per_hop,
        farther_neighbours_as_parents,
        a_root_that_gives_way_to_nobody,
        retained_announcements,
        removed_neighbours_stay_parents,
        a_dead_root_is_believed_for_ever,
    ],
)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    Planted(plant, rough_world, finds=(Wrong,)).check()


def test_a_loss_in_calm_is_found() -> None:
    def lose_nothing(seed: int) -> None:
        world = calm_world(seed)
        assert not any(world.missing(payload) for payload in world.published)

    Planted(the_first_copy_shows_the_way, lose_nothing, finds=(AssertionError,)).check()
