"""A barrier is passed when everything that was committed anywhere before it is applied here."""

from holdfast.log.journal.journal import Journal
from holdfast.log.record import MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import BARRIER
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.requests import RequestRefused, Unknown
from holdfast.node.reads.read_barrier import (
    ASK_AGAIN_S,
    ASKING_MAX,
    Barriers,
    decode_barrier,
    encode_log_ends,
)
from holdfast.node.reads.read_index import ASK_AGAIN_S as READ_AGAIN_S
from holdfast.node.reads.read_index import NOTHING, MetadataReads
from tests.support.journal_port import new_state

PARTITIONS = 2
KNOWN = RequestRefused(CHANGES_NOTHING)


class Agreed(ClusterContext):
    """What the metadata says, as this node knows it."""

    def __init__(self, node_id: str, journal: Journal) -> None:
        super().__init__(node_id, journal)
        self.leaders = ["n2"] * PARTITIONS
        self.epochs = [1] * PARTITIONS

    def leader(self, partition: int) -> str:
        return self.leaders[partition]

    def epoch(self, partition: int) -> int:
        return self.epochs[partition]


class Bench:
    """n1, which leads nothing."""

    def __init__(self) -> None:
        journal = Journal(PARTITIONS, replicated=True)
        self.state = new_state(NodeConfig(partitions=PARTITIONS), journal)
        self.context = Agreed("n1", journal)
        self.context.connected = {"n2", "n3"}
        self.has_leader = True
        self.proposed = 0
        self.reads = MetadataReads(self.propose_nothing)
        self.barriers = Barriers(self.state, self.context, self.reads)

    def propose_nothing(self, now: float) -> int:
        if not self.has_leader:
            return NOTHING
        self.proposed += 1
        return self.proposed

    def turn(self, seconds: float = 0.0) -> list[tuple[str, int]]:
        """Who is asked, and with which question."""
        self.state.now += seconds
        self.barriers.advance()
        self.reads.advance(self.state.now)
        asked: list[tuple[str, int]] = []
        for node, kind, payload in self.context.outgoing:
            assert kind == BARRIER
            assert isinstance(payload, bytes)
            asked.append((node, decode_barrier(payload)[0]))
        self.context.outgoing.clear()
        return asked

    def read(self) -> None:
        """The metadata is known up to the newest proposal."""
        assert self.reads.proposal_done(self.proposed, KNOWN, self.state.now)

    def apply(self, *ends: int) -> None:
        self.state.delivered[:] = ends


def test_it_waits_for_the_metadata_and_for_what_the_leaders_have() -> None:
    bench = Bench()
    barrier = bench.barriers.begin()
    assert bench.barriers.begin() == barrier
    assert bench.turn() == [("n2", 1)]
    bench.barriers.handle_reply(1, [(0, 1, 5), (1, 1, 0)])
    bench.apply(5, 0)
    bench.turn()
    assert not bench.barriers.has_passed(barrier)
    bench.read()
    bench.apply(4, 0)
    bench.turn()
    assert not bench.barriers.has_passed(barrier)
    bench.apply(5, 0)
    assert bench.turn() == []
    assert bench.barriers.has_passed(barrier)
    assert bench.barriers.timer() is None


def test_a_leader_that_was_deposed_is_not_believed() -> None:
    """n2 and this node are cut off from the others, and n3 leads there: it has committed a record
    that n2 does not know."""
    bench = Bench()
    barrier = bench.barriers.begin()
    bench.turn()
    bench.barriers.handle_reply(1, [(0, 1, 5), (1, 1, 0)])
    bench.apply(5, 0)
    for _ in range(100):
        bench.turn(5.0)
    assert not bench.barriers.has_passed(barrier)
    # The link to the others is there again.
    bench.context.leaders[0] = "n3"
    bench.context.epochs[0] = 2
    bench.read()
    assert bench.turn(ASK_AGAIN_S)[0][0] == "n3"
    assert not bench.barriers.has_passed(barrier)
    bench.barriers.handle_reply(200, [(0, 2, 6)])
    bench.turn()
    assert not bench.barriers.has_passed(barrier)
    bench.apply(6, 0)
    bench.turn()
    assert bench.barriers.has_passed(barrier)


