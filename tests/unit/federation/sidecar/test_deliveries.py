"""What the federation brings, into a broker that comes and goes."""

import random
from collections import Counter
from collections.abc import Callable

from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.streams import Position
from holdfast_federation.sidecar.deliveries import Deliveries
from tests.support.scripted_edge import ScriptedEdge

A, B = b"a" * 16, b"b" * 16


class Bench:
    def __init__(self) -> None:
        self.edge = ScriptedEdge()
        self.positions: dict[bytes, Position] = {}
        self.passed: list[MessageId] = []
        self.counts: Counter[str] = Counter()
        self.deliveries = Deliveries(self.edge, self._pass, self.counts)

    def _pass(self, origin: bytes, position: Position, ids: list[MessageId]) -> None:
        assert position > self.positions.get(origin, (0, 0))
        self.positions[origin] = position
        self.passed += ids

    def arrive(
        self, origin: bytes, place: int, qos: int = 1, expiry_s: float | None = None, now: float = 0
    ) -> None:
        message = Message("a/1", f"{place}".encode(), qos, expiry_s=expiry_s)
        id = MessageId(origin, 1, place)
        self.deliveries.accept(DeliverLocally(id, message, place if qos else 0, 1), now)


def test_a_position_moves_over_what_is_done_only() -> None:
    bench = Bench()
    bench.edge.holds = True
    bench.deliveries.up(0)
    for place in (1, 2, 3):
        bench.arrive(A, place)
    bench.arrive(B, 7)
    one, two, three, other = bench.edge.held
    two()
    three()
    assert bench.positions == {}
    other()
    assert bench.positions == {B: (1, 8)}
    one()
    assert bench.positions == {A: (1, 4), B: (1, 8)}
    assert len(bench.deliveries) == 0
    for again in (one, two, three, other):
        again()
    assert len(bench.passed) == 4


def test_what_was_not_done_is_delivered_again_in_order() -> None:
    bench = Bench()
    bench.arrive(A, 1)
    assert bench.edge.delivered == []
    bench.edge.holds = True
    bench.deliveries.up(0)
    for place in (2, 3, 4):
        bench.arrive(A, place)
    first, second, *_ = bench.edge.held
    second()
    bench.deliveries.down()
    first()
    assert bench.positions == {}, "who answers late has been given up"
    bench.arrive(A, 5)
    bench.edge.delivered.clear()
    bench.edge.holds = False
    bench.deliveries.up(0)
    assert bench.edge.payloads() == ["1", "3", "4", "5"]
    assert bench.positions == {A: (1, 6)}


def test_qos_0_does_not_wait_for_the_broker() -> None:
    bench = Bench()
    bench.arrive(A, 1, qos=0)
    bench.deliveries.up(0)
    bench.arrive(A, 2, qos=0)
    assert bench.edge.payloads() == ["2"]
    assert bench.counts == {"edge down": 1}
    assert bench.positions == {}


def test_what_has_expired_meanwhile_is_passed_over() -> None:
    bench = Bench()
    bench.arrive(A, 1, expiry_s=5.0, now=100.0)
    bench.arrive(A, 2, expiry_s=50.0, now=100.0)
    bench.deliveries.up(110.0)
    [(_, message, _)] = bench.edge.delivered
    assert message.payload == b"2"
    assert message.expiry_s == 40.0
    assert bench.positions == {A: (1, 3)}
    assert bench.counts == {"expired": 1}


def test_an_edge_that_goes_down_while_it_is_given_what_waits() -> None:
    bench = Bench()
    for place in (1, 2, 3):
        bench.arrive(A, place)
    deliver = bench.edge.deliver

    def refuse(delivery: DeliverLocally, done: Callable[[], None]) -> None:
        deliver(delivery, done)
        bench.deliveries.down()

    bench.edge.deliver = refuse  # type: ignore[method-assign]
    bench.edge.holds = True
    bench.deliveries.up(0)
    assert bench.edge.payloads() == ["1"]
    assert len(bench.deliveries) == 3


def test_any_order_of_answers_and_interruptions() -> None:
    """The broker's log is the first delivery of each; nothing is skipped, and each position is that
    of the first that is not done."""
    for seed in range(300):
        rng = random.Random(seed)
        bench = Bench()
        bench.edge.holds = True
        places = {A: 0, B: 0}
        done: dict[bytes, set[int]] = {A: set(), B: set()}
        is_up = False
        for _ in range(60):
            action = rng.random()
            if action < 0.4:
                origin = rng.choice((A, B))
                places[origin] += 1
                bench.arrive(origin, places[origin])
            elif action < 0.8 and bench.edge.held:
                at = rng.randrange(len(bench.edge.held))
                bench.edge.held.pop(at)()
                id, _, place = bench.edge.delivered.pop(at)
                if is_up:
                    done[id.node].add(place)
            elif action < 0.9 and is_up:
                bench.deliveries.down()
                is_up = False
            elif not is_up:
                bench.edge.held.clear()
                bench.edge.delivered.clear()
                bench.deliveries.up(0)
                is_up = True
                waiting = [(id.node, place) for id, _, place in bench.edge.delivered]
                for origin in (A, B):
                    of_it = [place for node, place in waiting if node == origin]
                    assert of_it == [
                        place for place in range(1, places[origin] + 1) if place not in done[origin]
                    ]
            for origin in (A, B):
                first = next(place for place in range(1, 100) if place not in done[origin])
                assert bench.positions.get(origin, (1, 1)) == (1, first)
