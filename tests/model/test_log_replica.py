"""A replica's journal against a list per partition: whatever is appended, taken over from leaders,
cut off, begun anew, written, crashed and opened again."""

import random

import pytest

from holdfast.log.batch import Batch
from holdfast.log.files.layout import segment_name
from holdfast.log.journal.segment_list import forgotten
from holdfast.log.reading.interest import ReadInterest
from tests.sim.disk import Crash, SimContent, SimDisk
from tests.support.replica_bench import (
    PartitionModel,
    RandomReplica,
    ReplicaBench,
    model_of_files,
)

SEEDS = range(8)
STEPS = 250


def check_bookkeeping(bench: ReplicaBench, models: list[PartitionModel]) -> None:
    journal = bench.journal
    for partition, model in enumerate(models):
        assert journal.start_offsets[partition] == model.start
        assert journal.next_offset[partition] == model.end
        assert journal.high_watermark[partition] == model.watermark
        assert journal.durable_offset[partition] <= model.end
        assert journal.last_epoch(partition) == model.last_epoch
        for epoch in {0, *(epoch + more for epoch, _ in model.contents for more in (-1, 0, 1))}:
            assert journal.epoch_end(partition, epoch) == model.epoch_end(epoch)


def check_reading(bench: ReplicaBench, models: list[PartitionModel], limits: list[int]) -> None:
    """Everything below the limits, which are in the file, is read as it must be, in every way."""
    starts = [model.start for model in models]
    for partition, model in enumerate(models):
        limit = limits[partition]
        expected = model.between(model.start, limit)
        assert bench.contents(partition, model.start, limit) == expected
        for offset in range(model.start, limit):
            record = bench.reader.fetch(partition, offset)
            assert record is not None
            assert record.payload == expected[offset - model.start][1]
        assert bench.reader.fetch(partition, model.start - 1) is None
    payloads = [
        [each[1] for each in model.between(model.start, limit)]
        for model, limit in zip(models, limits, strict=True)
    ]
    assert bench.replayed(None, limits) == payloads
    for interests in (
        [ReadInterest("#", None)],
        [ReadInterest(f"t/{number}", None) for number in range(5)],
    ):
        found: list[list[bytes]] = [[] for _ in models]
        positions = starts
        while any(position < limit for position, limit in zip(positions, limits, strict=True)):
            result = bench.reader.read(positions, limits, interests, 7, 1 << 20)
            assert result.lost == 0
            for record in result.records:
                found[record.partition].append(record.payload)
            positions = result.positions
            if result.done:
                break
        assert found == payloads


