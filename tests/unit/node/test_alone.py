"""A node that is its whole cluster commits by its journal, until another node is heard."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from bench.core import LEVEL, MESSAGES, Core, Row, _Client
from holdfast.log import record as log_record
from holdfast.log.journal.group_commit_delay import CommitPace
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import Record
from holdfast.node.metadata.model import WITNESS
from holdfast.node.ownership.acquisition import WAKES_MAX
from holdfast.node.publish.admission import REPEATED
from holdfast.node.publish.completion import PublishPromise
from holdfast.node.routing.routing import find_route
from holdfast.node.runtime.runtime import Runtime
from holdfast.node.session.connection import CLOSED, OPEN, OPENING
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.publish import Publish
from holdfast.security.peer_identity import PeerIdentity
from tests.transcripts.stage import ONE, THREE, Setup, Stage


class Links:
    """Links whose frames nobody receives."""

    def send(self, node_id: str, kind: int, payload: object) -> bool:
        return True

    def pending_bytes(self, node_id: str) -> int:
        return 0

    def close(self, node_id: str, text: str) -> None:
        """No link is closed."""

    def flush(self) -> None:
        """Nothing is queued."""

    def review(self) -> None:
        """All links are allowed."""

    def isolate(self, text: str) -> None:
        """There is none."""


class Held:
    """A cluster of one with a group that the disk has not written, and records behind it."""

    def __init__(self, row: Row) -> None:
        self.core = Core(row, "one")
        self.machine = self.core.machines[0]
        self.node._links = self.node.links._links = Links()
        self.expected = 0
        self.group = self._publish()
        self.machine.disk.group = None
        assert self._publish() is None

    @property
    def node(self) -> Runtime:
        assert isinstance(self.machine.runtime, Runtime)
        return self.machine.runtime

    def _publish(self) -> WriteGroup | None:
        core = self.core
        core.has_begun = True
        for number, publisher in enumerate(core.publishers):
            block = core.blocks[number]
            half = len(block) // 2
            # Other packet ids than those of the first half.
            publisher.send(block[:half] if self.expected == 0 else block[half:])
        self.expected += core.deliveries // 2
        self.machine.step()
        assert core.received == 0
        return self.machine.disk.group

    def write(self) -> None:
        """Write the group, and let everything settle."""
        self.machine.disk.group = self.group
        self.core._settle()

    def meet(self) -> None:
        """Connect a second node, which sends nothing."""
        self.node.links.link_up(PeerIdentity("n2", "n2", role=WITNESS))

    def is_answered(self) -> bool:
        connections = [each.connection for each in self.core.publishers]
        return self.core.received == self.expected and not any(
            each.unacknowledged for each in connections
        )


ROWS = [
    Row(1, 3),
    Row(2, 3),
    Row(1, 3, is_durable=True),
    Row(2, 3, is_durable=True),
    Row(1, 3, is_shared=True),
    Row(1, 3, is_durable=True, is_shared=True),
]


@pytest.mark.parametrize("row", ROWS)
def test_it_acknowledges_what_its_disk_has(row: Row) -> None:
    held = Held(row)
    assert held.node.cluster_node.context.is_alone
    assert not held.node.cluster_node.forwarding.pending
    assert not any(held.node.cluster_node.log.uncommitted)
    held.machine.step()
    assert held.core.received == 0
    held.write()
    assert held.is_answered()


@pytest.mark.parametrize("row", ROWS)
def test_another_node_joins_while_records_wait(row: Row) -> None:
    held = Held(row)
    held.meet()
    cluster_node = held.node.cluster_node
    assert not cluster_node.context.is_alone
    assert not cluster_node.local.waiting()
    # Every record can be found again, in the log or in a queue.
    assert len(cluster_node.forwarding.pending) >= row.topics * MESSAGES
    held.write()
    assert held.is_answered()
    assert not cluster_node.forwarding.pending
    held.core.round()
    assert not cluster_node.context.is_alone


def test_another_node_finds_the_packet_ids_of_records_that_wait() -> None:
    """Admission does without them while the node is alone, because their sessions are here. Without
    them, a repetition that comes over another node would be stored again."""
    held = Held(Row(2, 3, is_durable=True))
    admission = held.node.cluster_node.admission
    assert not any(tail.inbound for tail in admission._uncommitted.values())
    held.meet()
    waiting = held.node.cluster_node.forwarding.pending.values()
    records = [each.record for each in waiting if each.record.kind == log_record.MESSAGE]
    assert len(records) == 3 * MESSAGES
    for record in records:
        tail = admission._uncommitted[record.partition]
        assert admission._decide(tail, record) == REPEATED
    held.write()
    assert held.is_answered()
    assert not any(tail.inbound for tail in admission._uncommitted.values())


def test_the_high_watermark_waits_for_the_disk() -> None:
    held = Held(Row(1, 3))
    journal = held.machine.node.state.journal
    committed = list(journal.high_watermark)
    held.machine.step()
    assert journal.high_watermark == committed
    held.write()
    assert journal.high_watermark == journal.next_offset == held.machine.node.state.delivered


def test_a_record_of_the_next_group_waits_for_that_group() -> None:
    held = Held(Row(1, 3))
    connections = [each.connection for each in held.core.publishers]
    assert [each.unacknowledged for each in connections] == [MESSAGES] * 3
    held.machine.disk.group = held.group
    held.machine.step()
    assert [each.unacknowledged for each in connections] == [MESSAGES // 2] * 3
    held.core._settle()
    assert held.is_answered()


def test_it_is_alone_again_once_nothing_waits() -> None:
    held = Held(Row(1, 3))
    cluster_node = held.node.cluster_node
    cluster_node.alone.end()
    held.machine.step()
    assert not cluster_node.context.is_alone
    held.write()
    assert held.is_answered()
    held.core.round()
    assert cluster_node.context.is_alone


def test_a_record_that_admission_adds_is_folded() -> None:
    """A message without room in the retained store removes what its topic had."""
    core = Core(Row(1, 2), "one")
    machine = core.machines[0]
    machine.node.state.config.retained_max = 2
    for number, publisher in enumerate(core.publishers):
        topic = f"kept/{number}".encode()
        publisher.send(encode(Publish(topic, b"x", 1, True, False, 1, b"", 0, -1), LEVEL))
    core._settle()
    journal = machine.node.state.journal
    assert len(machine.node.state.retained) == 1
    assert sum(journal.next_offset) >= 3
    assert machine.node.state.delivered == journal.next_offset


@pytest.mark.parametrize(("form", "is_only_node"), [(ONE, True), (THREE, False)])
def test_only_a_cluster_of_one_has_one_clock_and_one_owner(form: str, is_only_node: bool) -> None:
    """Another node may have sent messages to a session, and may have closed it by its clock."""
    for host in Stage(form, Setup()).hosts.values():
        assert host.process is not None
        cluster_node = host.process.cluster_node
        assert (cluster_node.context.began_at is not None) == is_only_node
        assert (cluster_node.replicated.clock_slack_us == 0) == is_only_node


@pytest.mark.parametrize("joins", [False, True])
def test_qos_0_follows_a_message_that_is_refused_behind_others(joins: bool) -> None:
    """Also if another node joins before the others are on disk."""
    held = Held(Row(1, 3))
    state = held.machine.node.state
    route = find_route(state, b"bench/0")
    record = Record(route.partition, log_record.MESSAGE, flags=1, topic=b"bench/0", payload=b"x")
    connection = held.core.publishers[0].connection
    connection.unacknowledged += 1
    promise = PublishPromise(record, connection, 1001, False)
    promise.precede(route)
    state.disk_full = True
    held.node.cluster_node.local.publish(record, promise)
    state.disk_full = False
    publisher = held.core.publishers[0]
    publisher.send(encode(Publish(b"bench/0", b"follows", 0, False, False, 0, b"", 0, -1), LEVEL))
    held.machine.step()
    assert promise.followers
    if joins:
        held.meet()
    held.expected += 1
    held.write()
    assert held.is_answered()
    assert route.newest is None


@pytest.mark.parametrize("among_others", [False, True])
def test_records_gather_among_others_only_if_that_is_configured(among_others: bool) -> None:
    held = Held(Row(1, 3))
    held.write()
    node = held.node
    node._pace = pace = CommitPace(0.5)
    pace._gathers, pace._ends_at = True, float("inf")
    node._gathers_among_others = among_others
    message = Publish(b"bench/0", b"x", 1, False, False, 2000, b"", 0, -1)
    held.core.publishers[0].send(encode(message, LEVEL))
    held.machine.step()
    assert not node.group_in_flight, "alone, it waits"
    held.meet()
    held.machine.step()
    assert node.group_in_flight != among_others


def test_a_session_without_a_record_is_opened_in_one_step() -> None:
    core = Core(Row(1, 1), "one")
    (machine,) = core.machines
    assert isinstance(machine.runtime, Runtime)
    cluster_node = machine.runtime.cluster_node
    owners = cluster_node.session_coordinator.owners
    home = cluster_node.replicated.home("c")
    epoch = 0
    first = _Client(core, 0, "c", False)
    core._settle()
    # The first client of a home has waited for the reservation of its epoch.
    for _ in range(3):
        first.send(encode(m.Disconnect(0, {}), LEVEL))
        core._settle()
        assert owners.owner("c") is None
        first = _Client(core, 0, "c", False)
        machine.step()
        assert first.connection.state == OPEN
        assert not cluster_node.acquisition.asking
        owner, session = owners.owner("c"), first.connection.session
        assert owner is not None
        assert session is not None
        assert (owner.node, owner.epoch, owner.recorded) == ("n1", session.epoch, False)
        assert owners.epochs.is_reserved(home, session.epoch)
        assert session.epoch > epoch
        epoch = session.epoch
    # Another connection of the client waits for the end of the first one, and a durable session
    # for its record.
    for is_durable in (False, True):
        taker = _Client(core, 0, "c", is_durable)
        machine.step()
        assert is_durable == (taker.connection.state == OPENING)
        core._settle()
        assert (first.connection.state, taker.connection.state) == (CLOSED, OPEN)
        first = taker


def test_nothing_is_kept_of_a_request_that_is_done() -> None:
    core = Core(Row(1, 1), "one")
    runtime = core.machines[0].runtime
    assert isinstance(runtime, Runtime)
    acquisition = runtime.cluster_node.acquisition
    for number in range(2 * WAKES_MAX):
        _Client(core, 0, f"c{number}", True)
    core._settle()
    assert not acquisition.asking
    assert not acquisition._wakes


SESSIONS = 300


def bytes_away(core: Core) -> float:
    """The memory of a durable session without a client, of a log with records in all partitions."""

    def run(send: Callable[[int], object], count: int = SESSIONS) -> None:
        for number in range(count):
            send(number)
            if number % 20 == 19:
                core._advance(0.02)
        core._advance(1.0)

    def publish(number: int) -> None:
        topic = b"t%d" % number
        blocks = [
            encode(Publish(topic, b"x", 1, False, False, each, b"", 0, -1), LEVEL)
            for each in range(1, 21)
        ]
        core.publishers[0].send(b"".join(blocks))
        core._settle()

    run(publish, 1500)
    gc.collect()
    tracemalloc.start()
    clients = []
    run(lambda number: clients.append(_Client(core, 0, f"client{number}", True)))
    filters = [m.SubscriptionRequest(f"of/{number}", 1) for number in range(SESSIONS)]
    run(lambda number: clients[number].send(encode(m.Subscribe(1, [filters[number]]), LEVEL)))
    run(lambda number: clients[number].send(encode(m.Disconnect(0, {}), LEVEL)))
    clients.clear()
    core.machines[0].sent.clear()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / SESSIONS


@pytest.mark.parametrize("partitions", [16, 64])
def test_a_durable_session_costs_at_most_4_kib(
    monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """It was 3.4 KB and 3.9 KB. The table of given epochs is bounded, so it does not count."""
    monkeypatch.setattr("bench.core.PARTITIONS", partitions)
    monkeypatch.setattr("holdfast.node.ownership.owners.GIVEN_MAX", 8)
    size_bytes = bytes_away(Core(Row(1, 1)))
    assert size_bytes <= 4096, f"{size_bytes:.0f} bytes"
