"""Placement: even, the same everywhere, and it moves no more than it must."""

import random
from collections import Counter
from collections.abc import Collection, Sequence

import pytest

from holdfast.node.placement.ring import Assignment, Ring, placement, ring_point

SHAPES = [(3, 64, 3), (4, 64, 3), (5, 64, 3), (7, 64, 2), (10, 256, 3), (9, 50, 1), (40, 1024, 3)]


def names(count: int) -> list[str]:
    return [f"node-{number}" for number in range(count)]


def spread(counts: Counter[str], nodes: Collection[str]) -> int:
    loads = [counts[node] for node in nodes]
    return max(loads) - min(loads)


def require_even(placed: Assignment, nodes: Sequence[str], factor: int) -> None:
    copies = min(factor, len(nodes))
    assert all(len(set(replicas)) == len(replicas) == copies for replicas in placed)
    assert {node for replicas in placed for node in replicas} <= set(nodes)
    assert spread(Counter(node for replicas in placed for node in replicas), nodes) <= 1
    assert spread(Counter(replicas[0] for replicas in placed), nodes) <= 1


def moved(before: Assignment, after: Assignment) -> int:
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def leaders_moved(before: Assignment, after: Assignment) -> int:
    return sum(old[0] != new[0] for old, new in zip(before, after, strict=True))


def test_hashes_are_for_ever() -> None:
    """Another value would move every replica of every cluster."""
    assert ring_point("node-1#0") == 0x340ECC44EFB8946F  # b2sum -l 64
    assert placement(["a", "b", "c", "d"], 4, 3) == (
        ("a", "b", "d"),
        ("d", "a", "c"),
        ("c", "b", "a"),
        ("b", "c", "d"),
    )


@pytest.mark.parametrize(("count", "partitions", "factor"), SHAPES)
def test_a_new_cluster_is_even(count: int, partitions: int, factor: int) -> None:
    nodes = names(count)
    placed = placement(nodes, partitions, factor)
    require_even(placed, nodes, factor)
    assert placement(nodes[::-1], partitions, factor) == placed


@pytest.mark.parametrize(("count", "partitions", "factor"), SHAPES)
def test_nothing_moves_without_a_reason(count: int, partitions: int, factor: int) -> None:
    nodes = names(count)
    placed = placement(nodes, partitions, factor)
    assert placement(nodes, partitions, factor, placed) == placed


@pytest.mark.parametrize(("count", "partitions", "factor"), SHAPES)
def test_a_node_that_joins_takes_its_share_and_nothing_else_moves(
    count: int, partitions: int, factor: int
) -> None:
    nodes = names(count)
    before = placement(nodes, partitions, factor)
    after = placement([*nodes, "new"], partitions, factor, before)
    require_even(after, [*nodes, "new"], factor)
    share = partitions * factor // (count + 1)
    assert share <= moved(before, after) <= share + 1
    for old, new in zip(before, after, strict=True):
        assert set(new) - set(old) <= {"new"}
    # Leaders follow: the share of the new node, and a chain of hand-overs here and there.
    assert leaders_moved(before, after) <= 2 * (partitions // (count + 1) + 1)


@pytest.mark.parametrize(("count", "partitions", "factor"), SHAPES)
def test_a_node_that_leaves_moves_what_it_held(count: int, partitions: int, factor: int) -> None:
    nodes = names(count)
    before = placement(nodes, partitions, factor)
    for gone in nodes[:3]:
        rest = [node for node in nodes if node != gone]
        after = placement(rest, partitions, factor, before)
        require_even(after, rest, factor)
        held = sum(gone in replicas for replicas in before)
        if len(rest) >= factor:
            # Beyond what it held only what evens out the rest: one replica a node at most.
            assert held <= moved(before, after) <= held + len(rest)
        else:
            assert moved(before, after) == 0


def test_many_changes_one_after_another_stay_even() -> None:
    generator = random.Random(5)
    nodes = names(3)
    placed = placement(nodes, 64, 3)
    for number in range(60):
        if len(nodes) > 3 and generator.random() < 0.5:
            nodes.remove(generator.choice(nodes))
        else:
            nodes.append(f"more-{number}")
        placed = placement(nodes, 64, 3, placed)
        require_even(placed, nodes, 3)


def test_replicas_follow_the_preferred_leader_clockwise() -> None:
    nodes = names(6)
    ring = Ring(nodes, 64)
    for partition, replicas in enumerate(placement(nodes, 64, 3)):
        met = [node for node in ring.walk(partition) if node in replicas]
        first = met.index(replicas[0])
        assert (*met[first:], *met[:first]) == replicas


def test_a_walk_meets_every_node_once_nearest_first() -> None:
    nodes = names(20)
    ring = Ring(nodes, 30)
    for partition in range(30):
        walk = list(ring.walk(partition))
        assert sorted(walk) == sorted(nodes)
        distances = [ring.distance(partition, node) for node in walk]
        assert distances == sorted(distances)


def test_a_move_under_way_is_carried_on() -> None:
    """Four copies where three are wanted: the one on the fullest node goes, not the new one."""
    nodes = names(4)
    before = placement(nodes[:3], 64, 3)
    after = placement(nodes, 64, 3, before)
    under_way = [
        (*old, *(set(new) - set(old))) if number % 2 else old
        for number, (old, new) in enumerate(zip(before, after, strict=True))
    ]
    final = placement(nodes, 64, 3, under_way)
    require_even(final, nodes, 3)
    assert moved(tuple(under_way), final) + sum(map(len, under_way)) - 192 == moved(before, after)


def test_nobody_and_fewer_nodes_than_copies() -> None:
    assert placement([], 3, 3) == ((), (), ())
    assert placement(["only"], 2, 3) == (("only",), ("only",))
    two = placement(["a", "b"], 4, 3)
    assert sorted(replicas[0] for replicas in two) == ["a", "a", "b", "b"]
    assert placement([], 2, 3, [("a",), ("b",)]) == ((), ())


def test_nodes_that_hold_nothing_do_not_harm_small_clusters() -> None:
    nodes = names(100)
    require_even(placement(nodes, 16, 3), nodes, 3)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_stored_becomes_even(seed: int) -> None:
    """Too many or too few replicas, nodes that are gone, everything on one node."""
    generator = random.Random(seed)
    for _ in range(40):
        count, partitions = generator.randint(1, 12), generator.randint(1, 90)
        factor = generator.randint(1, 5)
        nodes = names(count)
        crowd = [*generator.sample(nodes, generator.randint(1, count)), "gone-1", "gone-2"]
        current = [
            generator.sample(crowd, generator.randint(0, min(len(crowd), factor + 2)))
            for _ in range(partitions)
        ]
        placed = placement(nodes, partitions, factor, current)
        require_even(placed, nodes, factor)
        assert placement(nodes, partitions, factor, placed) == placed
