"""What every node must derive alike from the same records, whatever it has besides them."""

import json
from collections.abc import Callable

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.metadata.model import NodePhase as StateOfNode
from holdfast.node.ownership import closings
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.live_sessions import live_session
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.session import Session, Will
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.retention_pins import pins_of
from holdfast.node.state.session_records import encode_session, open_record
from tests.support.folded_state import sessions_and_groups
from tests.support.journal_port import new_state

PARTITIONS = 2
CLIENT = "c"
HOME = partition_of(CLIENT.encode(), PARTITIONS)
OTHER = 1 - HOME


class Bench:
    """A node whose own log is empty: it is behind in every partition."""

    def __init__(self) -> None:
        self.journal = Journal(PARTITIONS, replicated=True)
        self.images = self.new()

    def new(self) -> ReplicatedState:
        state = new_state(NodeConfig(node_id="n1", partitions=PARTITIONS), self.journal)
        state.wall_us = 1_700_000_000_000_000
        return ReplicatedState(state)

    def apply(self, kind: int, payload: bytes, *, epoch: int, partition: int = HOME) -> Record:
        record = Record(
            partition,
            kind,
            timestamp_us=1_700_000_000_000_000,
            client_id=CLIENT.encode(),
            sequence=epoch,
            payload=payload,
        )
        self.images.apply(record)
        return record

    def open(
        self,
        epoch: int,
        *,
        owner: str = "n2",
        has_will: bool = False,
        is_clean: bool = False,
        generation: int = 0,
    ) -> Record:
        session = Session(CLIENT)
        session.epoch = epoch
        session.expiry_s = 3600
        if has_will:
            session.will = Will(b"will", b"gone", 1, False, b"", 0, 30)
        opened = open_record(session, is_clean, owner)
        opened.generation = generation
        return self.apply(log_record.SESSION, encode_session(opened), epoch=epoch)

    def close(self, epoch: int, *, maybe_sent: bool = False) -> Record:
        fields = {"maybe_sent": True} if maybe_sent else {}
        return self.change(epoch, op="close", expiry_s=3600, will=False, **fields)

    def maybe_sent(self) -> bool:
        return self.images.entry(self.session()).may_be_sent

    def change(self, epoch: int, **fields: object) -> Record:
        payload = json.dumps({"client": CLIENT, **fields}).encode()
        return self.apply(log_record.SESSION, payload, epoch=epoch)

    def send_qos2(self, epoch: int, *, packet_id: int) -> None:
        """In the other partition than the session's home."""
        self._apply_packet(log_record.MESSAGE, 2 | log_record.FLAG_PACKET_ID, epoch, packet_id)

    def release(self, epoch: int, *, packet_id: int) -> None:
        self._apply_packet(log_record.RELEASE, 0, epoch, packet_id)

    def _apply_packet(self, kind: int, flags: int, epoch: int, packet_id: int) -> None:
        self.images.apply(
            Record(
                OTHER,
                kind,
                flags=flags,
                timestamp_us=1_700_000_000_000_000,
                topic=b"t",
                client_id=CLIENT.encode(),
                producer_epoch=epoch,
                sequence=packet_id,
            )
        )

    def restart(self) -> None:
        """The images are in a snapshot, and a new process begins with them."""
        entries = list(self.images.snapshot())
        self.images = self.new()
        for kind, data in entries:
            self.images.apply_snapshot_entry(kind, data)

    def session(self) -> Session:
        session = self.images.state.sessions[CLIENT]
        self.images.entry(session)
        return session


def test_positions_are_those_of_the_log_and_not_of_this_node() -> None:
    """A resumed session that began too low would get at QoS 2 what it has had."""
    bench = Bench()
    bench.open(1)
    positions = [(HOME, 40), (OTHER, 70)]
    bench.apply(log_record.CURSOR, encode_cursor(positions, {}, []), epoch=1)
    found = bench.session().positions
    assert found is not None
    assert (found[HOME], found[OTHER]) == (40, 70)


