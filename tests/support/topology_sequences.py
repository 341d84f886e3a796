"""Random lives of federations, and the published manager's rules as a contrast."""

import random
from collections.abc import Callable

from holdfast_federation.manager.graph.graph import Graph, structure_of
from holdfast_federation.manager.graph.health import RoundTrips
from holdfast_federation.manager.state import federation_state as desired
from holdfast_federation.manager.state.federation_state import FederationState, Member, Policy


class Life:
    """A federation that members join and leave, with round trips that are drawn."""

    def __init__(self, seed: int, policy: Policy) -> None:
        self.random = random.Random(seed)
        self.policy = policy
        self.state = FederationState()
        self.trips = RoundTrips()
        self.problems: tuple[str, ...] = ()

    def branch(self, seed: int) -> "Life":
        """Another life that begins where this one is."""
        other = Life(seed, self.policy)
        other.state = self.state
        other.trips = RoundTrips(dict(self.trips.of_members), dict(self.trips.of_links))
        return other

    def join(self) -> None:
        id = self.state.next_id
        self.trips.add_measurement(id, self.random.choice([None, 1.0, 20.0, 150.0]))
        joined = desired.join(
            self.state,
            Member(id=-1, ip=f"tcp://m:{id}", uuid=f"uuid-{id:08}"),
            self.policy,
            self.trips.latency,
            self.trips.cost,
        )
        assert joined.member.id == id
        self.state, self.problems = joined.state, joined.problems

    def kill(self, count: int = 1) -> None:
        gone = self.random.sample(sorted(self.state.members), count)
        changed = desired.leave(self.state, gone, self.policy, self.trips.cost)
        self.state, self.problems = changed.state, changed.problems

    def check(self) -> None:
        """Invariants 1 to 3 of the package."""
        graph = self.state.graph()
        rules = self.policy.rules(self.state)
        assert all(len(graph[node]) <= rules.limit(node) for node in graph)
        assert all(one < other for one, other in self.state.links)
        if len(graph) >= 3:
            assert not self.problems
            found = structure_of(graph)
            assert len(found.components) == 1
            assert not found.articulation_points
            assert min(len(others) for others in graph.values()) >= 2
        elif len(graph) == 2:
            assert len(self.state.links) == 1


class PublishedManager:
    """Joins and repairs as the published manager does: repair is for members without any link."""

    def __init__(self, seed: int, degree_max: int) -> None:
        self.random = random.Random(seed)
        self.degree_max = degree_max
        self.graph: Graph = {}
        self.latency: dict[int, float] = {}

    def join(self) -> None:
        # Its defect that an id may be given again is left out: it is not what is compared.
        id = len(self.latency)
        self.latency[id] = self.random.random()
        self.graph[id] = set()
        self._link_to_two(id)

    def _link_to_two(self, node: int) -> None:
        others = [each for each in self.graph if each != node]
        free = [each for each in others if len(self.graph[each]) < self.degree_max]
        chosen = [min(free, key=self._latency_of)] if free else []
        rest = [each for each in others if each not in chosen]
        chosen += [min(rest, key=self._degree_of)] if rest else []
        for each in chosen:
            self.graph[each].add(node)
            self.graph[node].add(each)

    def _latency_of(self, node: int) -> float:
        return self.latency[node]

    def _degree_of(self, node: int) -> int:
        return len(self.graph[node])

    def kill(self) -> None:
        gone = self.random.choice(sorted(self.graph))
        for neighbour in self.graph.pop(gone):
            self.graph[neighbour].discard(gone)
            if not self.graph[neighbour]:
                self._link_to_two(neighbour)


def partitioned(runs: int, run: Callable[[int], Graph]) -> float:
    """The part of the runs that end with a federation in pieces."""
    return sum(len(structure_of(run(seed)).components) > 1 for seed in range(runs)) / runs
