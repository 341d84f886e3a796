"""Two inputs about one session, the second while the record of the first is not applied yet.

The coordinator decides on what is applied. So every pair of inputs is run with the first record
committed late, or lost with the leadership. What comes of it must be what comes of the two inputs
one after the other, and every reply must be true of the session that the log has.
"""

import random
from collections.abc import Callable
from functools import cache, partial
from itertools import permutations
from typing import Final, NamedTuple

import pytest

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node import frames
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import SESSION_CLOSE, SESSION_OPENED
from holdfast.node.frames import CloseFrame, OpenedFrame, OpenFrame, decode_frame
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.requests import RequestRefused
from holdfast.node.node_state import ClusterPort, NodeState, Promise
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.publish.admission import Admission
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.state.recorded_state import SESSION_EXPIRY, RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    OpenRecord,
    SubscribeRecord,
    WillEntry,
    decode_record,
    encode_session,
)

CLIENT: Final = "c"
FILTER: Final = "t/#"
EXPIRY_S: Final = 100
LONGER_S: Final = 1000
DELAY_S: Final = 50
FIRST: Final = 10
"""The epoch of the session of n2."""


class Port(ClusterPort):
    def __init__(self, forwarding: RecordForwarder) -> None:
        self._forwarding = forwarding

    def append(self, record: Record) -> None:
        self._forwarding.append(record)

    def publish(self, record: Record, promise: Promise) -> None:
        self._forwarding.publish(record, promise)

    def promise(self, promise: Promise) -> None:
        self._forwarding.promises.add(promise)

    def spread(self, message: object, topic: str, behind: int) -> None:
        pass


class Context(ClusterContext):
    """Without metadata."""

    def __init__(self, journal: Journal) -> None:
        super().__init__("n1", journal)
        self.gone: set[str] = set()
        self.connected.update(("n2", "n3"))
        self.features = dict.fromkeys(("n2", "n3"), "release-orders")
        self.reaches_majority = lambda now: True

    def is_gone(self, node: str) -> bool:
        return node in self.gone


class Asked(NamedTuple):
    """The request of a node. `is_gone`: its client has disconnected since."""

    node: str
    frame: OpenFrame


