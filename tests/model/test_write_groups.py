"""A write group is there as a whole or not at all, wherever a crash has torn it. All that read a
journal agree: recovery, a standby that follows it, `holdfast log`, and Spark."""

from collections.abc import Iterator
from itertools import pairwise, product
from operator import ge
from pathlib import Path

import pytest

import holdfast.log.reading.scan as scan
from holdfast.io.disk.journal_writer import GroupWriter
from holdfast.log.batch import ATTRIBUTE_GROUPED, HEADER_BYTES, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.files.data_directory import create
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import DataDirectory, Manifest, segment_name
from holdfast.log.journal.journal import Journal
from holdfast.log.journal.recovery import OpenedJournal, open_journal
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.tailing import JournalFollower
from holdfast.log.reading.scan import SegmentScan
from holdfast.log.reading.segment_reader import SegmentReader
from holdfast.log.record import MESSAGE, Record

PAGE_BYTES = 4096
PARTITIONS = 4
TAG = 0x9D2C5680
MANIFEST = Manifest("n1", PARTITIONS, "2026-01-01T00:00:00+00:00")


class Site:
    """A journal of one segment in real files."""

    def __init__(self, path: Path, tag: int = TAG) -> None:
        self.root = OsFileSystem(path)
        self.directory = create(self.root, MANIFEST)
        self.journal = Journal(PARTITIONS, 1 << 30, tag=tag)
        self.writer = GroupWriter(self.directory, durable=False, allocate_bytes=0)
        self.path = path / segment_name(0)
        self.count = 0

    def take(self, sizes: list[int], payload: bytes | None = None) -> WriteGroup:
        """A group with a batch for each size."""
        for partition, size in enumerate(sizes):
            self.count += 1
            self.journal.append(
                Record(
                    partition,
                    MESSAGE,
                    1,
                    1_000_000 + self.count,
                    b"t/%d" % self.count,
                    b"c",
                    b"",
                    b"\xff" * size if payload is None else payload,
                )
            )
        group = self.journal.close_write_group()
        assert group is not None
        return group

    def publish(self, *sizes: int) -> WriteGroup:
        group = self.take(list(sizes))
        self.writer.write(group)
        return group

    def put(self, group: WriteGroup, data: bytes) -> None:
        """These bytes in place of the group's."""
        with self.path.open("r+b") as file:
            file.truncate(group.position)
            file.seek(group.position)
            file.write(data)

    def follower(self) -> JournalFollower:
        opened = open_journal(DataDirectory(self.root, MANIFEST), 1 << 30, writes=False)
        return JournalFollower(DataDirectory(self.root, MANIFEST), opened)

    def open(self) -> OpenedJournal:
        return open_journal(DataDirectory(self.root, MANIFEST), 1 << 30, tag=7)

    def read(self) -> int:
        reader = SegmentReader(DataDirectory(self.root, MANIFEST), 0)
        assert all(isinstance(batch, Batch) for batch in reader.read(newest=True))
        return reader.position


