"""What the leader of a partition takes of other nodes' records."""

from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.metadata.model import DATA, WITNESS, ClusterMetadata, NodeInfo
from holdfast.node.publish.admission import Admission
from holdfast.node.publish.forward_frames import decode_result
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.session.session import Session
from holdfast.node.state.inbound_ids import life_of
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.mqtt import reasons
from tests.support.journal_port import new_state

EPOCH = 4
QOS_2 = 2 | log_record.FLAG_PACKET_ID
NUMBERED = 1 | log_record.FLAG_PRODUCER


class Bench:
    """This node leads partition 0; n2 forwards to it."""

    def __init__(self) -> None:
        self.journal = Journal(1, replicated=True)
        self.journal.lead(0, EPOCH)
        state = new_state(NodeConfig(partitions=1), self.journal)
        self.images = ReplicatedState(RecordedState(NodeConfig(partitions=1), self.journal))
        self.context = ClusterContext("n1", self.journal)
        self.context.connected.add("n2")
        self.context.leading[0] = EPOCH
        self.may_append = True
        self.state = state
        self.admission = Admission(state, self.context, self.images, lambda _: self.may_append)
        self.admission.forwarding = RecordForwarder(state, self.context, self.admission)
        self.admission.start_leading(0, [])
        self.ticket = 0
        self.committed: list[Record] = []

    def begin(self, life: int) -> None:
        """The home partition says that the client's session began in this epoch."""
        session = self.images.state.sessions.setdefault("c", Session("c"))
        session.epoch = life
        session.life = life

    def forward(
        self,
        *messages: tuple[str, int, int],
        attempt: int = 0,
        epoch: int = EPOCH,
        session_epoch: int = 7,
        life: int = 0,
        kind: int = log_record.MESSAGE,
    ) -> list[tuple[int, int]]:
        """(name, flags, sequence) each; what is answered: (ticket, reason) of those that are."""
        builder = BatchBuilder(0, 0)
        for name, flags, sequence in messages:
            self.ticket += 1
            producer = b"p" if flags & log_record.FLAG_PRODUCER else b""
            if life and flags & log_record.FLAG_PACKET_ID:
                producer = b"%d" % life
            builder.add(
                Record(
                    builder.partition,
                    kind,
                    flags=flags,
                    topic=name.encode(),
                    client_id=b"c",
                    producer=producer,
                    producer_epoch=session_epoch,
                    sequence=sequence,
                    ticket=self.ticket,
                )
            )
        self.admission.forwarded("n2", epoch, attempt, Batch(builder.build(0)))
        return self.answers()

    def answers(self) -> list[tuple[int, int]]:
        self.admission.flush()
        found = []
        for _, _, payload in self.context.outgoing:
            assert isinstance(payload, bytes)
            found += [(each.ticket, each.reason) for each in decode_result(payload)]
        self.context.outgoing.clear()
        return found

    def stored(self) -> int:
        return self.journal.next_offset[0]

    def commit(self) -> None:
        group = self.journal.close_write_group()
        assert group is not None
        self.journal.wrote(group)
        self.journal.commit(group)
        for batch in group.built:
            for record in batch.records():
                self.images.apply(record)
                self.committed.append(record)
        self.journal.advance(0, self.stored())
        self.state.delivered[0] = self.stored()
        self.admission.committed(0, self.stored())


def test_a_repetition_is_answered_when_what_it_repeats_is_committed() -> None:
    bench = Bench()
    assert bench.forward(("m", QOS_2, 9)) == []
    assert bench.forward(("m", QOS_2, 9)) == []
    assert bench.stored() == 1
    bench.commit()
    assert bench.answers() == [(2, reasons.SUCCESS)]
    assert bench.forward(("m", QOS_2, 9)) == [(3, reasons.SUCCESS)]
    assert bench.stored() == 1


@pytest.mark.parametrize("committed", [False, True])
def test_a_released_id_is_free(committed: bool) -> None:
    bench = Bench()
    bench.forward(("m", QOS_2, 9))
    if committed:
        bench.commit()
    bench.forward(("", 0, 9), kind=log_record.RELEASE)
    if committed:
        bench.commit()
    assert bench.forward(("next", QOS_2, 9)) == []
    assert bench.stored() == 3