class Bench:
    """n1 leads the one partition. n2 and n3 do what nodes do: they repeat requests, keep the
    sessions that they are given, and release them when they are ordered to."""

    def __init__(self) -> None:
        self.journal = Journal(1, replicated=True)
        config = NodeConfig(partitions=1)
        self.state = state = NodeState(config, self.journal)
        self.images = ReplicatedState(RecordedState(config, self.journal))
        self.images.state.delivered = state.delivered
        self.log = ApplyingLog(self.journal)
        self.context = context = Context(self.journal)
        self.admission = Admission(state, context, self.images, lambda _: True)
        self.forwarding = RecordForwarder(state, context, self.admission)
        self.admission.forwarding = self.forwarding
        state.cluster = Port(self.forwarding)
        self.reads = MetadataReads(lambda now: 1)
        self.barriers = Barriers(state, context, self.reads)
        changes = self.admission.changes_session
        self.homes = SessionCoordinator(state, context, self.images, self.barriers, changes)
        self.applier = Applier(
            state,
            self.images,
            self.log,
            self.forwarding.pending,
            self.forwarding.settle,
            self._applied,
            lambda _: None,
        )
        self.epoch = 0
        self.set_clock(0.0)
        self.committed: list[Record] = []
        # What nodes have sent and the log may lack.
        self.sent: list[Record] = []
        self.requests: dict[int, Asked] = {}
        # What is added to the numbers of the next requests, of which each input has its own.
        self.base = 0
        self.replies: dict[int, OpenedFrame] = {}
        # The node and the epoch of each session that a node has, recorded or not.
        self.owned: dict[str, tuple[int, bool]] = {}
        self.wills = 0
        self.lead()

    def set_clock(self, now: float) -> None:
        for state in (self.state, self.images.state):
            state.now = now
            state.wall_us = 1_700_000_000_000_000 + int(now * 1e6)

    def _applied(self, record: Record) -> None:
        if record.kind == log_record.SESSION:
            self.homes.applied(record)
        else:
            self.wills += 1
            self.homes.will_applied(record)

    # Leading

    def lead(self) -> None:
        self.epoch += 1
        self.journal.lead(0, self.epoch)
        self.context.leading[0] = self.epoch
        self.admission.start_leading(0, list(self.log.uncommitted[0]))
        self.forwarding.aligned(0, "n1", self.epoch, self.applier.tickets(0))
        self.homes.start_leading(0)
        self.homes.reports.requested.clear()

    def lose(self) -> None:
        """The uncommitted records are truncated, and n1 leads again after that."""
        self.write()
        self.context.leading[0] = 0
        self.admission.stop_leading(0)
        self.homes.stop_leading(0)
        self.forwarding.stop(0)
        self.log.truncate(0, self.journal.high_watermark[0])
        self.lead()
        have = {self._key(record) for record in self.committed}
        for record in self.sent:
            if self._key(record) not in have:
                self._forward(record)
        waiting = {
            each.node for number, each in self.requests.items() if number not in self.replies
        }
        for node in sorted({"n1", "n2", "n3"} - self.context.gone):
            owned = {CLIENT: self.owned[node][0]} if node in self.owned else {}
            self.homes.reports.receive(node, [0], owned, [CLIENT] if node in waiting else [])

    def _key(self, record: Record) -> tuple[int, int]:
        return record.ticket, record.kind

    # The log

    def write(self) -> None:
        group = self.journal.close_write_group()
        if group is not None:
            self.journal.wrote(group)
            self.journal.commit(group)
            for batch in group.built:
                self.log.built(batch)

    def commit(self) -> None:
        """Everything that is appended."""
        self.write()
        end = self.journal.next_offset[0]
        if self.journal.high_watermark[0] < end:
            self.journal.advance(0, end)
            for batch in self.log.uncommitted[0]:
                self.committed += batch.records()
            self.applier.apply_to(0, end)
            self.admission.committed(0, end)
        self.homes.committed(0)

    def _forward(self, record: Record) -> None:
        builder = BatchBuilder(0, 0)
        builder.add(record)
        self.admission.forwarded("n2", self.epoch, 0, Batch(builder.build(0)))

    def send(self, payload: bytes, epoch: int) -> None:
        """A SESSION record of a node."""
        record = Record(
            0,
            log_record.SESSION,
            timestamp_us=self.state.wall_us,
            client_id=CLIENT.encode(),
            sequence=epoch,
            payload=payload,
            ticket=1_000_000 + len(self.sent),
        )
        self.sent.append(record)
        self._forward(record)

    # What nodes do

    def ask(self, number: int, node: str, *, clean: bool, expiry_s: int) -> None:
        number += self.base
        frame = OpenFrame(number, CLIENT, clean, expiry_s, None)
        self.requests[number] = Asked(node, frame)
        self.homes.open(node, frame)

    def leave(self, number: int) -> None:
        """The client of the request disconnects."""
        number = max((each for each in self.requests if each % 100 == number), default=-1)
        asked = self.requests.get(number)
        if asked is None or asked.frame.gone:
            return
        asked.frame.gone = True
        reply = self.replies.get(number)
        if reply is None:
            self.homes.open(asked.node, asked.frame)
        elif self.owned.get(asked.node, (0, False))[0] == reply.epoch:
            self.release(asked.node)

    def subscribe(self, node: str) -> None:
        epoch, is_recorded = self.owned.get(node, (0, False))
        if is_recorded:
            rows = [(FILTER, 1, False, False, 0, 0)]
            self.send(encode_session(SubscribeRecord(CLIENT, rows, [0])), epoch)

    def release(self, node: str, expiry_s: int = EXPIRY_S, *, will: bool = True) -> None:
        """Close a session as `LiveSessions` does: the record first."""
        epoch, is_recorded = self.owned.pop(node, (0, False))
        if is_recorded:
            self.send(encode_session(CloseRecord(CLIENT, expiry_s, will)), epoch)
        if epoch:
            self.homes.closed(node, CLIENT, epoch)

    def take_replies(self) -> None:
        local: list[tuple[str, object]] = [("n1", each) for each in self.homes.answers.local]
        self.homes.answers.local = []
        for node, kind, payload in self.context.outgoing:
            assert isinstance(payload, bytes)
            if kind == SESSION_OPENED:
                local.append((node, decode_frame(frames.OPENED, payload)))
            elif kind == SESSION_CLOSE:
                local.append((node, decode_frame(frames.CLOSE, payload)))
        self.context.outgoing.clear()
        for node, frame in local:
            if isinstance(frame, OpenedFrame):
                self._opened(node, frame)
            elif isinstance(frame, CloseFrame) and node not in self.context.gone:
                if self.owned.get(node, (1 << 40, False))[0] <= frame.epoch:
                    self.release(node)
                else:
                    self.homes.closed(node, CLIENT, frame.epoch)

    def _opened(self, node: str, reply: OpenedFrame) -> None:
        if reply.request in self.replies:
            # The request was repeated.
            if not reply.lost and node not in self.owned:
                self.homes.closed(node, CLIENT, reply.epoch)
            return
        self.replies[reply.request] = reply
        image = self.images.state.sessions.get(CLIENT)
        if reply.lost or (image is not None and image.owner != node and image.epoch >= reply.epoch):
            # As `SessionAcquisition` decides: it is closed again, or has another owner.
            return
        asked = self.requests[reply.request].frame
        # The other nodes have an older version.
        assert (reply.session is not None) == (reply.present and node != "n1")
        assert reply.present == self._was_there(reply.epoch)
        if image is not None:
            assert (image.owner, image.epoch) == (node, reply.epoch)
            if reply.session is not None:
                assert [row[0] for row in reply.session.subscriptions] == list(image.subscriptions)
            else:
                assert reply.present or not image.subscriptions
        else:
            assert asked.expiry_s == 0
            assert not reply.present
        if node in self.owned:
            self.release(node)
        # As `finish_open` has it.
        self.owned[node] = (reply.epoch, asked.expiry_s > 0)
        if not reply.present:
            self.subscribe(node)
        if asked.gone:
            self.release(node)

    def _was_there(self, epoch: int) -> bool:
        """Whether the log had the session when its record with this epoch opened it."""
        newest = 0
        is_there = False
        for record in self.committed:
            if record.kind != log_record.SESSION or record.sequence < newest:
                continue
            change = decode_record(record.payload)
            if isinstance(change, OpenRecord):
                was_there = is_there and not change.clean
                if change.epoch == epoch:
                    return was_there
                is_there = True
                newest = change.epoch
            elif isinstance(change, EndRecord):
                is_there = False
        return False

    def settle(self) -> None:
        """Everything that follows without another input, within 4 s."""
        for _ in range(40):
            self.set_clock(self.state.now + 0.1)
            self.state.run_work()
            self.commit()
            self.pass_barriers()
            self.homes.handle_timers()
            self.fire_timers()
            self.commit()
            while self.homes.answers.local or self.context.outgoing:
                self.take_replies()
            for number, asked in list(self.requests.items()):
                if number not in self.replies:
                    self.homes.open(asked.node, asked.frame)

    def pass_barriers(self) -> None:
        for _ in range(3):
            self.barriers.advance()
            self.reads.advance(self.state.now)
            self.reads.proposal_done(1, RequestRefused(CHANGES_NOTHING), self.state.now)
            if self.barriers.advance():
                self.homes.endings.advance()
            self.homes.releases.advance()

    def fire_timers(self) -> None:
        for kind, subject in self.images.state.pop_due(self.state.now, 100):
            self.homes.endings.timer_due(kind, subject)
        for session in self.images.arm_some_timers(100):
            self.homes.endings.due(session, SESSION_EXPIRY)

    def wait(self, seconds: float) -> None:
        self.set_clock(self.state.now + seconds)
        self.fire_timers()
        self.pass_barriers()

    def outcome(self) -> dict[str, object]:
        """The packets that the clients see, now and in the end."""
        found: dict[str, object] = {}
        for number, asked in self.requests.items():
            reply = self.replies.get(number)
            if asked.frame.gone:
                # No client receives it.
                continue
            found[f"reply {number}"] = reply and (reply.present, reply.lost)
        found["state"] = self._state()
        found["wills"] = self.wills
        self.wait(DELAY_S + 3)
        self.settle()
        found["later"] = self._state()
        found["wills later"] = self.wills
        self.wait(EXPIRY_S + 3)
        self.settle()
        found["in the end"] = self._state()
        found["wills in the end"] = self.wills
        return found

    def _state(self) -> object:
        image = self.images.state.sessions.get(CLIENT)
        owned = sorted(self.owned)
        # The log has no owner that does not have the session.
        assert image is None or not image.owner or image.owner in owned
        if image is None:
            return owned
        return owned, image.owner, list(image.subscriptions), image.will is not None


