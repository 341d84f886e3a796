"""What is sent when: before it is stored, together to several destinations, and again."""

import random

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Delete, Message, Send, Store
from holdfast_federation.core.frames import (
    Announcement,
    Announcements,
    Data,
    StreamAck,
    decode,
    encode,
)
from holdfast_federation.core.identity import Identity, MessageId
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.messages.custody import Custody, PathChanges
from holdfast_federation.core.messages.retransmit_timer import RetransmitTimer
from tests.support.sim_federation import LAN_EDGES, Weather, World, edges_of, random_edges
from tests.support.sim_federation_member import node_id
from tests.unit.federation.core.test_defects import A, B, C, alone

GROUP = "$share/g/t"
OTHER_GROUP = "$share/h/t"
D = node_id(4)
KNOWN = Message("t", b"x", 2, is_repeatable=True)


def lan(weather: Weather | None = None, **options: object) -> World:
    config = FederationConfig(**options)  # type: ignore[arg-type]
    world = World(12, edges_of(LAN_EDGES), 1, weather, config, {0: ["t"], 5: ["t"]})
    world.run_until(world.is_stable, 20.0)
    world.run(1.0)
    return world


def sent(member: FederationMember) -> list[Data]:
    frames = [decode(effect.data) for effect in member.take_effects() if isinstance(effect, Send)]
    return [frame for frame in frames if isinstance(frame, Data)]


# Before it is stored


def test_what_would_be_known_again_is_sent_at_once() -> None:
    member = alone()
    id = member.local_publish(KNOWN, 1.0)
    store, send = member.take_effects()
    assert isinstance(store, Store)
    assert isinstance(send, Send)
    assert store.id == id
    assert id is not None
    member.stored(id, 1.1)
    assert member.take_effects() == []


@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_confirmed_before_it_is_stored_need_not_be_stored(qos: int) -> None:
    member = alone()
    id = member.local_publish(Message("t", b"x", qos, is_repeatable=True), 1.0)
    assert id is not None
    member.take_effects()
    member.frame(A, encode(StreamAck(B, 1, A, 1, 0)), 1.1)
    assert member.take_effects() == [Delete(id)]
    # The store was writing it meanwhile.
    member.stored(id, 1.2)
    member.handle_timers(5.0)
    assert sent(member) == []
    assert len(member.custody) == 0


@pytest.mark.parametrize(
    ("message", "filters"),
    [
        (Message("t", b"x", 1), ["t"]),
        # Another version is made of it when it is handed over again.
        (Message("t", b"x", 1, True, is_repeatable=True), ["t"]),
        # Another member may be given the group's share the second time.
        (KNOWN, [GROUP]),
        (KNOWN, ["t", GROUP]),
    ],
)
def test_what_would_not_be_known_again_is_stored_first(
    message: Message, filters: list[str]
) -> None:
    member = alone()
    news = Announcement(A, 1, 2, 0, [B], "", False, filters, [])
    member.frame(A, encode(Announcements([news])), 1.0)
    member.handle_timers(1.1)
    member.take_effects()
    id = member.local_publish(message, 2.0)
    assert id is not None
    assert sent(member) == []
    # In order: what is behind it waits, too.
    member.local_publish(KNOWN, 2.0)
    assert sent(member) == []
    member.stored(id, 2.1)
    assert [frame.id for frame in sent(member)][:1] == [id]


