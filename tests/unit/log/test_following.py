"""A follower's bookkeeping is the writer's, at every moment and from every starting point."""

import random
from pathlib import Path

import pytest

from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import DataDirectory, Manifest
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.epoch_folders import Epoch, epoch_folder
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import open_journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.tailing import POLL_BYTES, FollowError, JournalFollower
from holdfast.log.record import FLAG_RETAIN, MESSAGE, Record

PARTITIONS = 4
MANIFEST = Manifest("n1", PARTITIONS, "2026-01-01T00:00:00+00:00")


class Writer:
    """A node's writing side."""

    def __init__(self, path: Path, segment_bytes: int = 4000) -> None:
        self.root = OsFileSystem(path)
        self.directory = create(self.root, MANIFEST)
        self.journal = Journal(PARTITIONS, segment_bytes)
        self.writer = GroupWriter(self.directory, durable=False)
        self.count = 0

    def take(self, records: int = 1, size_bytes: int = 20) -> WriteGroup:
        for _ in range(records):
            self.count += 1
            self.journal.append(
                Record(
                    self.count % PARTITIONS,
                    MESSAGE,
                    flags=1 | (FLAG_RETAIN if self.count % 3 == 0 else 0),
                    timestamp_us=1_000_000 + self.count,
                    topic=b"topic/%d" % (self.count % 7),
                    client_id=b"c",
                    payload=b"%0*d" % (size_bytes, self.count),
                )
            )
        group = self.journal.close_write_group()
        assert group is not None
        return group

    def write(self, group: WriteGroup) -> None:
        self.writer.write(group)
        if group.sealed is not None:
            index = group.sealed.index
            assert isinstance(index, ActiveIndex)
            self.directory.write_index(group.sealed.sequence, index.encode())

    def publish(self, records: int = 1, size_bytes: int = 20) -> None:
        self.write(self.take(records, size_bytes))

    def follower(self) -> JournalFollower:
        directory = DataDirectory(self.root, MANIFEST)
        return JournalFollower(directory, open_journal(directory, 4000, writes=False))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def same(follower: JournalFollower, journal: Journal) -> None:
    """Everything that reading, retention and a takeover go by."""
    mine = follower.journal
    assert mine.next_offset == mine.high_watermark == mine.written == journal.next_offset
    assert mine.sequence == mine.committed_sequence == journal.sequence
    assert [each.sequence for each in mine.segments] == [each.sequence for each in journal.segments]
    for own, other in zip(mine.segments, journal.segments, strict=True):
        assert own.size_bytes == other.size_bytes
        assert own.end_offsets() == other.end_offsets()
        assert own.end_sequence() == other.end_sequence()
        if isinstance(own.index, ActiveIndex):
            assert isinstance(other.index, ActiveIndex)
            assert own.index.encode() == other.index.encode()


def test_follows_from_every_point(writer: Writer) -> None:
    """One begins after each group; all of them agree with the writer ever after."""
    chance = random.Random(7)
    followers = [writer.follower()]
    for _ in range(40):
        writer.publish(chance.randint(1, 9), chance.randint(1, 300))
        for follower in followers:
            list(follower.poll())
            same(follower, writer.journal)
        followers.append(writer.follower())
        same(followers[-1], writer.journal)
    assert len(writer.journal.segments) > 5


def test_hands_out_every_batch_once_in_order(writer: Writer) -> None:
    follower = writer.follower()
    seen: list[tuple[int, int]] = []
    for number in range(60):
        writer.publish(number % 5 + 1)
        if number % 3 == 0:
            for batch in follower.poll():
                seen += [(batch.partition, batch.base_offset + at) for at in range(batch.count)]
    for batch in follower.finish():
        seen += [(batch.partition, batch.base_offset + at) for at in range(batch.count)]
    for partition, end in enumerate(writer.journal.next_offset):
        assert [offset for found, offset in seen if found == partition] == list(range(end))