# ----------------------------------------------------------------------------- states and inputs


def nothing(bench: Bench) -> None:
    pass


def with_owner(bench: Bench, *, delay_s: int = -1, expiry_s: int = EXPIRY_S) -> None:
    will = None if delay_s < 0 else WillEntry("w", b"gone", 1, False, b"", -1, delay_s)
    opened = OpenRecord(CLIENT, FIRST, expiry_s, True, None, owner="n2", request=1, will=will)
    bench.send(encode_session(opened), FIRST)
    bench.owned["n2"] = (FIRST, True)
    bench.subscribe("n2")


def without_owner(bench: Bench, *, delay_s: int = -1) -> None:
    with_owner(bench, delay_s=delay_s)
    bench.commit()
    bench.release("n2")


def unrecorded(bench: Bench) -> None:
    bench.ask(1, "n2", clean=True, expiry_s=0)
    bench.settle()
    del bench.requests[1], bench.replies[1]


def for_now(bench: Bench) -> None:
    """A client that wants no session any more."""
    without_owner(bench)
    bench.ask(3, "n3", clean=False, expiry_s=0)
    bench.settle()
    del bench.requests[3], bench.replies[3]


def subscribe_late(bench: Bench) -> None:
    """The record of n2 was held up, and n2 does not have the session any more."""
    rows = [(FILTER, 1, False, False, 0, 0)]
    bench.send(encode_session(SubscribeRecord(CLIENT, rows, [0])), FIRST)