@pytest.mark.parametrize("committed", [False, True])
def test_an_id_of_an_earlier_life_is_free(committed: bool) -> None:
    """This node has not applied the clean start, which is a record of another partition."""
    bench = Bench()
    bench.begin(5)
    bench.forward(("old", QOS_2, 1), session_epoch=7, life=5)
    bench.forward(("old", QOS_2, 2), session_epoch=7, life=5)
    if committed:
        bench.commit()
    # A resumed session sends them again, and then a clean start follows.
    bench.forward(("old", QOS_2, 1), session_epoch=8, life=5)
    assert bench.stored() == 2
    bench.forward(("new", QOS_2, 1), session_epoch=9, life=9)
    bench.forward(("new", QOS_2, 1), session_epoch=10, life=9)
    assert bench.stored() == 3
    bench.commit()
    bench.answers()
    assert [each for each in bench.images.inbound["c"] if each[1]] == [(0, 1)]
    taken_over = [(6, reasons.SESSION_TAKEN_OVER)]
    assert bench.forward(("late", QOS_2, 2), session_epoch=8, life=5) == taken_over


@pytest.mark.parametrize("committed", [False, True])
def test_an_older_node_does_not_write_the_life(committed: bool) -> None:
    """Then the home partition says it, as far as it is applied here."""
    bench = Bench()
    bench.begin(7)
    bench.forward(("old", QOS_2, 1), session_epoch=7)
    if committed:
        bench.commit()
    # A newer node resumes the session.
    bench.forward(("old", QOS_2, 1), session_epoch=8, life=7)
    # And an older one after it.
    bench.forward(("old", QOS_2, 1), session_epoch=9)
    assert bench.stored() == 1
    bench.begin(10)
    # The record of a session that has ended since is sent again.
    bench.forward(("old", QOS_2, 1), session_epoch=7)
    assert bench.stored() == 1
    bench.forward(("new", QOS_2, 1), session_epoch=10)
    assert bench.stored() == 2


def test_a_life_that_is_no_number_counts_as_none() -> None:
    record = Record(0, log_record.MESSAGE, QOS_2, producer=b"7")
    assert life_of(record) == 7
    for text in (b"", b"-1", b" 7", b"1_0", b"\xb2", b"1" * 11, "७".encode()):
        record.producer = text
        assert life_of(record) == 0


def test_a_new_leader_knows_what_is_not_committed() -> None:
    bench = Bench()
    bench.forward(("m", QOS_2, 9), ("n", NUMBERED, 3))
    group = bench.journal.close_write_group()
    assert group is not None
    again = group.built
    bench.admission.stop_leading(0)
    bench.admission.start_leading(0, again)
    bench.forward(("m", QOS_2, 9), ("n", NUMBERED, 3), ("o", NUMBERED, 4))
    assert bench.stored() == 3


def test_nothing_behind_a_refused_message_is_stored_before_it() -> None:
    bench = Bench()
    bench.may_append = False
    refused = [(1, reasons.QUOTA_EXCEEDED), (2, reasons.QUOTA_EXCEEDED)]
    assert bench.forward(("one", 1, 0), ("two", 1, 0)) == refused
    bench.may_append = True
    # Sent before its node knew.
    assert bench.forward(("three", 1, 0), attempt=0) == [(3, reasons.QUOTA_EXCEEDED)]
    assert bench.stored() == 0
    assert bench.forward(("one", 1, 0), ("two", 1, 0), attempt=2) == []
    assert bench.stored() == 2


def test_a_sequence_behind_a_refused_one_waits_for_it() -> None:
    bench = Bench()
    bench.may_append = False
    bench.forward(("one", NUMBERED, 1))
    bench.may_append = True
    assert bench.forward(("two", NUMBERED, 2)) == [(2, reasons.QUOTA_EXCEEDED)]
    assert bench.forward(("one", NUMBERED, 1), ("two", NUMBERED, 2), attempt=1) == []
    assert bench.stored() == 2


def test_a_publisher_may_give_up_a_refused_sequence() -> None:
    """Its node orders what one connection sends, so the leader refuses no other for it."""
    bench = Bench()
    bench.may_append = False
    bench.forward(("one", NUMBERED, 1))
    bench.may_append = True
    assert bench.forward(("two", NUMBERED, 2), attempt=1) == []
    assert bench.stored() == 1


def test_records_for_another_epoch_are_left_lying() -> None:
    bench = Bench()
    assert bench.forward(("old", 1, 0), epoch=EPOCH - 1) == []
    assert bench.forward(("new", 1, 0), epoch=EPOCH + 1) == []
    assert bench.stored() == 0


def test_a_deposed_owners_message_is_not_stored() -> None:
    bench = Bench()
    bench.forward(("m", QOS_2, 9), session_epoch=8)
    assert bench.forward(("late", QOS_2, 10), session_epoch=7) == [(2, reasons.SESSION_TAKEN_OVER)]
    assert bench.stored() == 1


def test_state_is_taken_whatever_is_in_sync() -> None:
    """It waits in the log; the promise that goes with it waits too."""
    bench = Bench()
    bench.may_append = False
    bench.forward(("", 0, 9), kind=log_record.RELEASE)
    assert bench.stored() == 1


