"""What published federators get wrong, each by its name; and the bounds of what waits."""

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import (
    CloseLink,
    DeliverLocally,
    Dropped,
    Effect,
    IdentityConflict,
    Message,
    Send,
    Store,
)
from holdfast_federation.core.frames import (
    HOPS_MAX,
    Announcement,
    Announcements,
    Data,
    Goodbye,
    decode,
    encode,
)
from holdfast_federation.core.identity import Identity
from holdfast_federation.core.member import FederationMember
from tests.support.sim_federation import LAN_EDGES, World, edges_of, node_id

A, B, C = node_id(1), node_id(2), node_id(3)


def stable(edges: str, subscriptions: dict[int, list[str]]) -> World:
    pairs = edges_of(edges)
    world = World(1 + max(max(pair) for pair in pairs), pairs, 1, subscriptions=subscriptions)
    world.run_until(world.is_stable, 10.0)
    world.run(0.5)
    return world


def deliver(world: World, number: int, topic: str, qos: int = 1) -> float:
    id = world.publish(number, topic, qos)
    assert id is not None
    return world.run_until(lambda: not world.missing() and bool(world.arrivals[id]), 10.0)


def alone(**options: object) -> FederationMember:
    """Member B, linked with A, which wants `t`."""
    config = FederationConfig(**options)  # type: ignore[arg-type]
    member = FederationMember(Identity(B, 1), "", config, 0.0, ["in"])
    member.link_up(A, 0.0)
    news = Announcement(A, 1, 1, 0, [B], "", False, ["t"], [])
    member.frame(A, encode(Announcements([news])), 0.0)
    member.handle_timers(0.02)
    member.take_effects()
    return member


def of(kind: type[Effect], member: FederationMember) -> list[Effect]:
    return [effect for effect in member.take_effects() if isinstance(effect, kind)]


def incoming(sequence: int, place: int, qos: int = 1, epoch: int = 1) -> bytes:
    base = 1 if qos else 0
    return encode(
        Data(A, epoch, sequence, 1, 4, qos, False, "in", b"x", b"", None, [(B, place, base)])
    )


def test_1_the_links_that_the_manager_wants_come_up() -> None:
    world = stable("0-1 1-2", {})
    assert world.members[1].member.links.usable(world.now) == [node_id(0), node_id(2)]


def test_2_the_root_of_a_mesh_has_children() -> None:
    world = stable(LAN_EDGES, {0: ["t"], 5: ["t"], 9: ["t"]})
    mesh = world.members[11].member.mesh("t")
    assert mesh.root == node_id(0)
    assert mesh.members == (node_id(0), node_id(5), node_id(9))
    assert mesh.children[node_id(0)]
    assert node_id(0) not in mesh.parents
    assert all(child in mesh.children[parent] for child, parent in mesh.parents.items())


def test_3_news_does_not_multiply_with_the_number_of_paths() -> None:
    side = 6
    edges = [(n, n + 1) for n in range(side * side) if (n + 1) % side]
    edges += [(n, n + side) for n in range(side * (side - 1))]
    world = World(side * side, edges, 1)
    world.run_until(world.is_stable, 10.0)
    world.run(1.1)
    hellos = world.control_frames
    world.run(2.0)
    hellos = world.control_frames - hellos
    before = world.control_frames
    world.members[0].call(lambda core, now: core.local_interest(["t"], [], now))
    world.run(2.0)
    assert world.is_agreed()
    # 2E - N + 1, and now and then a request for what is on its way already.
    assert world.control_frames - before - hellos <= 2 * len(edges) - side * side + 1 + 20


def test_4_and_9_a_mesh_gets_another_root_when_its_root_leaves() -> None:
    world = stable(LAN_EDGES, {0: ["t"], 5: ["t"], 9: ["t"]})
    world.members[0].call(lambda core, now: core.leave(now))
    world.run(1.0)
    for member in world.members[1:]:
        assert member.member.mesh("t").root == node_id(5)


def test_5_malformed_frames_cost_the_link_and_nothing_else() -> None:
    member = alone()
    member.frame(A, b"\x02\x04garbage", 1.0)
    assert [effect.peer for effect in of(CloseLink, member)] == [A]  # type: ignore[union-attr]
    member.frame(A, incoming(1, 1), 1.0)
    assert member.counts["not linked"] == 1


def test_6_a_lost_link_is_dialled_again() -> None:
    world = stable("0-1 1-2 0-2", {2: ["t"]})
    world.kill_link(0, 1)
    assert world.run_until(world.is_stable, 5.0) < 2.0


