"""What the published federators get wrong, each by its number in docs/federation-paper.md; and the
bounds of what is kept. Their first defect, the lost answer to a join, is the driver's:
tests/unit/bench/paper/test_driver.py."""

import json
from typing import Any

import pytest

from bench.paper.config import BadConfig, PaperConfig
from bench.paper.effects import (
    ConnectNeighbour,
    DeliverLocally,
    DisconnectNeighbour,
    Effect,
    PublishToNeighbour,
)
from bench.paper.member import PaperMember
from bench.paper.topic import TIMES_MAX
from holdfast_federation.core.messages.duplicates import WINDOW
from tests.support.paper_worlds import grid_edges, lan, settled
from tests.support.sim_paper import TOPIC, PaperWorld

TC, TB = 10.0, 10.0


def alone(**options: Any) -> PaperMember:
    """Member 5; its neighbours are 2, 3, 4 and 7."""
    config = PaperConfig(
        **{"reply_delay_s": 0.0, "core_ann_interval_s": TC, "beacon_interval_s": TB, **options}
    )
    neighbours = {number: f"tcp://{number}" for number in (2, 3, 4, 7)}
    member = PaperMember(5, 1, config, neighbours, 0.0)
    member.take_effects()
    return member


def core_ann(
    member: PaperMember,
    now: float,
    root: int,
    sender: int,
    number: int,
    distance: int,
    epoch: int = 1,
) -> list[Effect]:
    body = {"CoreId": root, "SenderId": sender, "Seqn": number, "Dist": distance, "Epoch": epoch}
    return handled(member, "federator/core_ann/t", body, now)


def memb_ann(
    member: PaperMember, now: float, root: int, sender: int, number: int, epoch: int = 1
) -> list[Effect]:
    body = {"CoreId": root, "SenderId": sender, "Seqn": number, "Epoch": epoch}
    return handled(member, "federator/memb_ann/t", body, now)


def routed(
    member: PaperMember, now: float, origin: int, number: int, sender: int, hops: int = 1
) -> list[Effect]:
    body = {
        "PubId": {"OriginId": origin, "Seqn": number, "Epoch": 1},
        "SenderId": sender, "Payload": "", "Hops": hops,
    }  # fmt: skip
    return handled(member, "federator/routing/t", body, now)


def handled(member: PaperMember, topic: str, body: object, now: float) -> list[Effect]:
    member.handle(topic, json.dumps(body).encode(), now)
    return member.take_effects()


def beacon(member: PaperMember, now: float) -> list[Effect]:
    return handled(member, "federator/beacon/t", "", now)


def passed(member: PaperMember, now: float) -> list[Effect]:
    """The time up to `now`, timer by timer."""
    effects: list[Effect] = []
    while member.timer() <= now:
        member.handle_timers(member.timer())
        effects += member.take_effects()
    return effects


def to(effects: list[Effect], kind: str) -> list[int]:
    """Neighbours that get such a message."""
    return sorted(
        effect.neighbour
        for effect in effects
        if isinstance(effect, PublishToNeighbour) and effect.topic == f"federator/{kind}/t"
    )


def test_2_a_root_has_children() -> None:
    member = alone()
    assert to(beacon(member, 1.0), "core_ann") == [2, 3, 4, 7]
    memb_ann(member, 1.1, 5, 3, 1)
    assert member.view("t", 1.2).children == (3,)
    member.handle("federated/t", b"x", 1.2)
    assert to(member.take_effects(), "routing") == [3]


@pytest.mark.parametrize(("side", "count"), [(3, 16), (4, 33), (5, 56), (6, 85)])
def test_3_announcements_do_not_multiply_with_the_number_of_paths(side: int, count: int) -> None:
    """2E - N + 1 of them; with the published code 130, 492 and 1834 in the last three."""
    world = settled(PaperWorld(side * side, grid_edges(side), 1, {side: [TOPIC]}))
    world.sent.clear()
    world.run(world.config.core_ann_interval_s)
    assert world.sent["core_ann"] == count


