"""The order of a client's messages when a leader, or this node, does not take one of them: what was
sent behind it must not be stored before it comes again."""

import struct

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.publish.forward_frames import (
    ForwardResult,
    decode_forward,
    decode_result,
    encode_result,
)
from holdfast.node.publish.forwarding import WAIT_S, RecordForwarder
from holdfast.node.publish.pending_records import Appender, PendingRecord
from holdfast.node.publish.producer_dedup import Sequencer
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt import reasons
from tests.support.journal_port import new_state

LEADER = "n2"
REFUSED = reasons.QUOTA_EXCEEDED


class Promised(Promise):
    def __init__(self, kept: list[str], name: str, connection: Connection) -> None:
        super().__init__(connection)
        self.kept = kept
        self.name = name

    def release(self, state: NodeState) -> None:
        self.kept.append(self.name)

    def refuse(self, state: NodeState, refusal: Rejection) -> None:
        self.kept.append(f"{self.name} refused")


class Taking(Appender):
    def append(self, pending: PendingRecord) -> None:
        """It is in this node's own log."""


class Bench:
    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        self.state = new_state(NodeConfig(partitions=1), journal)
        self.context = ClusterContext("n1", journal)
        self.context.connected.add(LEADER)
        self.forwarding = RecordForwarder(self.state, self.context, Taking())
        self.kept: list[str] = []
        self.connection = Connection(1 << 20, "", ListenerRules(""))
        self.tickets: dict[str, int] = {}

    def publish(self, name: str, client: bytes = b"c", flags: int = 1) -> None:
        before = set(self.forwarding.pending)
        self.forwarding.publish(
            Record(0, log_record.MESSAGE, flags=flags, topic=name.encode(), client_id=client),
            Promised(self.kept, name, self.connection),
        )
        (self.tickets[name],) = set(self.forwarding.pending) - before

    def refuse(self, name: str) -> None:
        self.forwarding.refuse(self.tickets[name], Rejection("too few"))

    def commit(self, name: str, client: bytes = b"c") -> None:
        self.forwarding.settle(self.tickets[name], 0, client)

    def sent(self) -> list[tuple[int, list[str]]]:
        """(attempt, names) of every batch that has left since the last call."""
        self.forwarding.flush()
        found = []
        for _, _, payload in self.context.outgoing:
            assert isinstance(payload, bytes)
            for _, attempt, batch in decode_forward(payload):
                found.append((attempt, [record.topic.decode() for record in batch.records()]))
        self.context.outgoing.clear()
        return found


def test_a_refusal_that_is_not_told_yet_is_known_at_the_connection() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    bench.publish("first")
    bench.publish("second")
    bench.refuse("second")
    assert bench.kept == []
    assert bench.connection.refusals_due == 1
    bench.commit("first")
    assert bench.kept == ["first", "second refused"]
    assert bench.connection.refusals_due == 0


def test_a_repetition_is_no_refusal() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    bench.publish("first")
    bench.publish("second")
    bench.forwarding.refuse(bench.tickets["second"], None)
    assert bench.connection.refusals_due == 0
    bench.commit("first")
    assert bench.kept == ["first", "second"]


def test_what_was_on_its_way_when_the_refusal_came_says_so() -> None:
    """It leaves in the same turn, but was taken from the client before."""
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    bench.publish("refused")
    assert bench.sent() == [(0, ["refused"])]
    bench.publish("behind")
    bench.refuse("refused")
    bench.publish("next")
    assert bench.sent() == [(0, ["behind"]), (1, ["next"])]


def test_what_was_sent_behind_a_refused_message_does_not_go_to_the_next_leader() -> None:
    """The leader that refused the first one is lost before it has answered for the second."""
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    bench.publish("refused")
    bench.publish("behind")
    bench.publish("stored")
    bench.publish("other", b"d")
    bench.publish("will", flags=1 | log_record.FLAG_WILL)
    assert bench.sent()
    bench.refuse("refused")
    bench.publish("next")
    bench.forwarding.stop(0)
    bench.forwarding.aligned(0, LEADER, 2, {(bench.tickets["stored"], b"c")})
    assert bench.sent() == [(2, ["other", "will"])]
    assert bench.kept == ["refused refused", "behind refused"]
    for name, client in ("stored", b"c"), ("other", b"d"), ("will", b"c"):
        bench.commit(name, client)
    assert bench.kept[2:] == ["stored", "other", "will", "next refused"]
    bench.publish("again")
    assert [names for _, names in bench.sent()] == [["again"]]


