"""Who gets a QoS 2 record of a shared group whose node is lost: its session there may have kept it,
and the log may be told of that late. [MQTT-4.8.2-4]"""

import json

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.effects import ReadLog
from holdfast.node.groups.assignments import AgentContext
from holdfast.node.groups.codec import Assign
from holdfast.node.groups.control_frames import FullReport, NodeCapacity, Place
from holdfast.node.groups.coordinator import LOOK_AGAIN_S, Coordinator
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.message import Message
from holdfast.node.session.session import Inflight, Session, tag_of
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from tests.support.journal_port import new_state

KEY = "$share/g/t"
CLIENT = "c"
EPOCH = 5
PLACE: Place = (0, 0)


class Gate(Barriers):
    """Barriers that are passed when the test says so."""

    is_open = True

    def begin(self) -> int:
        return 1

    def has_passed(self, number: int) -> bool:
        return self.is_open

    def lacking(self, number: int) -> set[int]:
        return set() if self.is_open else {0}


class Bench:
    """n1 coordinates. The client c is at n2, with a durable session."""

    def __init__(self, qos: int = 2) -> None:
        journal = Journal(1, replicated=True)
        config = NodeConfig(node_id="n1", partitions=1)
        self.state = new_state(config, journal)
        self.images = ReplicatedState(RecordedState(config, journal))
        context = ClusterContext("n1", journal)
        nodes = {node: NodeInfo(node, "i1", f"{node}:1", "", "") for node in ("n1", "n2")}
        partition = PartitionInfo(tuple(nodes), (), "n1", 1, tuple(nodes))
        context.metadata = ClusterMetadata("c", 2, 1, nodes, (partition,), 1, tuple(nodes))
        self.gate = Gate(self.state, context, MetadataReads(lambda _: 0))
        self.context = context
        self.assigned: list[Assign] = []
        self.asked: list[tuple[str, list[tuple[int, int]]]] = []
        forwarding = RecordForwarder(self.state, context, Appender())
        self.coordinator = Coordinator(
            AgentContext(self.state, context, forwarding, self.images),
            self.gate,
            lambda *_: None,
            lambda _, assign: self.assigned.append(assign),
            lambda node, homes: self.asked.append((node, homes)),
        )
        self.subscribe(qos)

    def subscribe(self, qos: int) -> None:
        session = Session(CLIENT)
        session.epoch = EPOCH
        session.expiry_s = 3600
        self.record(log_record.SESSION, encode_session(open_record(session, False, "n2")))
        subscriptions = [[KEY, qos, False, False, 0, 0]]
        self.change(op="subscribe", subscriptions=subscriptions, start=[0])

    def record(self, kind: int, payload: bytes) -> None:
        key = CLIENT.encode()
        self.images.apply(Record(0, kind, client_id=key, sequence=EPOCH, payload=payload))

    def change(self, **fields: object) -> None:
        self.record(log_record.SESSION, json.dumps({"client": CLIENT, **fields}).encode())

    def close(self) -> None:
        """In place of n2."""
        self.change(op="close", expiry_s=3600, will=False, maybe_sent=True)

    def keep(self, state: int = 1, *, packet_id: int = 1, is_shared: bool = True) -> None:
        entry = Inflight(*PLACE, 2, False)
        entry.state = state
        entry.group_tag = tag_of(KEY) if is_shared else 0
        self.record(log_record.CURSOR, encode_cursor([], {packet_id: entry}, []))

    def has_kept(self) -> bool:
        return self.images.has_inflight(CLIENT, tag_of(KEY), PLACE)

    def tell(self, node: str, *held: Place) -> None:
        stock = NodeCapacity(KEY, 1, 1, 10, list(held), [], [0])
        self.coordinator.handle_full_report(node, FullReport(1, [(0, 1)], [stock]))

    def stock(self, *held: Place) -> FullReport:
        return FullReport(1, [(0, 2)], [NodeCapacity(KEY, 1, 1, 10, list(held), [], [0])])

    def log_group(self, positions: list[Place], epoch: int) -> None:
        """By the coordinator of that epoch."""
        self.record_of_group(encode_cursor(positions, {}, []), epoch)

    def record_of_group(self, payload: bytes, epoch: int) -> None:
        kind = log_record.CURSOR
        self.images.apply(Record(0, kind, client_id=KEY.encode(), sequence=epoch, payload=payload))

    def lead(self, *nodes: str) -> None:
        self.coordinator.start_leading(0, 1)
        for node in nodes:
            self.tell(node)
        self.pass_time(10.0)

    def give_to_n2(self) -> None:
        self.lead("n2")
        message = Message(b"t", b"payload", 2, False, b"", -1, 0, b"p")
        message.partition, message.offset = PLACE
        self.state.delivered[0] = 1
        (coordination,) = self.coordinator.homes.led[0].groups.values()
        self.coordinator.record(coordination.cursor, message)
        self.coordinator.flush()
        assert len(self.assigned) == 1
        self.tell("n1")

    def pass_time(self, seconds: float = LOOK_AGAIN_S) -> None:
        self.state.now += seconds
        self.coordinator.flush()

    def is_given_again(self) -> bool:
        """It is read, to be given to another node."""
        reads = [each for each in self.state.effects if isinstance(each, ReadLog)]
        return len(reads) > 0


