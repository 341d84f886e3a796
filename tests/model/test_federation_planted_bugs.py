"""The simulator of the federation finds what it is there to find: each mistake, made in the
production code for the length of a test, breaks a promise within a bounded number of seeds."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.frames import Data
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.messages import streams
from holdfast_federation.core.messages.custody import Custody
from holdfast_federation.core.messages.custody_entry import Stream
from holdfast_federation.core.messages.forwarding import FrameForwarder
from holdfast_federation.core.messages.origin import Arrivals, owner
from holdfast_federation.core.messages.streams import IncomingStreams, StreamSource
from holdfast_federation.core.routing.routes import Routes
from tests.support.planted import Planted, changed
from tests.support.sim_federation import Weather, World, rough_world
from tests.support.sim_federation_member import SimMember, node_id
from tests.support.sim_put_back import PutBackWorld, put_back_world

MISSING = "not well within 12.0 s: missing [(MessageId"
LOST = "missing after it was put back: [("

rough = partial(rough_world, settle_s=12.0)


def no_dedup_window() -> AbstractContextManager[object]:
    def deliver_all(core: IncomingStreams, data: Any, place: int, base: int, now: float) -> None:
        source = core._sources.setdefault(data.node, StreamSource(data.epoch, place))
        source.next_place = place
        core._deliver(source, data, now)
        source.next_place = place + 1
        core._acknowledge(data.node, source, now)

    return changed(IncomingStreams, "accept", deliver_all)


def a_cache_that_forgets_instead_of_a_position() -> AbstractContextManager[object]:
    seen: OrderedDict[object, None] = OrderedDict()

    def deliver_unknown(
        core: IncomingStreams, data: Any, place: int, base: int, now: float
    ) -> None:
        source = core._sources.setdefault(data.node, StreamSource(data.epoch, place))
        key = (id(core), data.id)
        if key not in seen:
            source.next_place = place
            core._deliver(source, data, now)
        seen[key] = None
        while len(seen) > 8:
            seen.popitem(last=False)
        source.next_place = place + 1
        core._acknowledge(data.node, source, now)

    return changed(IncomingStreams, "accept", deliver_unknown)


def confirmed_before_it_is_stored() -> AbstractContextManager[object]:
    return changed(StreamSource, "stored_up_to", lambda source: source.next_place - 1)


def sent_before_it_is_stored() -> AbstractContextManager[object]:
    take = Custody.accept

    def take_as_stored(core: Custody, id: Any, message: Any, nodes: Any, *more: Any) -> None:
        take(core, id, message, nodes, *more)
        core.stored(id)

    return changed(Custody, "accept", take_as_stored)


def a_repetition_is_not_known_again() -> AbstractContextManager[object]:
    return changed(SimMember, "_has", lambda member, effect: False)


def stores_are_durable_in_any_order() -> AbstractContextManager[object]:
    def sync(member: SimMember, then: Callable[[], object]) -> None:
        world, life = member.world, member.life

        def done() -> None:
            if life == member.life and member.core is not None:
                then()

        world.at(world.now + world.rng.uniform(*world.weather.sync_s), done)

    return changed(SimMember, "_sync", sync)


def restart_without_an_epoch() -> AbstractContextManager[object]:
    def same_epoch(world: World) -> None:
        world.epoch_step = 0 if world.now > 0.0 else 1

    return changed(World, "step_epochs", same_epoch)


def restart_without_memory() -> AbstractContextManager[object]:
    return changed(FederationMember, "memory", lambda core, now, wall_s: [])


def nothing_is_sent_again() -> AbstractContextManager[object]:
    def disarm(core: Custody, now: float) -> None:
        for node in core._flying:
            core._streams[node].retry_at = None

    return changed(Custody, "handle_timers", disarm)


def next_epoch_before_the_last_is_confirmed() -> AbstractContextManager[object]:
    fill = Custody._fill

    def fill_all(core: Custody, node: bytes, stream: Stream, now: float) -> Any:
        found = fill(core, node, stream, now)
        head = stream.entries[0] if stream.entries else None
        for entry in list(stream.entries)[stream.sent :]:
            if head is not None and entry.may_send and entry.id.epoch != head.id.epoch:
                _, place, _ = core._launch(node, stream, now)
                found.append((entry, (node, place, place)))
        return found

    return changed(Custody, "_fill", fill_all)


def early_places_are_delivered_at_once() -> AbstractContextManager[object]:
    take = IncomingStreams.accept

    def take_from_here(core: IncomingStreams, data: Any, place: int, base: int, now: float) -> Any:
        return take(core, data, place, place, now)

    return changed(IncomingStreams, "accept", take_from_here)


def a_former_epoch_is_confirmed_unread() -> AbstractContextManager[object]:
    return changed(streams, "_is_forgotten", lambda *_: True)


def starts_are_counted_one_by_one() -> AbstractContextManager[object]:
    """So the epochs of the lost starts are used again."""
    return changed(PutBackWorld, "step_epochs", lambda world: None)


def former_epochs_are_forgotten_at_a_restart() -> AbstractContextManager[object]:
    """So what its origin sends again after a crash is taken for new."""

    def keep_the_newest(member: SimMember, origin: bytes, position: tuple[int, int]) -> None:
        newest = member.disk.positions.get(origin, position)
        member.disk.positions[origin] = max(position, newest)

    return changed(SimMember, "_pass", keep_the_newest)


PLANTED = {
    "a former epoch is confirmed unread": Planted(
        a_former_epoch_is_confirmed_unread, put_back_world, LOST
    ),
    "starts are counted one by one": Planted(starts_are_counted_one_by_one, put_back_world, LOST),
    "former epochs are forgotten at a restart": Planted(
        former_epochs_are_forgotten_at_a_restart, rough, "twice at", 118
    ),
    "no dedup window": Planted(no_dedup_window, rough, "taken for known at"),
    "a cache that forgets instead of a position": Planted(
        a_cache_that_forgets_instead_of_a_position, rough, "taken for known at"
    ),
    "confirmed before it is stored": Planted(confirmed_before_it_is_stored, rough, MISSING, 3),
    "sent before it is stored": Planted(
        sent_before_it_is_stored, rough, "was sent before it was stored"
    ),
    "a repetition is not known again": Planted(
        a_repetition_is_not_known_again, rough, "twice at", 2
    ),
    "stores are durable in any order": Planted(
        stores_are_durable_in_any_order, rough, "taken for known at"
    ),
    "restart without an epoch": Planted(restart_without_an_epoch, rough, "two messages are", 1),
    "restart without memory": Planted(restart_without_memory, rough, MISSING, 2),
    "nothing is sent again": Planted(nothing_is_sent_again, rough, MISSING),
    "the next epoch before the last is confirmed": Planted(
        next_epoch_before_the_last_is_confirmed, rough, "taken for known at"
    ),
    "early places are delivered at once": Planted(
        early_places_are_delivered_at_once, rough, MISSING
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    PLANTED[name].check()


def test_a_share_that_is_sent_before_it_is_stored_may_be_two_members() -> None:
    """The origin dies before it is stored, and who was given it is away when it is back."""
    group = "$share/g/t"

    def run() -> list[int]:
        config = FederationConfig(group_reassign_s=3.0)
        weather = Weather(sync_s=(0.2, 0.2))
        world = World(4, [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)], 1, weather, config)
        for number in (2, 3):
            world.members[number].subscribe(group)
        world.run_until(world.is_stable, 10.0)
        world.run(1.0)
        # The disk of the origin stands still.
        world.synced_at[0] = world.now + 5.0
        world.publish(0, "t", 1)
        given = next(
            number
            for number in (2, 3)
            if owner(group, "t", [node_id(2), node_id(3)]) == node_id(number)
        )
        # It dies as soon as the other has stored it, if that was sent it.
        for _ in range(300):
            world.run(0.001)
            if world.group_arrivals[b"x", group]:
                break
        world.crash(0)
        world.crash(given)
        world.restart(0)
        world.run(15.0)
        return world.group_arrivals[b"x", group]

    take = Custody.accept

    def take_as_known(core: Custody, id: Any, message: Any, nodes: Any, *more: Any) -> None:
        take(core, id, message, nodes, *more)
        core._entries[id].waits_for = frozenset(() if message.is_repeatable else (id,))
        core._ready.update(nodes)

    assert len(run()) == 1
    # The world would say at once that it was not stored.
    unchecked = changed(SimMember, "_may_go", lambda member, store: True)
    with unchecked, changed(Custody, "accept", take_as_known):
        assert len(run()) == 2


def test_a_missing_hop_limit_is_found() -> None:
    """Where two members send a message to each other, only the limit ends it."""
    onward = Routes.next_hop

    def astray(routes: Routes, node: bytes) -> bytes | None:
        # Round and round, and never to where it should go.
        around = {0: 1, 1: 2, 2: 0}
        own = int.from_bytes(routes._own, "big")
        return around[own].to_bytes(16, "big") if own in around else onward(routes, node)

    def run() -> Any:
        world = World(4, [(0, 1), (1, 2), (0, 2), (2, 3)], 1, subscriptions={3: ["t"]})
        world.run_until(world.is_stable, 10.0)
        with changed(Routes, "next_hop", astray):
            id = world.publish(0, "t", 0)
            world.run(1.0)
        return world.copies[id] if id is not None else 0

    # As it is: 2 does not take a message of 0 from 1, for 1 is not on the way from 0 to it.
    assert run() == 2

    def without_own(core: Arrivals, peer: bytes, data: Data, now: float) -> None:
        core._forwarding.forward(data, data.destinations, peer, now)

    with changed(Arrivals, "handle_data", without_own):
        assert 3 < run() <= 16

    forward = FrameForwarder.forward

    def uncounted(core: FrameForwarder, data: Data, *more: Any) -> None:
        forward(core, replace(data, hops=0), *more)

    with (
        changed(Arrivals, "handle_data", without_own),
        changed(FrameForwarder, "forward", uncounted),
    ):
        assert run() > 16