def test_a_group_in_pieces(writer: Writer) -> None:
    """Whatever part of a write is there, whole batches are taken and nothing is called damaged."""
    writer.publish(3)
    follower = writer.follower()
    group = writer.take(8, 100)
    data = b"".join(group.data)
    file = writer.directory.append_to_segment(group.segment)
    for start in range(0, len(data), 37):
        file.write(group.position + start, [data[start : start + 37]])
        list(follower.poll())
        assert follower.position <= group.position + start + 37
    list(follower.poll())
    same(follower, writer.journal)


@pytest.mark.parametrize("cut", range(1, 400, 13))
def test_the_end_is_the_last_whole_group(writer: Writer, cut: int) -> None:
    """A writer that died in the middle of a group: `finish` takes nothing of it."""
    writer.publish(3)
    follower = writer.follower()
    list(follower.poll())
    whole = follower.position
    group = writer.take(4, 60)
    data = b"".join(group.data)
    file = writer.directory.append_to_segment(group.segment)
    file.write(group.position, [data[:cut]])
    assert len(group.data) > 1
    assert cut < len(data)
    list(follower.poll())
    list(follower.finish())
    assert follower.position == whole
    # What open_journal makes of the same bytes.
    opened = writer.follower()
    assert opened.position == follower.position
    assert opened.journal.next_offset == follower.journal.next_offset


@pytest.mark.parametrize("segment_bytes", [4000, 1 << 20])
def test_a_busy_writer_does_not_keep_it(tmp_path: Path, segment_bytes: int) -> None:
    """A standby must look at the lease, whatever is written meanwhile."""
    writer = Writer(tmp_path, segment_bytes)
    writer.publish()
    follower = writer.follower()
    writer.publish()
    followed = 0
    for batch in follower.poll():
        followed += batch.count
        writer.publish()
        assert followed < 500
    while list(follower.poll()):
        pass
    same(follower, writer.journal)


def test_the_beginning_of_a_batch_in_a_new_segment(writer: Writer) -> None:
    """Its header is there and the rest is not."""
    follower = writer.follower()
    group = writer.take(3)
    data = b"".join(group.data)
    file = writer.directory.create_segment(group.segment)
    for end in (10, 60, len(data)):
        file.write(0, [data[:end]])
        list(follower.poll())
    same(follower, writer.journal)


def test_space_allocated_in_advance_is_no_end(writer: Writer) -> None:
    writer.publish(2)
    follower = writer.follower()
    file = writer.directory.append_to_segment(writer.journal.segments[-1].sequence)
    file.allocate(9000)
    assert list(follower.poll()) == []
    writer.publish(2)
    list(follower.poll())
    same(follower, writer.journal)


def test_damage_is_not_followed(writer: Writer) -> None:
    writer.publish(2)
    follower = writer.follower()
    group = writer.take(4, 50)
    data = bytearray(b"".join(group.data))
    data[60] ^= 1
    later = writer.take(4, 50)
    file = writer.directory.append_to_segment(group.segment)
    file.write(group.position, [bytes(data), *later.data])
    with pytest.raises(FollowError, match="damage"):
        list(follower.finish())


def test_a_file_that_became_shorter_is_told(writer: Writer) -> None:
    writer.publish(4)
    follower = writer.follower()
    list(follower.poll())
    writer.directory.append_to_segment(writer.journal.segments[-1].sequence).truncate(100)
    with pytest.raises(FollowError, match="shorter"):
        list(follower.finish())


