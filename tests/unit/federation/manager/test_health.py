"""Who counts as dead, and how measurements are ranked that are none."""

import math

from holdfast_federation.manager.graph.health import (
    UNKNOWN_MS,
    MemberHealth,
    MemberState,
    RoundTrips,
)
from holdfast_federation.manager.graph.placement import place
from holdfast_federation.manager.graph.repair import GraphRules


def unreported(node: int) -> bool:
    return False


def health_with(failures: dict[int, int], members: int) -> MemberHealth:
    health = MemberHealth()
    for node in range(members):
        health.probed(node, True)
        for _ in range(failures.get(node, 0)):
            health.probed(node, False)
    return health


def test_dead_after_two_failures_in_a_row() -> None:
    health = health_with({1: 1}, 4)
    assert health.judge(range(4), unreported).states[1] is MemberState.SUSPECT
    health.probed(1, True)
    health.probed(1, False)
    assert health.judge(range(4), unreported).dead == ()
    health.probed(1, False)
    verdict = health.judge(range(4), unreported)
    assert verdict.dead == (1,)
    assert verdict.states[0] is MemberState.HEALTHY


def test_a_neighbour_that_reports_the_link_up_is_believed() -> None:
    verdict = health_with({1: 5}, 4).judge(range(4), lambda node: node == 1)
    assert verdict.dead == ()
    assert verdict.states[1] is MemberState.UNKNOWN


def test_when_more_than_half_fail_at_once_nobody_is_dead() -> None:
    half = health_with({0: 2, 1: 2}, 4).judge(range(4), unreported)
    assert half.dead == (0, 1)
    assert not half.is_frozen
    # The third has failed only once: what cuts the manager off need not hit all in one round.
    most = health_with({0: 2, 1: 2, 2: 1}, 4).judge(range(4), unreported)
    assert most.is_frozen
    assert most.dead == ()
    assert most.states[0] is MemberState.UNKNOWN


def test_a_manager_that_has_just_started_knows_of_nobody_dead() -> None:
    verdict = MemberHealth().judge(range(3), unreported)
    assert set(verdict.states.values()) == {MemberState.NEW}
    assert verdict.dead == ()


def test_a_probe_that_gives_no_number_is_never_the_best() -> None:
    """The published manager stores the mean of nothing, which its database sorts first."""
    trips = RoundTrips()
    for node, value in enumerate([math.nan, None, -1.0, math.inf, 80.0, 90.0]):
        trips.add_measurement(node, value)
    assert [trips.latency(node) for node in range(4)] == [UNKNOWN_MS] * 4
    graph = {node: {(node + 1) % 6, (node - 1) % 6} for node in range(6)}
    rules = GraphRules(lambda node: 5)
    assert set(place(graph, rules, trips.latency, trips.cost).neighbours) == {4, 5}


def test_a_failed_probe_forgets_the_measurement_before_it() -> None:
    trips = RoundTrips()
    trips.add_measurement(1, 3.0)
    trips.add_measurement(1, None)
    assert trips.latency(1) == UNKNOWN_MS


def test_both_neighbours_are_below_the_limit() -> None:
    """The published rule looks at the limit for the first neighbour only."""
    graph = {0: {1, 2, 3, 4}, 1: {0, 2, 3}, 2: {0, 1, 3}, 3: {0, 1, 2}, 4: {0}}
    rules = GraphRules(lambda node: 4)
    chosen = place(graph, rules, lambda node: float(node), lambda a, b: 1.0)
    assert len(set(chosen.neighbours)) == 2
    assert all(len(graph[node]) < 4 for node in chosen.neighbours)


def test_without_room_the_newcomer_goes_between_two_linked_members() -> None:
    ring = {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    found = place(ring, GraphRules(lambda node: 2), lambda node: 1.0, lambda a, b: 1.0)
    assert found.removed == {found.neighbours}


def test_the_manager_prefers_near_members_and_short_ways() -> None:
    ring = {node: {(node + 1) % 12, (node - 1) % 12} for node in range(12)}
    rules = GraphRules(lambda node: 5)
    same = place(ring, rules, lambda node: 1.0, lambda a, b: 1.0).neighbours
    assert abs(same[0] - same[1]) in (5, 6, 7)
    near = place(ring, rules, lambda node: 1.0 if node in (3, 4) else 500.0, lambda a, b: 1.0)
    assert set(near.neighbours) == {3, 4}
