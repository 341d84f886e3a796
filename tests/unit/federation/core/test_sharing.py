"""Shared subscriptions over members: who gets a group's message, and what when databases differ."""

from collections import Counter

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Delete, DeliverLocally, Dropped, Message, Send, Store
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
from holdfast_federation.core.messages.custody import Custody
from holdfast_federation.core.messages.origin import owner
from holdfast_federation.core.routing.interest import LocalInterest, RemoteInterest
from tests.support.sim_federation import LAN_EDGES, World, edges_of, node_id
from tests.unit.federation.core.test_defects import A, B, C, alone, of

GROUP = "$share/g/t/#"


def lan(subscriptions: dict[int, list[str]]) -> World:
    config = FederationConfig(group_reassign_s=3.0)
    world = World(12, edges_of(LAN_EDGES), 1, None, config, subscriptions)
    world.run_until(world.is_stable, 10.0)
    world.run(0.5)
    return world


def data(shares: list[str], is_plain: bool = False, topic: str = "t/1", place: int = 1) -> bytes:
    grants = [(B, is_plain, shares)]
    places = [(B, place, 1)]
    return encode(Data(A, 1, place, 1, 4, 1, False, topic, b"x", b"", None, places, 0, 0, grants))


def wanting_group(**options: object) -> FederationMember:
    member = alone(**options)
    member.local_interest([GROUP], [], 0.5)
    member.handle_timers(1.0)
    member.take_effects()
    return member


def test_each_message_goes_to_one_member_of_a_group() -> None:
    world = lan({0: [GROUP], 5: [GROUP, "t/1"], 9: [GROUP]})
    for number in range(90):
        world.publish(11, f"t/{number % 30}", number % 3, b"%d" % number)
        world.run(0.02)
    world.run(2.0)
    arrivals = [numbers for (_, group), numbers in world.group_arrivals.items() if group == GROUP]
    assert len(arrivals) == 90
    assert all(len(numbers) == 1 for numbers in arrivals)
    # Spread by topics; and 5, which wants t/1 plainly, has that in any case.
    assert {numbers[0] for numbers in arrivals} == {0, 5, 9}
    assert sum(5 in numbers for numbers in world.arrivals.values()) == 3


def test_a_topic_stays_with_its_owner_when_another_member_comes_or_goes() -> None:
    nodes = [node_id(number) for number in range(8)]
    topics = [f"t/{number}" for number in range(400)]
    before = {topic: owner(GROUP, topic, nodes) for topic in topics}
    after = {topic: owner(GROUP, topic, nodes[:-1]) for topic in topics}
    assert all(after[topic] == before[topic] for topic in topics if before[topic] != nodes[-1])
    assert all(20 < count < 90 for count in Counter(before.values()).values())


def test_the_origins_own_clients_come_first() -> None:
    world = lan({0: [GROUP], 11: [GROUP]})
    assert world.publish(11, "t/1", 1, b"here") is None
    assert world.publish(5, "t/1", 1, b"there") is not None
    world.run(1.0)
    assert world.group_arrivals[b"here", GROUP] == [11]
    assert len(world.group_arrivals[b"there", GROUP]) == 1


def test_groups_are_announced_and_plain_members_told_apart() -> None:
    local, remote = LocalInterest(), RemoteInterest()
    local.change([GROUP, "t/+"], [])
    remote.change(A, local.announced(), [])
    remote.change(B, [GROUP], [])
    wanting = remote.wanting("t/1")
    assert wanting.members == (A,)
    assert wanting.groups == {GROUP: (A, B)}
    remote.change(B, [], [GROUP])
    assert remote.wanting("t/1").groups == {GROUP: (A,)}
    assert remote.wanting("x") == ((), {})


def test_too_many_filters_are_announced_without_groups() -> None:
    local = LocalInterest(2)
    local.change([GROUP, "a/1", "a/2"], [])
    assert local.announced() == {"t/#", "a/#"}
    # Nobody can be granted the group, so it gets what plain subscribers get.
    assert not local.announces_groups()


def test_a_group_that_was_not_granted_a_message_does_not_get_it() -> None:
    member = wanting_group()
    member.local_interest(["t/1"], [], 1.0)
    member.take_effects()
    member.frame(A, data([], is_plain=True), 1.0)
    (delivered,) = of(DeliverLocally, member)
    assert isinstance(delivered, DeliverLocally)
    assert delivered.is_plain
    assert delivered.granted == ()
    assert not delivered.is_regranted