def torn(group: WriteGroup) -> Iterator[bytes]:
    """What a power cut may leave of the group: any of its pages, zeros or nothing in place of the
    others, and all its beginnings around the places where batches end."""
    data = b"".join(group.data)
    first = -group.position % PAGE_BYTES
    cuts = sorted({0, *range(first, len(data), PAGE_BYTES), len(data)})
    pages = list(pairwise(cuts))
    for kept in product((False, True), repeat=len(pages)):
        if not all(kept):
            left = [
                data[start:end] if keep else bytes(end - start)
                for keep, (start, end) in zip(kept, pages, strict=True)
            ]
            if b"".join(left) != data:
                yield b"".join(left)
                yield b"".join(left).rstrip(b"\0")
    end = 0
    for content in group.data:
        for near in (end, end + 1, end + HEADER_BYTES, end + len(content) // 2):
            yield data[:near]
        end += len(content)


SHAPES = [[3000, 200, 6000, 100], [5000, 5000], [9000], [50, 50, 50, 12_000]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("before", [[], [100], [2000, 700]], ids=str)
def test_every_page_that_may_be_missing(
    tmp_path: Path, shape: list[int], before: list[int]
) -> None:
    site = Site(tmp_path)
    if before:
        site.publish(*before)
        site.publish(*before)
    follower = site.follower()
    ends = list(site.journal.next_offset)
    group = site.take(shape)
    site.writer.write(group)
    site.put(group, b"")
    for left in torn(group):
        site.put(group, left)
        assert site.read() == group.position
        if before:
            list(follower.poll())
            list(follower.finish())
            assert follower.position == group.position
        opened = site.open()
        assert opened.damage == []
        assert (opened.truncated is None) == (not left.strip(b"\0"))
        assert opened.journal.next_offset == ends
        assert site.path.stat().st_size == group.position
        assert not before or opened.journal.tag == TAG
    site.put(group, b"".join(group.data))
    list(follower.finish())
    assert follower.position == group.position + group.size_bytes
    assert site.open().journal.next_offset == site.journal.next_offset


def test_a_recovery_that_keeps_whole_batches_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What recovery did before groups were marked."""
    monkeypatch.setattr(SegmentScan, "enter_group", lambda *_: None)
    with pytest.raises(AssertionError):
        test_every_page_that_may_be_missing(tmp_path, [3000, 200, 6000, 100], [100])


def test_damage_in_a_group_that_was_synced_takes_one_batch(tmp_path: Path) -> None:
    """A later group shows that it was. The other batches of the damaged group stay."""
    site = Site(tmp_path)
    site.publish(300, 200, 100)
    group = site.publish(300, 200, 100)
    site.publish(50)
    content = site.path.read_bytes()
    ends = list(site.journal.next_offset)
    position = group.position
    for number, batch in enumerate(group.data):
        for at in range(position, position + len(batch), 7):
            damaged = bytearray(content)
            damaged[at] ^= 0x55
            site.path.write_bytes(damaged)
            opened = site.open()
            assert [each.position for each in opened.damage] == [position], at
            assert opened.truncated is None
            assert all(map(ge, opened.journal.next_offset, ends))
            found = site.follower().journal.segments[0].gaps()
            assert (number, 1) in [(gap.partition, gap.start) for gap in found]
            for other in range(3):
                kept = opened.journal.segments[0].index
                assert kept is not None
                assert (kept.find_batch(other, 1) >= 0) == (other != number or other == 0)
        position += len(batch)


def test_all_pages_of_a_synced_group_are_damaged(tmp_path: Path) -> None:
    for first in (True, False):
        site = Site(tmp_path / str(first))
        if not first:
            site.publish(100, 100)
        group = site.publish(5000, 200, 6000)
        site.publish(50, 60)
        site.publish(70)
        end = site.path.stat().st_size
        with site.path.open("r+b") as file:
            file.seek(group.position)
            file.write(bytes(group.size_bytes))
        opened = site.open()
        assert [each.position for each in opened.damage] == [group.position]
        assert all(map(ge, opened.journal.next_offset, site.journal.next_offset))
        assert opened.journal.segments[-1].size_bytes == end


def impostor(partition: int, base_offset: int, group: int | None) -> bytes:
    builder = BatchBuilder(partition, base_offset)
    builder.add(Record(partition, MESSAGE, 1, 5, b"forged", b"", b"", b"forged"))
    if group is None:
        return builder.build(0)
    return builder.build(0, group, ATTRIBUTE_GROUPED)


@pytest.mark.parametrize("group_field", [None, 0, 1, 12_345])
def test_a_batch_in_a_payload_is_not_taken_for_one(tmp_path: Path, group_field: int | None) -> None:
    """The page with the header of the batch around it is lost, so no length leads past it."""
    site = Site(tmp_path)
    site.publish(100)
    forged = impostor(0, 2, group_field)
    for shift in range(8):
        payload = bytes(PAGE_BYTES * 2 + shift) + forged * 20
        group = site.take([0], payload)
        data = bytearray(b"".join(group.data))
        data[:PAGE_BYTES] = bytes(PAGE_BYTES)
        site.put(group, bytes(data))
        opened = site.open()
        assert opened.damage == []
        assert opened.journal.next_offset == [1, 0, 0, 0]
        assert site.path.stat().st_size == group.position
        # As the next process does.
        site.journal = opened.journal


def test_taking_it_for_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_has_tag", lambda *_: True)
    with pytest.raises(AssertionError):
        test_a_batch_in_a_payload_is_not_taken_for_one(tmp_path, None)


def test_the_tag_goes_on(tmp_path: Path) -> None:
    """In a segment that follows, after a restart, and at a standby."""
    site = Site(tmp_path)
    site.publish(100, 100)
    follower = site.follower()
    assert follower.journal.tag == TAG
    site.journal = site.open().journal
    site.journal.segment_bytes = 1
    group = site.publish(10, 20)
    assert Batch(group.data[0]).group == TAG
    assert Batch(group.data[1]).group == TAG + len(group.data[0])
    list(follower.poll())
    assert follower.journal.tag == TAG
    (site.path.parent / f"{group.segment:020d}.log").write_bytes(bytes(100))
    assert site.open().journal.tag == TAG


def test_a_journal_without_marks_goes_on_with_them(tmp_path: Path) -> None:
    site = Site(tmp_path)
    data = b"".join(impostor(0, offset, None) for offset in range(3))
    site.path.write_bytes(data + impostor(1, 0, None) + impostor(0, 3, None)[:50])
    opened = site.open()
    assert opened.journal.next_offset == [3, 1, 0, 0]
    assert opened.truncated is not None
    assert opened.journal.tag == 7
    site.journal = opened.journal
    group = site.publish(10, 20)
    site.publish(30)
    assert Batch(group.data[0]).group == 7
    again = site.open()
    assert again.journal.tag == 7
    assert again.journal.next_offset == site.journal.next_offset
    assert again.damage == []