def test_goes_on_in_a_newer_epoch(writer: Writer, tmp_path: Path) -> None:
    """The folder changes, the segment that was sealed is read to its seal and not beyond."""
    writer.publish(3)
    follower = writer.follower()
    list(follower.poll())
    sealed = writer.journal.segments[-1]
    seal_bytes = sealed.size_bytes
    new, journal = taken_over(writer, seal_bytes)
    # The deposed holder goes on; nobody will ever see it.
    writer.publish(5)
    next_writer = GroupWriter(new, durable=True, shared=True)
    journal.append(
        Record(0, MESSAGE, flags=1, timestamp_us=1, topic=b"t", client_id=b"c", payload=b"new")
    )
    group = journal.close_write_group()
    assert group is not None
    assert group.starts_segment
    next_writer.write(group)
    follower.switch(DataDirectory(new.files, MANIFEST, new.epoch))
    batches = list(follower.poll())
    assert [batch.epoch for batch in batches] == [1]
    same(follower, journal)


def test_beyond_a_seal_it_begins_anew(writer: Writer) -> None:
    """What it has applied does not count: nothing of it may be used."""
    writer.publish(3)
    seal_bytes = writer.journal.segments[-1].size_bytes
    writer.publish(3)
    follower = writer.follower()
    list(follower.poll())
    new, _ = taken_over(writer, seal_bytes)
    with pytest.raises(FollowError, match="we have followed it to"):
        follower.switch(new)


def test_a_segment_of_the_same_name_begins_anew(writer: Writer) -> None:
    """The deposed holder and the new one have each begun a segment after the seal, as long as the
    other. The follower has seen the one that nobody else will."""
    writer.publish(3)
    sealed = writer.journal.segments[-1]
    new, journal = taken_over(writer, sealed.size_bytes)
    writer.journal.start_segment()
    writer.publish()
    follower = writer.follower()
    list(follower.poll())
    journal.append(
        Record(
            0,
            MESSAGE,
            flags=1,
            timestamp_us=1,
            topic=b"topic/4",
            client_id=b"c",
            payload=b"%020d" % 5,
        )
    )
    group = journal.close_write_group()
    assert group is not None
    GroupWriter(new, durable=True, shared=True).write(group)
    ours, theirs = journal.segments[-1], follower.journal.segments[-1]
    assert (ours.sequence, ours.size_bytes) == (theirs.sequence, theirs.size_bytes)
    with pytest.raises(FollowError, match="another batch than followed"):
        follower.switch(DataDirectory(new.files, MANIFEST, new.epoch))


def taken_over(writer: Writer, seal_bytes: int) -> tuple[DataDirectory, Journal]:
    """Epoch 1's folder, and its journal as its holder has it."""
    sequence = writer.journal.segments[-1].sequence
    epoch = Epoch(1, sealed={sequence: seal_bytes})
    files = epoch.files(writer.root)
    files.make_folder("journal")
    for name in writer.root.list("journal"):
        writer.root.link(f"journal/{name}", f"{epoch_folder(1)}/journal/{name}")
    directory = DataDirectory(files, MANIFEST, epoch)
    journal = open_journal(directory, 4000, writes=False).journal
    for partition in range(journal.partitions):
        journal.lead(partition, 1)
    journal.start_segment()
    return directory, journal


def test_forgets_what_retention_removes(writer: Writer) -> None:
    follower = writer.follower()
    while len(writer.journal.segments) < 5:
        writer.publish(5, 100)
    list(follower.poll())
    removed = writer.journal.remove_oldest(2)
    writer.directory.write_start(
        writer.journal.segments[0].sequence, writer.journal.segments[0].start_offsets()
    )
    for segment in removed:
        writer.directory.remove_segment(segment.sequence)
    follower.forget_removed()
    same(follower, writer.journal)
    assert follower.journal.start_offsets == writer.journal.start_offsets
    # Their indexes are in files by now.
    assert [each.index is None for each in follower.journal.segments[:-1]] == [True, True]


def test_one_poll_is_bounded(tmp_path: Path) -> None:
    writer = Writer(tmp_path, segment_bytes=1 << 30)
    follower = writer.follower()
    for _ in range(3):
        writer.publish(4, POLL_BYTES // 3)
    assert sum(batch.length for batch in follower.poll()) < 2 * POLL_BYTES
    while list(follower.poll()):
        pass
    same(follower, writer.journal)
