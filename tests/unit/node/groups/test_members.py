"""The member records of shared groups: a group with a durable member has one in its own home,
whatever is lost or late, and a log of an older version has none."""

import itertools
import json
from collections.abc import Iterable

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.effects import ReadLog
from holdfast.node.features import GROUP_MEMBERS
from holdfast.node.groups.codec import AgentReport
from holdfast.node.groups.control_frames import FullReport, NodeCapacity
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group
from holdfast.node.session.state import encode_cursor
from holdfast.node.state import transfer as image_entries
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import SNAPSHOT_MEMBERS, ReplicatedState
from holdfast.node.state.session_records import (
    MemberRecord,
    MembersRecord,
    OpenRecord,
    encode_session,
)
from tests.unit.node.groups.test_lost import CLIENT, EPOCH, KEY
from tests.unit.node.groups.test_lost import Bench as LostBench

PARTITIONS = 4


def new_state(partitions: int = PARTITIONS) -> ReplicatedState:
    journal = Journal(partitions, replicated=True)
    return ReplicatedState(RecordedState(NodeConfig(node_id="n", partitions=partitions), journal))


def session_record(partition: int, payload: bytes, epoch: int, client_id: str = "") -> Record:
    key = client_id.encode()
    return Record(partition, log_record.SESSION, client_id=key, sequence=epoch, payload=payload)


def member(epoch: int, *, left: bool = False, client: str = "c", partitions: int = 1) -> Record:
    home = partition_of(KEY.encode(), partitions)
    return session_record(home, encode_session(MemberRecord(KEY, client, left)), epoch, KEY)


def test_a_removal_applies_to_its_epoch_and_those_before() -> None:
    for joined, removed in itertools.product(range(1, 4), repeat=2):
        state = new_state(1)
        state.apply(member(joined))
        state.apply(member(removed, left=True))
        assert state.group_members.has_any(KEY) == (removed < joined)


def test_an_end_behind_a_member_record_is_ignored() -> None:
    state = new_state(1)
    end = Record(0, log_record.CURSOR, client_id=KEY.encode(), sequence=1)
    end.payload = encode_cursor([], {}, [])
    begin = Record(0, log_record.CURSOR, client_id=KEY.encode(), sequence=1)
    begin.payload = encode_cursor([(0, 7)], {}, [(0, 9)])
    state.apply(begin)
    state.apply(member(3))
    state.apply(end)
    assert state.groups.is_finished(KEY, 0, 6)
    assert state.groups.is_finished(KEY, 0, 9)
    assert state.groups.pop_applied_ends() == {KEY}
    assert state.groups.pop_dropped() == set()
    state.apply(member(3, left=True))
    state.apply(end)
    assert KEY not in state.group_positions
    assert state.groups.pop_dropped() == {KEY}


def copies(state: ReplicatedState) -> Iterable[ReplicatedState]:
    """An entry of a snapshot and one of another node."""
    copy = new_state()
    for kind, data in state.snapshot():
        copy.apply_snapshot_entry(kind, data)
    yield copy
    copy = new_state()
    image_entries.take(copy, *_stale())
    partitions = frozenset(range(PARTITIONS))
    for _ in image_entries.drop(copy, partitions):
        pass
    for entry in image_entries.entries(state, partitions):
        if entry is not None:
            image_entries.take(copy, *entry)
    yield copy


def _stale() -> tuple[int, int, bytes]:
    stale = new_state()
    stale.apply(member(1, client="stale", partitions=PARTITIONS))
    entries = image_entries.entries(stale, range(PARTITIONS))
    return next(each for each in entries if each is not None and each[1] == SNAPSHOT_MEMBERS)


def test_snapshots_and_other_nodes_have_them() -> None:
    state = new_state()
    for number in range(1200):
        state.apply(member(number + 1, client=f"c{number}", partitions=PARTITIONS))
    state.apply(session_record(2, encode_session(MembersRecord("")), 0))
    for copy in copies(state):
        assert copy.group_members.recorded == state.group_members.recorded
        assert copy.group_members.is_complete == [False, False, True, False]