def test_a_share_is_not_taken_back_before_it_is_stored_for_another() -> None:
    """Else the one passes its place, and the other never has it."""
    member = alone()
    for node, filters, peers in ((A, [GROUP], [B, C]), (C, [GROUP], [A])):
        news = Announcement(node, 1, 2, 0, peers, "", False, filters, [])
        member.frame(A, encode(Announcements([news])), 1.0)
    member.handle_timers(1.1)
    member.take_effects()
    id = member.local_publish(KNOWN, 2.0)
    assert id is not None
    member.stored(id, 2.1)
    (given,) = {node for frame in sent(member) for node, _, _ in frame.grants}
    other = ({A, C} - {given}).pop()
    peers = {A: [B, C], C: [A]}[given]
    news = Announcement(given, 1, 3, 0, peers, "", False, [], [])
    member.frame(A, encode(Announcements([news])), 3.0)
    member.handle_timers(4.0)
    member.handle_timers(4.1)
    effects = member.take_effects()
    first, second = [decode(effect.data) for effect in effects if isinstance(effect, Store)]
    assert isinstance(first, Data)
    assert isinstance(second, Data)
    assert first.grants == [(other, False, [GROUP])]
    assert second.grants == [(given, False, [])]
    assert not [effect for effect in effects if isinstance(effect, Send) and effect.data[1] == 4]
    member.stored(first.id, 4.2)
    assert {frame.id for frame in sent(member)} == {first.id, second.id}
    assert second.id == id


def regranted(custody: Custody) -> None:
    """Message 1 is B's. One group's share of it moves to C as message 2, the other's to D as 3."""
    custody.accept(MessageId(A, 1, 1), KNOWN, [B], 10.0, {B: (True, (GROUP, OTHER_GROUP))})
    (entry,) = custody.granted()
    custody.regrant(entry, MessageId(A, 1, 2), {C: (False, (GROUP,))}, 10.1)
    custody.regrant(entry, MessageId(A, 1, 3), {D: (False, (OTHER_GROUP,))}, 10.1)
    custody.grant_only(entry, B, (), 10.1)
    custody.check()


def sequences(custody: Custody) -> list[int]:
    custody.check()
    return [data.id.sequence for data in custody.collect(lambda node: node == B, 11.0)]


def test_a_message_waits_for_the_store_of_each_share_that_was_taken_back() -> None:
    """The last one is dropped, and the first is not stored yet."""
    custody = Custody(MemberContext(Identity(A, 1), FederationConfig()))
    regranted(custody)
    custody.stored(MessageId(A, 1, 1))
    custody.abandon(D, "member left")
    assert sequences(custody) == []
    custody.stored(MessageId(A, 1, 2))
    assert sequences(custody) == [1]


def test_a_message_waits_for_its_own_store_when_its_shares_are_dropped() -> None:
    custody = Custody(MemberContext(Identity(A, 1), FederationConfig()))
    regranted(custody)
    custody.abandon(C, "member left")
    custody.abandon(D, "member left")
    assert sequences(custody) == []
    custody.stored(MessageId(A, 1, 1))
    assert sequences(custody) == [1]


def test_a_share_is_taken_back_when_custody_is_full() -> None:
    """The message that had it is dropped for its room, and is not stored again after that."""
    context = MemberContext(Identity(A, 1), FederationConfig(custody_bytes_max=3))
    custody = Custody(context)
    regranted(custody)
    assert len(custody) == 1
    written = [each for each in context.effects if isinstance(each, Store | Delete)]
    last = {each.id.sequence: type(each) for each in written}
    assert last == {1: Delete, 2: Delete, 3: Store}


def test_what_was_taken_over_from_an_earlier_life_goes_first() -> None:
    member = alone()
    member.local_publish(KNOWN, 1.0)
    (stored, _) = member.take_effects()
    assert isinstance(stored, Store)
    again = FederationMember(
        Identity(B, 2),
        "",
        FederationConfig(),
        0.0,
        ["in"],
        stored=[stored.data],
        remembered=member.memory(0.0, 0.0),
    )
    again.link_up(A, 0.0)
    again.handle_timers(0.02)
    again.local_publish(KNOWN, 0.03)
    assert [frame.epoch for frame in sent(again)] == [1]
    again.frame(A, encode(StreamAck(B, 1, A, 1, 0)), 0.1)
    assert [frame.epoch for frame in sent(again)] == [2]


# Together


