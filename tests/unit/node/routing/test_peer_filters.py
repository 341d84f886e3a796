"""The filters of peers are applied in slices, and end as if each change was applied at once."""

import random
from itertools import pairwise

import pytest
from msgspec import json

from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import INTEREST, INTEREST_ACK, BadFrame
from holdfast.node.node_state import STEPS_AT_ONCE, STEPS_PER_TURN
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.publish.retained_updates import RetainedUpdates
from holdfast.node.routing.interest_frames import INTEREST_DECODER, Interest, InterestAck
from holdfast.node.routing.peer_filters import FILTERS_PER_STEP
from holdfast.node.routing.qos0_routing import ANNOUNCED_MAX, Qos0Routing
from holdfast.protocol.topics.names import is_shared, matches, split_shared
from tests.support.journal_port import new_state

FILTERS_AT_ONCE = STEPS_AT_ONCE * FILTERS_PER_STEP
TURN = (STEPS_PER_TURN + STEPS_AT_ONCE) * FILTERS_PER_STEP


class Bench:
    """n1 with the peers n2 and n3."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        self.state = new_state(NodeConfig(node_id="n1", partitions=1), journal)
        self.context = ClusterContext("n1", journal)
        self.routing = Qos0Routing(
            self.state, self.context, RetainedUpdates(self.state), PromiseQueues(self.state)
        )
        self.filters = self.routing._filters
        self.number = 0
        for node in ("n2", "n3"):
            self.connect(node)

    def connect(self, node: str) -> None:
        self.context.connected.add(node)
        self.routing.connected(node)
        self.context.outgoing.clear()

    def lose(self, node: str) -> None:
        self.context.connected.discard(node)
        self.routing.disconnected(node)

    def change(
        self, node: str, added: list[str], removed: list[str], *, whole: bool = False
    ) -> None:
        self.number += 1
        frame = Interest(self.number, whole, added, removed)
        self.routing.handle_interest(node, json.encode(frame))

    def acknowledged(self) -> list[tuple[str, int]]:
        found = [
            (node, json.decode(payload, type=InterestAck).number)
            for node, kind, payload in self.context.outgoing
            if kind == INTEREST_ACK and isinstance(payload, bytes)
        ]
        self.context.outgoing.clear()
        return found

    def run(self) -> None:
        while self.state.work:
            self.state.run_work()

    def nodes(self, topic: str) -> list[str]:
        """By a route that may be cached."""
        route = self.routing._routes.get(topic)
        if route is None:
            route = self.routing._routes[topic] = self.routing._find(topic)
        groups = [f"{pick.key} {node}" for pick in route.picks for node in pick.nodes]
        return sorted(route.nodes + groups)


def test_many_filters_come_and_go_in_slices() -> None:
    bench = Bench()
    filters = [f"a/{number}" for number in range(3 * TURN)]
    bench.change("n2", filters, [], whole=True)
    assert len(bench.filters.plain) <= FILTERS_AT_ONCE
    sizes = [len(bench.filters.plain)]
    while bench.state.work:
        assert bench.acknowledged() == []
        bench.state.run_work()
        sizes.append(len(bench.filters.plain))
    assert bench.acknowledged() == [("n2", 1)]
    assert sizes[-1] == len(filters)
    assert all(after - before <= TURN for before, after in pairwise(sizes))
    bench.lose("n2")
    assert bench.nodes("a/1") == []
    assert len(bench.filters.plain) >= len(filters) - FILTERS_AT_ONCE
    bench.run()
    assert len(bench.filters.plain) == 0


def test_another_peer_does_not_wait_for_a_large_one() -> None:
    bench = Bench()
    bench.change("n2", [f"a/{number}" for number in range(3 * TURN)], [], whole=True)
    bench.change("n3", ["b"], [])
    assert bench.acknowledged() == [("n3", 2)]
    assert bench.nodes("b") == ["n3"]


def test_a_change_of_an_earlier_link_is_not_acknowledged() -> None:
    bench = Bench()
    bench.change("n2", [f"a/{number}" for number in range(3 * TURN)], [], whole=True)
    bench.connect("n2")
    bench.change("n2", ["b"], [], whole=True)
    bench.run()
    assert bench.acknowledged() == [("n2", 2)]
    assert (bench.nodes("a/1"), bench.nodes("b")) == ([], ["n2"])


def test_a_malformed_filter_is_refused_before_any_is_applied() -> None:
    bench = Bench()
    with pytest.raises(BadFrame):
        bench.change("n2", ["a", "$share/"], [])
    assert bench.nodes("a") == []


@pytest.mark.parametrize(("is_new_link", "size"), [(True, FILTERS_AT_ONCE), (False, ANNOUNCED_MAX)])
def test_many_filters_are_announced_in_several_frames(is_new_link: bool, size: int) -> None:
    """The last one has the number, which covers all of them."""
    bench = Bench()
    names = [f"a/{number}" for number in range(2 * size + 1)]
    for name in names:
        bench.routing.subscribed(name)
    if is_new_link:
        bench.routing.flush()
        bench.context.outgoing.clear()
        bench.routing.connected("n2")
        bench.run()
    else:
        bench.lose("n3")
        bench.routing.flush()
    frames = [
        INTEREST_DECODER.decode(payload)
        for node, kind, payload in bench.context.outgoing
        if kind == INTEREST and isinstance(payload, bytes)
    ]
    assert [frame.whole for frame in frames] == [is_new_link, False, False]
    assert [frame.number for frame in frames] == [0, 0, len(names)]
    assert [name for frame in frames for name in frame.added] == names


FILTERS = [
    *(f"a/{number}" for number in range(40)),
    *("a/+", "a/#", "#", "+/1", "b/+"),
    *(f"$share/g{number % 2}/a/{number}" for number in range(10)),
    "$share/g0/a/+",
]
TOPICS = [*(f"a/{number}" for number in range(12)), "b/1", "c"]


@pytest.mark.parametrize("seed", range(30))
def test_slices_between_other_inputs_have_the_same_end(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench()
    filters = bench.filters
    bench.state.steps_at_once = chance.choice((1, 5, 99))
    model: dict[str, set[str]] = {"n2": set(), "n3": set()}
    numbers: list[tuple[str, int]] = []
    for _ in range(200):
        node = chance.choice(("n2", "n3"))
        step = chance.randrange(8)
        some = chance.sample(FILTERS, chance.randint(0, 20))
        if step == 0:
            bench.lose(node)
            model[node] = set()
        elif step == 1 or node not in bench.context.connected:
            bench.connect(node)
            model[node] = set(some)
            bench.change(node, some, [], whole=True)
        elif step < 5:
            gone = [each for each in model[node] if each not in some][:5]
            model[node] = (model[node] | set(some)) - set(gone)
            bench.change(node, some, gone)
        elif step < 7:
            filters.step(bench.state, chance.randint(0, 3))
        for topic in chance.sample(TOPICS, 3):
            cached = bench.nodes(topic)
            bench.routing._routes.pop(topic)
            assert bench.nodes(topic) == cached
        numbers += bench.acknowledged()
    bench.run()
    numbers += bench.acknowledged()
    for node in model:
        acknowledged = [number for each, number in numbers if each == node]
        assert acknowledged == sorted(set(acknowledged))
    for topic in TOPICS:
        expected = []
        for node, names in model.items():
            plain = [each for each in names if not is_shared(each) and matches(each, topic)]
            expected += [node] if plain else []
            shared = [each for each in names if is_shared(each)]
            expected += [
                f"{each} {node}" for each in shared if matches(split_shared(each)[1], topic)
            ]
        assert bench.nodes(topic) == sorted(expected)