def test_an_older_node_receives_none_of_them() -> None:
    state = new_state()
    state.apply(member(1, partitions=PARTITIONS))
    entries = image_entries.entries(state, range(PARTITIONS), with_members=False)
    assert SNAPSHOT_MEMBERS not in {each[1] for each in entries if each is not None}
    assert SNAPSHOT_MEMBERS in {kind for kind, _ in state.snapshot()}


class Bench(LostBench):
    """n1 coordinates. The member c is away, and every node has reported."""

    def __init__(self) -> None:
        super().__init__(1)
        self.context.features = {"n2": GROUP_MEMBERS}
        self.close()
        self.log_group([(0, 10)], 1)
        self.state.delivered[0] = 10
        self.coordinator.start_leading(0, 2)
        for node in ("n1", "n2"):
            stock = NodeCapacity(KEY, 0, 0, 0)
            self.coordinator.handle_full_report(node, FullReport(1, [(0, 2)], [stock]))

    def written(self, seconds: float = 0.25) -> list[dict[str, object]]:
        """The records of sessions and ends that the coordinator appends next, and applies."""
        self.pass_time(seconds)
        self.coordinator.tidy()
        self.coordinator.flush()
        group = self.state.journal.close_write_group()
        records = [] if group is None else [r for each in group.built for r in each.records()]
        found: list[dict[str, object]] = []
        for record in records:
            self.images.apply(record)
            if record.kind == log_record.SESSION:
                found.append(json.loads(record.payload))
            elif record.payload == encode_cursor([], {}, []):
                found.append({"op": "group ends"})
        return found

    def end_session(self) -> None:
        self.record(log_record.SESSION, b'{"op":"end","client":"%s"}' % CLIENT.encode())


JOINED = {"op": "member", "client": KEY, "member": CLIENT}
LEFT = JOINED | {"left": True}
COMPLETE = {"op": "members", "client": ""}
ENDS = {"op": "group ends"}


def test_a_log_of_an_older_version_gets_its_member_records() -> None:
    bench = Bench()
    written = bench.written()
    assert JOINED in written
    assert written[-1] == COMPLETE
    assert bench.images.group_members.recorded == {KEY: {CLIENT: EPOCH}}
    assert bench.written() == []
    bench.end_session()
    assert bench.written() == [LEFT]
    assert bench.written() == [ENDS]


@pytest.mark.parametrize("features", [{"n2": "queues"}, {}])
def test_not_while_a_node_is_older_or_was_not_met(features: dict[str, str]) -> None:
    bench = Bench()
    bench.context.features = features
    for _ in range(5):
        assert COMPLETE not in bench.written()
    # The group ends by the subscriptions then, once everything is applied here.
    bench.gate.is_open = False
    bench.end_session()
    for _ in range(5):
        assert bench.written(60.0) == []
    bench.gate.is_open = True
    assert bench.written() == [LEFT]
    assert bench.written() == [ENDS]


def test_an_older_node_suspends_the_records() -> None:
    bench = Bench()
    assert bench.written()[-1] == COMPLETE
    bench.images.apply(member(EPOCH, left=True))
    bench.images.group_members.unrecorded.clear()
    # As if the subscription had come from an older node, without a member record.
    bench.context.features = {"n2": "queues"}
    assert bench.written() == []
    bench.context.features = {"n2": GROUP_MEMBERS}
    bench.gate.is_open = False
    assert bench.written() == []
    bench.gate.is_open = True
    assert ENDS in bench.written()


def test_a_group_does_not_end_before_every_node_has_reported() -> None:
    bench = Bench()
    bench.written()
    bench.written()
    bench.coordinator.disconnected("n2")
    bench.end_session()
    assert bench.written() == [LEFT]
    for _ in range(5):
        assert bench.written(60.0) == []
    stock = NodeCapacity(KEY, 0, 0, 0)
    bench.coordinator.handle_full_report("n2", FullReport(2, [(0, 2)], [stock]))
    assert bench.written() == [ENDS]


def test_a_member_record_is_kept_while_its_subscription_may_be_under_way() -> None:
    """The session has the epoch of the record: the UNSUBSCRIBE is applied here, or the SUBSCRIBE is
    not."""
    bench = Bench()
    bench.written()
    bench.written()
    bench.change(op="unsubscribe", filters=[KEY])
    for _ in range(5):
        assert bench.written(60.0) == []
    opened = OpenRecord(CLIENT, EPOCH + 1, 3600, False, None)
    bench.images.apply(session_record(0, encode_session(opened), EPOCH + 1, CLIENT))
    assert bench.written() == [LEFT]


