"""Retained messages and shared groups in rough federations: see tests/support/sim_retained.py and
sim_groups.py for what is checked; and mistakes, made in the production code for the length of a
test, that break a promise within a bounded number of seeds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from holdfast_federation.core.messages.custody import Custody
from holdfast_federation.core.messages.forwarding import FrameForwarder
from holdfast_federation.core.messages.local_delivery import LocalDelivery
from holdfast_federation.core.messages.origin import SharedGroups
from holdfast_federation.core.messages.streams import IncomingStreams
from holdfast_federation.core.messages.streams import _size as size_ahead
from holdfast_federation.core.retained.anti_entropy import AntiEntropy
from holdfast_federation.core.retained.clock import HybridClock
from holdfast_federation.core.retained.replication import RetainedReplication
from holdfast_federation.core.retained.store import RetainedStore
from tests.support.planted import Plant, changed, is_found
from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_federation import World, Wrong
from tests.support.sim_groups import rough_groups_world
from tests.support.sim_retained import rough_retained_world

SEEDS = 24
"""How many worlds of each kind; a failure names its seed."""

Rough = Callable[..., World]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rough", [rough_retained_world, rough_groups_world])
def test_what_is_promised_holds_in_rough_worlds(rough: Rough) -> None:
    run_seeds(block_of_seeds(0, 1, SEEDS), rough)


def the_last_to_arrive_is_retained() -> AbstractContextManager[object]:
    return changed(RetainedReplication, "is_newest", lambda core, data, now: True)


def a_clock_that_hears_nothing() -> AbstractContextManager[object]:
    return changed(HybridClock, "observe", lambda clock, stamp, now: True)


def a_removal_is_forgotten_at_once() -> AbstractContextManager[object]:
    put = RetainedStore.put

    def remove(store: RetainedStore, message: Any, now: float) -> bool:
        if message.payload:
            return put(store, message, now)
        store.remove(message.topic)
        return True

    return changed(RetainedStore, "put", remove)


def versions_are_forgotten_at_a_restart() -> AbstractContextManager[object]:
    return changed(RetainedReplication, "load", lambda core, stored, now: None)


def nobody_compares() -> AbstractContextManager[object]:
    return changed(AntiEntropy, "_compare", lambda core, peer, now: None)


def a_replay_does_not_reach_the_broker() -> AbstractContextManager[object]:
    return changed(RetainedReplication, "_replay", lambda core, held, now, may_wait=False: None)


def every_group_takes_what_comes() -> AbstractContextManager[object]:
    return changed(LocalDelivery, "accepts", lambda core, data: True)


def what_came_early_is_not_looked_at_again() -> AbstractContextManager[object]:
    def deliver_early(core: IncomingStreams, source: Any, now: float) -> None:
        while source.next_place in source.out_of_order:
            data = source.out_of_order.pop(source.next_place)
            source.out_of_order_bytes -= size_ahead(data)
            core._deliver(source, data, now)
            source.next_place += 1

    return changed(IncomingStreams, "_deliver_in_order", deliver_early)


def what_was_granted_stays_granted() -> AbstractContextManager[object]:
    return changed(SharedGroups, "review", lambda core, *more: None)


def a_share_is_taken_back_and_given_to_nobody() -> AbstractContextManager[object]:
    return changed(Custody, "regrant", lambda core, entry, id, grants, now: None)


def grants_stay_behind_at_a_relay() -> AbstractContextManager[object]:
    let_out = FrameForwarder._send

    def without(core: FrameForwarder, hop: bytes, data: Any, *more: Any) -> Any:
        found: Any = let_out(core, hop, data, *more)
        if getattr(found, "grants", None) and data.hops:
            for grant in found.grants[:]:
                found.grants.remove(grant)
        return found

    return changed(FrameForwarder, "_send", without)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rough", "plant"),
    [
        (rough_retained_world, the_last_to_arrive_is_retained),
        (rough_retained_world, a_clock_that_hears_nothing),
        (rough_retained_world, a_removal_is_forgotten_at_once),
        (rough_retained_world, versions_are_forgotten_at_a_restart),
        (rough_retained_world, nobody_compares),
        (rough_retained_world, a_replay_does_not_reach_the_broker),
        (rough_groups_world, every_group_takes_what_comes),
        (rough_groups_world, what_came_early_is_not_looked_at_again),
        (rough_groups_world, what_was_granted_stays_granted),
        (rough_groups_world, a_share_is_taken_back_and_given_to_nobody),
        (rough_groups_world, grants_stay_behind_at_a_relay),
    ],
)
def test_a_planted_bug_is_found(rough: Rough, plant: Plant) -> None:
    with plant():
        assert is_found(partial(rough, settle_s=12.0), range(60), (Wrong,))