def test_a_group_here_that_began_later_leaves_a_message_to_another_member() -> None:
    member = wanting_group()
    announce(member, A, 2, [GROUP])
    member.take_effects()
    early = Message("t/1", b"x", 1, missed_by=(GROUP,))
    assert member.local_publish(Message("t/1", b"x", 1), 3.0) is None
    assert member.local_publish(early, 3.0) is not None
    assert grants_in(member) == [(A, False, [GROUP])]


def test_a_message_for_a_group_that_has_left_is_not_confirmed() -> None:
    member = wanting_group()
    member.local_interest([], [GROUP], 1.0)
    member.take_effects()
    member.frame(A, data([GROUP]), 1.0)
    assert member.counts["group not here"] == 1
    member.handle_timers(1.5)
    assert of(DeliverLocally, member) == []
    assert member.receiving.positions()[A] == (1, 1)
    # Its origin has heard of it.
    member.frame(A, data([]), 2.0)
    assert of(Dropped, member)
    assert member.receiving.positions()[A] == (1, 2)


def test_a_later_copy_without_the_group_counts_before_the_turn_of_its_place() -> None:
    """Place 2 came early with a grant for the group, which left. Counter-example: the copy without
    the grant is dropped for a repetition, and each retransmission frees one place only."""
    member = wanting_group()
    member.frame(A, data([GROUP], place=2), 1.0)
    member.local_interest([], [GROUP], 1.0)
    member.frame(A, data([], place=2), 2.0)
    member.frame(A, data([], place=1), 2.0)
    assert member.receiving.positions()[A] == (1, 3)


def grants_in(member: FederationMember) -> list[tuple[bytes, bool, list[str]]]:
    found = []
    for effect in member.take_effects():
        if isinstance(effect, Store | Send):
            frame = decode(effect.data)
            if isinstance(frame, Data):
                found.extend(frame.grants)
    return found


def announce(member: FederationMember, node: bytes, version: int, filters: list[str]) -> None:
    links = {A: [B, C], C: [A, B]}[node]
    news = Announcement(node, 1, version, 0, links, "", False, filters, [])
    member.frame(A, encode(Announcements([news])), float(version))


def test_what_a_member_has_no_group_for_any_more_is_granted_to_another() -> None:
    member = alone()
    announce(member, A, 2, [GROUP])
    member.handle_timers(2.5)
    member.take_effects()
    id = member.local_publish(Message("t/1", b"x", 1), 2.5)
    assert id is not None
    member.stored(id, 2.6)
    assert grants_in(member) == [(A, False, [GROUP]), (A, False, [GROUP])]
    announce(member, C, 3, [GROUP])
    announce(member, A, 4, [])
    member.handle_timers(5.5)
    assert grants_in(member)[:2] == [(C, False, [GROUP]), (A, False, [])]
    assert member.custody.queued(C) == 1


def test_what_is_granted_to_another_says_so_after_a_restart_too() -> None:
    """Its destination may have the message, for plain subscribers or under a later number."""
    member = alone()
    announce(member, A, 2, [GROUP])
    member.take_effects()
    id = member.local_publish(Message("t/1", b"x", 1), 2.5)
    announce(member, C, 3, [GROUP])
    announce(member, A, 4, [])
    member.handle_timers(5.5)
    stored = {each.id: each.data for each in of(Store, member) if isinstance(each, Store)}
    told = {each: decode(data) for each, data in stored.items()}
    assert {each: isinstance(data, Data) and data.is_regranted for each, data in told.items()} == {
        each: each != id for each in stored
    }
    assert len(told) == 2
    again = Custody(MemberContext(Identity(A, 1), FederationConfig()))
    again.load(stored.values(), 0.0)
    (sent,) = again.collect(lambda node: node == C, 0.0)
    assert sent.is_regranted
    assert sent.grants == [(C, False, [GROUP])]


def granted_to_a(**options: object) -> tuple[FederationMember, MessageId]:
    """A member with a message in custody whose group only A has."""
    member = alone(**options)
    announce(member, A, 2, [GROUP])
    id = member.local_publish(Message("t/1", b"x", 1), 2.5)
    assert id is not None
    member.stored(id, 2.6)
    member.take_effects()
    return member, id


def test_a_share_that_only_the_origin_has_a_group_for_any_more_comes_back() -> None:
    member, id = granted_to_a()
    member.local_interest([GROUP], [], 3.0)
    announce(member, A, 4, [])
    member.handle_timers(5.5)
    (store,) = (each for each in of(Store, member) if isinstance(each, Store) and each.id != id)
    member.stored(store.id, 5.6)
    (delivered,) = of(DeliverLocally, member)
    assert isinstance(delivered, DeliverLocally)
    assert (delivered.id, delivered.granted) == (store.id, (GROUP,))
    assert delivered.is_regranted
    assert not delivered.is_plain
    # It is in custody until the broker has it, and no longer.
    member.handle_timers(7.0)
    assert Delete(store.id) not in of(Delete, member)
    member.stored(store.id, 7.1)
    member.handle_timers(7.2)
    assert Delete(store.id) in of(Delete, member)
    # A does not have the message either, and says so.
    assert member.custody.queued(A) == 1
    member.frame(A, encode(StreamAck(B, 1, A, 1, 0)), 7.3)
    assert len(member.custody) == 0