def test_it_goes_to_another_one_once_the_session_is_closed() -> None:
    bench = Bench()
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.pass_time(1.0)
    assert not bench.is_given_again()
    bench.close()
    bench.pass_time()
    assert bench.is_given_again()


def test_it_stays_with_a_session_that_tells_late() -> None:
    bench = Bench()
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.pass_time()
    bench.keep()
    bench.close()
    bench.pass_time()
    assert bench.has_kept()
    assert not bench.is_given_again()


def test_what_is_told_behind_the_end_does_not_count() -> None:
    bench = Bench()
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.close()
    bench.pass_time()
    assert bench.is_given_again()
    bench.keep()
    assert not bench.has_kept()


def test_of_what_it_had_before_a_lost_node_has_the_last_word() -> None:
    bench = Bench()
    bench.keep(1, packet_id=1)
    bench.keep(1, packet_id=2, is_shared=False)
    bench.close()
    bench.keep(2, packet_id=1)
    bench.keep(2, packet_id=2, is_shared=False)
    bench.keep(1, packet_id=3, is_shared=False)
    session = bench.images.state.sessions[CLIENT]
    assert {key: entry.state for key, entry in session.inflight.items()} == {1: 2, 2: 2, 3: 1}


def test_a_node_that_is_back_tells_itself() -> None:
    bench = Bench()
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.pass_time()
    bench.tell("n2", PLACE)
    bench.pass_time()
    bench.close()
    bench.pass_time()
    assert not bench.is_given_again()


def test_one_that_is_back_without_it_never_had_it() -> None:
    bench = Bench()
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.pass_time()
    bench.tell("n2")
    bench.pass_time()
    assert bench.is_given_again()


@pytest.mark.parametrize("qos", [1, 2])
def test_with_qos_1_nobody_waits(qos: int) -> None:
    bench = Bench(qos)
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.pass_time()
    assert bench.is_given_again() == (qos == 1)


def test_nothing_is_known_before_the_barrier() -> None:
    bench = Bench(qos=1)
    bench.give_to_n2()
    bench.gate.is_open = False
    bench.coordinator.node_down("n2")
    bench.pass_time()
    assert not bench.is_given_again()
    bench.gate.is_open = True
    bench.pass_time()
    assert bench.is_given_again()


@pytest.mark.parametrize("is_back", [True, False])
def test_the_next_coordinator_waits_likewise(is_back: bool) -> None:
    """The one before may have given a record to a node that has not told yet."""
    bench = Bench()
    bench.state.delivered[0] = 1
    bench.lead("n1")
    (coordination,) = bench.coordinator.homes.led[0].groups.values()
    assert not coordination.is_open
    if is_back:
        bench.tell("n2")
    else:
        bench.close()
        bench.pass_time()
    assert coordination.is_open
    # Once: what it hands out from here on would come again.
    assert coordination.cursor.positions == [0]
    coordination.cursor.positions = [1]
    bench.pass_time()
    assert coordination.cursor.positions == [1]


def test_a_home_is_left_while_groups_wait() -> None:
    bench = Bench()
    bench.give_to_n2()
    bench.coordinator.node_down("n2")
    bench.pass_time()
    bench.coordinator.stop_leading(0)
    bench.pass_time()
    bench.lead("n1")
    bench.coordinator.stop_leading(0)
    bench.pass_time()
    assert bench.coordinator.timer() == float("inf")