def test_3_parents_are_nearest_and_have_the_lowest_ids() -> None:
    member = alone()
    assert to(core_ann(member, 1.0, 0, 7, 1, 2), "core_ann") == [2, 3, 4]
    # Farther: not a parent. As far: one more. Nearer: in place of all.
    assert core_ann(member, 1.1, 0, 3, 1, 3) == []
    assert core_ann(member, 1.1, 0, 4, 1, 2) == []
    assert member.view("t", 1.2).parents == (4, 7)
    core_ann(member, 1.1, 0, 3, 1, 2)
    assert member.view("t", 1.2).parents == (3, 4)
    assert to(core_ann(member, 1.2, 0, 2, 1, 1), "core_ann") == [3, 4, 7]
    assert member.view("t", 1.2).parents == (2,)
    assert member.view("t", 1.2).distance == 2


def test_3_a_deposed_root_falls_silent() -> None:
    member = alone()
    beacon(member, 1.0)
    assert core_ann(member, 2.0, 8, 7, 3, 0) == []
    assert member.counts["higher root"] == 1
    assert to(core_ann(member, 2.0, 3, 3, 1, 0), "memb_ann") == [3]
    assert to(passed(member, 11.5), "core_ann") == []
    assert member.view("t", 11.5).root == 3


def test_4_nothing_is_retained_and_a_dead_root_is_not_elected_again() -> None:
    world = settled(lan())
    (root,) = world.roots()
    assert root is not None
    # That nothing is retained is checked with each message.
    world.members[root].wanted.clear()
    world.crash(root)
    config = world.config
    world.run(3 * config.core_ann_interval_s + config.beacon_interval_s + 1.0)
    other = 5 if root == 0 else 0
    assert world.roots() == {other}
    world.crash(11)
    world.restart(11)
    world.run(config.core_ann_interval_s)
    assert world.members[11].member.view(TOPIC, world.now).root == other


def test_6_neighbours_that_are_back_are_members_again() -> None:
    """Of what the driver does: tests/interop/test_paper_mosquitto.py."""
    world = settled(lan())
    world.cut.update(edge for edge in world.edges if 5 in edge)
    world.run(60.0)
    world.heal()
    world.run(2 * TC)
    payload = world.publish(11)
    world.run(1.0)
    assert not world.missing(payload)


def test_7_a_removed_neighbour_is_no_parent_no_child_and_no_connection() -> None:
    member = alone(redundancy=3)
    for sender in (2, 3, 4):
        core_ann(member, 1.0, 0, sender, 1, 1)
    memb_ann(member, 1.1, 0, 7, 1)
    removal = {"neighbor": {"id": 3, "ip": "tcp://3"}, "action": "REMOVE"}
    assert handled(member, "federator/topology_ann", removal, 2.0) == [DisconnectNeighbour(3)]
    removal["neighbor"] = {"id": 7, "ip": "tcp://7"}
    assert handled(member, "federator/topology_ann", removal, 2.0) == [DisconnectNeighbour(7)]
    view = member.view("t", 2.0)
    assert (view.parents, view.children) == ((2, 4), ())
    member.handle("federated/t", b"x", 2.0)
    assert to(member.take_effects(), "routing") == [2, 4]
    # And what it still says is refused.
    core_ann(member, 2.1, 0, 3, 2, 1)
    assert member.counts["no neighbour"] == 1
    member.set_neighbours({2: "tcp://2", 8: "tcp://8"})
    assert member.take_effects() == [DisconnectNeighbour(4), ConnectNeighbour(8, "tcp://8")]


def test_7_what_is_known_of_a_root_ends_with_it() -> None:
    member = alone()
    core_ann(member, 1.0, 0, 2, 1, 1)
    memb_ann(member, 1.1, 0, 7, 1)
    passed(member, 1.0 + 3 * TC)
    view = member.view("t", 1.0 + 3 * TC)
    assert (view.root, view.parents, view.children) == (None, (), ())
    assert not list(member.topics)


