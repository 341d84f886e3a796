"""Reports, owners, overdue sessions and filters that are too many for one turn: what happens
between two slices."""

import random
from collections.abc import Iterator

import pytest
from msgspec import json

from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import INTEREST, INTEREST_ACK, SESSION_OWNED
from holdfast.node.frames import OWNED_DECODER, OpenFrame
from holdfast.node.node_state import NodeState
from holdfast.node.ownership import closings, reports
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.own_reports import OwnReports
from holdfast.node.ownership.requests import (
    NEVER,
    STALE_MAX,
    SessionRequest,
    SessionRequests,
)
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.publish.retained_updates import RetainedUpdates
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import NOTHING, MetadataReads
from holdfast.node.routing.interest_frames import INTEREST_ACK_DECODER, InterestAck
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import SESSION_EXPIRY, RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from holdfast.node.state.snapshot_entries import SNAPSHOT_SESSION, session_entry
from holdfast.node.sweep import Sweep
from tests.support.journal_port import new_state, release_promises

PARTITIONS = 3


class Bench:
    """n1 leads all partitions. A turn runs `slice_steps` steps of each job."""

    def __init__(self, slice_steps: int) -> None:
        journal = Journal(PARTITIONS, replicated=True)
        config = NodeConfig(node_id="n1", partitions=PARTITIONS)
        self.state = new_state(config, journal)
        self.state.steps_at_once = self.state.steps_per_turn = slice_steps
        self.context = ClusterContext("n1", journal)
        self.context.connected.update(("n2", "n3"))
        self.context.features = {"n2": reports.FEATURE, "n3": reports.FEATURE}
        self.images = ReplicatedState(RecordedState(config, journal))
        barriers = Barriers(self.state, self.context, MetadataReads(lambda now: NOTHING))
        self.homes = SessionCoordinator(
            self.state, self.context, self.images, barriers, lambda *_: False
        )
        self.own = OwnReports(self.state, self.context, self.homes)
        for partition in range(PARTITIONS):
            self.lead(partition)
        self.number = 0
        self.closed: list[str] = []

    def lead(self, partition: int) -> None:
        self.context.leading[partition] = 1
        self.homes.start_leading(partition)

    def lose(self, partition: int) -> None:
        self.context.leading[partition] = 0
        self.homes.stop_leading(partition)

    def run(self) -> None:
        while self.state.work:
            self.state.run_work()
        self.homes.reports.check()

    def report(self, node: str, owned: dict[str, int], *, at_once: int) -> Iterator[None]:
        """A report in pieces of this size. It pauses after each."""
        names = list(owned)
        partitions = list(range(PARTITIONS))
        for at in range(0, max(1, len(names)), at_once):
            self.homes.reports.receive(
                node,
                partitions,
                {name: owned[name] for name in names[at : at + at_once]},
                [],
                is_first=not at,
                is_last=at + at_once >= len(names),
            )
            yield

    def record(self, client_id: str, owner: str, epoch: int) -> None:
        session = Session(client_id)
        session.epoch = epoch
        session.expiry_s = 60
        payload = encode_session(open_record(session, False, owner))
        home = self.images.home(client_id)
        record = Record(home, SESSION, client_id=session.key, sequence=epoch, payload=payload)
        self.images.apply(record)
        self.homes.applied(record)

    def open(self, node: str, client_id: str) -> None:
        """A client without a state connects at a node."""
        self.number += 1
        self.homes.open(node, OpenFrame(self.number, client_id, True, 0, None))
        release_promises(self.state)

    def owner(self, client_id: str) -> str:
        owner = self.homes.owners.owner(client_id)
        return "" if owner is None else owner.node


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(1)
    monkeypatch.setattr(
        closings, "log_close", lambda state, session, **_: bench.closed.append(session.client_id)
    )
    return bench


def test_a_sweep_runs_its_passes_in_order_and_in_slices() -> None:
    state = new_state(NodeConfig(partitions=1), Journal(1))
    state.steps_at_once = state.steps_per_turn = 4
    sweep: Sweep[int] = Sweep(state)
    seen: list[int] = []

    def visit(number: int) -> int:
        seen.append(number)
        return 2

    sweep.begin([1, 2, 3], visit, lambda: seen.append(-1))
    assert seen == [1, 2]
    sweep.begin([4], visit, lambda: seen.append(-2))
    assert seen == [1, 2]
    while state.work:
        before = len(seen)
        state.run_work()
        assert len(seen) - before <= 4
    assert seen == [1, 2, 3, -1, 4, -2]