def test_a_node_that_was_seen_down_late_is_asked_again() -> None:
    """It told when it was back, and the coordinator learned afterwards that it had been away."""
    bench = Bench()
    coordinator = bench.coordinator
    coordinator.start_leading(0, 1)
    for node in ("n1", "n2"):
        coordinator.handle_full_report(node, FullReport(1, [(0, 1)], []))
    coordinator.tidy()
    assert bench.asked == []
    bench.context.connected.add("n2")
    coordinator.node_down("n2")
    coordinator.tidy()
    assert bench.asked == [("n2", [(0, 1)])]
    coordinator.handle_full_report("n2", FullReport(2, [(0, 1)], []))
    coordinator.tidy()
    assert len(bench.asked) == 1


def test_what_is_finished_is_not_claimed() -> None:
    """n2 was cut off, and its session has completed the record at another node. The log says that
    the group has finished with it."""
    for tells_before in (False, True):
        bench = Bench()
        bench.state.delivered[0] = 20
        bench.log_group([(0, 10)], 1)
        bench.coordinator.start_leading(0, 2)
        if tells_before:
            # The records of the coordinator before are applied after it.
            bench.images.groups.drop(KEY)
            bench.coordinator.handle_full_report("n2", bench.stock((0, 4), (0, 12)))
            bench.log_group([(0, 10)], 1)
        else:
            bench.coordinator.handle_full_report("n2", bench.stock((0, 4), (0, 12)))
        bench.pass_time(10.0)
        coordination = bench.coordinator.homes.led[0].groups[KEY]
        assert coordination.is_open
        assert list(coordination.holders.assigned) == [(0, 12)]
        assert coordination.weights.nodes["n2"].count == 1
        assert coordination.positions() == [10]


def test_a_home_is_opened_behind_what_was_logged_before() -> None:
    """Whatever barriers say: a home is opened for QoS 1 after a time."""
    bench = Bench()
    bench.context.journal.append(Record(0, log_record.CONTROL))
    bench.coordinator.start_leading(0, 2)
    bench.pass_time(10.0)
    assert not bench.coordinator.homes.led[0].is_open
    bench.state.delivered[0] = 1
    bench.pass_time()
    assert bench.coordinator.homes.led[0].is_open


def test_the_position_of_a_group_never_goes_back() -> None:
    bench = Bench()
    bench.log_group([(0, 10)], 1)
    bench.log_group([(0, 4)], 2)
    assert bench.images.group_positions[KEY] == [10]
    assert bench.images.groups.is_finished(KEY, 0, 9)
    bench.record_of_group(encode_cursor([], {}, []), 2)
    bench.log_group([(0, 4)], 3)
    assert bench.images.group_positions[KEY] == [4]


@pytest.mark.parametrize("is_kept", [False, True])
def test_without_the_barrier_a_home_is_opened_for_qos_1(is_kept: bool) -> None:
    """A session in a partition that is not reached may have kept the QoS 2 record."""
    bench = Bench()
    bench.close()
    bench.gate.is_open = False
    bench.state.delivered[0] = 2
    bench.lead("n1")
    (coordination,) = bench.coordinator.homes.led[0].groups.values()
    assert coordination.is_open
    records = [Record(0, log_record.MESSAGE, flags=qos, topic=b"t") for qos in (2, 1)]
    records[0].offset, records[1].offset = PLACE[1], 1
    bench.coordinator.handle_read(coordination.cursor, records, [2], True)
    bench.state.effects.clear()
    for _ in range(5):
        bench.pass_time(60.0)
        bench.coordinator.tidy()
    given = [(each.partition, each.offset) for found in bench.assigned for each in found.messages]
    assert given == [(0, 1)]
    assert coordination.positions() == [0]
    if is_kept:
        session = bench.images.state.sessions[CLIENT]
        entry = Inflight(*PLACE, 2, False)
        entry.group_tag = tag_of(KEY)
        bench.images._set_inflight(session, 1, entry)
    bench.gate.is_open = True
    bench.pass_time()
    assert bench.is_given_again() != is_kept
    assert (PLACE in coordination.finished_offsets) == is_kept
    assert coordination.positions() == [1 if is_kept else 0]