def test_of_a_session_that_is_not_there_everything_must_be_applied() -> None:
    bench = Bench()
    bench.written()
    bench.written()
    bench.gate.is_open = False
    bench.end_session()
    for _ in range(5):
        assert bench.written(60.0) == []
    bench.gate.is_open = True
    assert bench.written() == [LEFT]


class DeniedBench(Bench):
    """No member is applied here, a node may be older, and n2 denies the record at PLACE."""

    PLACE = (0, 10)

    def __init__(self) -> None:
        super().__init__()
        self.context.features = {}
        self.report_member(2)
        self.coordinator.flush()
        self.end_session()
        self.gate.is_open = False
        message = Message(b"t", b"payload", 1, False, b"", -1, 0, b"p")
        message.partition, message.offset = self.PLACE
        self.state.delivered[0] = 11
        (coordination,) = self.coordinator.homes.led[0].groups.values()
        self.coordinator.record(coordination.cursor, message)
        self.coordinator.flush()
        denied = [self.PLACE]
        report = AgentReport(0, 2, 2, KEY, 1, 0, 10, [], denied, [], denied)
        self.coordinator.report("n2", report)
        self.coordinator.flush()
        self.read()

    def report_member(self, number: int) -> None:
        report = FullReport(number, [(0, 2)], [NodeCapacity(KEY, 1, 0, 10)])
        self.coordinator.handle_full_report("n2", report)

    def read(self) -> int:
        """Serves the reads of the log. Returns their number."""
        reads = [each for each in self.state.effects if isinstance(each, ReadLog)]
        self.state.effects.clear()
        record = Record(0, log_record.MESSAGE, 1, topic=b"t", offset=self.PLACE[1])
        for each in reads:
            assert isinstance(each.cursor, Group)
            self.coordinator.handle_read(each.cursor, [record], each.limits, True)
        self.coordinator.flush()
        return len(reads)

    def apply_of_next_session(self, payload: bytes) -> None:
        self.images.apply(session_record(0, payload, EPOCH + 1, CLIENT))

    def tidy(self) -> int:
        self.pass_time(0.25)
        self.coordinator.tidy()
        self.coordinator.flush()
        return self.read()


def test_a_record_is_dropped_once_no_subscription_can_be_on_its_way() -> None:
    """A node of an older version does not keep it aside for good."""
    bench = DeniedBench()
    bench.tidy()
    for _ in range(5):
        assert bench.tidy() == 0
        assert bench.state.stats.dropped_unreadable == 0
    bench.gate.is_open = True
    assert bench.tidy() == 1
    assert bench.state.stats.dropped_unreadable == 1
    assert bench.tidy() == 0


def test_a_record_waits_for_a_member_whose_subscription_came_late() -> None:
    bench = DeniedBench()
    joined = [[KEY, 1, False, False, 0, 0]]
    bench.apply_of_next_session(encode_session(OpenRecord(CLIENT, EPOCH + 1, 3600, True, None)))
    bench.apply_of_next_session(
        json.dumps(
            {"op": "subscribe", "client": CLIENT, "subscriptions": joined, "start": [0]}
        ).encode()
    )
    for is_open in (False, True):
        bench.gate.is_open = is_open
        bench.tidy()
        for _ in range(5):
            assert bench.tidy() == 0
    assert bench.state.stats.dropped_unreadable == 0
    bench.apply_of_next_session(b'{"op":"end","client":"%s"}' % CLIENT.encode())
    assert bench.tidy() == 1
    assert bench.state.stats.dropped_unreadable == 1


def test_a_record_is_not_dropped_while_a_partition_is_loaded() -> None:
    """The subscriptions of that partition are not here, although the barrier was passed before."""
    bench = DeniedBench()
    bench.context.is_whole = False
    bench.gate.is_open = True
    for _ in range(5):
        bench.tidy()
        assert bench.state.stats.dropped_unreadable == 0
    bench.context.is_whole = True
    bench.tidy()
    bench.tidy()
    assert bench.state.stats.dropped_unreadable == 1
