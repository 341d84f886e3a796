"""A node becomes a replica of a partition that it was fed, and stops being one: the feed and the
copy of the log meet at any offset, while leaders change and the node crashes. Each record is
applied once, in order."""

import random

import pytest

from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.segment_list import forgotten
from holdfast.log.record import SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.transfer import replay_offset
from tests.sim.disk import SimDisk
from tests.support.journal_port import new_state
from tests.support.replica_bench import PartitionModel, ReplicaBench

P, OTHER = 0, 1
Found = list[tuple[int, bytes]]


class Applied(ReplicatedState):
    """Notes what is applied."""

    def __init__(self, state: RecordedState) -> None:
        super().__init__(state)
        self.found: Found = []

    def apply(self, record: Record) -> None:
        self.found.append((record.offset, record.payload))


def session_batch(base: int, epoch: int, payloads: list[bytes]) -> Batch:
    builder = BatchBuilder(P, base)
    for payload in payloads:
        builder.add(Record(P, SESSION, timestamp_us=1, client_id=b"c", payload=payload))
    return Batch(builder.build(epoch))


class World:
    """The log of whoever leads the partition, and a node that follows it or is fed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.leader = PartitionModel()
        self.epoch = 1
        self.count = 0
        self.ends: list[int] = []
        """The end of the leader's batches."""
        self.copied = self.crashes = 0
        # The newest snapshot: the first record that it lacks, and what it has.
        self.snapshot: tuple[int, Found] = (0, [])
        self.is_stored = False
        self.start(SimDisk())
        self.journal.place(P, 0)

    def start(self, disk: SimDisk) -> None:
        self.disk = disk
        self.bench = ReplicaBench(disk, 2)
        self.journal = self.bench.journal
        config = NodeConfig(partitions=2)
        self.state = new_state(config, self.journal)
        self.images = Applied(RecordedState(config, self.journal))
        self.log = ApplyingLog(self.journal)
        self.applier = Applier(
            self.state,
            self.images,
            self.log,
            {},
            lambda ticket, partition, client: None,
            lambda record: None,
            lambda record: None,
        )
        self.applier.on_copied = self.on_copied

    def on_copied(self, partition: int) -> None:
        assert partition == P
        self.copied += 1

    @property
    def delivered(self) -> int:
        return self.state.delivered[P]

    @property
    def is_fed(self) -> bool:
        return not self.is_stored or P in self.log.fed

    # The leader

    def append(self) -> None:
        base = self.leader.end
        for _ in range(self.chance.randint(1, 4)):
            self.count += 1
            self.leader.contents.append((self.epoch, b"%d" % self.count))
        self.leader.bases.add(base)
        self.ends.append(self.leader.end)

    def commit_there(self) -> None:
        if self.ends and self.leader.watermark < self.leader.end:
            self.leader.watermark = self.chance.randint(self.leader.watermark, self.leader.end)

    def change_leader(self) -> None:
        """The next leader lacks some of what is not committed."""
        bases = [base for base in self.leader.bases if base >= self.leader.watermark]
        if bases and self.chance.random() < 0.7:
            self.leader.cut(self.chance.choice(sorted(bases)))
        self.ends = [end for end in self.ends if end <= self.leader.end]
        self.epoch += 1
        self.append()

    def retain_there(self) -> None:
        """Its log begins later, but not behind what the node has applied."""
        limit = min(self.leader.watermark, self.delivered)
        bases = [base for base in self.leader.bases if self.leader.start < base <= limit]
        if bases and self.snapshot[0] >= min(bases):
            start = min(bases)
            self.leader.begin_later(start)

    # The node

    def feed(self) -> None:
        if not self.is_fed:
            return
        end = self.chance.randint(self.delivered, max(self.delivered, self.leader.watermark))
        for offset in range(self.delivered, end):
            record = Record(P, SESSION, client_id=b"c", payload=self.payload(offset))
            record.offset = offset
            self.applier.fold(record)
        if self.is_stored:
            self.log.note_fed(P, self.delivered)
        else:
            self.journal.place(P, self.delivered)

    def payload(self, offset: int) -> bytes:
        return self.leader.contents[offset - self.leader.start][1]

    def join(self) -> None:
        if not self.is_stored:
            self.is_stored = True
            self.applier.store(P)

    def leave(self) -> None:
        if self.is_stored:
            self.is_stored = False
            self.applier.forget(P)

    def follow(self) -> None:
        """Takes a batch of the leader, after a cut or a reset if the logs differ."""
        if not self.is_stored:
            return
        end = self.journal.next_offset[P]
        if end < self.leader.start:
            if self.delivered >= self.leader.start and P in self.log.fed:
                self.log.reset(P, self.leader.start)
                assert self.applier.log_begins(P, self.leader.start)
            return
        own_epochs = [self.journal.epoch_end(P, epoch) for epoch in range(self.epoch + 1)]
        common = self.leader.start
        for epoch, own_end in own_epochs:
            found, end_there = self.leader.epoch_end(epoch)
            if epoch and found == epoch:
                common = max(common, min(own_end, end_there))
        if end > common:
            assert common >= self.journal.high_watermark[P], "committed here, and not by the leader"
            self.log.truncate(P, common)
            return
        following = [each for each in self.ends if each > end]
        if following:
            contents = self.leader.between(end, following[0])
            batch = session_batch(end, contents[0][0], [each[1] for each in contents])
            self.log.append_batch(batch)

    def commit_here(self) -> None:
        if not self.is_stored:
            return
        own = self.journal
        # As a follower: what the leader has committed, as far as the logs are known to be equal.
        if own.last_epoch(P) and own.last_epoch(P) != self.leader_epoch_at(own.next_offset[P]):
            return
        offset = min(self.leader.watermark, own.durable_offset[P])
        if offset > own.high_watermark[P]:
            self.log.advance(P, offset)
            self.applier.apply_to(P, offset)

    def leader_epoch_at(self, end: int) -> int:
        """The epoch of the leader's record before `end`."""
        if not self.leader.start < end <= self.leader.end:
            return 0
        return self.leader.contents[end - 1 - self.leader.start][0]

    def write(self) -> None:
        if self.bench.in_flight is not None:
            self.bench.finish()
        else:
            self.bench.append(OTHER, b"x" * 30)
            self.bench.write()

    def work(self) -> None:
        self.state.run_work()
        self.applier.end_turn()

    def save(self) -> None:
        self.bench.flush()
        # The effect of a record that is applied again is left out.
        offset = replay_offset(self.journal, P, self.delivered)
        self.snapshot = offset, self.images.found[:offset]

    def overtake(self) -> None:
        """The next leader commits other records in place of a tail here, and feeds them. The node
        saves its state, and crashes before it has cut the tail."""
        for _ in range(3):
            self.append()
        for _ in range(40):
            self.follow()
        journal = self.journal
        if self.is_fed and self.is_stored and journal.next_offset[P] == self.leader.end:
            self.change_leader()
            while self.delivered <= min(self.leader.end, journal.next_offset[P]) - 1:
                self.leader.watermark = self.leader.end
                self.feed()
            self.save()
            self.crash()

    def checkpoint(self) -> None:
        self.bench.directory.write_watermarks(self.journal.checkpoint())

    def crash(self) -> None:
        self.crashes += 1
        survival = self.chance.choice(["none", "all", "torn", "sectors"])
        self.start(self.disk.after_crash(survival, self.chance.randint(0, 1 << 20)))
        assert not self.bench.opened.damaged
        known, found = self.snapshot
        self.images.found = list(found)
        journal = self.journal
        is_empty = journal.start_offsets[P] == journal.next_offset[P]
        if is_empty or not self.is_stored:
            # Without the mark of its end, it is forgotten again.
            self.state.delivered[P] = known
            if not is_empty:
                journal.forget(P)
            journal.place(P, known)
            if self.is_stored:
                self.applier.store(P)
            return
        if known > journal.next_offset[P]:
            assert not journal.next_offset[P] or P in forgotten(journal.segments)
            self.applier.copy(P, known)
        else:
            journal.advance(P, known)
            limit = journal.high_watermark[P]
            if known < journal.start_offsets[P]:
                # Its log began again behind the snapshot; the transfer of state is not modelled.
                raise AssertionError("the model lets no log begin behind the snapshot")
            for batch in self.bench.reader.read_batches(P, known, limit, 1 << 30):
                for record in Batch(batch).records():
                    if known <= record.offset < limit:
                        self.images.found.append((record.offset, record.payload))
            self.state.delivered[P] = limit
        start = journal.high_watermark[P]
        while start < journal.next_offset[P]:
            batches = self.bench.reader.read_batches(P, start, journal.next_offset[P], 200)
            for data in batches:
                self.log.built(Batch(data))
            start = Batch(batches[-1]).end_offset

    def check(self, delivered: int) -> None:
        assert self.delivered >= delivered, "what is applied falls"
        assert [offset for offset, _ in self.images.found] == list(range(self.delivered))
        for offset, payload in self.images.found[self.leader.start :]:
            assert payload == self.payload(offset)
        assert self.delivered <= self.leader.watermark, "applied before the commit"
        self.applier.check()
        self.journal.check()
        if not self.is_fed:
            assert self.delivered <= self.journal.high_watermark[P]

    def settle(self) -> None:
        """Everything arrives: the node is a replica that has applied all."""
        self.append()
        self.leader.watermark = self.leader.end
        self.join()
        for _ in range(4000):
            self.follow()
            self.bench.flush()
            self.commit_here()
            self.work()
            if self.chance.random() < 0.2:
                self.feed()
            if not self.is_fed and self.delivered == self.leader.end:
                break
        self.check(0)
        assert self.delivered == self.leader.end
        assert not self.is_fed
        start = max(self.journal.start_offsets[P], self.leader.start)
        own = self.bench.contents(P, start, self.leader.end)
        assert own == self.leader.between(start, self.leader.end)


@pytest.mark.parametrize("seed", range(30))
def test_feed_and_copy_meet(seed: int) -> None:
    world = World(seed)
    chance = world.chance
    steps = [
        (world.append, 6.0), (world.commit_there, 6.0), (world.change_leader, 0.7),
        (world.retain_there, 0.5), (world.feed, 4.0), (world.join, 0.6), (world.leave, 0.3),
        (world.follow, 12.0), (world.commit_here, 6.0), (world.write, 8.0), (world.work, 4.0),
        (world.save, 0.6), (world.checkpoint, 1.0), (world.crash, 0.4),
        (world.overtake, 0.2),
    ]  # fmt: skip
    calls = [call for call, _ in steps]
    weights = [weight for _, weight in steps]
    for _ in range(600):
        delivered = world.delivered
        call = chance.choices(calls, weights)[0]
        call()
        world.check(0 if call in (world.crash, world.overtake) else delivered)
    world.settle()
    assert world.copied or world.crashes