def test_a_session_without_positions_begins_where_it_subscribed_on_every_node() -> None:
    """Not where deliveries on this node are."""
    found = []
    for delivered in ([0, 0], [5, 100], [100, 5]):
        bench = Bench()
        bench.images.state.delivered = list(delivered)
        bench.open(1)
        filters = [["f/#", 1, False, False, 0, 0]]
        bench.change(1, op="subscribe", start=[30, 20], subscriptions=filters)
        taken = live_session(bench.new().state, bench.session())
        found.append(taken.positions)
    assert found == [[30, 20]] * 3


def test_a_cursor_does_not_depend_on_when_a_node_looked_at_its_session() -> None:
    """Timers, snapshots, transfers and takeovers look, each at its own time on each node."""
    expected = [30, 20]
    expected[HOME] = 40
    for look_before in range(4):
        assert _position_after_a_look(look_before) == expected


def _position_after_a_look(look_before: int) -> list[int] | None:
    bench = Bench()
    bench.images.state.delivered = [look_before, 9]
    filters = [["f/#", 1, False, False, 0, 0]]
    records: list[Callable[[], object]] = [
        lambda: bench.open(1),
        lambda: bench.change(1, op="subscribe", start=[30, 20], subscriptions=filters),
        lambda: bench.apply(log_record.CURSOR, encode_cursor([(HOME, 40)], {}, []), epoch=1),
        lambda: None,
    ]
    for number, apply in enumerate(records):
        apply()
        if number == look_before:
            bench.images.arm_some_timers(10)
            bench.restart()
    return bench.session().positions


def test_the_first_cursor_after_a_takeover_names_all_positions() -> None:
    """The images have none that a record could change."""
    bench = Bench()
    bench.open(1)
    taken = live_session(bench.new().state, bench.session())
    assert taken.positions is not None
    assert taken.logged_positions is None


def test_retention_keeps_what_a_session_without_a_cursor_has_to_get() -> None:
    bench = Bench()
    bench.images.state.delivered = [99, 99]
    bench.open(1)
    filters = [["f/#", 1, False, False, 0, 0]]
    bench.change(1, op="subscribe", start=[30, 20], subscriptions=filters)
    (hold,) = pins_of(bench.images.state, None)
    assert list(hold.positions) == [30, 20]


def test_a_will_that_was_published_stays_so_over_a_snapshot() -> None:
    """The records that tell may come in any order after it: the will's is in another partition."""
    bench = Bench()
    bench.open(1, has_will=True)
    bench.images.note_fired(CLIENT, 1)
    assert bench.session().will is None
    bench.restart()
    again = bench.images
    assert again.has_fired(CLIENT, 1, b"w")
    assert not again.has_fired(CLIENT, 2, b"w")
    bench.open(1, has_will=True)
    assert bench.session().will is None
    bench.open(2, has_will=True)
    assert bench.session().will is not None


