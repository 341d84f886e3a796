"""A standby whose holder is deposed, retires segments, or cannot be read whole; and what a node
makes of a directory that is full or away."""

import errno
from pathlib import Path

import pytest

from holdfast.io.disk.journal_writer import DiskFullError, GroupWriter
from holdfast.io.disk.standby import Standby
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import ReadFile
from holdfast.log.files.layout import DataDirectory, Manifest, segment_name, snapshot_name
from holdfast.log.journal.compaction import SegmentCompactor
from holdfast.log.journal.epoch_folders import (
    CLAIMED_NAME,
    LEASE,
    Epoch,
    newest_epoch,
    write_epoch,
)
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import open_journal
from holdfast.log.journal.tailing import FollowError, JournalFollower
from holdfast.log.record import FLAG_RETAIN, MESSAGE, Record
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.node.config import NodeConfig
from holdfast.node.lease.claim import link_epoch
from holdfast.node.lease.directory import HolderInfo, LeaseDirectory
from holdfast.node.lease.standby_watch import EXPIRED, WAIT, HolderWatch, LeaseTimes, Sight
from holdfast.node.lease.tenure import LeaseLost, Tenure
from tests.sim.disk import SimDisk

MANIFEST = Manifest("shared", 1, "2026-01-01T00:00:00Z", incarnation="first")
SEGMENT_BYTES = 2000


class Holder:
    """A node's writing side, in the folder of an epoch."""

    def __init__(self, directory: DataDirectory, journal: Journal) -> None:
        self.directory = directory
        self.journal = journal
        self.writer = GroupWriter(directory, durable=True, shared=True, allocate_bytes=0)

    def write(self, payload: bytes, topic: bytes = b"t") -> None:
        self.journal.append(
            Record(
                0, MESSAGE, flags=1, timestamp_us=1, topic=topic, client_id=b"c", payload=payload
            )
        )
        group = self.journal.close_write_group()
        assert group is not None
        self.writer.write(group)
        self.journal.wrote(group)
        self.journal.commit(group)

    def retire(self, count: int) -> None:
        """What Storage.remove_segments does."""
        removed = self.journal.remove_oldest(count)
        oldest = self.journal.segments[0]
        self.directory.write_start(oldest.sequence, oldest.start_offsets())
        for segment in removed:
            self.directory.remove_segment(segment.sequence)

    def save(self, sequence: int) -> None:
        encoder = SnapshotEncoder(sequence, [sequence], 0)
        self.directory.replace_file(snapshot_name(sequence), encoder.finish())


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk()
    create(disk, MANIFEST)
    disk.make_folder(LEASE)
    disk.open_write(CLAIMED_NAME, create=True)
    return disk


def folder_of(disk: SimDisk, epoch: Epoch) -> DataDirectory:
    return DataDirectory(epoch.files(disk), MANIFEST, epoch)


def begin_epoch(journal: Journal, number: int) -> None:
    """Do what the holder of an epoch does, as the only node of its cluster."""
    journal.is_alone = True
    journal.lead(0, number)
    journal.start_segment()


def first_holder(disk: SimDisk) -> Holder:
    journal = Journal(1, SEGMENT_BYTES, replicated=True)
    begin_epoch(journal, 1)
    folder = link_epoch(disk, MANIFEST, Epoch(0), 1)
    write_epoch(disk, Epoch(1))
    return Holder(folder, journal)


def follower_of(disk: SimDisk, epoch: Epoch) -> JournalFollower:
    directory = folder_of(disk, epoch)
    return JournalFollower(directory, open_journal(directory, SEGMENT_BYTES, writes=False))


def take_over(disk: SimDisk, number: int) -> Holder:
    """From what is there now; the caller's follower sees no more."""
    old = newest_epoch(disk)
    folder = link_epoch(disk, MANIFEST, old, number)
    opened = open_journal(folder, SEGMENT_BYTES, writes=False)
    last = opened.journal.segments[-1]
    folder.sealed[last.sequence] = last.size_bytes
    begin_epoch(opened.journal, number)
    return Holder(folder, opened.journal)


def begin(disk: SimDisk, holder: Holder, number: int) -> Epoch:
    epoch = Epoch(number, sealed=holder.directory.sealed)
    write_epoch(disk, epoch)
    return epoch


