"""The invariants of the desired links over random lives of federations."""

import pytest

from holdfast_federation.manager.graph.graph import Graph
from holdfast_federation.manager.state.federation_state import Policy
from tests.support.topology_sequences import Life, PublishedManager, partitioned

SEQUENCES = 10_000
CHUNKS = 2


def beginnings() -> list[Life]:
    """Three to six members, with every limit."""
    found = []
    for seed in range(200):
        life = Life(seed, Policy(2 + seed % 5))
        for _ in range(3 + seed // 10 % 4):
            life.join()
            life.check()
        found.append(life)
    return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_joins_and_kills_keep_the_invariants(chunk: int) -> None:
    starts = beginnings()
    for seed in range(chunk, SEQUENCES, CHUNKS):
        life = starts[seed % len(starts)].branch(seed)
        for _ in range(life.random.randrange(2, 6)):
            if life.state.members and life.random.random() < 0.65:
                life.kill(min(life.random.choice([1, 1, 1, 2]), len(life.state.members)))
            else:
                life.join()
            life.check()


@pytest.mark.parametrize("degree_max", [2, 3, 5])
def test_a_federation_of_sixty_withers_and_grows(degree_max: int) -> None:
    life = Life(degree_max, Policy(degree_max))
    for _ in range(60):
        life.join()
        life.check()
    while len(life.state.members) > 3:
        life.kill(min(3, len(life.state.members) - 3))
        life.check()
    life.join()
    life.check()


def test_many_members_killed_at_once_are_repaired_around() -> None:
    for seed in range(40):
        life = Life(seed, Policy(4))
        for _ in range(24):
            life.join()
        life.kill(12)
        life.check()


def test_the_published_rule_is_partitioned_where_ours_is_not() -> None:
    def published(seed: int) -> Graph:
        manager = PublishedManager(seed, degree_max=5)
        for _ in range(12):
            manager.join()
        for _ in range(6):
            manager.kill()
        return manager.graph

    def ours(seed: int) -> Graph:
        life = Life(seed, Policy(5))
        for _ in range(12):
            life.join()
        for _ in range(6):
            life.kill()
        return life.state.graph()

    assert partitioned(250, published) > 0.15
    assert partitioned(250, ours) == 0


def test_an_id_is_never_given_again() -> None:
    """The published manager gives the highest id plus one: that of a member just removed."""
    life = Life(1, Policy(5))
    seen: set[int] = set()
    for _ in range(50):
        life.join()
        newest = life.state.next_id - 1
        assert newest not in seen
        seen.add(newest)
        if life.random.random() < 0.5:
            life.kill()
