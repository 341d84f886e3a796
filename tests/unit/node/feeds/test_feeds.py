"""A node that stores nothing gets from the leader what it needs: once and in order."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.feeds import server
from holdfast.node.feeds.receiver import FeedReceiver
from holdfast.node.feeds.server import MARKS_S, Feed, FeedServer
from holdfast.node.frame_kinds import FEED, FEED_ACK, FEED_FROM, FORWARD, BadFrame
from holdfast.node.metadata.model import DATA, GATEWAY
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.publish.forward_frames import decode_forward
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.journal_port import new_state

TOPICS = (b"a", b"b", b"c")


class Images(ReplicatedState):
    """Notes the state records that are applied."""

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        self.applied: list[int] = []

    def apply(self, record: Record) -> None:
        if record.kind != log_record.CONTROL:
            self.applied.append(record.offset)


class Context(ClusterContext):
    """n1 leads the only partition in `led`."""

    led = 1

    def leader(self, partition: int) -> str:
        return "n1"

    def epoch(self, partition: int) -> int:
        return self.led


class Node:
    def __init__(self, name: str, role: str) -> None:
        self.journal = Journal(1, replicated=True)
        config = NodeConfig(node_id=name, partitions=1)
        self.state = new_state(config, self.journal)
        self.context = Context(name, self.journal, role)
        self.images = Images(RecordedState(config, self.journal))
        self.log = ApplyingLog(self.journal)
        self.forwarding = RecordForwarder(self.state, self.context, Appender())
        self.applier = Applier(
            self.state,
            self.images,
            self.log,
            self.forwarding.pending,
            self.forwarding.settle,
            lambda record: None,
            lambda record: None,
        )


class Pair:
    """The leader n1 and the gateway g1, and the link between them."""

    def __init__(self) -> None:
        self.leader, self.gateway = Node("n1", DATA), Node("g1", GATEWAY)
        self.written: list[Batch] = []
        self.wanted: set[str] = set()
        self.announced: deque[str] = deque()
        # Topic -> the offset from which the gateway counts on it.
        self.starts: dict[bytes, int] = {}
        self.messages: list[int] = []
        self.links: dict[str, deque[tuple[int, bytes]]] = {}
        leader = self.leader
        self.server = FeedServer(
            leader.state,
            leader.context,
            leader.log,
            lambda topic: ["g1"] if topic in self.wanted else [],
            lambda node: False,
        )
        leader.applier.fed = self.server.live
        leader.applier.on_committed = self.server.applied
        self.reads: deque[tuple[int, int]] = deque()
        gateway = self.gateway
        self.receiver = FeedReceiver(
            gateway.state, gateway.context, gateway.applier, gateway.forwarding
        )
        deliver_plain = gateway.applier.deliver_plain

        def note(topic: bytes, flags: int, batch: Batch, index: int, offset: int) -> None:
            self.messages.append(offset)
            deliver_plain(topic, flags, batch, index, offset)

        gateway.applier.deliver_plain = note  # type: ignore[method-assign]
        self.number = 0
        self.is_compared_at_once = True
        self.lead()
        self.connect()

    def lead(self) -> None:
        """A new epoch: the tail that is not committed may be lost."""
        self.learn()
        self.leader.context.led = self.gateway.context.led
        self.server.stop_leading(0)
        self.leader.context.leading[0] = self.leader.context.led
        self.leader.context.uncompared = set() if self.is_compared_at_once else {0}
        self.leader.log.lead(0, self.leader.context.led)

    def compare(self) -> None:
        """All replicas in sync follow the leader."""
        self.leader.context.uncompared = set()
        self.server.align(0)

    def learn(self) -> None:
        """The gateway learns of the next epoch, before the leader does."""
        if self.gateway.context.led == self.leader.context.led:
            self.gateway.context.led += 1
            self.gateway.forwarding.stop(0)
            self.receiver.lose(0)

    def connect(self) -> None:
        """A new link, with none of the old one's frames."""
        self.links = {"n1": deque(), "g1": deque()}
        for node, other in ((self.leader, "g1"), (self.gateway, "n1")):
            node.context.drop_frames(other)
            node.context.connected.add(other)
        self.gateway.forwarding.stop(0)
        self.receiver.lose(0)
        self.receiver.connected("n1")
        self.server.disconnected("g1")
        # The whole announcement comes first.
        while self.announced:
            self.wanted.add(self.announced.popleft())
        for topic in self.wanted:
            self.starts.setdefault(topic.encode(), self.gateway.state.delivered[0])

    def append(self, chance: random.Random) -> None:
        kind = chance.choice((log_record.MESSAGE, log_record.MESSAGE, log_record.SESSION))
        topic = chance.choice(TOPICS) if kind == log_record.MESSAGE else b""
        record = Record(0, kind, flags=1, topic=topic, client_id=b"x", payload=b"p" * 50)
        record.flags = 1 if kind == log_record.MESSAGE else 0
        self.leader.journal.append(record)

    def publish(self, chance: random.Random) -> None:
        """A client of the gateway publishes."""
        self.number += 1
        record = Record(
            0,
            log_record.MESSAGE,
            flags=1,
            topic=chance.choice(TOPICS),
            client_id=b"own",
            payload=b"%d" % self.number,
        )
        self.gateway.forwarding.append(record)

    def close(self) -> None:
        group = self.leader.journal.close_write_group()
        if group is not None:
            self.leader.journal.wrote(group)
            self.leader.journal.commit(group)
            for batch in group.built:
                self.leader.log.built(batch)
                self.written.append(batch)

    def commit(self, chance: random.Random) -> None:
        batches = self.leader.log.uncommitted[0]
        if batches:
            end = chance.choice(batches).end_offset
            self.leader.log.advance(0, end)
            self.leader.applier.apply_to(0, end)

    def cut_tail(self) -> None:
        """The next leader has nothing that is not committed."""
        self.close()
        end = self.leader.journal.high_watermark[0]
        self.leader.log.truncate(0, end)
        self.written = [each for each in self.written if each.end_offset <= end]
        self.lead()

    def subscribe(self, chance: random.Random) -> None:
        """Announces a topic; the leader has it when the link has brought it."""
        topic = chance.choice(TOPICS).decode()
        if topic not in self.wanted and topic not in self.announced:
            self.announced.append(topic)
            self.links["n1"].append((0, topic.encode()))

    def read(self, is_damaged: bool = False) -> None:
        """A damaged batch is missing in the result."""
        if self.reads:
            request, start = self.reads.popleft()
            at = [each for each in self.written if each.end_offset > start][:3]
            at = at[1:] if is_damaged else at
            self.server.handle_batches(request, [each.content() for each in at])

    def turn(self) -> None:
        """Both nodes end a turn."""
        self.receiver.flush()
        self.gateway.forwarding.flush()
        self.server.flush()
        self.reads.extend((each.request, each.start) for each in self.server.pop_reads())
        for node, other in ((self.leader, "g1"), (self.gateway, "n1")):
            for _, kind, payload in node.context.outgoing:
                assert isinstance(payload, bytes)
                self.links[other].append((kind, payload))
            node.context.outgoing.clear()
        self.server.check()
        self.receiver.check()
        if self.leader.context.uncompared:
            for feed in self.server.live.get(0, ()):
                assert not (feed.is_aligned and feed.tickets), "a replica may have one of them"
        assert self.gateway.state.delivered[0] <= self.leader.state.delivered[0]

    def arrive(self, node: str) -> None:
        """The next frame of the link."""
        if not self.links[node]:
            return
        kind, payload = self.links[node].popleft()
        if kind == FEED:
            self.receiver.handle_feed("n1", payload)
        elif kind == FEED_FROM:
            self.server.handle_request("g1", payload)
        elif kind == FEED_ACK:
            self.server.handle_ack("g1", payload)
        elif kind == FORWARD:
            for epoch, _, batch in decode_forward(payload):
                if epoch == self.leader.context.led:
                    begin = self.leader.journal.extend(batch)
                    self.server.forwarded("g1", 0, begin)
        elif node == "n1":
            # A filter: the marks before the acknowledgement do not count it.
            self.announced.popleft()
            self.wanted.add(payload.decode())
            self.server.send_marks("g1")
            self.turn()
            self.links["g1"].append((0, payload))
        else:
            self.receiver.after("n1", lambda: self.acknowledged(payload))

    def acknowledged(self, topic: bytes) -> None:
        self.starts.setdefault(topic, self.gateway.state.delivered[0])

    def work(self) -> None:
        while self.gateway.state.work:
            self.gateway.state.run_work()

    def settle(self) -> None:
        if self.gateway.context.led > self.leader.context.led:
            self.lead()
        self.compare()
        for _ in range(2000):
            self.close()
            end = self.leader.journal.next_offset[0]
            self.leader.log.advance(0, end)
            self.leader.applier.apply_to(0, end)
            for node in (self.leader, self.gateway):
                node.state.now += MARKS_S
                node.applier.end_turn()
                while node.state.work:
                    node.state.run_work()
            self.turn()
            self.read()
            self.arrive("n1")
            self.arrive("g1")
            if self.gateway.state.delivered[0] == end and not self.gateway.forwarding.pending:
                return
        raise AssertionError("the gateway does not get everything")

    def check(self) -> None:
        state, own, wanted = [], [], []
        for batch in self.written:
            for record in batch.records():
                if record.kind != log_record.MESSAGE:
                    state.append(record.offset)
                elif record.offset >= self.starts.get(record.topic, 1 << 62):
                    wanted.append(record.offset)
                if record.client_id == b"own":
                    own.append(record.payload)
        assert self.gateway.images.applied == state
        assert self.messages == sorted(set(self.messages))
        assert set(wanted) <= set(self.messages)
        # Each message of the gateway's clients is stored once.
        assert sorted(own, key=int) == [b"%d" % number for number in range(1, self.number + 1)]