def backlog(world: World, count: int) -> int:
    """Copies of so many messages that are published at once at 11, for 0 and 5."""
    before = sum(world.copies.values())
    ids = [world.publish(11, "t", 1) for _ in range(count)]
    world.run_until(lambda: set(ids) <= world.promised and not world.missing(), 60.0)
    return sum(world.copies.values()) - before


def test_a_backlog_costs_no_more_copies_than_single_messages() -> None:
    count = 1500
    assert backlog(lan(), count) == 3 * count


def test_a_backlog_costs_hardly_more_where_the_far_end_is_slower() -> None:
    """Its confirmations take several times as long as the near one's."""
    world = lan(Weather(delay_s=(0.01, 0.02)))
    count = 1500
    assert backlog(world, count) <= 3.05 * count


def test_nobody_waits_for_a_destination_that_is_dead() -> None:
    seconds = {}
    for is_dead in (False, True):
        world = lan(window_messages=32, shared_window_messages=256)
        if is_dead:
            # Known to be there for another two seconds.
            world.crash(5, is_silent=True)
        begun = world.now
        ids = [world.publish(11, "t", 1) for _ in range(400)]
        world.run_until(lambda ids=ids, world=world: all(0 in world.arrivals[id] for id in ids), 9)  # type: ignore[misc]
        seconds[is_dead] = world.now - begun
        if is_dead:
            stream = world.members[11].member.custody._streams[node_id(5)]
            assert stream.sent <= world.config.shared_window_messages
            world.restart(5)
            world.run_until(lambda world=world: not world.missing(), 20.0)  # type: ignore[misc]
    assert seconds[True] <= seconds[False] + 0.05


def test_what_comes_ahead_of_its_turn_is_bounded() -> None:
    world = lan(window_messages=32, shared_window_messages=256)
    # The first one is lost, and what is behind it comes.
    world.weather.loss = 1.0
    world.publish(11, "t", 1)
    world.weather.loss = 0.0
    early = 0
    for _ in range(400):
        world.publish(11, "t", 1)
    for _ in range(50):
        world.run(0.01)
        for number in (0, 5):
            sources = world.members[number].member.receiving._sources
            early = max(
                early, len(sources[node_id(11)].out_of_order) if node_id(11) in sources else 0
            )
    assert 0 < early < world.config.shared_window_messages
    world.run_until(lambda: not world.missing(), 20.0)


# Again


def copies_of_slow_stream(confirm_s: float, every_s: float) -> tuple[list[int], int]:
    """A destination that stores slowly, while links come and go elsewhere: copies of each message,
    and how many there should be."""
    world = lan()
    world.members[0].filters.clear()
    world.members[0].call(lambda core, now: core.local_interest([], ["t"], now))
    world.run(1.0)
    path = world.members[11].member.routes.paths(node_id(11), node_id(5))[0]
    on_path = {int.from_bytes(node, "big") for node in path}
    elsewhere = [edge for edge in world.edges if not set(edge) & on_path]
    assert elsewhere
    world.weather.sync_s = (confirm_s, confirm_s)
    rng = random.Random(1)
    ids = []
    for _ in range(12):
        ids.append(world.publish(11, "t", 1))
        world.run(every_s / 2)
        world.kill_link(*rng.choice(elsewhere))
        world.run(every_s / 2)
    world.run(20.0)
    return [world.copies[id] for id in ids if id is not None], len(path) - 1


def test_a_destination_that_confirms_slowly_gets_each_message_once() -> None:
    copies, least = copies_of_slow_stream(0.4, 0.5)
    assert copies == [least] * len(copies)


def test_one_that_takes_longer_than_the_wait_gets_the_first_ones_twice() -> None:
    copies, least = copies_of_slow_stream(1.7, 2.5)
    assert sum(copies[2:]) == least * len(copies[2:])
    assert sum(copies[:2]) <= 4 * least


