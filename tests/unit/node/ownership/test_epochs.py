"""Epochs of sessions without a record: no two leaders of their home give a client the same one."""

import json

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import SESSION_OPENED
from holdfast.node.frames import OpenFrame
from holdfast.node.node_state import Promise
from holdfast.node.ownership import owners
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.owners import EPOCH_ORIGIN_S, OWN_STEP, PATIENCE_S, RANGE, STEP
from holdfast.node.publish.forwarding import LEADS_NO_MORE
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import NOTHING, MetadataReads
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import ReserveRecord, encode_session
from holdfast.node.state.transfer import entries, take
from tests.support.journal_port import new_state

WALL_US = 1_760_000_000_000_000


class Leader:
    """A node that leads the first partition. `log` is what earlier leaders have appended."""

    def __init__(
        self, log: list[Record], wall_us: int = WALL_US, partitions: int = 1, epoch: int = 2
    ) -> None:
        journal = Journal(partitions, replicated=True)
        config = NodeConfig(partitions=partitions)
        self.state = new_state(config, journal)
        self.state.wall_us = wall_us
        self.context = ClusterContext("n1", journal)
        self.context.connected |= {"n2", "n3"}
        self.context.leading[0] = epoch
        barriers = Barriers(self.state, self.context, MetadataReads(lambda now: NOTHING))
        self.images = ReplicatedState(RecordedState(config, journal))
        self.homes = SessionCoordinator(
            self.state, self.context, self.images, barriers, lambda *_: False
        )
        self.log = log
        self.appended: list[Record] = []
        self.promises: list[Promise] = []
        self.state.publish = self._publish  # type: ignore[method-assign]
        for record in log:
            self.images.apply(record)
        self.homes.start_leading(0)
        self.requests = 0

    def _publish(self, record: Record, promise: Promise) -> None:
        self.appended.append(record)
        self.promises.append(promise)

    def ask(self, client_id: str = "c", node: str = "n2", *, releases: bool = True) -> None:
        """`releases`: the node has released the session that it had for the client."""
        self.requests += 1
        owner = self.homes.owners.owner(client_id)
        if releases and owner is not None and owner.node == node:
            self.homes.closed(node, client_id, owner.epoch)
        self.homes.open(node, OpenFrame(self.requests, client_id, True, 0, None))

    def commit(self) -> None:
        for record in self.appended:
            self.images.apply(record)
        self.log += self.appended
        self.appended = []
        for promise in self._waiting():
            promise.release(self.state)

    def refuse(self) -> None:
        """Another node leads."""
        self.appended = []
        for promise in self._waiting():
            promise.refuse(self.state, LEADS_NO_MORE)

    def _waiting(self) -> list[Promise]:
        waiting, self.promises = self.promises, []
        return waiting

    def wait(self, seconds: float) -> None:
        self.state.now += seconds
        self.homes.handle_timers()

    def given(self) -> list[int]:
        """The epochs in SESSION_OPENED, in order."""
        payloads = [each for _, kind, each in self.context.outgoing if kind == SESSION_OPENED]
        return [json.loads(each)["epoch"] for each in payloads if isinstance(each, bytes)]


def test_two_leaders_give_a_client_no_epoch_twice() -> None:
    """The second one has heard no node. Counter-example: both give the same one, and the client's
    QoS 2 message at the second node is taken for one that it sent at the first."""
    log: list[Record] = []
    first = Leader(log)
    first.ask(node="n2")
    first.commit()
    second = Leader(log)
    second.ask(node="n3")
    second.commit()
    assert len(first.given()) == len(second.given()) == 1
    assert first.given()[0] < second.given()[0]


def test_a_session_without_a_record_waits_until_its_epoch_is_reserved() -> None:
    leader = Leader([])
    leader.ask("a")
    leader.ask("b")
    assert leader.given() == []
    assert len(leader.appended) == 1
    leader.commit()
    assert len(leader.given()) == 2
    leader.ask("d")
    assert len(leader.given()) == 3
    assert not leader.appended


