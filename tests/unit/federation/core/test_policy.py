"""What may cross a link, and what becomes of what may not."""

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import DeliverLocally, Dropped, Message, Send
from holdfast_federation.core.frames import Data, Skip, decode, encode
from holdfast_federation.core.identity import Identity
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.policy import OPEN, Allowance, Gate, LinkPolicy
from tests.support.sim_federation import World, edges_of, node_id
from tests.unit.federation.core.test_defects import A, B, alone

INSIDE = LinkPolicy(export_allow=("a/#", "b"), export_deny=("a/secret/#",), import_deny=("c",))


def chain(policies: dict[tuple[int, int], LinkPolicy], filters: list[str]) -> World:
    """0 - 1 - 2, and 2 wants the filters."""
    # No third link by repair.
    config = FederationConfig(degree_min=1)
    world = World(3, edges_of("0-1 1-2"), 1, None, config, {2: filters})
    for (one, other), policy in policies.items():
        world.policies[node_id(one), node_id(other)] = policy
    world.run_until(world.is_stable, 10.0)
    world.run(0.5)
    return world


def with_policy(policy: LinkPolicy) -> FederationMember:
    member = alone()
    member.link_up(A, 1.0, policy)
    member.take_effects()
    return member


def message(sequence: int, qos: int = 1, payload: bytes = b"x", topic: str = "in") -> bytes:
    place = sequence if qos else 0
    destinations = [(B, place, min(place, 1))]
    return encode(Data(A, 1, sequence, 1, 4, qos, False, topic, payload, b"", None, destinations))


@pytest.mark.parametrize(
    ("topic", "reason"),
    [("a/1", None), ("b", None), ("b/1", "not exported"), ("a/secret/1", "not exported")],
)
def test_what_is_allowed_and_not_denied_goes_out(topic: str, reason: str | None) -> None:
    gate = Gate(INSIDE, 0.0)
    assert gate.refuses_export(topic, 1) == reason
    assert gate.refuses_import(topic, 1) is None
    assert gate.refuses_import("c", 1) == "not imported"


def test_an_open_link_lets_everything_through() -> None:
    gate = Gate(OPEN, 0.0)
    for _ in range(10_000):
        assert gate.lets_out(1 << 20, 0.0)
    assert gate.refuses_export("a", 1 << 20) is None


def test_an_allowance_is_used_up_and_fills_again() -> None:
    allowance = Allowance(10.0, 2.0, 0.0)

    def take(now: float) -> int:
        count = 0
        while allowance.has(now):
            allowance.spend(1.0)
            count += 1
        return count

    assert take(0.0) == 20
    assert take(1.0) == 10
    assert take(100.0) == 20


def test_a_message_larger_than_the_allowance_is_not_held_up_for_ever() -> None:
    allowance = Allowance(10.0, 1.0, 0.0)
    assert allowance.has(0.0)
    allowance.spend(100.0)
    assert not allowance.has(8.0)
    assert allowance.has(9.5)


@pytest.mark.parametrize("end", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_what_is_withheld_holds_nothing_up(end: tuple[int, int]) -> None:
    """By either end of either link; what is behind it arrives, and the loss is told."""
    is_export = end in ((0, 1), (1, 2))
    deny = ("t/no",)
    policy = LinkPolicy(export_deny=deny) if is_export else LinkPolicy(import_deny=deny)
    world = chain({end: policy}, ["t/#"])
    for number in range(20):
        world.publish(0, "t/no" if number % 2 else "t/yes", 1, b"%d" % number)
    world.run(2.0)
    arrived = sorted(id.sequence for id in world.arrivals)
    assert arrived == list(range(1, 20, 2))
    assert len(world.members[0].member.custody) == 0
    assert any(effect.reason.startswith("not ") for effect in world.dropped)


def test_a_payload_beyond_the_maximum_is_withheld() -> None:
    world = chain({(0, 1): LinkPolicy(payload_bytes_max=10)}, ["t"])
    for size in (10, 11, 9):
        world.publish(0, "t", 1, b"x" * size)
        world.publish(0, "t", 0, b"x" * size)
    world.run(2.0)
    assert len(world.arrivals) == 4
    assert {effect.reason for effect in world.dropped} == {"payload too large", "withheld"}


def test_a_rate_makes_messages_late_and_loses_none_at_qos_1() -> None:
    world = chain({(1, 2): LinkPolicy(messages_per_s=20.0)}, ["t"])
    for number in range(60):
        world.publish(0, "t", 1, b"%d" % number)
    world.run(1.0)
    assert len(world.arrivals) < 60
    world.run_until(lambda: not world.missing(), 60.0)
    assert world.members[1].member.counts["rate limited"] > 0


def test_the_receiver_filters_whatever_the_sender_does() -> None:
    member = with_policy(LinkPolicy(import_deny=("in",), payload_bytes_max=100))
    member.frame(A, message(1), 1.0)
    member.frame(A, message(2, 0), 1.0)
    effects = member.take_effects()
    assert not any(isinstance(effect, DeliverLocally) for effect in effects)
    reasons = [effect.reason for effect in effects if isinstance(effect, Dropped)]
    assert reasons == ["not imported", "withheld", "not imported"]
    # Its place is confirmed: it will not come again.
    assert member.receiving.positions()[A] == (1, 2)


def test_a_flood_is_cut_to_its_rate_and_costs_no_memory() -> None:
    member = with_policy(LinkPolicy(messages_per_s=10.0, bytes_per_s=1000.0))
    for sequence in range(1, 2000):
        member.frame(A, message(sequence, 0), 1.0)
    delivered = [e for e in member.take_effects() if isinstance(e, DeliverLocally)]
    assert len(delivered) == 10
    assert member.counts["rate limited"] == 1989


def test_early_messages_are_bounded_in_bytes() -> None:
    member = alone(shared_window_bytes=1000)
    for place in range(2, 200):
        member.frame(A, message(place, payload=b"x" * 90), 1.0)
    assert member.counts["beyond the window"] == 198 - 10


def test_a_skip_goes_on_without_topic_and_payload() -> None:
    member = FederationMember(Identity(B, 1), "", alone().config, 0.0)
    world = chain({(0, 1): LinkPolicy(export_deny=("#",))}, ["t"])
    assert member.node == B
    sent: list[object] = []
    send = world.send

    def watch(sender: object, peer: bytes, data: bytes) -> None:
        sent.append(decode(data))
        send(sender, peer, data)  # type: ignore[arg-type]

    world.send = watch  # type: ignore[method-assign, assignment]
    world.publish(0, "t", 1, b"secret")
    world.run(1.0)
    skips = [frame for frame in sent if isinstance(frame, Skip)]
    assert [skip.hops for skip in skips] == [1, 2]
    assert not any(isinstance(frame, Data) for frame in sent)
    assert len(world.members[0].member.custody) == 0


def test_a_policy_ends_with_its_link() -> None:
    member = with_policy(LinkPolicy(export_deny=("#",)))
    member.link_up(A, 2.0)
    for now in (2.02, 2.12, 2.14):
        member.handle_timers(now)
    member.take_effects()
    member.local_publish(Message("t", b"x", 0), 2.2)
    assert len([e for e in member.take_effects() if isinstance(e, Send)]) == 1