@pytest.mark.parametrize("payload", [b"x" * 100, b"promised" + b"x" * 92, b"y" * 300])
def test_two_segments_of_one_name(disk: SimDisk, payload: bytes) -> None:
    """A deposed holder begins a segment, as the new one does after the same number of records. Who
    has followed the first must not go on in the second."""
    old = first_holder(disk)
    old.write(b"x" * 100)
    batch_bytes = old.journal.size_bytes()
    while old.journal.size_bytes() + batch_bytes <= SEGMENT_BYTES:
        old.write(b"x" * 100)
    follower = follower_of(disk, Epoch(1))
    new = take_over(disk, 2)
    epoch = begin(disk, new, 2)
    for _ in range(2):
        old.write(b"x" * 100)
    for _ in range(4):
        new.write(payload)
    assert old.journal.segments[-1].sequence == new.journal.segments[-1].sequence
    list(follower.poll())
    with pytest.raises(FollowError):
        follower.switch(folder_of(disk, epoch))


def test_a_finished_segment_ends_with_its_last_batch(disk: SimDisk) -> None:
    """Space allocated in advance is given back: a size that its index does not know would have
    every segment read again at each takeover."""
    holder = first_holder(disk)
    holder.writer = GroupWriter(holder.directory, durable=True, shared=True, allocate_bytes=4096)
    while len(holder.journal.segments) < 3:
        holder.write(b"x" * 300)
    for segment in holder.journal.segments[:-1]:
        assert holder.directory.open_segment(segment.sequence).size() == segment.size_bytes


def test_a_shared_file_is_not_cut_when_a_write_found_no_space(disk: SimDisk) -> None:
    """Another node may have taken over with what is in it."""
    holder = first_holder(disk)
    holder.writer = GroupWriter(holder.directory, durable=True, shared=True, allocate_bytes=4096)
    holder.write(b"x")
    segment = holder.journal.segments[-1].sequence
    disk.capacity_bytes -= disk.free_bytes() - 200
    with pytest.raises(DiskFullError):
        holder.write(bytes(8000))
    content = disk.files[f"{Epoch(1).folder}/journal/{segment:020d}.log"]
    before = bytes(content.now)
    holder.writer.close()
    assert content.now == before


def test_an_empty_journal_of_which_the_beginning_was_missed(disk: SimDisk) -> None:
    """Who has followed nothing yet must not take that for all there is."""
    holder = first_holder(disk)
    follower = follower_of(disk, Epoch(1))
    while len(holder.journal.segments) < 4:
        holder.write(b"x" * 300)
    holder.retire(2)
    with pytest.raises(FollowError):
        list(follower.poll())
    with pytest.raises(FollowError):
        list(follower.finish())


def test_segments_that_retention_removed_before_they_were_followed(disk: SimDisk) -> None:
    holder = first_holder(disk)
    holder.write(b"x" * 300)
    follower = follower_of(disk, Epoch(1))
    while len(holder.journal.segments) < 4:
        holder.write(b"x" * 300)
    holder.retire(3)
    list(follower.poll())
    with pytest.raises(FollowError):
        follower.forget_removed()


def test_a_pause_of_ones_own_is_not_silence_of_the_holder() -> None:
    watch = HolderWatch(LeaseTimes(timeout_s=0.5))
    seen = Sight(epoch=3, counts=True, counter=5, is_locked=True, is_released=False)
    assert watch.judge(seen, 10.0, 11.0) == WAIT
    assert watch.judge(seen, 11.02, 11.03) == WAIT
    assert watch.judge(seen, 11.49, 99.0) == WAIT
    assert watch.judge(seen, 99.02, 99.03) == EXPIRED


def test_a_lease_runs_out_although_nothing_can_be_read(disk: SimDisk) -> None:
    tenure = Tenure(LeaseDirectory(disk), 1, LeaseTimes(timeout_s=0.5), 10.0)
    del disk.files[CLAIMED_NAME]
    with pytest.raises(FileNotFoundError):
        tenure.check(10.5)
    with pytest.raises(LeaseLost):
        tenure.check(10.51)


def test_a_directory_that_is_away_is_not_one_without_epochs(disk: SimDisk) -> None:
    holder = first_holder(disk)
    begin(disk, holder, 1)
    files, folders = disk.files, disk.folders
    disk.files, disk.folders = {}, set()
    with pytest.raises(FileNotFoundError):
        newest_epoch(disk)
    with pytest.raises(FileNotFoundError):
        LeaseDirectory(disk).next_epoch()
    disk.files, disk.folders = files, folders
    assert newest_epoch(disk).number == 1