ACTIONS: tuple[Callable[[Pair, random.Random], None], ...] = (
    Pair.append,
    Pair.publish,
    lambda pair, chance: pair.close(),
    Pair.commit,
    lambda pair, chance: pair.arrive("n1"),
    lambda pair, chance: pair.arrive("g1"),
    lambda pair, chance: pair.turn(),
    Pair.subscribe,
    lambda pair, chance: pair.read(chance.random() < 0.3),
    lambda pair, chance: pair.work(),
    lambda pair, chance: pair.connect(),
    lambda pair, chance: pair.lead(),
    lambda pair, chance: pair.cut_tail(),
    lambda pair, chance: pair.learn(),
    lambda pair, chance: pair.compare(),
)
WEIGHTS = (12, 12, 8, 4, 14, 14, 20, 2, 5, 5, 2, 1, 1, 1, 5)


@pytest.mark.parametrize("block", range(4))
def test_a_gateway_gets_what_it_needs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links, leaders and uncommitted records come and go. Small windows send feeds to the disk."""
    use_small_windows(monkeypatch)
    assert sum(map(play, range(block * 100, block * 100 + 100)))


def use_small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WINDOW_BYTES", 1500)
    monkeypatch.setattr("holdfast.node.feeds.receiver.ACK_BYTES", 200)


def play(seed: int) -> int:
    """One run; the number of its reads from the disk. Raises `AssertionError`."""
    chance = random.Random(seed)
    pair = Pair()
    pair.is_compared_at_once = chance.random() < 0.6
    pair.gateway.state.steps_at_once = chance.choice((1, 10, 1000))
    reads = 0
    for _ in range(chance.randrange(50, 300)):
        chance.choices(ACTIONS, WEIGHTS)[0](pair, chance)
        pair.leader.state.now += 0.004
        reads += len(pair.reads)
    pair.settle()
    pair.check()
    return reads


def _mark_ahead(feeds: FeedServer, feed: Feed) -> None:
    feed.position = feeds._log.next_offset[0]
    MARK(feeds, feed)


MARK = FeedServer._mark
STOP = FeedServer.stop_leading


def stop_and_forget(feeds: FeedServer, partition: int) -> None:
    STOP(feeds, partition)
    for fed in feeds._nodes.values():
        fed.asked.clear()


PLANTED: dict[str, tuple[type, str, Any]] = {
    "a mark runs ahead": (FeedServer, "_mark", _mark_ahead),
    "a start at the mark without the acknowledgement": (
        FeedReceiver, "after", lambda feeds, node, do: do()
    ),
    "the uncommitted log is not named": (FeedServer, "_uncommitted", lambda feeds, feed: []),
    "an open batch is not waited for": (
        FeedServer, "_closed_end", lambda feeds, partition: 1 << 62
    ),
    "a request for the next epoch is forgotten": (
        FeedServer, "stop_leading", lambda feeds, partition: stop_and_forget(feeds, partition)
    ),
    "noted records are forgotten too soon": (
        Feed, "forget_own", lambda feed, offset: feed.own.clear()
    ),
    "forwarded records are forgotten": (FeedServer, "forwarded", lambda *arguments: None),
    "pending records of before are forgotten": (
        Feed, "is_own", lambda feed, batch, index, ticket: bool(feed.own)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_the_model_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_windows(monkeypatch)
    owner, method, planted = PLANTED[name]
    monkeypatch.setattr(owner, method, planted)
    with pytest.raises(AssertionError):
        list(map(play, range(400)))


def test_a_feed_below_the_log_begins_with_the_state() -> None:
    pair = Pair()
    begun: list[tuple[int, int]] = []
    pair.receiver.on_begins = lambda partition, offset: begun.append((partition, offset))
    pair.leader.log.reset(0, 40)
    pair.leader.state.delivered[0] = 40
    for _ in range(3):
        pair.turn()
        pair.arrive("n1")
        pair.arrive("g1")
    assert begun == [(0, 40)]
    assert not pair.receiver.is_live(0)


def test_a_feed_that_is_overtaken_aligns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed is live, falls behind, and retention removes what it lacks. No record leaves for
    the leader before the next feed: nothing would say that it is stored."""
    use_small_windows(monkeypatch)
    chance = random.Random(1)
    pair = Pair()
    begun: list[int] = []
    pair.receiver.on_begins = lambda partition, offset: begun.append(offset)
    pair.publish(chance)
    pair.settle()
    assert pair.gateway.forwarding.target(0) == "n1"
    journal = pair.leader.journal
    for _ in range(100):
        pair.append(chance)
        pair.close()
        pair.leader.applier.end_turn()
        pair.leader.log.advance(0, journal.next_offset[0])
        pair.leader.applier.apply_to(0, journal.next_offset[0])
        pair.turn()
    journal.start_offsets[0] = journal.next_offset[0]
    pair.written.clear()
    while pair.links["g1"] or pair.reads:
        pair.arrive("g1")
        pair.turn()
        pair.arrive("n1")
        pair.turn()
        pair.read()
        pair.turn()
    assert set(begun) == {journal.next_offset[0]}
    pair.receiver.check()
    pair.publish(chance)
    pair.gateway.forwarding.flush()
    assert not any(kind == FORWARD for _, kind, _ in pair.gateway.context.outgoing)


def test_the_noted_records_of_a_feed_end_with_it() -> None:
    """The gateway's filters match everything, so no record is sent because it is its own."""
    chance = random.Random(1)
    pair = Pair()
    pair.wanted = {topic.decode() for topic in TOPICS}
    pair.settle()
    for _ in range(50):
        pair.append(chance)
        pair.publish(chance)
        pair.settle()
    (feed,) = pair.server.live[0]
    assert not feed.own


def test_frames_that_cannot_be_are_refused() -> None:
    pair = Pair()
    with pytest.raises(BadFrame, match="partition 9, there are 1"):
        pair.server.handle_request("g1", b"\x09" + bytes(21))
    pair.turn()
    pair.arrive("n1")
    with pytest.raises(BadFrame, match="9 bytes of feeds applied, of 0 sent"):
        pair.server.handle_ack("g1", b"\x09" + bytes(7))