def test_a_session_given_to_a_node_that_has_died_meanwhile_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record is applied after the node went: nobody else would ever close it."""
    bench = Bench()
    state = new_state(NodeConfig(node_id="n1", partitions=PARTITIONS), bench.journal)
    context = ClusterContext("n1", bench.journal)
    infos = {
        "n1": NodeInfo("n1", "i", "n1:1", "", ""),
        "n2": NodeInfo("n2", "i", "n2:1", "", "", state=StateOfNode.DOWN),
        "n3": NodeInfo("n3", "i", "n3:1", "", ""),
    }
    partitions = (PartitionInfo(("n1", "n2", "n3"), (), "n1", 1, ("n1", "n3")),) * PARTITIONS
    context.metadata = ClusterMetadata("c", 3, 1, infos, partitions, 1)
    context.leading = [1] * PARTITIONS
    closed: list[dict[str, object]] = []

    def close(state: object, session: Session, *, maybe_sent: bool) -> None:
        closed.append({"client": session.client_id, "owner": session.owner})

    monkeypatch.setattr(closings, "log_close", close)
    barriers = Barriers(state, context, MetadataReads(lambda now: 1))
    homes = SessionCoordinator(state, context, bench.images, barriers, lambda *_: False)
    for partition in range(PARTITIONS):
        homes.start_leading(partition)
        homes.committed(partition)
    homes.applied(bench.open(1, owner="n3"))
    assert closed == []
    homes.applied(bench.open(2, owner="n2"))
    assert closed == [{"client": CLIENT, "owner": "n2"}]


def test_a_start_is_forgotten_once_the_positions_are_past_it() -> None:
    """A subscription that begins later than the session's positions begins there, also after a
    restart. Behind them its start says nothing."""

    def starts() -> dict[str, list[int] | None]:
        return {each.filter: each.start for each in bench.session().subscriptions.values()}

    def subscribe(filter: str, start: list[int]) -> None:
        row = [filter, 1, False, False, 0, 0]
        bench.change(1, op="subscribe", subscriptions=[row], start=start)

    def move(partition: int, offset: int) -> None:
        payload = encode_cursor([(partition, offset)], {}, [])
        bench.apply(log_record.CURSOR, payload, epoch=1)

    bench = Bench()
    bench.open(1)
    subscribe("a", [5, 9])
    assert starts() == {"a": [5, 9]}
    move(0, 7)
    assert starts() == {"a": None}
    subscribe("b", [8, 9])
    move(1, 10)
    assert starts() == {"a": None, "b": [8, 9]}
    bench.restart()
    assert starts() == {"a": None, "b": [8, 9]}
    move(0, 8)
    assert starts() == {"a": None, "b": None}
    subscribe("b", [9, 9])
    assert starts() == {"a": None, "b": None}
    assert not bench.session().has_starts
    bench.images.check()


def test_packet_ids_keep_their_epochs_over_a_snapshot() -> None:
    """A release of the connection before, from a partition that is behind the session's home, is
    applied after a restart as it is without one: an id that stayed would swallow the next message
    with it."""
    bench = Bench()
    bench.open(1)
    bench.send_qos2(1, packet_id=7)
    bench.open(2)
    bench.restart()
    assert bench.images.inbound_ids(CLIENT) == {7: OTHER}
    bench.release(1, packet_id=7)
    assert bench.images.inbound_ids(CLIENT) == {}


def test_packet_ids_of_a_session_that_is_not_open_yet_are_kept_over_a_snapshot() -> None:
    """A repetition must be known even if the session's home was behind when the node stopped."""
    bench = Bench()
    bench.open(1)
    bench.send_qos2(3, packet_id=7)
    bench.change(2, op="end")
    bench.restart()
    bench.open(3)
    assert bench.images.inbound_at(CLIENT, OTHER, 7) == 3
    assert bench.images.inbound_ids(CLIENT) == {7: OTHER}


def test_packet_ids_from_before_the_log_was_put_back_are_doubtful() -> None:
    """Until a session of the generation has used them, also over a snapshot. A session that no
    leader with the generation has opened says nothing about its ids."""
    bench = Bench()
    bench.open(1)
    for packet_id in (7, 8, 9):
        bench.send_qos2(1, packet_id=packet_id)
    assert bench.images.doubtful_ids(CLIENT, 0) is None
    assert bench.images.doubtful_ids(CLIENT, 5) == {7, 8, 9}
    bench.open(2, generation=5)
    bench.send_qos2(2, packet_id=8)
    bench.release(2, packet_id=9)
    for epoch in (3, 4):
        assert bench.images.doubtful_ids(CLIENT, 5) == {7}
        assert bench.images.doubtful_ids(CLIENT, 6) == {7, 8}
        bench.restart()
        bench.open(epoch, generation=5)
    bench.open(5, generation=6)
    assert bench.images.doubtful_ids(CLIENT, 6) == {7, 8}
    bench.change(5, op="end")
    bench.open(6, generation=6)
    bench.send_qos2(6, packet_id=7)
    assert bench.images.doubtful_ids(CLIENT, 6) is None


