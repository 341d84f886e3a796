"""The finished records of a shared group behind one that is stuck: none is forgotten, however many
they are."""

import random
from itertools import pairwise

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.record import CURSOR, Record
from holdfast.node.config import NodeConfig
from holdfast.node.groups import assignments
from holdfast.node.groups.group_state import RANGES_MAX, Coordination
from holdfast.node.groups.next_node import NodeLoad
from holdfast.node.groups.progress import ProgressLog
from holdfast.node.session.message import Message
from holdfast.node.session.state import encode_cursor
from holdfast.node.state import groups as positions
from holdfast.node.state.groups import OFFSETS_MAX
from holdfast.node.state.offset_ranges import OffsetRanges
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import decode_group, encode_session
from tests.support.journal_port import new_state
from tests.unit.node.groups.test_ended import Corner, Leaver, Receiver

KEY = "$share/g/t"


@pytest.mark.parametrize("seed", range(50))
def test_ranges_are_a_set_of_offsets(seed: int) -> None:
    chance = random.Random(seed)
    ranges = OffsetRanges()
    model: set[int] = set()
    for _ in range(200):
        if chance.random() < 0.1:
            below = chance.randrange(60)
            ranges.drop_below(below)
            model = {each for each in model if each >= below}
        else:
            start = chance.randrange(80)
            end = start + chance.choice((1, 1, 1, 5))
            ranges.add_range(start, end)
            model.update(range(start, end))
        assert list(ranges.offsets()) == sorted(model)
        assert [each in ranges for each in range(90)] == [each in model for each in range(90)]
        found = ranges.ranges()
        assert all(before[1] < after[0] for before, after in pairwise(found))
        assert ranges == OffsetRanges(model) == ranges.copy()


def test_one_stuck_record_costs_one_range() -> None:
    state = ReplicatedState(RecordedState(NodeConfig(partitions=1), Journal(1, replicated=True)))

    def log(places: list[tuple[int, int]], done: list[tuple[int, int]]) -> None:
        payload = encode_cursor(places, {}, done)
        state.apply(Record(0, CURSOR, client_id=KEY.encode(), sequence=1, payload=payload))

    log([(0, 10)], [])
    for start in range(11, OFFSETS_MAX * 3, 10_000):
        log([], [(0, offset) for offset in range(start, start + 10_000)])
    end = start + 10_000
    assert state.groups.done[KEY].items() == [(0, OffsetRanges(range(11, end)))]
    assert state.groups.is_finished(KEY, 0, 11)
    assert state.groups.is_finished(KEY, 0, end - 1)
    assert not state.groups.is_finished(KEY, 0, 10)
    # In a snapshot, and at another node.
    data = encode_session(state.groups.entry(KEY))
    assert len(data) < 12 * OFFSETS_MAX
    entry = decode_group(data, 1)
    # All that an older version would have stored is where it looks.
    assert entry.done == [(0, list(range(11, 11 + OFFSETS_MAX)))]
    copy = ReplicatedState(RecordedState(NodeConfig(partitions=1), Journal(1, replicated=True)))
    copy.apply_snapshot_entry(3, data)
    assert copy.groups.done == state.groups.done
    log([(0, end)], [])
    assert not len(state.groups.done[KEY])


class Bench:
    """A coordinator whose member n1 never finishes the record 0. n2 finishes what it gets."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        config = NodeConfig(node_id="n1", partitions=1, outbox_messages=10)
        self.state = new_state(config, journal)
        self.logged = ReplicatedState(RecordedState(config, journal)).groups
        self.coordination = Coordination(KEY, 0, 1, self.state)
        self.load = NodeLoad()
        self.coordination.open([0], self.logged)
        self.coordination.cursor.tailing = True
        self.offset = 0

    def tell(self, node: str, limit: int) -> None:
        stake = self.coordination.weights.of(node, self.load)
        self.coordination.measured(stake, 1, limit)

    def log_progress(self) -> None:
        progress = ProgressLog(self.state, lambda *_: None)
        progress.add(self.coordination)
        self.state.now += 1.0
        progress.flush()

    def publish(self, offset: int) -> bool:
        """Whether a node gets it."""
        message = Message(b"t", b"", 1, False, b"", -1, 0, b"p")
        message.partition, message.offset = 0, offset
        self.state.delivered[0] = offset + 1
        self.coordination.tail(message)
        found = self.coordination.assign(lambda *_: True)
        for stake in found:
            if stake.node == "n2":
                self.coordination.finish("n2", (0, offset))
        return bool(found)


def test_at_the_bound_the_group_waits() -> None:
    """Every other offset is of another topic, so each finished one is a range."""
    bench = Bench()
    bench.tell("n1", 1)
    assert bench.publish(0)
    bench.tell("n2", 1000)
    for number in range(1, RANGES_MAX + 1):
        assert bench.publish(2 * number)
    assert not bench.publish(2 * RANGES_MAX + 2)
    assert len(bench.coordination.finished_offsets) == RANGES_MAX
    bench.coordination.finish("n1", (0, 0))
    bench.log_progress()
    assert bench.publish(2 * RANGES_MAX + 4)


@pytest.mark.parametrize("seed", [3, 4])
def test_after_a_failover_no_session_gets_a_record_again(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(assignments, "FINISHED_MAX", 20)
    monkeypatch.setattr(positions, "OFFSETS_MAX", 20)
    corner = Corner(seed)
    stuck = Leaver(corner, corner.name("one", corner.hub))
    corner.connect(stuck)
    corner.publish("stuck", qos=2)
    corner.until(lambda: stuck.received == ["stuck"])
    other = Receiver(corner.world, corner.name("two", corner.left), corner.filter, 2)
    corner.connect(other, corner.left)
    for number in range(0, 99, 3):
        corner.publish(*(f"{number + each}" for each in range(3)), qos=2)
    corner.run(1.0)
    before = len(other.received)
    assert before > 40
    corner.host(corner.right).kill(power=False)
    corner.run(6.0)
    assert len(other.received) == len(set(other.received)) == before
    received = [*stuck.received, *other.received]
    assert len(received) == len(set(received))