def test_patience_grows_with_waits_in_vain_and_with_what_confirmations_take() -> None:
    config = FederationConfig()
    patience = RetransmitTimer(config)
    waits = []
    for _ in range(6):
        waits.append(patience.wait_s)
        patience.expired()
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    # What was sent several times says nothing; one that was sent once does.
    patience.confirmed(1, 1, 50.0)
    patience.start(50.0)
    assert patience.wait_s == 8.0
    patience.launched(1, 2, 50.0)
    patience.confirmed(1, 2, 52.0)
    assert patience.wait_s == 3.0
    # Forgotten with time.
    for place in range(3, 60):
        patience.launched(1, place, 60.0)
        patience.confirmed(1, place, 60.01)
    assert patience.wait_s == config.retry_s


def test_after_a_loss_of_the_path_waits_begin_short_and_end_long() -> None:
    config = FederationConfig()
    patience = RetransmitTimer(config)
    patience.launched(1, 1, 10.0)
    patience.moved(10.01)
    waits = [patience.after_a_loss(1, 1)]
    for _ in range(9):
        patience.expired()
        waits.append(patience.wait_s)
    assert waits == pytest.approx([0.05, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0])
    # And a message that is sent soon after is not left to the long one.
    patience = RetransmitTimer(config)
    patience.moved(10.0)
    patience.start(10.5)
    assert patience.wait_s == config.reroute_s
    patience.start(11.5)
    assert patience.wait_s == config.retry_s


def test_what_was_on_a_lost_path_does_not_wait_for_confirmations_of_what_came_before() -> None:
    """The first two came through, and their confirmations take a detour. The others are lost."""
    context = MemberContext(Identity(A, 1), FederationConfig())
    custody = Custody(context)
    for sequence in range(1, 5):
        custody.accept(MessageId(A, 1, sequence), KNOWN, [B], 10.0)
    assert len(custody.collect(lambda node: True, 10.0)) == 4
    custody.rerouted(PathChanges(frozenset([B]), frozenset([B])), 10.1)
    due = 10.1 + context.config.reroute_s
    for place, now in ((1, 10.12), (2, 10.14)):
        custody.confirmed(B, 1, place, now)
        assert custody.timer() == due
    custody.handle_timers(due)
    assert [data.id.sequence for data in custody.collect(lambda node: True, due)] == [3, 4]
    # What the first two took tells of the loss: the next wait is not longer for it.
    assert custody.timer() == due + context.config.reroute_s


def test_a_lost_path_that_had_passed_all_on_costs_nothing() -> None:
    context = MemberContext(Identity(A, 1), FederationConfig())
    custody = Custody(context)
    custody.accept(MessageId(A, 1, 1), KNOWN, [B], 10.0)
    custody.collect(lambda node: True, 10.0)
    custody.rerouted(PathChanges(frozenset([B]), frozenset([B])), 10.1)
    custody.accept(MessageId(A, 1, 2), KNOWN, [B], 10.11)
    custody.collect(lambda node: True, 10.11)
    custody.confirmed(B, 1, 1, 10.14)
    # The wait for the second one begins with this confirmation.
    assert custody.timer() == 10.14 + context.config.reroute_s


def test_healing_costs_few_copies() -> None:
    """Of a stream that flows while links close on its way."""
    rng = random.Random(3)
    world = World(12, random_edges(12, rng), 3, subscriptions={11: ["t"]})
    world.run_until(world.is_stable, 20.0)
    world.run(1.0)
    repeated = 0
    for _ in range(10):
        path = world.members[0].member.routes.paths(node_id(0), node_id(11))[0]
        hops = [int.from_bytes(node, "big") for node in path]
        ids = [world.publish(0, "t", 1)]
        world.kill_link(hops[-2], hops[-1])
        for _ in range(50):
            ids.append(world.publish(0, "t", 1))
            world.run(0.01)
        world.run(5.0)
        longest = max(world.hops)
        repeated += sum(max(0, world.copies[id] - longest) for id in ids if id is not None)
    assert not world.missing()
    assert repeated < 10 * 50