STATES: dict[str, Callable[[Bench], None]] = {
    "no session": nothing,
    "a session without connection": without_owner,
    "a session with a delayed will": partial(without_owner, delay_s=DELAY_S),
    "a session with a will": partial(without_owner, delay_s=0),
    "a session of n2": with_owner,
    "a session of n2 with a will": partial(with_owner, delay_s=0),
    "a session of n2 without record": unrecorded,
    "a session that ends with its connection": for_now,
}


def n2_down(bench: Bench) -> None:
    bench.context.gone.add("n2")
    bench.owned.pop("n2", None)
    bench.homes.node_gone("n2")


def n2_lacks_it(bench: Bench) -> None:
    """Another process runs there."""
    bench.owned.pop("n2", None)
    bench.homes.reports.receive("n2", [0], {}, [])


INPUTS: dict[str, Callable[[Bench], None]] = {
    "n1 resumes": lambda bench: bench.ask(11, "n1", clean=False, expiry_s=EXPIRY_S),
    "n1 begins": lambda bench: bench.ask(12, "n1", clean=True, expiry_s=EXPIRY_S),
    "n3 resumes": lambda bench: bench.ask(31, "n3", clean=False, expiry_s=0),
    "n3 begins": lambda bench: bench.ask(32, "n3", clean=True, expiry_s=0),
    "n1 leaves": lambda bench: bench.leave(11),
    "n2 releases": lambda bench: bench.release("n2"),
    "n2's client says DISCONNECT": lambda bench: bench.release("n2", LONGER_S, will=False),
    "n2 subscribes": lambda bench: bench.subscribe("n2"),
    "n2 has subscribed": subscribe_late,
    "n3 leaves": lambda bench: bench.release("n3"),
    "n2 is down": n2_down,
    "n2 lacks it": n2_lacks_it,
    "the will is due": lambda bench: bench.wait(DELAY_S + 3),
    "the session expires": lambda bench: bench.wait(EXPIRY_S + 3),
}