def test_a_session_that_begins_between_two_pieces_is_not_closed(bench: Bench) -> None:
    owned = {f"c{number}": 1 for number in range(20)}
    for name in owned:
        bench.record(name, "n2", 1)
    bench.record("lacking", "n2", 1)
    pieces = bench.report("n2", owned, at_once=3)
    next(pieces)
    bench.open("n2", "late")
    epoch = bench.homes.owners.owner("late")
    assert epoch is not None
    bench.record("late", "n2", epoch.epoch)
    for _ in pieces:
        bench.state.run_work()
    bench.run()
    assert bench.closed == ["lacking"]
    assert bench.owner("late") == "n2"


def test_an_incomplete_report_closes_nothing(bench: Bench) -> None:
    bench.record("c", "n2", 1)
    pieces = bench.report("n2", {"a": 1, "b": 1}, at_once=1)
    next(pieces)
    bench.run()
    bench.homes.disconnected("n2")
    for _ in pieces:
        bench.run()
    assert bench.closed == []
    for _ in bench.report("n2", {"a": 1, "b": 1}, at_once=1):
        bench.run()
    assert bench.closed == ["c"]


def test_a_session_that_was_released_between_two_slices_has_no_owner(bench: Bench) -> None:
    owned = {f"c{number}": 1 for number in range(20)}
    for _ in bench.report("n2", owned, at_once=20):
        pass
    bench.homes.closed("n2", "c19", 1)
    bench.run()
    assert bench.owner("c19") == ""
    assert bench.owner("c18") == "n2"


def test_a_report_waits_until_this_node_decides(bench: Bench) -> None:
    bench.record("c", "n2", 1)
    for partition in range(PARTITIONS):
        bench.lose(partition)
        bench.context.journal.next_offset[partition] = 1
        bench.lead(partition)
    for _ in bench.report("n2", {"a": 1}, at_once=1):
        bench.run()
    assert (bench.owner("a"), bench.closed) == ("", [])
    for partition in range(PARTITIONS):
        bench.state.delivered[partition] = 1
        bench.homes.committed(partition)
    bench.run()
    assert (bench.owner("a"), bench.closed) == ("n2", ["c"])


def test_owners_that_an_event_has_ended_do_not_count_before_they_are_removed(bench: Bench) -> None:
    names = [f"c{number}" for number in range(30)]
    for node in ("n2", "n3"):
        for _ in bench.report(node, {f"{node}-{name}": 1 for name in names}, at_once=100):
            bench.run()
    owners = bench.homes.owners
    owners.forget_node("n2")
    assert len(owners._owners) > 50
    assert all(bench.owner(f"n2-{name}") == "" for name in names)
    assert all(bench.owner(f"n3-{name}") == "n3" for name in names)
    # It is back before the sweep has ended.
    bench.homes.reports.receive("n2", list(range(PARTITIONS)), {"n2-c1": 3}, [])
    bench.run()
    assert bench.owner("n2-c1") == "n2"
    assert len(owners._owners) == 31
    bench.lose(0)
    bench.run()
    assert all(bench.images.home(f"n3-{name}") or not bench.owner(f"n3-{name}") for name in names)


def test_the_pieces_of_a_report_name_each_session_that_is_still_there() -> None:
    bench = Bench(3)
    for number in range(50):
        bench.state.sessions[f"c{number}"] = Session(f"c{number}")
    reported = list(range(PARTITIONS))
    bench.own.begin("n2", reported, ["waits"])
    del bench.state.sessions["c49"]
    bench.state.sessions["late"] = Session("late")
    bench.run()
    frames = [
        OWNED_DECODER.decode(payload)
        for node, kind, payload in bench.context.outgoing
        if kind == SESSION_OWNED and isinstance(payload, bytes)
    ]
    assert len(frames) == 2
    assert [each.follows for each in frames] == [False, True]
    assert [each.more for each in frames] == [True, False]
    assert frames[0].asking == ["waits"]
    named = {name for frame in frames for name, _ in frame.owned}
    assert named == {f"c{number}" for number in range(49)}


def test_an_older_coordinator_gets_one_piece() -> None:
    bench = Bench(3)
    bench.context.features = {}
    for number in range(50):
        bench.state.sessions[f"c{number}"] = Session(f"c{number}")
    bench.own.begin("n2", list(range(PARTITIONS)), [])
    ((_, _, payload),) = bench.context.outgoing
    assert isinstance(payload, bytes)
    assert len(OWNED_DECODER.decode(payload).owned) == 50
    assert b"more" not in payload