def test_what_this_node_has_stored_as_a_leader_is_not_refused() -> None:
    """The next leader may have it: its packet id must not be free."""
    bench = Bench()
    bench.forwarding.aligned(0, "n1", 1, set())
    bench.publish("stored")
    bench.forwarding.stop(0)
    bench.publish("waiting")
    bench.state.now = WAIT_S * 2
    bench.forwarding.refuse_overdue(bench.state.now)
    assert bench.kept == []
    assert list(bench.forwarding.pending) == [bench.tickets["stored"]]
    bench.commit("stored")
    assert bench.kept == ["stored", "waiting refused"]


def test_nothing_later_of_a_producer_before_what_was_refused() -> None:
    sequencer = Sequencer()
    sequencer.producer_id, sequencer.epoch = b"p", 1
    assert sequencer.note_refused(b"p", 1, 7)
    assert sequencer.note_refused(b"p", 1, 5)
    assert sequencer.note_refused(b"p", 1, 6)
    sequencer.sequence = 6
    assert sequencer.follows_refused()
    sequencer.sequence = 5
    assert not sequencer.follows_refused()
    sequencer.sequence = 6
    assert not sequencer.follows_refused()


@pytest.mark.parametrize("reason", [reasons.SUCCESS, REFUSED])
@pytest.mark.parametrize(
    ("node", "partition", "epoch", "counts"),
    [
        (LEADER, 0, 4, False),
        ("n3", 0, 5, True),
        ("n3", 0, 4, False),
        ("n3", 1, 5, False),
        # Of an older version, which names no epoch.
        ("n3", 0, 0, True),
        (LEADER, 0, 0, False),
    ],
)
def test_an_answer_counts_from_the_leader_that_the_record_is_with(
    node: str, partition: int, epoch: int, counts: bool, reason: int
) -> None:
    """n2 is deposed and has not heard of it: it refuses what n3, the next leader, stores."""
    bench = Bench()
    bench.context.connected.add("n3")
    bench.forwarding.aligned(0, LEADER, 4, set())
    bench.publish("first")
    assert bench.sent() == [(0, ["first"])]
    bench.forwarding.stop(0)
    early = ForwardResult(0, 4, bench.tickets["first"], REFUSED, "disk full")
    bench.forwarding.answered(LEADER, early)
    bench.forwarding.aligned(0, "n3", 5, set())
    assert bench.sent() == [(0, ["first"])]
    bench.forwarding.answered(
        node, ForwardResult(partition, epoch, bench.tickets["first"], reason, "")
    )
    kept = ["first refused"] if reason == REFUSED else ["first"]
    assert bench.kept == (kept if counts else [])


def test_answers_name_partition_and_epoch_in_a_way_that_older_nodes_pass_over() -> None:
    answers = [
        ForwardResult(3, 7, 1, 0, ""),
        ForwardResult(3, 7, 2, 0x97, "full"),
        ForwardResult(4, 9, 5, 0x97, "é"),
    ]
    payload = encode_result(answers)
    found = [
        (each.partition, each.epoch, each.ticket, each.reason) for each in decode_result(payload)
    ]
    assert found == [(3, 7, 1, 0), (3, 7, 2, 0x97), (4, 9, 5, 0x97)]
    # As version 0.1 reads them: entries of ticket, reason and text.
    tickets = []
    at = 0
    while at < len(payload):
        ticket, _, length = struct.unpack_from("<IBH", payload, at)
        at += 7 + length
        tickets.append(ticket)
    assert tickets == [0, 1, 2, 0, 5]
    old = struct.pack("<IBH", 6, 0x97, 2) + b"no"
    (answer,) = decode_result(old)
    assert (answer.epoch, answer.ticket, answer.text) == (0, 6, "no")