def begin(state: str) -> Bench:
    bench = Bench()
    bench.commit()
    STATES[state](bench)
    bench.commit()
    bench.wills = 0
    return bench


@cache
def serial(state: str, inputs: tuple[str, ...]) -> dict[str, object]:
    bench = begin(state)
    for name in inputs:
        INPUTS[name](bench)
        bench.settle()
    return bench.outcome()


def outcomes(state: str, pair: tuple[str, str]) -> list[dict[str, object]]:
    """The allowed ones."""
    found = [serial(state, pair), serial(state, pair[::-1])]
    if pair == ("n1 resumes", "n1 leaves"):
        # The request is withdrawn.
        found.append(serial(state, ()))
    if state == "a session with a delayed will":
        # The will goes its own way: it precedes the end of the session, which may not come.
        found += [serial(state, ("the will is due", *order)) for order in (pair, pair[::-1])]
    return found


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_inputs_are_decided_one_after_the_other(state: str, is_lost: bool) -> None:
    wrong = []
    for pair in permutations(INPUTS, 2):
        allowed = outcomes(state, pair)
        bench = begin(state)
        INPUTS[pair[0]](bench)
        if is_lost:
            bench.lose()
        try:
            INPUTS[pair[1]](bench)
            bench.settle()
            found = bench.outcome()
        except AssertionError as error:
            wrong.append((pair, str(error)))
            continue
        if found not in allowed:
            wrong.append((pair, found, allowed))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("seed", range(60))
def test_a_session_is_where_the_log_has_it(seed: int) -> None:
    """After longer histories, and every reply on the way is true."""
    chance = random.Random(seed)
    for state in STATES:
        bench = begin(state)
        for name in chance.choices([*INPUTS], k=8):
            bench.base += 100
            INPUTS[name](bench)
            slice = bench.state.run_work
            chance.choice(
                (lambda: None, bench.write, bench.commit, bench.lose, slice, bench.settle)
            )()
        bench.settle()
        bench.settle()
        image = bench.images.state.sessions.get(CLIENT)
        recorded = [node for node in bench.owned if node == (image and image.owner)]
        assert recorded == ([image.owner] if image is not None and image.owner else [])


@pytest.mark.parametrize("asks", [1, 2])
def test_a_session_that_waits_for_its_last_will_is_over(asks: int) -> None:
    """It has expired, and a read barrier has to pass before its delayed will is published."""
    bench = Bench()
    without_owner(bench, delay_s=DELAY_S)
    bench.commit()
    bench.set_clock(bench.state.now + EXPIRY_S + 3)
    bench.fire_timers()
    for number in range(5, 5 + asks):
        bench.ask(number, "n3", clean=False, expiry_s=EXPIRY_S)
        bench.commit()
        bench.take_replies()
        assert not bench.replies
        bench.leave(number - 1)
    bench.settle()
    assert not any(reply.present for reply in bench.replies.values())
    assert bench.wills == 1
    image = bench.images.state.sessions[CLIENT]
    assert image.owner == "n3"
