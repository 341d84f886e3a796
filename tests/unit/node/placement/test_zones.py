"""Placement with zones and capacities: pure, so random clusters show what must always hold."""

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest

from holdfast.log.partition import partition_of
from holdfast.node.metadata.model import NodeTraits
from holdfast.node.placement.ring import Assignment, placement
from holdfast.node.placement.shares import NodeShares, zone_limit

Traits = dict[str, NodeTraits]


def cluster_of(**zones: int) -> Traits:
    """So many nodes in each zone; those of the zone "none" have no zone."""
    return {
        f"{zone}{number}": NodeTraits(f"{zone}{number}", "" if zone == "none" else zone)
        for zone, count in zones.items()
        for number in range(count)
    }


def placed_in(
    traits: Traits, partitions: int, factor: int, current: Sequence[Sequence[str]] = ()
) -> Assignment:
    return placement(list(traits), partitions, factor, current, traits)


def loads(placed: Assignment, nodes: Sequence[str]) -> dict[str, int]:
    counts = Counter(node for replicas in placed for node in replicas)
    return {node: counts[node] for node in nodes}


def led(placed: Assignment, nodes: Sequence[str]) -> dict[str, int]:
    counts = Counter(replicas[0] for replicas in placed)
    return {node: counts[node] for node in nodes}


def moved(before: Assignment, after: Assignment) -> int:
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def require_placed(placed: Assignment, traits: Traits, factor: int) -> None:
    """Each partition has its replicas on different nodes, no zone has more of them than it must,
    and no node has more than one replica above or below its share."""
    copies = min(factor, len(traits))
    shares = NodeShares(traits, len(placed), copies, traits)
    limit = zone_limit(shares.zones.values(), copies)
    enough = len(set(shares.zones.values())) >= copies
    assert limit == 1 if enough else limit > 1
    for replicas in placed:
        assert len(set(replicas)) == len(replicas) == copies
        zones = Counter(shares.zones[node] for node in replicas)
        assert max(zones.values()) <= limit, (replicas, zones)
    for node, load in loads(placed, [*traits]).items():
        assert shares.least[node] <= load <= shares.most[node], (node, load)


def random_cluster(chance: random.Random, count: int, first: int = 0) -> Traits:
    zones = [f"z{number}" for number in range(chance.randint(1, 6))]
    return {
        f"n{number}": NodeTraits(
            f"n{number}",
            chance.choice(["", *zones, *zones]),
            chance.choice((100, 100, 100, 50, 200, 317)),
        )
        for number in range(first, first + count)
    }


@pytest.mark.parametrize("seed", range(40))
def test_any_cluster_is_placed_in_its_zones_through_joins_and_leaves(seed: int) -> None:
    chance = random.Random(seed)
    traits = random_cluster(chance, chance.randint(1, 9))
    factor, partitions = chance.randint(1, 5), chance.choice((1, 16, 64, 100))
    placed = placed_in(traits, partitions, factor)
    require_placed(placed, traits, factor)
    for number in range(12):
        if len(traits) > 1 and chance.random() < 0.45:
            del traits[chance.choice(sorted(traits))]
        else:
            traits |= random_cluster(chance, 1, 100 + number)
        placed = placed_in(traits, partitions, factor, placed)
        require_placed(placed, traits, factor)
        assert placed_in(traits, partitions, factor, placed) == placed, "nothing else moves"
        backwards = dict(reversed(traits.items()))
        assert placed_in(backwards, partitions, factor, placed) == placed


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_stored_comes_into_its_zones(seed: int) -> None:
    """Nodes that get zones later, nodes that are gone, too many and too few replicas."""
    chance = random.Random(seed)
    for _ in range(10):
        traits = random_cluster(chance, chance.randint(1, 10))
        factor = chance.randint(1, 5)
        crowd = [*traits, "gone-1", "gone-2"]
        current = [
            chance.sample(crowd, chance.randint(0, min(len(crowd), factor + 2)))
            for _ in range(chance.randint(1, 70))
        ]
        placed = placed_in(traits, len(current), factor, current)
        require_placed(placed, traits, factor)