def test_8_a_restarted_root_is_heard_at_once() -> None:
    member = alone()
    core_ann(member, 1.0, 2, 2, 500, 0, epoch=1)
    core_ann(member, 2.0, 2, 2, 1, 0, epoch=2)
    beacon(member, 2.0)
    assert member.counts["old announcement"] == 0
    # Of its former life:
    core_ann(member, 2.1, 2, 2, 501, 0, epoch=1)
    assert member.counts["old announcement"] == 1


def test_8_a_root_restarts_and_nobody_waits_for_an_expiry() -> None:
    world = settled(lan())
    (root,) = world.roots()
    assert root is not None
    for _ in range(30):
        world.publish(root)
    world.run(1.0)
    world.crash(root)
    world.restart(root)
    world.run(world.config.beacon_interval_s + 0.5)
    assert world.roots() == {root}
    payload = world.publish(root)
    world.run(0.5)
    assert not world.missing(payload)


def test_9_a_root_with_a_higher_id_follows_a_dead_one_without_delay() -> None:
    member = alone()
    core_ann(member, 1.0, 0, 2, 1, 1)
    # A little before the dead one expires here, it has expired elsewhere.
    assert to(core_ann(member, 30.9, 9, 7, 1, 0), "core_ann") == [2, 3, 4]
    assert member.view("t", 31.0).root == 9
    # If it was not dead after all, its next announcement settles it.
    core_ann(member, 32.0, 0, 2, 4, 1)
    assert member.view("t", 32.0).root == 0
    core_ann(member, 33.0, 9, 7, 2, 0)
    assert member.counts["higher root"] == 1


def test_10_a_root_that_lost_its_subscribers_serves_those_of_others() -> None:
    world = settled(lan())
    (root,) = world.roots()
    assert root is not None
    world.members[root].wanted.clear()
    end = world.now + 12 * TC
    while world.now < end:
        payload = world.publish(11 if root != 11 else 0)
        world.run(0.5)
        assert not world.missing(payload)
    assert world.roots() == {root}


def test_10_a_silent_root_begins_again_when_it_is_answered() -> None:
    member = alone()
    beacon(member, 1.0)
    passed(member, 45.0)
    assert member.view("t", 45.0).root is None
    # Somebody who has not heard of the end yet:
    assert to(memb_ann(member, 46.0, 5, 3, 3), "core_ann") == [2, 3, 4, 7]
    assert member.view("t", 46.0).children == (3,)


def test_11_old_publications_never_begin_to_circulate_again() -> None:
    member = alone()
    beacon(member, 1.0)
    newest = 3 * WINDOW
    numbers = [*range(1, 200), *range(newest - 100, newest + 1)]
    delivered = 0
    for number in [*numbers, 1, 2, 150, newest - 100, newest]:
        effects = routed(member, 2.0, 9, number, 2)
        delivered += sum(isinstance(effect, DeliverLocally) for effect in effects)
    assert delivered == len(numbers)
    assert member.counts["duplicate"] == 5


def test_a_forgotten_topic_does_not_make_old_publications_new() -> None:
    """Windows are not those of topics, so a full table costs no duplicates."""
    member = alone(topics_max=1)
    core_ann(member, 1.0, 0, 2, 1, 1)
    assert to(routed(member, 1.1, 9, 1, 3), "routing") == [2]
    body = {"CoreId": 0, "SenderId": 2, "Seqn": 1, "Dist": 1}
    handled(member, "federator/core_ann/other", body, 1.2)
    assert list(member.topics) == ["other"]
    assert member.counts["topic forgotten"] == 1
    core_ann(member, 1.3, 0, 2, 2, 1)
    assert routed(member, 1.4, 9, 1, 3) == []