def test_the_first_record_that_ends_a_delayed_message_decides() -> None:
    """A cancellation that is acknowledged is not followed by the publication, nor the other way."""
    bench = Bench()
    waiting = log_record.FLAG_DELAYED | 1
    for sequence, topic in enumerate(["$delayed/5/a", "$delayed/5/b", "$delayed/5/c"]):
        bench.forward((topic, waiting, 0))
        assert bench.stored() == sequence + 1
    bench.commit()
    refused = reasons.IMPLEMENTATION_SPECIFIC_ERROR
    # Cancelled first.
    assert bench.forward(("", 0, 0), kind=log_record.DELAYED) == []
    assert bench.admission.ends_delayed((0, 0))
    assert bench.forward(("a", waiting, 0)) == []
    assert bench.forward(("", 0, 0), kind=log_record.DELAYED) == [(6, refused)]
    # Published first.
    assert bench.forward(("b", waiting, 1)) == []
    assert bench.forward(("", 0, 1), kind=log_record.DELAYED) == [(8, refused)]
    # Of QoS 0: delivered, and its record is still under way.
    bench.images.state.delayed.by_place[(0, 2)].is_delivered = True
    assert bench.forward(("", 0, 2), kind=log_record.DELAYED) == [(9, refused)]
    assert bench.stored() == 5
    bench.commit()
    bench.state.delivered[0] = bench.stored()
    bench.answers()
    assert not bench.admission.ends_delayed((0, 0))
    assert bench.forward(("", 0, 1), kind=log_record.DELAYED) == [(10, refused)]
    assert bench.stored() == 5


def test_features_wait_for_the_last_older_node() -> None:
    """A witness keeps no records, and a node that was removed does not count."""
    bench = Bench()
    info = NodeInfo("n2", "i", DATA, "h:1", "h:2")
    nodes = {
        "n2": info,
        "n3": replace(info, node_id="n3"),
        "w": replace(info, node_id="w", role=WITNESS),
    }
    bench.context.metadata = cast(ClusterMetadata, SimpleNamespace(nodes=nodes))
    assert bench.context.nodes_without("bans") == []
    bench.context.features.update(n2="position", n3="x,bans", w="", removed="")
    assert bench.context.nodes_without("bans") == ["n2"]
    bench.context.features["n2"] = "position,bans,queues"
    assert bench.context.nodes_without("bans") == []
    assert bench.context.nodes_without("queues") == ["n3"]


def retain(bench: Bench, *topics: str, kind: int = log_record.MESSAGE) -> None:
    builder = BatchBuilder(0, 0)
    for topic in topics:
        flags = 1 | log_record.FLAG_RETAIN
        builder.add(Record(0, kind, flags, topic=topic.encode(), payload=b"x"))
    bench.admission.forwarded("n2", EPOCH, 0, Batch(builder.build(0)))


@pytest.mark.parametrize("kind", [log_record.MESSAGE, log_record.RETAINED])
@pytest.mark.parametrize("committed", [False, True])
def test_the_leader_decides_what_is_retained(kind: int, committed: bool) -> None:
    """And its log says so: no other node looks at its own limit."""
    bench = Bench()
    bench.images.state.config.retained_max = 2
    for topic in ("a", "b", "c", "a"):
        retain(bench, topic, kind=kind)
        if committed:
            bench.commit()
    if not committed:
        bench.commit()
    retained = bench.images.state.retained
    assert sorted(retained.entries) == ["a", "b"]
    assert bench.images.state.stats.refused_quota == 1
    # A message is delivered nevertheless.
    assert bench.stored() == (5 if kind == log_record.MESSAGE else 4)
    other = ReplicatedState(RecordedState(NodeConfig(partitions=1, retained_max=1), bench.journal))
    for record in bench.committed:
        other.apply(record)
    assert sorted(other.state.retained.entries) == ["a", "b"]


def test_a_topic_without_room_does_not_keep_its_old_message() -> None:
    bench = Bench()
    retain(bench, "a", "b")
    bench.images.state.config.retained_bytes_max = 1
    retain(bench, "a")
    bench.commit()
    assert sorted(bench.images.state.retained.entries) == ["b"]
    # A change of the limit makes room again.
    bench.images.state.config.retained_bytes_max = 1 << 20
    retain(bench, "a")
    bench.commit()
    assert sorted(bench.images.state.retained.entries) == ["a", "b"]


def test_an_expired_position_is_no_repetition() -> None:
    """Though the producer has a position in another partition that is not expired."""
    bench = Bench()
    table = bench.images.state.producers
    table.expiry_us = 10
    table.store(b"p", 0, 0, 100, 0)
    table.store(b"p", 1, 0, 1, 1000)
    bench.state.wall_us = 1000
    assert bench.forward(("m", NUMBERED, 1), session_epoch=0) == []
    assert bench.stored() == 1