def test_an_id_of_two_partitions_is_where_it_was_used_last() -> None:
    bench = Bench()
    bench.open(1)
    bench.send_qos2(1, packet_id=7)
    bench.images.inbound[CLIENT][(HOME, 7)] = 2
    assert bench.images.inbound_ids(CLIENT) == {7: HOME}
    bench.images.inbound[CLIENT][(OTHER, 7)] = 3
    assert bench.images.inbound_ids(CLIENT) == {7: OTHER}


def test_what_a_lost_node_has_sent_may_come_again() -> None:
    """And nothing of what a node that lives has left in the log: messages that are new to the
    client are new. [MQTT-3.3.1-1]"""
    bench = Bench()
    bench.open(1)
    bench.close(1)
    assert not bench.maybe_sent()
    bench.open(2)
    bench.close(2, maybe_sent=True)
    assert bench.maybe_sent()
    bench.open(3)
    bench.restart()
    assert bench.maybe_sent()
    bench.close(3)
    assert not bench.maybe_sent()
    bench.restart()
    assert not bench.maybe_sent()


def test_a_node_that_was_taken_for_lost_has_the_last_word() -> None:
    """Its own `close`, with what it left in the log before, and the one that is written in its
    place: in any order."""
    for own_first in (True, False):
        bench = Bench()
        bench.open(1)
        bench.close(1, maybe_sent=not own_first)
        bench.close(1, maybe_sent=own_first)
        assert not bench.maybe_sent()
        bench.open(2)
        bench.close(1, maybe_sent=True)
        assert not bench.maybe_sent()


def test_a_session_that_begins_anew_was_sent_nothing() -> None:
    bench = Bench()
    bench.open(1)
    bench.close(1, maybe_sent=True)
    bench.change(1, op="end")
    bench.open(2)
    assert not bench.maybe_sent()
    bench.close(2, maybe_sent=True)
    bench.open(3, is_clean=True)
    assert not bench.maybe_sent()


@pytest.mark.parametrize("begins", ["clean", "after its end"])
def test_a_session_that_begins_anew_during_a_snapshot_is_there_after_a_restart(begins: str) -> None:
    """The snapshot has the old session no more, and its record is applied again behind it."""
    bench = Bench()
    for client in ("first", CLIENT):
        session = Session(client)
        session.epoch = 2
        session.expiry_s = 3600
        payload = encode_session(open_record(session, False, "n2"))
        bench.apply(log_record.SESSION, payload, epoch=2)
    entries = bench.images.snapshot()
    taken = [next(entries)]
    records = []
    if begins == "after its end":
        records.append(bench.change(2, op="end"))
    records.append(bench.open(4, is_clean=begins == "clean"))
    records.append(bench.close(4))
    taken += entries
    expected = bench.images.entry(bench.session())
    bench.images = bench.new()
    for kind, data in taken:
        bench.images.apply_snapshot_entry(kind, data)
    for record in records:
        bench.images.apply(record)
    assert bench.images.entry(bench.session()) == expected


def test_a_queue_is_the_same_after_a_restart() -> None:
    """Its keeper began in the epoch of all keepers, and its home has at least that one."""
    bench = Bench()
    key = "$share/$queue/a"
    bench.change(0, client=key, op="queue", start=[3, 4], past=True)
    expected = sessions_and_groups(bench.images), list(bench.images.newest_epochs)
    bench.images.check()
    bench.restart()
    assert (sessions_and_groups(bench.images), bench.images.newest_epochs) == expected
    assert bench.images.state.sessions[key].life == 1


def test_retention_keeps_what_a_group_has_to_finish_before_its_queue_begins() -> None:
    """The group is there before the queue when an operator deleted that and members remained."""
    bench = Bench()
    bench.images.state.delivered = [99, 99]
    key = "$share/$queue/a"
    payload = encode_cursor([(0, 30), (1, 20)], {}, [])
    bench.images.apply(
        Record(HOME, log_record.CURSOR, client_id=key.encode(), sequence=1, payload=payload)
    )
    bench.change(0, client=key, op="queue", start=[99, 99])
    (pin,) = pins_of(bench.images.state, None)
    assert list(pin.positions) == [30, 20]