def readable(bench: ReplicaBench) -> list[int]:
    """Committed and in the file."""
    journal = bench.journal
    return [
        max(start, min(pair))
        for start, *pair in zip(
            journal.start_offsets, journal.high_watermark, journal.written, strict=True
        )
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step(seed: int) -> None:
    bench = ReplicaBench(SimDisk())
    bench.writes_indexes = seed % 3 != 0
    replica = RandomReplica(bench, seed)
    replica.forgets = 0.3 + seed % 3
    for step in range(STEPS):
        replica.step()
        check_bookkeeping(bench, replica.models)
        if step % 10 == 0:
            check_reading(bench, replica.models, readable(bench))
    bench.flush()
    assert bench.journal.durable_offset == bench.journal.next_offset
    check_reading(bench, replica.models, bench.journal.next_offset)
    assert len(bench.journal.segments) + replica.removed > 5
    assert replica.reclaimed_bytes or seed % 3 < 2
    bench.journal.check()


def check_opened(disk: SimDisk) -> ReplicaBench:
    """Opens to what a plain walk through the files gives, and not more is committed than was."""
    bench = ReplicaBench(disk)
    checkpoint = bench.directory.read_checkpoint()
    known = checkpoint.offsets
    if bench.journal.segments and checkpoint.segment < bench.journal.segments[0].sequence:
        # Marks behind it may have been removed.
        known = [0] * bench.journal.partitions
    models = model_of_files(bench.directory, bench.journal.partitions)
    for partition, model in enumerate(models):
        model.watermark = min(model.end, max(model.start, known[partition]))
        marked = bench.journal.high_watermark[partition]
        if marked == model.start and forgotten(bench.journal.segments).get(partition, -1) >= 0:
            # The checkpoint may be older than the mark where the partition began again.
            model.watermark = marked
    check_bookkeeping(bench, models)
    check_reading(bench, models, bench.journal.next_offset)
    assert not bench.opened.damage
    assert not bench.opened.damaged
    bench.journal.check()
    assert not any(segment.head.missing for segment in bench.journal.segments)
    return bench


def check_kept(bench: ReplicaBench, models: list[PartitionModel], durable: list[int]) -> None:
    """What was durable and not cut off is there, except for a partition that began anew in the
    group that was lost."""
    for partition, model in enumerate(models):
        if durable[partition] and model.is_stored:
            start = bench.journal.start_offsets[partition]
            # Later, if retention was interrupted.
            assert model.start <= start <= model.watermark
            kept = model.between(start, durable[partition])
            assert bench.contents(partition, start, durable[partition]) == kept


def check_recovery(bench: ReplicaBench, replica: RandomReplica) -> None:
    """From the newest snapshot on, everything committed is replayed, and nothing else."""
    assert replica.snapshot is not None
    snapshot = replica.snapshot[1]
    for partition, offset in enumerate(snapshot):
        bench.journal.advance(partition, offset)
    limits = list(bench.journal.high_watermark)
    found = bench.replayed(snapshot, limits)
    for partition, model in enumerate(replica.models):
        # Unless it had begun anew since, and that was lost or not.
        if (
            model.is_stored
            and partition not in replica.begun_again
            and bench.journal.start_offsets[partition] <= snapshot[partition]
            and model.start <= snapshot[partition]
        ):
            expected = model.between(snapshot[partition], limits[partition])
            assert found[partition] == [each[1] for each in expected]


@pytest.mark.parametrize("seed", SEEDS)
def test_crashes(seed: int) -> None:
    assert crash_a_replica(seed).removed


def crash_a_replica(seed: int) -> RandomReplica:
    """The replica after eight crashes, each in the middle of its writes."""
    disk = SimDisk()
    replica = RandomReplica(ReplicaBench(disk), seed)
    chance = random.Random(seed)
    for _ in range(8):
        bench = replica.bench
        bench.writes_indexes = chance.random() < 0.7
        disk.crash_at = disk.steps + chance.randint(20, 80)
        try:
            for _ in range(STEPS):
                replica.step()
        except Crash:
            pass
        durable = list(bench.journal.durable_offset)
        written = bench.journal.committed_sequence
        disk = disk.after_crash(
            chance.choice(["none", "all", "torn", "sectors"]), chance.randint(0, 1 << 20)
        )
        if chance.random() < 0.3:
            for name in [name for name in disk.files if name.endswith(".idx")]:
                if chance.random() < 0.5:
                    del disk.files[name]
        again = check_opened(disk)
        check_kept(again, replica.models, durable)
        assert written <= again.journal.committed_sequence, "fewer records than were durable"
        if replica.snapshot is not None:
            check_recovery(again, replica)
        models = model_of_files(again.directory, 3)
        for partition, model in enumerate(models):
            model.watermark = again.journal.high_watermark[partition]
        following = RandomReplica(again, chance.randint(0, 1 << 20))
        following.models = models
        following.epoch = replica.epoch
        following.count = replica.count
        following.snapshot = replica.snapshot
        following.begun_again = replica.begun_again
        following.removed = replica.removed
        replica = following
    return replica


@pytest.mark.parametrize("seed", range(3))
def test_every_truncation_of_the_last_segment(seed: int) -> None:
    disk = SimDisk()
    replica = RandomReplica(ReplicaBench(disk), seed)
    replica.reclaims = 0.0
    for _ in range(120):
        replica.step()
    replica.bench.flush()
    last = sorted(name for name in disk.files if name.endswith(".log"))[-1]
    content = bytes(disk.files[last].now)
    checkpoint = replica.bench.directory.read_checkpoint()
    # Without a byte that was synced, it would be damaged.
    begin = checkpoint.position if last.endswith(segment_name(checkpoint.segment)) else 0
    for length in range(begin, len(content), 13):
        cut = disk.copy()
        cut.files[last] = SimContent(content[:length])
        check_opened(cut)


@pytest.mark.parametrize("seed", range(4))
def test_followers_bytes_are_the_leaders(seed: int) -> None:
    """Whatever its own history, a follower that has cut off what differs and taken over the rest
    holds the same batches."""
    leader = RandomReplica(ReplicaBench(SimDisk()), seed)
    follower = RandomReplica(ReplicaBench(SimDisk(), segment_bytes=900), seed + 1000)
    for _ in range(100):
        leader.step()
        follower.step()
    leader.bench.flush()
    for partition, model in enumerate(leader.models):
        mine = follower.models[partition]
        journal = follower.bench.journal
        if mine.start == mine.watermark == model.start:
            journal.truncate(partition, model.start)
        else:
            journal.reset(partition, model.start)
        start = model.start
        while start < model.end:
            for data in leader.bench.reader.read_batches(partition, start, model.end, 500):
                journal.append_batch(Batch(data))
                start = Batch(data).end_offset
    follower.bench.flush()
    follower.bench = ReplicaBench(follower.bench.directory.files.copy(), segment_bytes=900)  # type: ignore[attr-defined]
    for partition, model in enumerate(leader.models):
        expected = leader.bench.reader.read_batches(partition, model.start, model.end, 1 << 30)
        found = follower.bench.reader.read_batches(partition, model.start, model.end, 1 << 30)
        assert found == expected
        own, other = follower.bench.journal, leader.bench.journal
        for epoch, _ in model.contents:
            assert own.epoch_end(partition, epoch) == other.epoch_end(partition, epoch)


def test_flipped_bytes() -> None:
    """Damage to what was durable costs nobody's trust in what it did not touch: below the first
    offset that a partition is unsure of, it holds what it held."""
    with_void = 0
    for seed in range(5):
        disk = SimDisk()
        replica = RandomReplica(ReplicaBench(disk, segment_bytes=4096), seed)
        for _ in range(100):
            replica.step()
        replica.bench.flush()
        replica.checkpoint(0)
        bench = ReplicaBench(disk)
        with_void += sum(segment.has_void() for segment in bench.journal.segments[-2:])
        models = model_of_files(bench.directory, bench.journal.partitions)
        for name in sorted(name for name in disk.files if name.endswith(".log"))[-2:]:
            check_flips(disk, name, models)
    assert with_void > 2


def check_flips(disk: SimDisk, name: str, models: list[PartitionModel]) -> None:
    content = bytes(disk.files[name].now)
    for position in range(0, len(content), 61):
        damaged = disk.copy()
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        damaged.files[name] = SimContent(bytes(changed))
        damaged.files.pop(name.replace(".log", ".idx"), None)
        for opened in (ReplicaBench(damaged), ReplicaBench(damaged)):
            # The second time, too, although the end may have been cut off the first time.
            check_trusted(opened, models)


def check_trusted(bench: ReplicaBench, models: list[PartitionModel]) -> None:
    journal = bench.journal
    unsure = bench.opened.damaged
    for partition, model in enumerate(models):
        end = min(unsure.get(partition, model.end), journal.next_offset[partition])
        if bench.opened.damage and partition not in unsure:
            assert journal.next_offset[partition] == model.end
        start = journal.start_offsets[partition]
        assert bench.contents(partition, start, end) == model.between(start, end)
