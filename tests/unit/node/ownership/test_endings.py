"""The will and the end of a session without a connection, at the leader of its home."""

import json

import pytest

from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.record import FLAG_WILL, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.requests import RequestRefused
from holdfast.node.ownership.wills_and_expiry import Endings
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.session import Session, Will
from holdfast.node.state.recorded_state import (
    CANCELLED,
    SESSION_EXPIRY,
    WILL_DUE,
    RecordedState,
    Timer,
)
from holdfast.node.state.replicated import CLOCK_SLACK_S, ReplicatedState
from tests.support.journal_port import new_state

CLIENT = "c"
EPOCH = 5


class Bench:
    """A node that leads the one partition; what it appends goes to its own journal."""

    def __init__(self, delay_s: int = 10) -> None:
        self.journal = Journal(1, replicated=True)
        config = NodeConfig(partitions=1)
        self.state = new_state(config, self.journal)
        self.images = RecordedState(config, self.journal)
        context = ClusterContext("n1", self.journal)
        context.leading[0] = 1
        self.reads = MetadataReads(lambda now: 1)
        self.barriers = Barriers(self.state, context, self.reads)
        self.decides = True
        self.is_changing = False
        self.replica = ReplicatedState(self.images)
        self.endings = Endings(
            self.state,
            self.replica,
            self.barriers,
            lambda partition: self.decides,
            lambda client_id: self.is_changing,
        )
        self.session = Session(CLIENT)
        self.session.epoch = EPOCH
        self.session.expiry_s = 100
        self.session.will = Will(b"t", b"gone", 1, False, b"", -1, delay_s)
        self.images.sessions[CLIENT] = self.session
        # Long after it was closed.
        self.state.wall_us = self.images.wall_us = 1_000_000_000

    def pass_barrier(self) -> None:
        self.barriers.advance()
        self.reads.advance(self.state.now)
        assert self.reads.proposal_done(1, RequestRefused(CHANGES_NOTHING), self.state.now)
        if self.barriers.advance():
            self.endings.advance()

    def set_clock(self, now: float, wall_s: float) -> None:
        for state in (self.state, self.images):
            state.now = now
            state.wall_us = int(wall_s * 1e6)

    def close(self, at_s: float) -> None:
        """A `close` record is applied, as `Homes.applied` does it."""
        fields = {"op": "close", "client": CLIENT, "expiry_s": 100, "will": False}
        payload = json.dumps(fields).encode()
        at_us = int(at_s * 1e6)
        self.replica.apply(
            Record(
                0,
                SESSION,
                timestamp_us=at_us,
                client_id=CLIENT.encode(),
                sequence=self.session.epoch,
                payload=payload,
            )
        )
        if not self.replica.arm_timers(self.session):
            self.endings.due(self.session, SESSION_EXPIRY)

    def run(self, until: float) -> None:
        """Fires the timers of the images, as `Member.handle_timers` does it."""
        wall_s = self.state.wall_us / 1e6 + until - self.state.now
        self.set_clock(until, wall_s)
        for kind, subject in self.images.pop_due(until, 100):
            if kind in (WILL_DUE, SESSION_EXPIRY) and isinstance(subject, Session):
                self.endings.due(subject, kind)

    def armed(self) -> list[Timer]:
        return [timer for timer in self.images.timers if timer.kind != CANCELLED]

    def appended(self) -> list[str]:
        """Since the last call."""
        group = self.journal.close_write_group()
        if group is None:
            return []
        self.state.delivered[:] = self.journal.next_offset
        records = [record for data in group.data for record in Batch(data).records()]
        assert all(record.kind == SESSION or record.flags & FLAG_WILL for record in records)
        return ["end" if record.kind == SESSION else "will" for record in records]


def test_a_delayed_will_waits_until_it_is_known_that_nobody_is_back() -> None:
    bench = Bench()
    bench.endings.due(bench.session, WILL_DUE)
    assert bench.appended() == []
    bench.pass_barrier()
    assert bench.appended() == ["will"]
    bench.endings.advance()
    assert bench.appended() == []


def test_a_session_that_is_back_keeps_its_will() -> None:
    bench = Bench()
    bench.endings.due(bench.session, WILL_DUE)
    bench.session.owner = "n2"
    bench.session.epoch = EPOCH + 1
    bench.endings.forget(CLIENT)
    bench.pass_barrier()
    assert bench.appended() == []


def test_a_later_life_has_a_barrier_of_its_own() -> None:
    bench = Bench()
    bench.endings.due(bench.session, WILL_DUE)
    bench.barriers.advance()
    bench.reads.advance(bench.state.now)
    bench.session.epoch = EPOCH + 1
    bench.endings.due(bench.session, WILL_DUE)
    bench.pass_barrier()
    assert bench.appended() == []
    bench.pass_barrier()
    assert bench.appended() == ["will"]