def test_a_share_that_came_back_and_was_not_stored_comes_again_after_a_restart() -> None:
    member, id = granted_to_a()
    member.local_interest([GROUP], [], 3.0)
    announce(member, A, 4, [])
    member.handle_timers(5.5)
    stored = [each.data for each in of(Store, member) if isinstance(each, Store)]
    identity = Identity(B, 2)
    for positions, count in (({}, 1), ({B: (1, 2)}, 0)):
        again = FederationMember(
            identity, "", FederationConfig(), 0.0, [GROUP], stored=stored, positions=dict(positions)
        )
        again.handle_timers(0.5)
        found = [one for one in again.take_effects() if isinstance(one, DeliverLocally)]
        assert len(found) == count
        for one in found:
            assert (one.id.node, one.id.epoch) == (B, 1)
            assert one.id != id
        again.handle_timers(1.0)
        assert len(again.custody) == 1 + count


def test_nobody_else_brings_a_share_back() -> None:
    member = wanting_group()
    forged = Data(
        B,
        1,
        1,
        1,
        4,
        1,
        False,
        "t/1",
        b"x",
        b"",
        None,
        [(B, 1, 1)],
        0,
        0,
        [(B, False, [GROUP])],
        True,
    )
    member.frame(A, encode(forged), 1.0)
    assert member.counts["own message"] == 1
    assert of(DeliverLocally, member) == []


def test_a_share_that_nobody_has_a_group_for_waits_for_one() -> None:
    member, _ = granted_to_a(group_reassign_s=5.0)
    announce(member, A, 4, [])
    for now in (5.0, 6.0, 9.0):
        member.handle_timers(now)
    assert of(Dropped, member) == []
    announce(member, C, 9, [GROUP])
    member.handle_timers(11.0)
    assert member.custody.queued(C) == 1
    assert of(Dropped, member) == []


def test_a_share_that_nobody_has_a_group_for_is_dropped_in_the_end() -> None:
    member, _ = granted_to_a(group_reassign_s=5.0)
    announce(member, A, 4, [])
    for now in (5.0, 6.0, 9.0, 20.0):
        member.handle_timers(now)
    assert [each.reason for each in of(Dropped, member) if isinstance(each, Dropped)] == [
        "group gone"
    ]


def test_a_member_that_leaves_loses_its_shares_to_others() -> None:
    member, _ = granted_to_a()
    announce(member, C, 3, [GROUP])
    leaving = Announcement(A, 1, 4, 0, [B, C], "", True, [GROUP], [])
    member.frame(A, encode(Announcements([leaving])), 4.0)
    assert member.custody.queued(A) == 0
    assert member.custody.queued(C) == 1


def test_a_group_that_goes_from_member_to_member_loses_nothing() -> None:
    """It always has clients somewhere, at first elsewhere and in the end at the publisher's."""
    world = lan({0: [GROUP]})
    number = 0
    for here, there in ((0, 5), (5, 11), (11, 9), (9, 0), (0, 11)):
        for _ in range(20):
            number += 1
            world.publish(11, f"t/{number}", 1 + number % 2, b"%d" % number)
        world.members[there].subscribe(GROUP)
        world.members[here].unsubscribe(GROUP)
        world.run(0.03)
    world.run(10.0)
    lacking = [
        number for number in range(1, 1 + number) if not world.group_arrivals[b"%d" % number, GROUP]
    ]
    assert lacking == []
    assert all(not len(member.member.custody) for member in world.members)


def test_a_member_that_cannot_be_reached_loses_its_share_to_another() -> None:
    world = lan({0: [GROUP], 5: [GROUP]})
    topic = next(
        f"t/{number}"
        for number in range(99)
        if owner(GROUP, f"t/{number}", [node_id(0), node_id(5)]) == node_id(5)
    )
    world.cut.update(
        (min(node_id(5), peer), max(node_id(5), peer)) for peer in map(node_id, range(12))
    )
    world.publish(11, topic, 1, b"x")
    world.run(1.0)
    assert world.group_arrivals[b"x", GROUP] == []
    world.run(10.0)
    assert world.group_arrivals[b"x", GROUP] == [0]