def test_claims_on_a_full_disk_leave_nothing(disk: SimDisk) -> None:
    lease = LeaseDirectory(disk)
    disk.capacity_bytes -= disk.free_bytes()
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            lease.begin_claim(lease.next_epoch(), HolderInfo("a"))
    assert disk.list(LEASE) == ["epochs"]
    assert not disk.locks


def standby_on(disk: SimDisk) -> Standby:
    return Standby(disk, Path("/simulated"), SEGMENT_BYTES, NodeConfig(partitions=1))


def test_a_takeover_removes_what_retention_has_left(disk: SimDisk) -> None:
    """The holder stalls when it has recorded the removal, and before it removes the files."""
    holder = first_holder(disk)
    while len(holder.journal.segments) < 4:
        holder.write(b"x" * 300)
    holder.journal.remove_oldest(2)
    oldest = holder.journal.segments[0]
    epochs = holder.journal.start_epochs()
    holder.directory.write_start(oldest.sequence, oldest.head.start_offsets, epochs)
    folder = link_epoch(disk, MANIFEST, Epoch(1), 2)
    assert folder.segments() == [each.sequence for each in holder.journal.segments]
    assert len(holder.directory.segments()) == 4


def test_a_takeover_right_after_retention(disk: SimDisk) -> None:
    """Before the standby has had a look at what is gone."""
    holder = first_holder(disk)
    while len(holder.journal.segments) < 4:
        holder.write(b"x" * 300)
    standby = standby_on(disk)
    standby.load(Epoch(1))
    holder.retire(2)
    folder = link_epoch(disk, MANIFEST, Epoch(1), 2)
    lock = disk.lock("lock")
    assert lock is not None
    storage = standby.take_over(Epoch(1), folder, lock)
    assert [each.sequence for each in storage.journal.segments] == folder.segments()


def test_a_snapshot_that_cannot_be_read_now_is_not_done_without(
    disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the journal does not reach back to the beginning, it has what else is lost."""
    holder = first_holder(disk)
    while len(holder.journal.segments) < 4:
        holder.write(b"x" * 300)
    holder.save(holder.journal.segments[2].sequence)
    holder.retire(2)
    standby = standby_on(disk)
    open_read = SimDisk.open_read

    def failing(files: SimDisk, name: str) -> ReadFile:
        if name.endswith(".snap"):
            raise OSError(errno.EIO, "Input/output error")
        return open_read(files, name)

    with monkeypatch.context() as patched:
        patched.setattr(SimDisk, "open_read", failing)
        with pytest.raises(OSError, match="Input/output"):
            standby.load(Epoch(1))
    assert not standby.is_loaded
    standby.load(Epoch(1))
    assert standby.is_loaded


@pytest.mark.parametrize("follows", [True, False])
def test_a_takeover_writes_again_what_a_failed_sync_left_in_the_cache(
    disk: SimDisk, follows: bool
) -> None:
    """The seal makes it count, and its sync alone writes nothing."""
    holder = first_holder(disk)
    holder.write(b"acknowledged")
    standby = standby_on(disk)
    standby.load(Epoch(1))
    disk.fail_sync = True
    with pytest.raises(OSError, match="error"):
        holder.write(b"cached")
    disk.fail_sync = False
    if follows:
        standby.follow(Epoch(1))
    folder = link_epoch(disk, MANIFEST, Epoch(1), 2)
    lock = disk.lock("lock")
    assert lock is not None
    storage = standby.take_over(Epoch(1), folder, lock)
    end = storage.journal.segments[-1].size_bytes
    name = segment_name(storage.journal.segments[-1].sequence)
    content = next(each for path, each in disk.files.items() if path.endswith(name))
    assert storage.journal.next_offset == [2]
    assert bytes(content.durable[:end]) == bytes(content.now[:end])


def test_a_standby_loads_again_when_compaction_has_emptied_what_it_did_not_follow(
    disk: SimDisk,
) -> None:
    """The newest retained message of a topic may be in the snapshot alone then."""
    holder = first_holder(disk)
    holder.write(b"first")
    standby = standby_on(disk)
    standby.load(newest_epoch(disk))
    builder = BatchBuilder(0, 1)
    builder.add(Record(0, MESSAGE, flags=1 | FLAG_RETAIN, topic=b"t", payload=b"retained"))
    whole = Batch(builder.build(1))
    emptied = Batch(SegmentCompactor({b"t": 1}).rewrite(whole))
    standby._apply([whole])
    with pytest.raises(FollowError, match="compaction has emptied"):
        standby._apply([emptied])
    # Also if the next load fails: it must not follow on behind what it has not seen.
    assert not standby.is_loaded
