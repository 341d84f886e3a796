"""A linked peer that says whatever it likes, in well-formed frames: no error gets out, and no table
outgrows its bound."""

import random

import pytest

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import Send
from holdfast_federation.core.frames import (
    BUCKETS,
    HOPS_MAX,
    MEMBERS_MAX,
    Announcement,
    AnnouncementRequest,
    Announcements,
    Data,
    Frame,
    Hello,
    Retained,
    RetainedDigest,
    RetainedMessage,
    RetainedRequest,
    Skip,
    StreamAck,
    decode,
    encode,
)
from holdfast_federation.core.identity import EPOCH_MAX, Identity, MessageId
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.policy import LinkPolicy
from holdfast_federation.core.retained.anti_entropy import PULLS_MAX
from tests.support.sim_federation import node_id
from tests.unit.federation.core.test_defects import A, B, alone

NODES = [node_id(number) for number in range(1, 7)]
OWN = NODES[0]
TOPICS = ["a", "a/1", "a/2", "b", "c/d/e"]
FILTERS = ["#", "a/#", "+", "a/+", "$share/g/a/#", "$share/h/+", "$SYS/#", "b"]
NUMBERS = [0, 1, 2, 3, 255, 256, 2**40, EPOCH_MAX]


def number(rng: random.Random, least: int = 0) -> int:
    return max(least, rng.choice(NUMBERS))


def announcement(rng: random.Random) -> Announcement:
    version = number(rng, 1)
    base = rng.choice([0, 0, max(0, version - 1)])
    filters = rng.sample(FILTERS, rng.randint(0, 4))
    return Announcement(
        rng.choice(NODES),
        number(rng, 1),
        version,
        base,
        rng.sample(NODES, rng.randint(0, 5)),
        "",
        rng.random() < 0.1,
        filters,
        rng.sample(FILTERS, 2) if base else [],
    )


def destinations(rng: random.Random, qos: int, origin: bytes) -> list[tuple[bytes, int, int]]:
    nodes = [node for node in NODES if node != origin]
    found = []
    for node in rng.sample(nodes, rng.randint(1, 4)):
        place = number(rng, 1) if qos else 0
        found.append((node, place, rng.randint(1, place) if qos else 0))
    return found


def version(rng: random.Random) -> tuple[int, bytes, int, int]:
    return (number(rng, 1), rng.choice(NODES), number(rng, 1), number(rng, 1))


def anything(rng: random.Random) -> Frame:
    kind = rng.randrange(9)
    origin, hops = rng.choice(NODES), rng.randint(0, HOPS_MAX)
    qos = rng.randint(0, 2)
    if kind == 0:
        return Hello(number(rng, 1), rng.randbytes(8), rng.random() < 0.5)
    if kind == 1:
        return Announcements([announcement(rng) for _ in range(rng.randint(0, 3))])
    if kind == 2:
        return AnnouncementRequest([(rng.choice(NODES), number(rng, 1), number(rng, 1))])
    if kind == 3:
        places = destinations(rng, qos, origin)
        shares = [filter for filter in FILTERS if filter.startswith("$share")]
        grants = [(places[0][0], rng.random() < 0.5, rng.sample(shares, rng.randint(0, 2)))]
        return Data(
            *(origin, number(rng, 1), number(rng, 1), hops, rng.randint(1, HOPS_MAX), qos),
            *(rng.random() < 0.5, rng.choice(TOPICS), b"x" * rng.randint(0, 2000), b""),
            *(rng.choice([None, 0.0, 1.0]), places, rng.randrange(3), number(rng)),
            grants if rng.random() < 0.5 else [],
        )
    if kind == 4:
        return StreamAck(origin, number(rng, 1), rng.choice(NODES), number(rng), hops)
    if kind == 5:
        bucket = rng.choice([None, rng.randrange(BUCKETS)])
        known = [(rng.choice(TOPICS), version(rng)) for _ in range(rng.randint(0, 3))]
        after, upto = rng.choice(["", *TOPICS]), rng.choice([None, *TOPICS])
        destination = rng.choice(NODES)
        return RetainedRequest(origin, destination, hops, 1, "#", bucket, after, upto, known)
    if kind == 6:
        messages = [
            RetainedMessage(
                rng.choice(TOPICS), b"y" * rng.randint(0, 9), 1, b"", None, version(rng)
            )
            for _ in range(rng.randint(0, 4))
        ]
        upto = rng.choice([None, *TOPICS])
        return Retained(origin, rng.choice(NODES), hops, rng.randint(0, 9), messages, upto)
    if kind == 7:
        buckets = [(rng.randrange(BUCKETS), number(rng)) for _ in range(rng.randint(0, 5))]
        return RetainedDigest(origin, rng.choice(NODES), hops, buckets)
    places = destinations(rng, 1, origin)
    return Skip(origin, number(rng, 1), number(rng, 1), hops, 4, places, rng.randrange(3))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_a_peer_says_breaks_a_member(seed: int) -> None:
    rng = random.Random(seed)
    config = FederationConfig(
        retained_messages_max=3, redundancy=rng.randint(1, 3), queue_messages_max=50
    )
    member = FederationMember(
        Identity(OWN, 1), "", config, 0.0, ["#", "$share/g/a/#"], wall_s=1_750_000_000.0
    )
    now = 0.0
    policy = LinkPolicy(messages_per_s=1000.0) if seed % 2 else LinkPolicy()
    for _ in range(4000):
        now += rng.choice((0.0, 0.001, 0.05))
        for peer in NODES[1:4]:
            if peer not in member.links:
                member.link_up(peer, now, policy)
        member.frame(rng.choice(NODES[1:4]), encode(anything(rng)), now)
        if member.timer(now) <= now:
            member.handle_timers(now)
        for effect in member.take_effects():
            id = getattr(effect, "id", None)
            if id is not None and rng.random() < 0.5:
                member.stored(id, now)
    assert member.counts["bad frame"] == 0
    assert len(member.retained.store) <= 3
    assert len(member.retained._reconciling._pulls) <= PULLS_MAX
    assert len(member.retained._reconciling._digests) <= len(NODES)
    assert len(member.receiving.positions()) <= MEMBERS_MAX
    assert sum(
        map(len, (source.out_of_order for source in member.receiving._sources.values()))
    ) <= (len(NODES) * config.shared_window_messages)


def test_an_origin_that_uses_an_id_twice_is_confirmed_what_is_stored() -> None:
    """The id is unstored at two places. Counter-example: the later one counts, so the first is
    confirmed before it is stored, and the next confirmation falls."""
    member = alone()
    for place, sequence in enumerate((1, 2, 1), 1):
        data = Data(A, 1, sequence, 1, 4, 1, False, "in", b"x", b"", None, [(B, place, 1)], 0)
        member.frame(A, encode(data), 1.0)
    member.handle_timers(2.0)
    member.take_effects()
    confirmed = []
    for sequence in (1, 2):
        member.check()
        member.stored(MessageId(A, 1, sequence), 3.0)
        member.handle_timers(4.0)
        frames = [decode(each.data) for each in member.take_effects() if isinstance(each, Send)]
        confirmed += [frame.place for frame in frames if isinstance(frame, StreamAck)]
    assert confirmed == [1, 3]