def test_no_entry_of_a_snapshot_costs_a_walk_over_the_sessions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def entry(*arguments: object) -> object:
        nonlocal made
        made += 1
        return session_entry(*arguments)  # type: ignore[arg-type]

    for number in range(50):
        bench.record(f"c{number}", "n2", 1)
    for module in ("node.state.replicated", "node.state.snapshot_entries"):
        monkeypatch.setattr(f"holdfast.{module}.session_entry", entry)
    before = 0
    for kind, _ in bench.images.snapshot():
        assert made - before == (kind == SNAPSHOT_SESSION)
        before = made
    assert made == 50


def test_a_check_of_the_timers_removes_few_waits_that_are_over() -> None:
    """All clients of a node come to this one, and then their node answers all of them."""
    requests = SessionRequests(PARTITIONS, lambda each: partition_of(each.encode(), PARTITIONS))
    waiting = [SessionRequest("n2", OpenFrame(n, f"c{n}", True, 0, None)) for n in range(1000)]
    for number, request in enumerate(waiting):
        requests.add(request)
        request.waits_for = "n3"
        requests.wait(request, 1.0 + number)
    for request in waiting[:-1]:
        requests.remove_first(request)
    checks = 0
    while requests.timer() < 1000.0:
        checks += 1
    assert checks == 999 // STALE_MAX
    assert requests.pop_waiting() is waiting[-1]
    assert requests.timer() == NEVER


def test_overdue_sessions_end_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    endings = bench.homes.endings
    names = [name for name in map(str, range(60)) if bench.images.home(name) == 0]
    for name in names:
        bench.record(name, "", 1)
        endings._note_overdue(name, SESSION_EXPIRY)
    ended: list[str] = []
    monkeypatch.setattr(endings, "due", lambda session, kind: ended.append(session.client_id))
    endings.start_deciding(0)
    assert len(ended) == 1
    bench.lose(0)
    bench.run()
    assert len(ended) == 1
    bench.lead(0)
    bench.run()
    assert sorted(ended) == sorted(names)


@pytest.mark.parametrize("seed", range(20))
def test_a_peer_has_the_filters_of_this_node_when_it_acknowledges(seed: int) -> None:
    """Two nodes with changes between all slices."""
    chance = random.Random(seed)
    routings: dict[str, Qos0Routing] = {}
    states: dict[str, NodeState] = {}
    for node in ("n1", "n2"):
        state = new_state(NodeConfig(node_id=node, partitions=1), Journal(1, replicated=True))
        state.steps_at_once = state.steps_per_turn = chance.choice((1, 2, 50))
        context = ClusterContext(node, state.journal)
        context.connected.add("n2" if node == "n1" else "n1")
        updates = RetainedUpdates(state)
        routings[node] = Qos0Routing(state, context, updates, PromiseQueues(state))
        states[node] = state
    here, there = routings["n1"], routings["n2"]
    # The filters after each change, by its number.
    versions: list[frozenset[str]] = [frozenset()]

    def change() -> None:
        filter = f"a/{chance.randrange(60)}"
        if filter in versions[-1]:
            here.unsubscribed(filter)
        else:
            here.subscribed(filter)
        versions.append(versions[-1] ^ {filter})

    for _ in range(100):
        change()
    here.connected("n2")
    there.connected("n1")
    acknowledged = 0
    for step in range(400):
        if step < 300 and chance.random() < 0.5:
            change()
        if chance.random() < 0.5:
            here.flush()
        for state in states.values():
            state.run_work()
        outgoing, here._context.outgoing = here._context.outgoing, []
        for _, kind, payload in outgoing:
            if kind == INTEREST:
                assert isinstance(payload, bytes)
                there.handle_interest("n1", payload)
        outgoing, there._context.outgoing = there._context.outgoing, []
        for _, kind, payload in outgoing:
            number = INTEREST_ACK_DECODER.decode(payload).number if kind == INTEREST_ACK else 0
            if number:
                acknowledged = number
                # What has not changed since that number is known as it was then.
                later = set().union(*(versions[number] ^ each for each in versions[number:]))
                known = there._filters._of_peer.get("n1", set())
                assert known - later == versions[number] - later
    here.flush()
    assert acknowledged == here._number
    assert there._filters._of_peer.get("n1", set()) == versions[-1]
    here.handle_ack("n2", json.encode(InterestAck(acknowledged)))
    assert not here._laggards(here._number)
