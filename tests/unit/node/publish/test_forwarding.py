"""Records on their way to leaders: who waits for which, in which order they leave, what is sent
again."""

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import FORWARD
from holdfast.node.node_state import NodeState, Promise
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.publish.forward_frames import decode_forward
from holdfast.node.publish.forwarding import FORWARD_BYTES_MAX, WAIT_S, RecordForwarder
from holdfast.node.publish.pending_records import Appender, PendingRecord
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.mqtt import reasons
from tests.support.journal_port import new_state

PARTITIONS = 2
LEADER = "n2"


class Promised(Promise):
    def __init__(self, kept: list[str], name: str, connection: Connection) -> None:
        super().__init__(connection)
        self.kept = kept
        self.name = name

    def release(self, state: NodeState) -> None:
        self.kept.append(self.name)

    def refuse(self, state: NodeState, refusal: Rejection) -> None:
        self.kept.append(f"{self.name} refused 0x{refusal.reason:02x}")


class Leading(Appender):
    """This node leads: takes everything, or refuses it at once."""

    def __init__(self) -> None:
        self.taken: list[PendingRecord] = []
        self.forwarding: RecordForwarder | None = None
        self.refuses = 0

    def append(self, pending: PendingRecord) -> None:
        if self.refuses:
            assert self.forwarding is not None
            self.forwarding.refuse(pending.ticket, Rejection("no", self.refuses))
        else:
            self.taken.append(pending)


class Bench:
    def __init__(self) -> None:
        journal = Journal(PARTITIONS, replicated=True)
        self.state = new_state(NodeConfig(partitions=PARTITIONS), journal)
        self.context = ClusterContext("n1", journal)
        self.context.connected.add(LEADER)
        self.leading = Leading()
        self.forwarding = RecordForwarder(self.state, self.context, self.leading)
        self.leading.forwarding = self.forwarding
        self.kept: list[str] = []
        self.connections: dict[str, Connection] = {}

    def publish(
        self, name: str, partition: int = 0, qos: int = 1, size: int = 1, client: str = "c"
    ) -> int:
        """Append a message and promise its acknowledgement; the ticket."""
        connection = self.connections.setdefault(client, Connection(1 << 28, "", ListenerRules("")))
        record = self.record(partition, log_record.MESSAGE, qos, name, b"x" * size)
        self.forwarding.publish(record, Promised(self.kept, name, connection))
        return self.newest()

    def append(self, partition: int, kind: int, flags: int, name: str, payload: bytes) -> int:
        self.forwarding.append(self.record(partition, kind, flags, name, payload))
        return self.newest()

    def record(self, partition: int, kind: int, flags: int, name: str, payload: bytes) -> Record:
        topic = name.encode()
        return Record(partition, kind, flags=flags, topic=topic, client_id=b"c", payload=payload)

    def newest(self) -> int:
        return max(self.forwarding.pending, default=0)

    def attempts(self) -> list[int]:
        """Of every batch that has left since the last look."""
        found = []
        for _, _, payload in self.context.outgoing:
            assert isinstance(payload, bytes)
            found += [attempt for _, attempt, _ in decode_forward(payload)]
        return found

    def sent(self) -> list[tuple[str, int, int, list[str]]]:
        """(node, epoch, partition, names) of every batch that has left since the last call."""
        found = []
        for node, kind, payload in self.context.outgoing:
            assert kind == FORWARD
            assert isinstance(payload, bytes)
            for epoch, _, batch in decode_forward(payload):
                names = [record.topic.decode() for record in batch.records()]
                found.append((node, epoch, batch.partition, names))
        self.context.outgoing.clear()
        return found

    def commit(self, ticket: int, partition: int = 0) -> None:
        self.forwarding.settle(ticket, partition, b"c")