def test_a_topic_that_is_wanted_here_is_not_forgotten_for_others() -> None:
    member = alone(topics_max=20)
    for number in range(20):
        handled(member, f"federator/beacon/{number}", "", 1.0)
    body = {"CoreId": 0, "SenderId": 2, "Seqn": 1, "Dist": 1}
    handled(member, "federator/core_ann/other", body, 1.2)
    handled(member, "federator/beacon/another", "", 1.2)
    assert member.counts["too many topics"] == 2
    assert len(list(member.topics)) == 20


def test_times_of_forgotten_topics_are_bounded() -> None:
    member = alone(topics_max=4)
    for number in range(1000):
        body = {"CoreId": 0, "SenderId": 2, "Seqn": 1, "Dist": 1}
        handled(member, f"federator/core_ann/{number}", body, 1.0)
    assert len(member._topics._due) <= TIMES_MAX * 4
    assert len(list(member.topics)) == 4
    passed(member, 1.0 + 3 * TC)
    assert not list(member.topics)


def test_neighbours_are_bounded() -> None:
    member = alone(neighbours_max=5)
    for id in (11, 12):
        news = {"neighbor": {"id": id, "ip": "tcp://x"}, "action": "NEW"}
        handled(member, "federator/topology_ann", news, 1.0)
    assert 11 in member.neighbours
    assert member.counts["too many neighbours"] == 1


def test_a_publication_ends_at_the_hop_limit() -> None:
    member = alone(hops_max=4)
    core_ann(member, 1.0, 0, 2, 1, 0)
    beacon(member, 1.0)
    assert to(routed(member, 1.1, 9, 1, 3, hops=3), "routing") == [2]
    effects = routed(member, 1.1, 9, 2, 3, hops=4)
    assert effects == [DeliverLocally("federated/t", b"", 2)]
    assert member.counts["hop limit"] == 1


def test_a_root_is_within_half_the_hop_limit() -> None:
    """So everybody in the mesh can be reached from everybody else."""
    member = alone(hops_max=4)
    assert core_ann(member, 1.0, 0, 2, 1, 2) == []
    assert member.counts["root too far"] == 1
    assert not list(member.topics)


def test_what_a_stale_parent_sends_goes_nowhere() -> None:
    """To a member that nobody is below of any more; what comes from below goes up."""
    member = alone()
    core_ann(member, 1.0, 0, 2, 1, 1)
    core_ann(member, 1.0, 0, 3, 1, 1)
    assert routed(member, 1.1, 9, 1, 2) == []
    assert to(routed(member, 1.1, 9, 2, 7), "routing") == [2, 3]
    # A member of the mesh passes on what a parent sends, but not back.
    memb_ann(member, 1.2, 0, 4, 1)
    assert to(routed(member, 1.3, 9, 3, 2), "routing") == [3, 4]


def test_own_publications_end_here() -> None:
    member = alone()
    beacon(member, 1.0)
    assert routed(member, 1.1, 5, 1, 2) == []
    assert member.counts["own publication"] == 1


def test_answers_wait_for_the_other_copies_of_an_announcement() -> None:
    """So the lowest parents are answered, once each, whichever copy comes first."""
    member = alone(reply_delay_s=0.05)
    core_ann(member, 1.0, 0, 2, 1, 1)
    beacon(member, 1.1)
    for sender in (7, 4, 3):
        assert to(core_ann(member, 11.0, 0, sender, 2, 1), "memb_ann") == []
    # A child's answer makes no difference.
    assert to(memb_ann(member, 11.01, 0, 2, 2), "memb_ann") == []
    assert to(passed(member, 11.1), "memb_ann") == [3, 4]
    assert to(beacon(member, 11.2), "memb_ann") == []


@pytest.mark.parametrize(
    "options",
    [
        {"redundancy": 0},
        {"core_ann_interval_s": 0.0},
        {"beacon_interval_s": float("nan")},
        {"qos": 3},
        {"hops_max": 1},
        {"reply_delay_s": 10.0},
        {"topics_max": 0},
    ],
)
def test_a_wrong_configuration_is_refused(options: Any) -> None:
    with pytest.raises(BadConfig, match=next(iter(options))):
        PaperConfig(**options)