def test_a_client_that_uses_up_the_range_waits_for_another_one() -> None:
    log: list[Record] = []
    leader = Leader(log)
    for _ in range(3 * RANGE // STEP):
        leader.ask()
        leader.commit()
    given = leader.given()
    assert len(set(given)) == 3 * RANGE // STEP
    assert 2 <= len(log) <= 4
    successor = Leader(log)
    successor.ask()
    successor.commit()
    assert successor.given()[0] > max(given)


def test_a_reservation_that_is_refused_drops_the_request() -> None:
    """The node repeats it, here or at the next leader."""
    leader = Leader([])
    leader.ask()
    leader.refuse()
    assert leader.given() == []
    leader.ask()
    leader.commit()
    assert len(leader.given()) == 1


def test_a_leader_that_is_followed_gives_nothing_under_a_late_reservation() -> None:
    leader = Leader([])
    leader.ask()
    leader.homes.stop_leading(0)
    leader.context.leading[0] = 0
    leader.commit()
    leader.context.leading[0] = 4
    leader.homes.start_leading(0)
    assert leader.given() == []
    leader.ask()
    assert leader.given() == []
    leader.commit()
    assert len(leader.given()) == 1


def test_clients_connect_though_the_partition_commits_nothing() -> None:
    """With epochs that the next leader leaves out, which can commit."""
    log: list[Record] = []
    first = Leader(log)
    first.context.reaches_majority = lambda now: True
    first.ask("c")
    due = first.homes.timer()
    assert due == first.state.now + PATIENCE_S
    first.wait(PATIENCE_S)
    assert first.homes.timer() is None
    first.ask("d")
    for _ in range(RANGE // OWN_STEP - 1):
        first.ask("c")
    given = first.given()
    assert len(given) == RANGE // OWN_STEP + 1
    second = Leader(log)
    second.ask("c")
    second.commit()
    assert second.given()[0] > max(given)


@pytest.mark.parametrize("behind_s", [0, 100])
def test_a_leader_gives_no_epoch_that_one_before_gave_without_a_record(behind_s: int) -> None:
    """Whatever either knows of other partitions. Counter-example: the first one counts from an
    epoch of another partition, which the second one has not applied yet, or whose clock is ahead.
    The second one reserves the epochs that the first one gave."""
    newest = WALL_US // 1_000_000 - EPOCH_ORIGIN_S
    home = Record(0, SESSION, sequence=newest, payload=encode_session(ReserveRecord("", newest)))
    other = newest + RANGE
    elsewhere = Record(1, SESSION, sequence=other, payload=encode_session(ReserveRecord("", other)))
    assert partition_of(b"d", 2) == 0
    first = Leader([home, elsewhere], partitions=2)
    first.context.reaches_majority = lambda now: True
    first.ask("d")
    first.wait(PATIENCE_S)
    for _ in range(RANGE // OWN_STEP - 1):
        first.ask("d")
    second = Leader([home], WALL_US - behind_s * 1_000_000, partitions=2, epoch=3)
    for _ in range(RANGE // STEP):
        second.ask("d", "n3")
        second.commit()
    assert len(first.given()) == RANGE // OWN_STEP
    assert len(second.given()) == RANGE // STEP
    assert not set(first.given()) & set(second.given())


def test_a_leader_that_is_followed_gives_no_epoch_of_its_successor() -> None:
    """It does not know yet that another one leads, and commits nothing. A node reports the epoch
    that the other one gave. Counter-example: both give the client the next one."""
    first = Leader([])
    first.context.reaches_majority = lambda now: True
    first.ask("d")
    first.wait(PATIENCE_S)
    second = Leader([])
    second.ask("c")
    second.commit()
    (reserved,) = second.given()
    first.homes.reports.receive("n2", [0], {"c": reserved}, [])
    first.ask("c", "n2", releases=False)
    for _ in range(3):
        first.wait(PATIENCE_S)
    assert len(first.given()) == 1
    assert first.homes.timer() is None
    second.ask("c", "n2")
    second.commit()
    assert second.given()[1] == reserved + STEP
    first.refuse()
    assert first.homes.timer() is None


def test_a_snapshot_of_an_older_version_counts_for_all_partitions() -> None:
    leader = Leader([], partitions=2)
    leader.images.apply_snapshot_entry(100, b'{"fired":[],"ended":[],"newest":700}')
    assert leader.images.newest_epochs == [700, 700]


def test_a_leader_without_a_majority_gives_nothing_unreserved() -> None:
    """Another node may lead, which does so. Counter-example: both give the same epoch."""
    leader = Leader([])
    leader.ask("c")
    for number in range(3):
        due = leader.homes.timer()
        assert due is not None
        assert due > leader.state.now
        leader.wait(PATIENCE_S)
        leader.ask(f"d{number}")
    assert leader.given() == []
    leader.context.reaches_majority = lambda now: True
    leader.wait(PATIENCE_S)
    assert len(leader.given()) == 4


def test_an_owner_that_is_reported_meanwhile_releases_the_session_first() -> None:
    leader = Leader([])
    leader.ask("c", "n2")
    leader.homes.reports.receive("n3", [0], {"c": 5}, [])
    leader.commit()
    assert leader.given() == []
    leader.homes.closed("n3", "c", 5)
    assert len(leader.given()) == 1


def test_the_reserved_epochs_survive_a_snapshot_and_a_transfer() -> None:
    log: list[Record] = []
    leader = Leader(log)
    leader.ask()
    leader.commit()
    restarted, transferred = Leader([], 0), Leader([], 0)
    for kind, data in leader.images.snapshot():
        restarted.images.apply_snapshot_entry(kind, data)
    for entry in entries(leader.images, {0}):
        if entry is not None:
            take(transferred.images, *entry)
    for other in (restarted, transferred):
        other.ask()
        other.commit()
        assert other.given()[0] > leader.given()[0]


def test_a_forgotten_client_gets_no_epoch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "GIVEN_MAX", 2)
    leader = Leader([])
    for client_id in ("c", "c", "c", "a", "b", "d"):
        leader.ask(client_id)
        leader.commit()
    before = leader.given()[2]
    leader.homes.owners.forget_node("n2")
    leader.ask("c")
    leader.commit()
    assert leader.given()[-1] > before


def test_a_partition_that_is_not_led_yet_has_no_floor() -> None:
    """Its log may reserve more before this node leads it."""
    leader = Leader([])
    leader.homes.owners.epochs.raise_floor(0, 5)
    newest = leader.homes.owners.epochs.reservable(0, 0) + 1000
    late = Leader([])
    late.homes.owners.epochs.raise_floor(0, 5)
    late.images.apply(
        Record(0, SESSION, sequence=newest, payload=encode_session(ReserveRecord("", newest)))
    )
    assert late.homes.owners.epochs.reservable(0, 0) > newest


def test_a_reservation_opens_no_session() -> None:
    leader = Leader([])
    leader.images.apply(
        Record(0, SESSION, sequence=900, payload=encode_session(ReserveRecord("", 900)))
    )
    assert leader.images.newest_epochs == [900]
    assert not leader.images.state.sessions
    assert not any(leader.images.ended)


def test_a_leader_gives_a_forgotten_client_no_epoch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the partition commits nothing. Counter-example: the epochs below the floor are
    free as the leader begins. Later its floor is that of a forgotten client, and this leader has
    given those below it."""
    monkeypatch.setattr(owners, "GIVEN_MAX", 2)  # 20,000 in the program
    leader = Leader([])
    leader.context.reaches_majority = lambda now: True
    for _ in range(2):
        leader.ask("c", "n2")
        leader.commit()
    before = leader.given()[-1]
    leader.homes.closed("n2", "c", before)  # the client has disconnected
    for _ in range(RANGE // STEP + 1):  # a client that connects again and again
        leader.ask("z", "n2")
    assert not leader.appended
    for other in ("x", "y"):  # c and z are forgotten
        leader.ask(other, "n2")
    assert not leader.appended
    count = len(leader.given())
    leader.ask("c", "n3")
    assert leader.appended  # the partition commits nothing from here on
    leader.wait(PATIENCE_S)
    (again,) = leader.given()[count:]
    assert again > before


def test_a_forgotten_client_while_the_partition_commits_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "GIVEN_MAX", 2)
    leader = Leader([])
    leader.context.reaches_majority = lambda now: True
    leader.ask("c", "n2")
    leader.wait(PATIENCE_S)
    (before,) = leader.given()
    leader.homes.closed("n2", "c", before)
    for other in ("x", "y"):
        leader.ask(other, "n2")
    leader.ask("c", "n3")
    assert leader.given()[-1] > before


def test_a_leader_that_has_committed_gives_no_epoch_of_the_one_before() -> None:
    """Also if that is no reservation, and the partition commits nothing after it."""
    first = Leader([])
    first.context.reaches_majority = lambda now: True
    first.ask("d")
    first.wait(PATIENCE_S)
    second = Leader([], epoch=3)
    second.context.reaches_majority = lambda now: True
    second.homes.open("n2", OpenFrame(99, "r", True, 60, None))
    second.commit()
    second.ask("d", "n3")
    second.wait(PATIENCE_S)
    assert first.given()[0] != second.given()[-1]


@pytest.mark.parametrize(
    ("asked_before", "later_s", "behind_s"),
    [
        # The floor of `first` is read from the clock at its first request, after `second` leads.
        (False, 10, 0),
        # The floor is read when it begins to lead. The successor's clock is 5 s behind.
        (True, 0, 5),
    ],
)
def test_no_epoch_of_the_successor(asked_before: bool, later_s: int, behind_s: int) -> None:
    """A leader that does not know its successor hears of its epochs from a node. Clocks differ."""
    first = Leader([])
    first.context.reaches_majority = lambda now: True
    if asked_before:
        first.ask("d")
        first.wait(PATIENCE_S)
    second = Leader([], WALL_US - behind_s * 1_000_000, epoch=3)
    second.ask("c", "n2")
    second.commit()
    (reserved,) = second.given()
    # `first` hears of it by a node's report, and of no successor yet. It commits nothing.
    first.state.wall_us += later_s * 1_000_000
    first.homes.reports.receive("n2", [0], {"c": reserved}, [])
    before = len(first.given())
    first.ask("c", "n3")
    for _ in range(3):
        first.wait(PATIENCE_S)
    second.ask("c", "n2")
    second.commit()
    # c has one epoch at n3 by `first`, and the same one at n2 by `second`.
    assert not set(first.given()[before:]) & set(second.given())