def test_a_will_without_delay_does_not_wait() -> None:
    bench = Bench(delay_s=0)
    bench.endings.due(bench.session, WILL_DUE)
    assert bench.appended() == ["will"]
    bench.endings.due(bench.session, WILL_DUE)
    assert bench.appended() == []


def test_a_session_ends_behind_its_will() -> None:
    bench = Bench()
    bench.endings.due(bench.session, SESSION_EXPIRY)
    bench.pass_barrier()
    assert bench.appended() == ["will"]
    bench.session.will = None
    bench.endings.will_applied(CLIENT, EPOCH)
    assert bench.appended() == ["end"]


def test_what_is_due_while_a_client_comes_back_waits() -> None:
    bench = Bench(delay_s=0)
    bench.is_changing = True
    bench.endings.due(bench.session, WILL_DUE)
    assert bench.appended() == []
    bench.is_changing = False
    bench.endings.start_deciding(0)
    assert bench.appended() == ["will"]


def test_what_another_node_has_not_done_is_done_by_the_next_that_decides() -> None:
    bench = Bench(delay_s=0)
    bench.decides = False
    bench.endings.due(bench.session, WILL_DUE)
    assert bench.appended() == []
    bench.decides = True
    bench.endings.start_deciding(0)
    assert bench.appended() == ["will"]
    # It may be lost with the leader of the will's partition.
    bench.endings.stop_deciding(0)
    bench.endings.start_deciding(0)
    assert bench.appended() == ["will"]


def test_a_session_whose_timer_went_by_a_wrong_clock_lives_on() -> None:
    """This node was two days ahead when it armed the timers, and had not met the others yet."""
    bench = Bench(delay_s=50)
    bench.state.wall_us = bench.images.wall_us = 30_000_000
    for kind, left_s in ((WILL_DUE, 20.0), (SESSION_EXPIRY, 70.0)):
        bench.endings.due(bench.session, kind)
        bench.endings.advance()
        assert bench.appended() == []
        assert [timer.when for timer in bench.images.timers if timer.kind == kind] == [left_s]
    bench.set_clock(71.0, 101.0)
    bench.endings.due(bench.session, SESSION_EXPIRY)
    bench.pass_barrier()
    assert bench.appended() == ["will"]


def test_a_session_that_was_closed_in_the_future_ends_by_its_timer() -> None:
    bench = Bench()
    bench.session.will = None
    bench.session.own_rare().disconnected_us = 200_000 * 1_000_000
    bench.endings.due(bench.session, SESSION_EXPIRY)
    assert bench.appended() == ["end"]


def test_a_session_that_is_closed_again_while_it_is_overdue_has_one_timer() -> None:
    """Counter-example: the second timer takes the place of the first, which nothing cancels when
    the client comes back. It ends the next life of the session too early."""
    bench = Bench()
    bench.decides = False
    # By a close of another leader it is over; its node, which was held up, closes it now.
    bench.set_clock(1000.0, 1000.0)
    bench.close(at_s=800.0)
    bench.close(at_s=1000.0)
    bench.decides = True
    bench.endings.start_deciding(0)
    assert bench.appended() == []
    assert bench.armed() == [bench.session.rare.expiry_timer]

    # The client comes, and goes 50 s later.
    bench.session.epoch += 1
    bench.run(1050.0)
    bench.close(at_s=1050.0)
    assert bench.armed() == [bench.session.rare.expiry_timer]
    bench.run(1149.0)
    assert bench.appended() == []
    bench.run(1150.0)
    assert bench.appended() == ["end"]


def test_a_timer_that_was_armed_meanwhile_gives_way_to_the_next_one() -> None:
    bench = Bench()
    bench.session.will = None
    bench.session.own_rare().disconnected_us = 999 * 1_000_000
    bench.replica.touched[bench.session] = None
    bench.endings.due(bench.session, SESSION_EXPIRY)
    assert bench.replica.arm_timers(bench.session)
    assert bench.armed() == [bench.session.rare.expiry_timer]


@pytest.mark.parametrize("ahead_s", [-CLOCK_SLACK_S, -1.0, 0.0, 1.0, CLOCK_SLACK_S])
def test_a_session_lasts_its_whole_interval_though_clocks_differ(ahead_s: float) -> None:
    """`ahead_s`: the clock of the node that ends it, of the one that has closed it."""
    bench = Bench()
    bench.session.will = None
    bench.set_clock(50.0, 1000.0 + ahead_s)
    bench.close(at_s=1000.0)
    bench.run(149.99)
    assert bench.appended() == []
    bench.run(150.0 + CLOCK_SLACK_S)
    assert bench.appended() == ["end"]


def test_a_session_lasts_its_whole_interval_though_this_node_starts_in_it() -> None:
    """Then only the clock tells how much of it has passed."""
    bench = Bench()
    bench.session.will = None
    bench.set_clock(50.0, 1060.0 + CLOCK_SLACK_S)
    bench.close(at_s=1000.0)
    bench.run(89.99)
    assert bench.appended() == []
    bench.run(90.0)
    assert bench.appended() == ["end"]
