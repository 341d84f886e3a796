"""Records of a shared group that several nodes report, after two coordinators assigned them.
[MQTT-4.8.2-4]"""

import random

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.groups.control_frames import NodeCapacity, Place
from holdfast.node.groups.group_state import Coordination
from holdfast.node.groups.next_node import NodeLoad
from holdfast.node.state.groups import GroupPositions
from holdfast.node.state.recorded_state import RecordedState
from tests.support.journal_port import new_state

KEY = "$share/g/t"
PLACE: Place = (0, 7)
NODES = ("n1", "n2", "n3")


class Bench:
    """The coordination of a group, and what it has been told by each node."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        config = NodeConfig(node_id="n1", partitions=1)
        self.coordination = Coordination(KEY, 0, 1, new_state(config, journal))
        self.logged = GroupPositions(RecordedState(config, journal), {})
        self.loads = {node: NodeLoad() for node in NODES}

    def tell(
        self, node: str, held: tuple[Place, ...] = (), finished: tuple[Place, ...] = ()
    ) -> list[Place]:
        stock = NodeCapacity(KEY, 1, 1, 10, list(held), list(finished))
        weight = self.coordination.weights.of(node, self.loads[node])
        return self.coordination.apply(weight, stock, self.logged)

    @property
    def holder(self) -> str:
        return self.coordination.holders.assigned.get(PLACE, ("", 0))[0]

    def count(self, node: str) -> int:
        return self.coordination.weights.nodes[node].count


@pytest.fixture
def bench() -> Bench:
    """n1 has told first, n2 after it."""
    bench = Bench()
    bench.tell("n1", (PLACE,))
    bench.tell("n2", (PLACE,))
    assert bench.holder == "n1"
    return bench


def test_what_the_holder_returns_stays_with_the_other_node_that_has_it(bench: Bench) -> None:
    bench.coordination.return_record("n1", PLACE)
    assert bench.holder == "n2"
    assert (bench.count("n1"), bench.count("n2")) == (0, 1)
    assert not bench.coordination.to_assign
    bench.coordination.return_record("n2", PLACE)
    assert list(bench.coordination.to_assign) == [PLACE]
    assert not bench.coordination.holders.claims


@pytest.mark.parametrize("is_told", [False, True])
def test_what_either_finishes_is_finished(bench: Bench, is_told: bool) -> None:
    if is_told:
        bench.tell("n2", (), (PLACE,))
    else:
        bench.coordination.finish("n2", PLACE)
    bench.coordination.return_record("n1", PLACE)
    assert bench.coordination.finished == [PLACE]
    assert not bench.coordination.holders.assigned
    assert not bench.coordination.to_assign
    assert bench.count("n1") == 0


def test_a_claim_that_is_returned_is_over(bench: Bench) -> None:
    bench.coordination.return_record("n2", PLACE)
    assert bench.holder == "n1"
    bench.coordination.return_record("n1", PLACE)
    assert list(bench.coordination.to_assign) == [PLACE]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_claimant_that_is_lost_may_have_kept_the_record(bench: Bench, is_kept: bool) -> None:
    coordination = bench.coordination
    coordination.mark_doubtful(coordination.lose("n2"), 1, "n2")
    coordination.return_record("n1", PLACE)
    assert not coordination.to_assign
    assert coordination.positions() == [0]
    coordination.resolve_doubtful({(1, "n2")}, {PLACE} if is_kept else set())
    assert list(coordination.to_assign) == ([] if is_kept else [PLACE])
    assert coordination.finished == ([PLACE] if is_kept else [])


def test_a_lost_holder_may_have_kept_what_a_claimant_returns(bench: Bench) -> None:
    coordination = bench.coordination
    coordination.mark_doubtful(coordination.lose("n1"), 1, "n1")
    assert bench.holder == "n2"
    coordination.return_record("n2", PLACE)
    assert not coordination.to_assign
    coordination.resolve_doubtful({(1, "n1")}, {PLACE})
    assert coordination.finished == [PLACE]


def test_a_node_that_reports_without_its_claim_has_lost_it(bench: Bench) -> None:
    assert bench.tell("n2") == [PLACE]


def test_whichever_node_has_a_record_it_is_not_assigned_again() -> None:
    """Random reports, returns, losses and doubts. `has`: the nodes that have the record by their
    own word."""
    for seed in range(2000):
        rng = random.Random(seed)
        bench = Bench()
        coordination = bench.coordination
        has: set[str] = set()
        doubts: dict[str, int] = {}
        for barrier in range(30):
            node = rng.choice(NODES)
            match rng.randrange(5):
                case 0:
                    bench.tell(node, (PLACE,))
                    has.add(node)
                    doubts.pop(node, None)
                case 1 if node in has:
                    coordination.return_record(node, PLACE)
                    has.discard(node)
                case 2:
                    if coordination.lose(node):
                        doubts[node] = barrier
                    coordination.mark_doubtful(coordination.lose(node), barrier, node)
                    has.discard(node)
                case 3 if node in doubts:
                    coordination.resolve_doubtful({(doubts.pop(node), node)}, set())
                case 4 if not rng.randrange(5) and node in has:
                    coordination.finish(node, PLACE)
                    break
            assert bench.holder in (has or {""}), seed
            claimants = set(coordination.holders.claims.get(PLACE, ()))
            assert claimants | {bench.holder} == (has or {""}), seed
            assert bench.holder not in claimants, seed
            assert coordination.holders.doubtful.get(PLACE, {}) == doubts, seed
            is_known = PLACE in coordination.holders.assigned or doubts or not coordination.skipped
            assert (PLACE in coordination.to_assign) == (not is_known), seed
            for each, weight in coordination.weights.nodes.items():
                assert weight.count == (each == bench.holder), seed
        else:
            continue
        assert coordination.finished == [PLACE], seed
        left = (
            coordination.holders.assigned,
            coordination.holders.claims,
            coordination.holders.doubtful,
        )
        assert not any(left), seed