def test_a_promise_waits_for_its_record_and_for_those_before() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 3, set())
    bench.forwarding.aligned(1, LEADER, 5, set())
    first = bench.publish("first", 0)
    second = bench.publish("second", 1)
    other = bench.publish("other", 1, client="d")
    bench.forwarding.flush()
    assert sorted(bench.sent()) == [
        (LEADER, 3, 0, ["first"]),
        (LEADER, 5, 1, ["second", "other"]),
    ]
    bench.commit(second, 1)
    bench.commit(other, 1)
    assert bench.kept == ["other"]
    bench.commit(first, 0)
    assert bench.kept == ["other", "first", "second"]
    assert bench.forwarding.pending_bytes == 0


def test_much_at_once_is_promised_no_sooner() -> None:
    """A frame is full in the middle of a turn, between a record and its promise."""
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    tickets = [bench.publish(f"m{at}", size=FORWARD_BYTES_MAX // 3) for at in range(8)]
    assert bench.kept == []
    bench.forwarding.flush()
    assert [name for batch in bench.sent() for name in batch[3]] == [f"m{at}" for at in range(8)]
    for ticket in tickets:
        bench.commit(ticket)
    assert bench.kept == [f"m{at}" for at in range(8)]


def test_nobody_waits_for_qos_0_and_wills() -> None:
    """So their refusal is nobody's."""
    bench = Bench()
    bench.context.leading[0] = 1
    bench.forwarding.aligned(0, "n1", 1, set())
    bench.leading.refuses = reasons.QUOTA_EXCEEDED
    bench.append(0, log_record.MESSAGE, 0, "qos 0", b"")
    bench.append(0, log_record.MESSAGE, 1 | log_record.FLAG_WILL, "will", b"")
    bench.append(0, log_record.RETAINED, log_record.FLAG_RETAIN, "retained", b"")
    bench.leading.refuses = 0
    ticket = bench.publish("wanted")
    assert bench.kept == []
    bench.commit(ticket)
    assert bench.kept == ["wanted"]


def test_refusals_keep_the_order_too() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    first = bench.publish("first")
    second = bench.publish("second")
    bench.forwarding.refuse(second, Rejection("too few"))
    assert bench.kept == []
    bench.commit(first)
    assert bench.kept == ["first", "second refused 0x97"]


def test_after_a_failover_only_what_is_missing_is_sent_again() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    tickets = [bench.publish(f"m{at}") for at in range(4)]
    bench.forwarding.flush()
    bench.sent()
    bench.commit(tickets[0])
    bench.forwarding.stop(0)
    # Nothing leaves while it is unknown what the next leader has.
    bench.publish("m4")
    bench.forwarding.flush()
    assert bench.sent() == []
    bench.context.connected.add("n3")
    bench.forwarding.aligned(0, "n3", 2, {(tickets[1], b"c")})
    bench.forwarding.flush()
    assert bench.sent() == [("n3", 2, 0, ["m2", "m3", "m4"])]
    for ticket in list(bench.forwarding.pending):
        bench.commit(ticket)
    assert bench.kept == [f"m{at}" for at in range(5)]


def test_a_record_with_the_ticket_of_another_node_is_sent() -> None:
    """Tickets of two nodes may be equal. The log has the record of the other one, not committed."""
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    ticket = bench.publish("m0")
    bench.forwarding.flush()
    bench.sent()
    bench.forwarding.stop(0)
    log = ApplyingLog(bench.state.journal)
    builder = BatchBuilder(0, 0)
    builder.add(Record(0, log_record.MESSAGE, 1, client_id=b"of n3", ticket=ticket))
    log.built(Batch(builder.build(1)))
    replicated = ReplicatedState(bench.state)
    settle = bench.forwarding.settle
    pending = bench.forwarding.pending
    applier = Applier(bench.state, replicated, log, pending, settle, print, print)
    bench.forwarding.aligned(0, LEADER, 2, applier.tickets(0))
    bench.forwarding.flush()
    assert bench.sent() == [(LEADER, 2, 0, ["m0"])]


def test_what_was_built_for_a_lost_leader_does_not_leave() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    bench.publish("m0")
    bench.forwarding.stop(0)
    bench.forwarding.flush()
    assert bench.sent() == []
    bench.forwarding.aligned(0, LEADER, 2, set())
    bench.forwarding.flush()
    assert bench.sent() == [(LEADER, 2, 0, ["m0"])]


def test_without_a_leader_messages_are_refused_in_the_end_but_never_in_doubt() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    bench.publish("in doubt")
    bench.forwarding.flush()
    bench.forwarding.stop(0)
    bench.publish("never sent", client="d")
    bench.append(0, log_record.SESSION, 0, "state", b"")
    bench.forwarding.refuse_overdue(WAIT_S / 2)
    assert bench.kept == []
    bench.forwarding.refuse_overdue(WAIT_S * 2)
    assert bench.kept == ["never sent refused 0x97"]
    assert len(bench.forwarding.pending) == 2


def test_somebody_elses_ticket_settles_nothing() -> None:
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    ticket = bench.publish("m0")
    bench.forwarding.settle(ticket, 1, b"c")
    bench.forwarding.settle(ticket, 0, b"somebody else")
    assert bench.kept == []


def test_a_refusal_is_known_by_the_number_of_what_is_sent_next() -> None:
    """The leader refuses what was sent before the refusal was known: it may be behind it."""
    bench = Bench()
    bench.forwarding.aligned(0, LEADER, 1, set())
    first = bench.publish("first")
    bench.forwarding.flush()
    assert bench.attempts() == [0]
    bench.sent()
    bench.publish("behind")
    bench.forwarding.flush()
    assert bench.attempts() == [0]
    bench.sent()
    bench.forwarding.refuse(first, Rejection("too few"))
    bench.publish("next")
    bench.forwarding.flush()
    assert bench.attempts() == [1]


def test_what_a_client_sent_behind_a_refused_message_is_refused_too() -> None:
    """Else a client that sends the refused one again would have the later one stored first."""
    bench = Bench()
    bench.publish("old")
    bench.state.now = WAIT_S
    bench.publish("young")
    bench.forwarding.refuse_overdue(WAIT_S * 1.5)
    assert bench.kept == ["old refused 0x97", "young refused 0x97"]


def test_what_waits_for_the_newest_record_waits_for_those_before_it() -> None:
    """Also if the newest is refused, and is done first."""
    bench = Bench()
    done: list[str] = []
    first = bench.append(0, log_record.CURSOR, 0, "", b"")
    second = bench.append(0, log_record.CURSOR, 0, "", b"")
    bench.forwarding.after_newest(0, lambda: done.append("second"))
    third = bench.publish("third")
    bench.forwarding.after_newest(0, lambda: done.append("third"))
    bench.forwarding.refuse(third, Rejection("no"))
    assert done == []
    bench.commit(first)
    assert done == []
    bench.commit(second)
    assert done == ["second", "third"]
    fourth = bench.publish("fourth")
    bench.forwarding.after_newest(0, lambda: done.append("fourth"))
    bench.forwarding.refuse(fourth, Rejection("no"))
    assert done == ["second", "third", "fourth"]


def test_the_progress_of_a_group_does_not_outlive_its_coordinator() -> None:
    """The next one has begun without it. A session's goes on: its epoch is the session's."""
    bench = Bench()
    connection = Connection(1 << 20, "", ListenerRules(""))
    for epoch, client_id in ((3, b"$share/g/t"), (1 << 30, b"c")):
        bench.forwarding.publish(
            Record(0, log_record.CURSOR, client_id=client_id, sequence=epoch, payload=b""),
            Promised(bench.kept, client_id.decode(), connection),
        )
    session = bench.newest()
    bench.forwarding.aligned(0, LEADER, 4, set())
    assert list(bench.forwarding.pending) == [session]
    bench.commit(session)
    assert bench.kept == ["$share/g/t", "c"]