def test_7_a_link_that_is_gone_is_in_no_route() -> None:
    world = stable("0-1 1-2 0-2", {2: ["t"]})
    world.cut.add((node_id(0), node_id(2)))
    world.kill_link(0, 2)
    world.run(0.1)
    assert world.members[0].member.routes.next_hop(node_id(2)) == node_id(1)


def test_8_what_a_restarted_origin_says_is_new() -> None:
    world = stable("0-1 1-2", {2: ["t"]})
    for _ in range(3):
        deliver(world, 0, "t", 2)
        deliver(world, 0, "t", 0)
        world.crash(0)
        world.restart(0)
        world.run_until(world.is_stable, 10.0)
    assert deliver(world, 0, "t", 2) < 1.0


def test_10_who_wants_nothing_relays() -> None:
    world = stable("0-1 1-2", {1: ["t"], 2: ["t"]})
    deliver(world, 0, "t")
    world.members[1].filters = []
    world.members[1].call(lambda core, now: core.local_interest([], ["t"], now))
    assert deliver(world, 0, "t") < 0.5


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_11_old_messages_never_begin_to_circulate_again(qos: int) -> None:
    member = alone()
    # At QoS 0 the last one is a window ahead of the others.
    first = [*range(1, 500), 500 if qos else 70_000]
    delivered = 0
    for sequence in [*first, 1, 2, 300, 499, first[-1]]:
        member.frame(A, incoming(sequence, sequence if qos else 0, qos), 1.0)
        delivered += len(of(DeliverLocally, member))
    assert delivered == len(first)


def test_topics_of_brokers_and_federators_and_what_came_in_stay() -> None:
    member = alone()
    news = Announcement(A, 1, 2, 1, [B], "", False, ["#", "$SYS/#"], [])
    member.frame(A, encode(Announcements([news])), 1.0)
    for topic in ("$SYS/broker", "federator/core_ann/t", "federator"):
        assert member.local_publish(Message(topic, b"", 1), 1.0) is None
    id = member.local_publish(Message("t", b"", 1), 1.0)
    assert id is not None
    assert member.local_publish(Message("t", b"", 1, delivered_id=id), 1.0) is None


def test_nothing_is_sent_before_it_is_stored() -> None:
    member = alone()
    id = member.local_publish(Message("t", b"", 1), 1.0)
    assert id is not None
    (store,) = member.take_effects()
    assert isinstance(store, Store)
    member.stored(id, 1.0)
    (send,) = member.take_effects()
    assert isinstance(send, Send)
    frame = decode(send.data)
    assert isinstance(frame, Data)
    assert frame.hops == 1
    assert frame.hops_max <= HOPS_MAX


def test_a_full_queue_loses_its_oldest_and_says_so() -> None:
    member = alone(queue_messages_max=3)
    ids = [member.local_publish(Message("t", b"", 1), 1.0) for _ in range(5)]
    dropped = of(Dropped, member)
    assert dropped == [Dropped("queue full", id, A) for id in ids[:2]]
    assert member.custody.queued(A) == 3


def test_what_expires_while_it_waits_is_dropped_and_counted() -> None:
    member = alone()
    id = member.local_publish(Message("t", b"", 1, expiry_s=5.0), 1.0)
    member.handle_timers(4.0)
    assert of(Dropped, member) == []
    member.handle_timers(7.0)
    assert of(Dropped, member) == [Dropped("expired", id, A)]
    assert len(member.custody) == 0


def test_qos_0_does_not_wait_for_a_busy_link() -> None:
    member = alone()
    member.link_busy(A, True)
    member.local_publish(Message("t", b"", 0), 1.0)
    assert member.take_effects() == []
    assert member.counts["link busy"] == 1


def test_two_members_with_one_id_are_told() -> None:
    member = alone()
    other = Announcement(B, 7, 1, 0, [], "", False, [], [])
    member.frame(A, encode(Announcements([other])), 1.0)
    assert of(IdentityConflict, member) == [IdentityConflict(7)]


def test_a_goodbye_closes_the_link() -> None:
    member = alone()
    member.frame(A, encode(Goodbye("maintenance")), 1.0)
    assert of(CloseLink, member) == [CloseLink(A, "the peer says: maintenance")]
    assert member.routes.next_hop(A) is None or A not in member.links


def test_links_of_own_making_go_when_the_wanted_ones_are_back() -> None:
    world = stable("0-1 1-2 2-3 3-4 4-0", {})
    world.crash(1)
    world.run(3.0)
    assert len(world.members[0].member.links.usable(world.now)) == 2
    world.restart(1)
    world.run(30.0)
    for member in world.members:
        assert set(member.member.links.usable(world.now)) == set(member.desired)