@pytest.mark.parametrize(
    ("zones", "zone"),
    [
        ({"a": 1, "b": 1, "c": 1}, "a"),
        ({"a": 2, "b": 2, "c": 2}, "b"),
        ({"a": 3, "b": 3, "c": 3}, "d"),
        ({"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}, "e"),
        ({"a": 1, "b": 1, "c": 4}, "c"),
        ({"none": 5}, "none"),
        ({"a": 2, "b": 1}, "b"),
    ],
)
def test_a_node_that_joins_gets_its_share_and_little_else_moves(
    zones: Mapping[str, int], zone: str
) -> None:
    traits = cluster_of(**zones)
    before = placed_in(traits, 64, 3)
    traits = traits | {"new": NodeTraits("new", "" if zone == "none" else zone)}
    after = placed_in(traits, 64, 3, before)
    require_placed(after, traits, 3)
    share = loads(after, [*traits])["new"]
    # Each node besides may give or take one for evenness.
    assert share <= moved(before, after) <= share + len(traits)
    leave = placed_in({name: each for name, each in traits.items() if name != "new"}, 64, 3, after)
    assert share <= moved(after, leave) <= share + len(traits)


@pytest.mark.parametrize("seed", range(20))
def test_the_homes_of_sessions_are_within_a_fifth_of_even(seed: int) -> None:
    """The node that leads the home partition of a session decides about it. 64 partitions, as by
    default, through joins and leaves."""
    chance = random.Random(seed)
    clients = Counter(
        partition_of(f"meter-{seed}-{number}".encode(), 64) for number in range(20_000)
    )
    traits = cluster_of(none=chance.randint(2, 9))
    placed = placed_in(traits, 64, 3)
    for number in range(8):
        if len(traits) > 2 and (len(traits) > 8 or chance.random() < 0.5):
            del traits[chance.choice(sorted(traits))]
        else:
            traits |= {f"new{number}": NodeTraits(f"new{number}")}
        placed = placed_in(traits, 64, 3, placed)
        homes = dict.fromkeys(traits, 0)
        for partition, replicas in enumerate(placed):
            homes[replicas[0]] += clients[partition]
        even = 20_000 / len(traits)
        assert all(count == pytest.approx(even, rel=0.2) for count in homes.values()), homes


@pytest.mark.parametrize("seed", range(20))
def test_replicas_and_leaders_are_within_a_fifth_of_the_shares(seed: int) -> None:
    """The shares are as even as whole partitions allow, where every zone can have its part."""
    chance = random.Random(seed)
    each = chance.randint(1, 4)
    traits = cluster_of(**{f"z{number}-": each for number in range(chance.randint(3, 6))})
    if chance.random() < 0.5:
        large = chance.sample(sorted(traits), chance.randint(1, len(traits)))
        traits |= {node: NodeTraits(node, traits[node].zone, 130) for node in large}
    placed = placed_in(traits, 256, 3)
    for _ in range(3):
        gone = chance.choice(sorted(traits))
        rest = {node: found for node, found in traits.items() if node != gone}
        placed = placed_in(rest, 256, 3, placed)
        placed = placed_in(traits, 256, 3, placed)
    whole = sum(found.capacity for found in traits.values())
    shares = NodeShares(traits, 256, 3, traits)
    for counts, copies in ((loads(placed, [*traits]), 3), (led(placed, [*traits]), 1)):
        for node, load in counts.items():
            share = Fraction(256 * copies * traits[node].capacity, whole)
            is_free = 3 * 256 * traits[node].capacity <= 256 * whole
            if copies == 1 or (is_free and shares.least[node] == int(share)):
                assert abs(load - share) <= max(1, share / 5), (node, load, float(share))


def test_a_zone_of_one_node_has_every_partition_and_leads_its_part() -> None:
    traits = cluster_of(a=1, b=1, c=4)
    placed = placed_in(traits, 96, 3)
    assert loads(placed, [*traits]) == {"a0": 96, "b0": 96, "c0": 24, "c1": 24, "c2": 24, "c3": 24}
    assert set(led(placed, [*traits]).values()) == {16}


def test_a_node_of_twice_the_capacity_has_twice_the_replicas() -> None:
    traits = cluster_of(none=5)
    traits["none0"] = NodeTraits("none0", "", 200)
    assert loads(placed_in(traits, 60, 2), [*traits]) == {
        "none0": 40, "none1": 20, "none2": 20, "none3": 20, "none4": 20,
    }  # fmt: skip


def test_fewer_zones_than_replicas_have_no_more_than_they_must() -> None:
    traits = cluster_of(a=3, b=3)
    for replicas in placed_in(traits, 64, 3):
        assert sorted(Counter(node[0] for node in replicas).values()) == [1, 2]
    traits = cluster_of(a=1, b=4)
    for replicas in placed_in(traits, 16, 4):
        assert Counter(node[0] for node in replicas) == {"a": 1, "b": 3}


def test_two_replicas_in_one_zone_part_and_the_rest_stays() -> None:
    """A cluster whose nodes get their zones after they have data."""
    traits = cluster_of(a=2, b=2, c=2)
    before = placement([*traits], 64, 3)
    crowded = sum(len({node[0] for node in replicas}) < 3 for replicas in before)
    after = placed_in(traits, 64, 3, before)
    require_placed(after, traits, 3)
    assert crowded <= moved(before, after) <= 2 * crowded


def test_a_large_cluster_is_placed_in_a_moment() -> None:
    traits = cluster_of(**{f"z{number}-": 20 for number in range(5)})
    begun = time.process_time()
    before = placed_in(traits, 4096, 3)
    traits["z0-new"] = NodeTraits("z0-new", "z0-")
    after = placed_in(traits, 4096, 3, before)
    require_placed(after, traits, 3)
    assert time.process_time() - begun < 20
    assert moved(before, after) <= 4096 * 3 // 101 + 101
