"""Retained messages: versions, what is held and for whom, pages, and what is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.topics.names import matches
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import (
    DeleteRetained,
    DeliverLocally,
    Effect,
    Message,
    RetainLocally,
    Send,
    StoreRetained,
)
from holdfast_federation.core.frames import (
    RETAINED_PAGE_MAX,
    Announcement,
    Announcements,
    Data,
    Frame,
    Goodbye,
    InvalidFrame,
    Retained,
    RetainedDigest,
    RetainedMessage,
    RetainedRequest,
    Skip,
    decode,
    encode,
)
from holdfast_federation.core.identity import Identity
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.messages.custody import BadEntry
from holdfast_federation.core.retained.anti_entropy import witnesses
from holdfast_federation.core.retained.clock import AHEAD_MAX_S, HybridClock
from holdfast_federation.core.retained.store import RetainedStore
from tests.support.sim_federation import LAN_EDGES, World, edges_of, node_id

A, B, C = node_id(1), node_id(2), node_id(3)
WALL_S = 1_750_000_000.0
NOW_US = int(WALL_S * 1e6)


def retained(
    topic: str,
    payload: bytes = b"x",
    stamp: int = NOW_US,
    node: bytes = A,
    expires_us: int | None = None,
) -> RetainedMessage:
    return RetainedMessage(topic, payload, 1, b"", expires_us, (stamp, node, 1, 1))


def member(filters: tuple[str, ...] = ("#",), **options: object) -> FederationMember:
    """Member B, linked with A, which wants `a/#`."""
    config = FederationConfig(**options)  # type: ignore[arg-type]
    found = FederationMember(Identity(B, 1), "", config, 0.0, filters, wall_s=WALL_S)
    found.link_up(A, 0.0)
    news = Announcement(A, 1, 1, 0, [B], "", False, ["a/#"], [])
    found.frame(A, encode(Announcements([news])), 0.0)
    found.handle_timers(0.02)
    found.take_effects()
    return found


def tell(to: FederationMember, *messages: RetainedMessage, now: float = 1.0) -> list[Effect]:
    to.frame(A, encode(Retained(A, B, 0, 0, list(messages), None)), now)
    return to.take_effects()


def frames(effects: list[Effect]) -> list[Frame]:
    found = [decode(effect.data) for effect in effects if isinstance(effect, Send)]
    return [frame for frame in found if frame is not None]


def held(to: FederationMember, topic: str) -> bytes | None:
    message = to.retained.store.get(topic)
    return message.payload if message is not None else None


@pytest.mark.parametrize(
    "frame",
    [
        RetainedRequest(A, B, 0, 1, "a/#", None, "", None, []),
        RetainedRequest(A, B, 3, 9, "#", 63, "a", "b", [("aa", (5, C, 1, 7))]),
        Retained(A, B, 0, 0, [retained("a"), retained("b", b"", expires_us=7)], "b"),
        RetainedDigest(A, B, 1, [(0, 17), (63, 2**62)]),
        Skip(A, 1, 7, 1, 4, [(B, 3, 1)], 1),
    ],
)
def test_what_is_said_is_heard(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (RetainedRequest(A, B, 0, 1, "a#", None, "", None, []), "level of its own"),
        (RetainedRequest(A, B, 0, 1, "$share/g/a", None, "", None, []), "shared"),
        (RetainedRequest(A, B, 0, 1, "#", 64, "", None, []), "< 64|<= 63"),
        (RetainedRequest(A, B, 0, 1, "#", 1, "", None, [("a", (1, C, 1, 1))] * 501), "length"),
        (Retained(A, B, 0, 0, [retained("a/+")], None), "wildcards"),
        (Retained(A, B, 0, 0, [retained("a", stamp=0)], None), ">= 1"),
        (Retained(A, B, 0, 0, [retained("a")] * (RETAINED_PAGE_MAX + 1), None), "length"),
        (RetainedDigest(A, b"x", 0, []), "length"),
        (Skip(A, 1, 7, 1, 4, [(A, 3, 1)]), "own origin"),
        (Skip(A, 1, 7, 1, 4, [(B, 0, 0)]), "place 0"),
    ],
)
def test_what_is_wrong_is_refused(frame: Frame, reason: str) -> None:
    with pytest.raises(InvalidFrame, match=reason):
        decode(encode(frame))


@given(st.integers(6, 10), st.binary(max_size=200))
def test_noise_is_refused(kind: int, noise: bytes) -> None:
    try:
        decode(bytes((2, kind)) + noise)
    except InvalidFrame:
        pass


def test_stamps_grow_and_stay_near_the_wall() -> None:
    clock = HybridClock(WALL_S, 0.0)
    first = clock.stamp(1.0)
    assert first == NOW_US + 1_000_000
    assert clock.stamp(1.0) == first + 1
    # Another clock is ahead: what follows is newer than what was seen.
    assert clock.observe(first + 60_000_000, 1.0)
    assert clock.stamp(2.0) == first + 60_000_001
    assert clock.stamp(100.0) == NOW_US + 100_000_000
    clock.set_wall(WALL_S - 3600.0, 100.0)
    assert clock.stamp(101.0) == NOW_US + 100_000_001


def test_a_stamp_too_far_ahead_is_not_believed() -> None:
    clock = HybridClock(WALL_S, 0.0)
    ahead = int((WALL_S + AHEAD_MAX_S + 1.0) * 1e6)
    assert not clock.observe(ahead, 0.0)
    assert clock.stamp(0.0) == NOW_US
    one = member()
    assert tell(one, retained("a/1", stamp=ahead + 10_000_000)) == []
    assert one.counts["stamp ahead"] == 1


def test_the_newest_version_counts_in_whatever_order_they_come() -> None:
    versions = [
        retained("a/1", b"%d" % number, NOW_US + number // 2, node_id(number % 2 + 8))
        for number in range(6)
    ]
    for seed in range(10):
        one = member()
        shuffled = versions[:]
        random.Random(seed).shuffle(shuffled)
        for version in shuffled:
            tell(one, version)
        assert held(one, "a/1") == b"5"


def test_a_replay_is_given_to_the_broker_and_stored_and_nothing_is_sent() -> None:
    one = member()
    effects = tell(one, retained("a/1"))
    assert [type(effect) for effect in effects] == [RetainLocally, StoreRetained]
    assert isinstance(effects[0], RetainLocally)
    assert effects[0].message.payload == b"x"
    assert effects[0].message.delivered_id == effects[0].id
    assert tell(one, retained("a/1")) == []


def test_who_has_an_older_version_is_told_the_newer() -> None:
    one = member()
    tell(one, retained("a/1", b"new", NOW_US + 5))
    (answer,) = frames(tell(one, retained("a/1", b"old", NOW_US)))
    assert isinstance(answer, Retained)
    assert answer.messages == [retained("a/1", b"new", NOW_US + 5)]
    assert answer.destination == A


def test_what_nobody_wants_here_is_not_held() -> None:
    one = member(("b/#",))
    assert tell(one, retained("a/1")) == []
    assert held(one, "a/1") is None


def test_a_tombstone_outlives_what_it_removed_and_then_goes() -> None:
    one = member(tombstone_s=100.0)
    tell(one, retained("a/1", b"v"))
    effects = tell(one, retained("a/1", b"", NOW_US + 9))
    assert [type(effect) for effect in effects] == [RetainLocally, StoreRetained]
    # What was removed does not come back with one who was away.
    tell(one, retained("a/1", b"v"), now=50.0)
    assert held(one, "a/1") == b""
    one.handle_timers(99.0)
    assert held(one, "a/1") == b""
    one.take_effects()
    one.handle_timers(102.0)
    assert held(one, "a/1") is None
    assert DeleteRetained("a/1") in one.take_effects()
    assert tell(one, retained("a/1", b"", NOW_US + 9), now=102.0) == []


def test_what_expires_goes() -> None:
    one = member()
    tell(one, retained("a/1", expires_us=NOW_US + 10_000_000))
    one.handle_timers(9.0)
    assert held(one, "a/1") == b"x"
    one.handle_timers(10.5)
    assert held(one, "a/1") is None
    tell(one, retained("a/2", expires_us=NOW_US + 10_000_000), now=11.0)
    assert held(one, "a/2") is None


def test_a_publication_gets_a_stamp_and_is_held_though_nobody_wants_it() -> None:
    one = member(())
    assert one.local_publish(Message("b/1", b"x", 1, True), 1.0) is None
    (store,) = one.take_effects()
    assert isinstance(store, StoreRetained)
    id = one.local_publish(Message("a/1", b"x", 1, True), 2.0)
    assert id is not None
    version = one.retained.store.get("a/1")
    assert version is not None
    assert version.version == (NOW_US + 2_000_000, *id)
    # Not retained: no version.
    one.local_publish(Message("a/2", b"x", 1), 2.0)
    assert held(one, "a/2") is None


def live(stamp: int, payload: bytes = b"x", sequence: int = 1, qos: int = 0) -> bytes:
    place = sequence if qos else 0
    return encode(
        Data(A, 1, sequence, 1, 4, qos, True, "a/1", payload, b"", None,
             [(B, place, min(place, 1))], 0, stamp)
    )  # fmt: skip


def test_a_late_publication_is_delivered_and_leaves_what_is_retained() -> None:
    one = member()
    tell(one, retained("a/1", b"new", NOW_US + 9, C))
    one.frame(A, live(NOW_US, b"old"), 1.0)
    (delivered,) = one.take_effects()
    assert isinstance(delivered, DeliverLocally)
    assert not delivered.message.is_retained
    one.frame(A, live(NOW_US + 20, b"newer", 2), 1.0)
    effects = one.take_effects()
    assert [type(effect) for effect in effects] == [DeliverLocally, StoreRetained]
    assert held(one, "a/1") == b"newer"


def test_what_qos_0_lost_to_order_is_still_retained() -> None:
    one = member()
    one.frame(A, live(NOW_US, b"first", 2), 1.0)
    one.take_effects()
    one.frame(A, live(NOW_US + 1, b"second", 1), 1.0)
    assert [type(effect).__name__ for effect in one.take_effects()] == [
        "Dropped", "RetainLocally", "StoreRetained",
    ]  # fmt: skip


def test_what_a_broker_had_before_is_older_than_anything_published() -> None:
    one = member()
    one.broker_has_retained(Message("a/1", b"old", 1, True), 1.0)
    assert held(one, "a/1") == b"old"
    tell(one, retained("a/1", b"known", 2))
    assert held(one, "a/1") == b"known"
    one.broker_has_retained(Message("a/1", b"old", 1, True), 2.0)
    (correction,) = one.take_effects()
    assert isinstance(correction, RetainLocally)
    assert correction.message.payload == b"known"
    one.broker_has_retained(Message("a/1", b"known", 1, True), 2.0)
    assert one.take_effects() == []
    one.broker_has_retained(Message("$SYS/1", b"x", 1, True), 2.0)
    assert held(one, "$SYS/1") is None


@pytest.mark.parametrize("known", [b"old", b""])
def test_what_a_client_retained_later_in_its_broker_is_newer(known: bytes) -> None:
    """Nobody else wanted the topic then, so the federation was not told."""
    one = member()
    tell(one, retained("a/1", b"older", NOW_US - 1), retained("a/1", known, NOW_US))
    one.broker_has_retained(Message("a/1", b"new", 1, True, stamp=NOW_US + 1), 2.0)
    assert not any(isinstance(effect, RetainLocally) for effect in one.take_effects())
    assert held(one, "a/1") == b"new"
    (answer,) = frames(tell(one, retained("a/1", known, NOW_US), now=3.0))
    assert isinstance(answer, Retained)
    assert [message.payload for message in answer.messages] == [b"new"]
    one.broker_has_retained(Message("a/1", b"older", 1, True, stamp=NOW_US - 1), 4.0)
    assert held(one, "a/1") == b"new"


def test_what_was_stored_is_known_after_a_restart() -> None:
    one = member()
    stores = [effect for effect in tell(one, retained("a/1", stamp=NOW_US + 3600_000_000))
              if isinstance(effect, StoreRetained)]  # fmt: skip
    again = FederationMember(
        Identity(B, 2),
        "",
        FederationConfig(),
        5.0,
        ["#"],
        retained=[store.data for store in stores],
        wall_s=WALL_S + 5.0,
    )
    # Not published again: nobody is told, nothing is delivered.
    assert not [e for e in again.take_effects() if isinstance(e, RetainLocally | DeliverLocally)]
    assert held(again, "a/1") == b"x"
    again.local_publish(Message("a/1", b"y", 1, True), 6.0)
    newer = again.retained.store.get("a/1")
    assert newer is not None
    assert newer.version[0] == NOW_US + 3600_000_001


def test_a_store_with_something_else_in_it_is_refused() -> None:
    with pytest.raises(BadEntry):
        FederationMember(
            Identity(B, 1), "", FederationConfig(), 0.0,
            retained=[encode(Goodbye("x"))], wall_s=0.0,
        )  # fmt: skip


def test_what_is_beyond_the_bounds_is_not_held_and_counted() -> None:
    one = member(retained_messages_max=2)
    for number in range(3):
        tell(one, retained(f"a/{number}"))
    assert len(one.retained.store) == 2
    assert one.counts["retained full"] == 1
    tell(one, retained("a/0", b"newer", NOW_US + 1))
    assert held(one, "a/0") == b"newer"
    small = member(retained_bytes_max=100)
    tell(small, retained("a/1", b"x" * 50), retained("a/2", b"x" * 50))
    assert len(small.retained.store) == 1


def test_pages_are_bounded_and_together_have_everything() -> None:
    one = member()
    topics = [f"a/{number:04}" for number in range(1000)]
    for topic in topics:
        tell(one, retained(topic, b"x" * 600, node=B))
    asked, after, got = 0, "", []
    while True:
        asked += 1
        request = RetainedRequest(A, B, 0, asked, "a/#", None, after, None, [])
        one.frame(A, encode(request), 2.0)
        (page,) = frames(one.take_effects())
        assert isinstance(page, Retained)
        assert page.number == asked
        assert len(page.messages) <= RETAINED_PAGE_MAX
        assert sum(message.size for message in page.messages) <= 256 << 10
        got += [message.topic for message in page.messages]
        if page.end_topic is None:
            break
        after = page.end_topic
    assert got == topics
    assert 4 <= asked < 8


def test_others_are_let_go_from_the_broker_too_when_nobody_has_wanted_them_for_long() -> None:
    one = member(("a/#",), unwanted_s=60.0)
    tell(one, retained("a/1"))
    one.local_publish(Message("a/2", b"own", 1, True), 1.0)
    one.local_interest([], ["a/#"], 2.0)
    one.handle_timers(10.0)
    assert held(one, "a/1") == b"x"
    one.take_effects()
    one.handle_timers(80.0)
    assert held(one, "a/1") is None
    assert held(one, "a/2") == b"own"
    cleared = [e for e in one.take_effects() if isinstance(e, RetainLocally)]
    assert [(e.message.topic, e.message.payload) for e in cleared] == [("a/1", b"")]


def test_without_wall_time_nothing_is_held_and_everything_relayed() -> None:
    one = FederationMember(Identity(B, 1), "", FederationConfig(), 0.0, ["#"])
    one.link_up(A, 0.0)
    one.link_up(C, 0.0)
    for node, number in ((A, 1), (C, 2)):
        news = Announcement(node, 1, 1, 0, [B], "", False, ["a/#"], [])
        one.frame(node, encode(Announcements([news])), 0.0)
        assert number
    one.handle_timers(0.02)
    one.take_effects()
    one.local_publish(Message("a/1", b"x", 0, True), 1.0)
    data = [frame for frame in frames(one.take_effects()) if isinstance(frame, Data)]
    assert {frame.stamp for frame in data} == {0}
    one.frame(A, encode(RetainedDigest(A, C, 0, [(1, 1)])), 1.0)
    (passed,) = frames(one.take_effects())
    assert passed == RetainedDigest(A, C, 1, [(1, 1)])
    one.frame(A, encode(RetainedDigest(A, B, 0, [(1, 1)])), 1.0)
    assert one.counts["retained off"] == 1


def test_frames_of_strangers_and_in_circles_end() -> None:
    one = member()
    stranger = RetainedDigest(node_id(99), B, 0, [(1, 1)])
    one.frame(A, encode(stranger), 1.0)
    assert one.counts["unknown member"] == 1
    one.frame(A, encode(RetainedDigest(A, C, 16, [(1, 1)])), 1.0)
    assert one.counts["hop limit"] == 1
    assert frames(one.take_effects()) == []


LEVELS = st.lists(st.sampled_from(["a", "b", "+"]), min_size=1, max_size=4)


@given(LEVELS, st.booleans(), LEVELS, st.booleans(), LEVELS.map("/".join))
def test_a_witness_is_matched_only_by_what_covers_its_filter(
    inner: list[str], inner_rest: bool, outer: list[str], outer_rest: bool, topic: str
) -> None:
    narrow = "/".join([*inner, *(["#"] if inner_rest else [])])
    wide = "/".join([*outer, *(["#"] if outer_rest else [])])
    name = topic.replace("+", "c")
    if all(matches(wide, one) for one in witnesses(narrow)) and matches(narrow, name):
        assert matches(wide, name)


@given(st.data())
def test_two_members_say_the_same_of_what_they_share(data: st.DataObject) -> None:
    """Whatever order versions and interest come in, as long as they end alike."""
    topics = ["a", "a/1", "b"]
    wanted: dict[str, set[bytes]] = {topic: set() for topic in topics}
    stores = {
        node: RetainedStore(
            MemberContext(Identity(node, 1), FederationConfig()), lambda t: tuple(sorted(wanted[t]))
        )
        for node in (A, B)
    }
    final = {
        topic: retained(topic, b"x", NOW_US + number, data.draw(st.sampled_from([A, B, C])))
        for number, topic in enumerate(topics)
    }
    for node, store in stores.items():
        for topic in data.draw(st.permutations(topics)):
            store.put(retained(topic, b"old", NOW_US - 1), 0.0)
            assert node
    for topic in topics:
        wanted[topic] = set(data.draw(st.sets(st.sampled_from([A, B, C]))))
    for node, store in stores.items():
        store.review(["#"], 0.0)
        for topic, message in final.items():
            if node in wanted[topic] or message.version[1] == node:
                store.put(message, 0.0)
            else:
                store.remove(topic)
    assert stores[A].vector(B) == stores[B].vector(A)


def test_a_new_subscriber_gets_what_is_retained_from_far_away() -> None:
    world = World(12, edges_of(LAN_EDGES), 1, subscriptions={0: ["t/#"]})
    world.run_until(world.is_stable, 10.0)
    for number in range(600):
        world.publish(11, f"t/{number}", 1, b"%d" % number, is_retained=True)
        world.run(0.001)
    world.run(1.0)
    # Its origin is gone: the nearest that holds them is asked.
    world.crash(11)
    world.run(1.0)
    world.members[5].subscribe("t/#")
    took = world.run_until(lambda: len(world.members[5].broker) == 600, 5.0)
    assert took < 2.0
    assert world.members[5].broker == world.members[0].broker
    assert not any(5 in numbers for numbers in world.arrivals.values())
    # A restart says nothing again.
    copies = world.copies.total()
    world.restart(11)
    world.run(10.0)
    assert world.copies.total() == copies


def test_a_retained_message_that_nobody_wanted_is_found_at_its_origin() -> None:
    world = World(12, edges_of(LAN_EDGES), 1)
    world.run_until(world.is_stable, 10.0)
    world.publish(11, "t", 1, b"x", is_retained=True)
    world.run(1.0)
    world.members[5].subscribe("t")
    assert world.run_until(lambda: world.members[5].broker.get("t") == b"x", 5.0) < 2.0


def test_what_a_broker_says_late_that_it_has_comes_without_waiting_for_the_next_check() -> None:
    world = World(12, edges_of(LAN_EDGES), 1, subscriptions={5: ["t"]})
    world.run_until(world.is_stable, 10.0)
    world.run(1.0)
    found = Message("t", b"x", 1, True)
    world.members[11].call(lambda core, now: core.broker_has_retained(found, now))
    assert world.run_until(lambda: world.members[5].broker.get("t") == b"x", 30.0) < 2.0


@pytest.mark.parametrize("count", [0, 100])
def test_without_changes_retained_messages_cost_little_control(count: int) -> None:
    world = World(12, edges_of(LAN_EDGES), 1, subscriptions={0: ["t/#"], 5: ["t/#"]})
    world.run_until(world.is_stable, 10.0)
    for number in range(count):
        world.publish(11, f"t/{number}", 1, b"x", is_retained=True)
    world.run(5.0)
    world.frames.clear()
    world.run(60.0)
    assert world.frames[6] == world.frames[7] == 0
    assert world.frames[9] == 0 if not count else 0 < world.frames[9] < 60


def test_a_healed_partition_agrees_on_what_is_retained_within_three_seconds() -> None:
    world = World(12, edges_of(LAN_EDGES), 1, subscriptions={0: ["#"], 5: ["#"], 9: ["#"]})
    world.run_until(world.is_stable, 10.0)
    for number in range(200):
        world.publish(11, f"t/{number}", 1, b"before", is_retained=True)
    world.run(1.0)
    world.partition(set(range(6)))
    world.run(20.0)
    for number in range(100):
        world.publish(5, f"t/{number}", 1, b"here", is_retained=True)
    world.run(1.0)
    for number in range(50, 150):
        world.publish(9, f"t/{number}", 1, b"" if number < 75 else b"there", is_retained=True)
    world.run(1.0)
    world.heal()
    brokers = [world.members[number].broker for number in (0, 5, 9)]
    assert brokers[0] != brokers[2]
    world.run_until(lambda: brokers[0] == brokers[1] == brokers[2], 3.0)
    # The later side of the two wins, topic by topic.
    expected = {f"t/{number}": b"here" for number in range(50)}
    expected |= {f"t/{number}": b"there" for number in range(75, 150)}
    expected |= {f"t/{number}": b"before" for number in range(150, 200)}
    assert brokers[0] == expected


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_handed_over_after_the_broker_got_another_version_replaces_that(
    is_replaced: bool,
) -> None:
    """As after a crash, when nobody remembers what the broker was given lately."""
    one = member()
    tell(one, retained("a/1", b"theirs"))
    one.local_publish(Message("a/1", b"ours", 1, True, is_replaced=is_replaced), 20.0)
    effects = one.take_effects()
    told = [effect.message.payload for effect in effects if isinstance(effect, RetainLocally)]
    assert told == ([b"ours"] if is_replaced else [])
    assert held(one, "a/1") == b"ours"


def crashed_while_a_removal_was_late(published: list[bytes]) -> tuple[World, list[bytes]]:
    """Member 0's clients publish these to a topic that was removed. Its own broker gets the removal
    once more behind them, as it comes from the federation, and the member dies before it has stored
    anything. Also what the broker of member 0 was brought since."""
    world = World(2, [(0, 1)], 1, subscriptions={0: ["#"], 1: ["#"]})
    world.run_until(world.is_stable, 10.0)
    for payload in (b"old", b""):
        world.publish(0, "t", 1, payload, is_retained=True)
        world.run(10.0)
    for payload in published:
        world.publish(0, "t", 1, payload, is_retained=True)
    world.crash(0)
    world.members[0].broker.pop("t", None)
    brought: list[bytes] = []
    retains = world.members[0].broker_retains

    def noted(message: Message, is_brought: bool) -> None:
        brought.append(message.payload)
        retains(message, is_brought)

    world.members[0].broker_retains = noted  # type: ignore[method-assign]
    world.run(5.0)
    world.restart(0)
    world.run(10.0)
    return world, brought


def test_a_publication_that_lost_against_an_older_removal_comes_back_at_its_origin() -> None:
    """It is handed over again, and reaches all others: its own broker is told, too."""
    world, brought = crashed_while_a_removal_was_late([b"new"])
    assert [member.broker for member in world.members] == [{"t": b"new"}] * 2
    assert brought == [b"new"]


def test_what_a_client_has_removed_does_not_come_back_for_a_moment() -> None:
    """The publication is handed over again, and its removal behind it."""
    world, brought = crashed_while_a_removal_was_late([b"new", b""])
    assert [member.broker for member in world.members] == [{}] * 2
    assert b"new" not in brought