def test_a_leader_that_is_not_known_here_yet_is_believed() -> None:
    bench = Bench()
    barrier = bench.barriers.begin()
    bench.turn()
    bench.read()
    bench.barriers.handle_reply(1, [(0, 2, 6), (1, 1, 0)])
    bench.barriers.handle_reply(1, [(0, 1, 5)])
    bench.apply(5, 0)
    bench.turn()
    assert not bench.barriers.has_passed(barrier)
    bench.apply(6, 0)
    bench.turn()
    assert bench.barriers.has_passed(barrier)


def test_what_the_next_leader_does_not_have_is_not_waited_for() -> None:
    bench = Bench()
    barrier = bench.barriers.begin()
    bench.turn()
    bench.read()
    bench.barriers.handle_reply(1, [(0, 1, 9), (1, 1, 0)])
    bench.apply(5, 0)
    bench.turn()
    bench.context.leaders[0] = "n3"
    bench.context.epochs[0] = 2
    assert bench.turn(ASK_AGAIN_S) == [("n3", 2)]
    bench.barriers.handle_reply(2, [(0, 2, 5)])
    bench.turn()
    assert bench.barriers.has_passed(barrier)


def test_answers_and_reads_from_before_it_began_do_not_count() -> None:
    bench = Bench()
    first = bench.barriers.begin()
    assert bench.turn() == [("n2", 1)]
    second = bench.barriers.begin()
    assert second != first
    assert bench.turn() == [("n2", 2)]
    bench.barriers.handle_reply(1, [(0, 1, 0), (1, 1, 0)])
    bench.read()
    bench.turn()
    assert bench.barriers.has_passed(first)
    assert not bench.barriers.has_passed(second)
    bench.barriers.handle_reply(2, [(0, 1, 0), (1, 1, 0)])
    bench.turn()
    assert not bench.barriers.has_passed(second)
    bench.read()
    bench.turn()
    assert bench.barriers.has_passed(second)


def test_partitions_that_this_node_leads() -> None:
    bench = Bench()
    bench.context.leading = [3, 0]
    bench.context.epochs = [3, 1]
    bench.context.journal.append(Record(0, MESSAGE))
    barrier = bench.barriers.begin()
    bench.turn()
    bench.read()
    bench.barriers.handle_reply(1, [(1, 1, 0)])
    bench.turn()
    assert not bench.barriers.has_passed(barrier)
    bench.apply(1, 0)
    bench.turn()
    assert bench.barriers.has_passed(barrier)
    # The same is what it answers others.
    answer = encode_log_ends(bench.context, bytes(8))
    assert decode_barrier(answer) == (0, [(0, 3, 1)])


def test_it_names_the_partitions_that_it_has_not_reached_and_waits_for_them() -> None:
    bench = Bench()
    bench.context.leaders = ["", "n2"]
    barrier = bench.barriers.begin()
    bench.turn()
    bench.barriers.handle_reply(1, [(1, 1, 0)])
    assert bench.barriers.lacking(barrier) == set()
    bench.read()
    for _ in range(100):
        bench.turn(60.0)
        assert bench.barriers.lacking(barrier) == {0}
        assert not bench.barriers.has_passed(barrier)
    bench.context.leaders[0] = "n3"
    bench.turn(ASK_AGAIN_S)
    bench.barriers.handle_reply(200, [(0, 2, 0)])
    bench.turn()
    assert bench.barriers.has_passed(barrier)


def test_many_of_them_are_asked_about_at_once() -> None:
    bench = Bench()
    bench.context.leaders = ["", "n2"]
    found = set()
    for _ in range(3 * ASKING_MAX):
        found.add(bench.barriers.begin())
        bench.turn()
    assert len(found) == ASKING_MAX + 1
    assert len(bench.turn(ASK_AGAIN_S)) == 1
    assert bench.proposed == 1


def test_the_metadata_is_read_again_until_it_is_known() -> None:
    bench = Bench()
    bench.has_leader = False
    barrier = bench.barriers.begin()
    bench.turn()
    bench.barriers.handle_reply(1, [(0, 1, 0), (1, 1, 0)])
    bench.turn()
    assert bench.proposed == 0
    assert bench.reads.timer() is None
    bench.has_leader = True
    bench.turn()
    assert bench.proposed == 1
    assert not bench.reads.proposal_done(7, KNOWN, bench.state.now)
    assert bench.reads.proposal_done(1, Unknown("no majority"), bench.state.now)
    bench.turn()
    assert bench.proposed == 1
    assert bench.reads.timer() == bench.state.now + READ_AGAIN_S
    bench.turn(READ_AGAIN_S)
    assert bench.proposed == 2
    bench.read()
    bench.turn()
    assert bench.barriers.has_passed(barrier)
