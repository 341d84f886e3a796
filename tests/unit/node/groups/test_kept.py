"""A QoS 2 record of a shared group whose member has gone: whether its session has kept it is known
when the session's home partition says so, which may have no leader for long."""

import pytest
from msgspec.structs import replace

from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import CURSOR, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.groups.assignments import AgentContext
from holdfast.node.groups.node_agent import NodeAgent
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.session.session import Inflight, Session, tag_of
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from tests.support.journal_port import new_state

KEY = "$share/g/t"
PLACE = (1, 7)
PARTITIONS = 2
HOME = partition_of(b"c", PARTITIONS)


class Bench:
    """The session c has got the record here, and its connection is gone. Its last record waits for
    a leader of its home."""

    def __init__(self) -> None:
        journal = Journal(PARTITIONS, replicated=True)
        config = NodeConfig(node_id="n1", partitions=PARTITIONS)
        self.state = new_state(config, journal)
        self.images = ReplicatedState(RecordedState(config, journal))
        self.context = ClusterContext("n1", journal)
        self.lead("")
        self.forwarding = RecordForwarder(self.state, self.context, Appender())
        self.shares = NodeAgent(
            AgentContext(self.state, self.context, self.forwarding, self.images),
            lambda *_: None,
            lambda *_: None,
            lambda *_: None,
        )
        self.share = self.shares._assignments(KEY)
        self.session = Session("c")
        self.session.epoch = 1
        self.session.expiry_s = 3600
        self.keep(self.session)

    def lead(self, node: str) -> None:
        """All partitions."""
        info = PartitionInfo(("n1", "n2"), (), node, 1, ("n1", "n2"))
        nodes = {name: NodeInfo(name, "i1", f"{name}:1", "", "") for name in ("n1", "n2")}
        metadata = ClusterMetadata("c", 2, 1, nodes, (info, info), 1, tuple(nodes))
        self.context.metadata = replace(metadata, partitions=(info,) * PARTITIONS)

    def keep(self, session: Session) -> None:
        home = partition_of(session.key, PARTITIONS)
        self.forwarding.append(Record(home, CURSOR, client_id=session.key, sequence=1))
        self.newest = max(self.forwarding.pending)
        self.share.assigned[PLACE] = None
        self.shares.note_session_record(KEY, session, PLACE)

    def has_inflight(self) -> None:
        """By the log."""
        opened = encode_session(open_record(self.session, False, "n1"))
        self.images.apply(Record(HOME, SESSION, client_id=b"c", sequence=1, payload=opened))
        entry = Inflight(*PLACE, 2, False)
        entry.group_tag = tag_of(KEY)
        payload = encode_cursor([], {1: entry}, [])
        self.images.apply(Record(HOME, CURSOR, client_id=b"c", sequence=1, payload=payload))

    def pass_time(self, seconds: float) -> None:
        self.state.now += seconds
        self.shares.tidy()


@pytest.mark.parametrize("is_kept", [False, True])
def test_it_waits_for_the_leader_of_the_home_for_as_long_as_there_is_none(is_kept: bool) -> None:
    bench = Bench()
    for _ in range(10):
        bench.pass_time(3600.0)
        assert PLACE in bench.share.assigned
    bench.lead("n2")
    if is_kept:
        bench.has_inflight()
    bench.forwarding.settle(bench.newest, HOME, b"c")
    assert (bench.share.done, bench.share.returned) == (([PLACE], []) if is_kept else ([], [PLACE]))
    assert not bench.share.assigned


@pytest.mark.parametrize("seconds", [60.0, 3600.0])
def test_with_a_leader_it_waits_for_the_record(seconds: float) -> None:
    bench = Bench()
    bench.lead("n2")
    bench.pass_time(seconds)
    assert PLACE in bench.share.assigned
    bench.has_inflight()
    bench.forwarding.settle(bench.newest, HOME, b"c")
    assert bench.share.done == [PLACE]


def test_a_record_that_comes_late_takes_nothing_from_the_next_member() -> None:
    bench = Bench()
    late = bench.newest
    bench.share.return_record(PLACE)
    bench.pass_time(1.0)
    bench.share.assigned[PLACE] = None
    bench.forwarding.settle(late, HOME, b"c")
    assert PLACE in bench.share.assigned
    other = Session("d")
    other.expiry_s = 3600
    bench.keep(other)
    bench.forwarding.settle(bench.newest, partition_of(b"d", PARTITIONS), b"d")
    assert PLACE not in bench.share.assigned
