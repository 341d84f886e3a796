"""Records go to a leader once no replica in sync has more than it."""

from holdfast.log.journal.journal import Journal
from holdfast.log.record import MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.leader_sync import LeaderSync
from holdfast.node.publish.pending_records import Appender, PendingRecord
from holdfast.node.reads.read_barrier import (
    ALIGNMENT,
    barrier_request,
    decode_barrier,
    is_alignment,
)
from tests.support.journal_port import new_state
from tests.support.replica_cores import Cores


class Taking(Appender):
    def append(self, pending: PendingRecord) -> None:
        """It is in this node's own log."""


def test_a_leader_tells_its_end_when_all_replicas_in_sync_follow() -> None:
    """a has a record that b, the next leader, lacks, and is in sync. Until a follows it may lead
    again with that record, so a refusal by b would not last."""
    cores = Cores()
    cores.cut("a", "b")
    cores.cut("a", "c")
    cores.append("a", 1)
    cores.change(leader="b", epoch=2)
    cores.tell("b", "c")
    cores.run()
    journal = Journal(1, replicated=True)
    context = ClusterContext("b", journal)
    context.connected.add("c")
    context.leading[0] = 2
    context.uncompared.add(0)
    forwarding = RecordForwarder(new_state(NodeConfig(partitions=1), journal), context, Taking())
    sync = LeaderSync(context, forwarding, cores["b"].core)
    forwarding.append(Record(0, MESSAGE, flags=1, topic=b"new", client_id=b"c"))
    assert sync.lead(0), "a record that no leader has had need not wait"
    forwarding.aligned(0, "b", 2, set())
    assert not sync.lead(0)
    assert not forwarding.target(0)

    def told() -> list[tuple[str, int, list[tuple[int, int, int]]]]:
        found = [(node, *decode_barrier(bytes(payload))) for node, _, payload in context.outgoing]  # type: ignore[arg-type]
        context.outgoing.clear()
        return found

    assert sync.compare() == []
    sync.tell("c", barrier_request(0))  # version 0.1 asks so
    sync.tell("c", barrier_request(ALIGNMENT + 5))
    sync.tell("c", barrier_request(7))
    # A read barrier waits for the commit of what this log has, whoever follows.
    assert told() == [("c", 0, []), ("c", ALIGNMENT + 5, []), ("c", 7, [(0, 2, 0)])]
    cores.tell("a")
    cores.connect("ab")
    assert cores.numbers("a") == []
    assert sync.compare() == [0]
    assert told() == [("c", ALIGNMENT + 5, [(0, 2, 0)])], "to the newest question"
    # Once in an epoch is enough: whoever comes into the set has followed this leader.
    cores.cut("a", "b")
    assert sync.compare() == []
    sync.tell("c", barrier_request(ALIGNMENT))
    assert told() == [("c", ALIGNMENT, [(0, 2, 0)])]


def test_a_reply_from_before_a_partition_was_lost_does_not_count() -> None:
    """b has asked about partition 1, then sent a record to partition 0, whose log comes to b now.
    The reply has the end of partition 0 before the record."""
    cores = Cores(2, partitions=2)
    journal = Journal(2, replicated=True)
    context = ClusterContext("b", journal)
    context.metadata = cores.metadata
    context.connected.add("a")
    forwarding = RecordForwarder(new_state(NodeConfig(partitions=2), journal), context, Taking())
    sync = LeaderSync(context, forwarding, cores["b"].core)
    forwarding.append(Record(0, MESSAGE, flags=1, topic=b"new", client_id=b"c"))
    forwarding.append(Record(1, MESSAGE, flags=1, topic=b"new", client_id=b"c"))

    def asked() -> int:
        sync.ask(cores.now)
        (_, _, payload) = context.outgoing.pop()
        assert not context.outgoing
        return decode_barrier(bytes(payload))[0]  # type: ignore[arg-type]

    sync.lose(1)
    first = asked()
    assert is_alignment(first)
    assert sync.take_aligned() == [(0, "a", 1), (1, "a", 1)], "no record was sent before"
    forwarding.aligned(0, "a", 1, set())
    forwarding.flush()
    context.outgoing.clear()
    assert forwarding.has_doubt(0)
    sync.lose(0)
    sync.answered("a", first, [(0, 1, 0), (1, 1, 0)])
    assert sync.take_aligned() == []
    second = asked()
    assert second > first
    sync.answered("a", second, [(0, 1, 1), (1, 1, 0)])
    assert sync.take_aligned() == [], "the record is not in this log yet"
