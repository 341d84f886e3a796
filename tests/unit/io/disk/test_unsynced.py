"""The mark of a directory whose newest records may not be on the disk."""

import pytest

from holdfast.io.disk import unsynced
from holdfast.io.disk.journal_writer import sync_newest
from holdfast.io.disk.process_identity import boot_identity, machine_identity
from holdfast.io.disk.unsynced import UnsyncedMark
from holdfast.log.files.layout import DataDirectory, Manifest
from tests.sim.disk import SimDisk


@pytest.mark.parametrize(
    ("marked", "boot", "lost"),
    [
        (None, "b1", False),
        (None, "", False),
        ("b1", "b1", False),
        ("b1", "b2", True),
        ("b1", "", True),
        ("", "", True),
    ],
)
def test_the_mark_of_another_boot_says_that_records_may_be_lost(
    marked: str | None, boot: str, lost: bool
) -> None:
    for durable in (False, True):
        disk = SimDisk()
        if marked is not None:
            UnsyncedMark(disk, marked, durable=False)
        disk = disk.after_crash("none", 1)
        mark = UnsyncedMark(disk, boot, durable=durable)
        assert mark.may_lack_records == lost
        after = disk.after_crash("none", 1)
        assert unsynced.may_lack_records(after, "later") == (lost or not durable)
    mark.renew()
    assert not unsynced.may_lack_records(disk.after_crash("none", 1), "later")


def test_after_a_failed_sync_records_may_be_lost_under_the_same_boot() -> None:
    disk = SimDisk()
    UnsyncedMark(disk, "b1", durable=True).note_failure()
    assert not unsynced.may_lack_records(disk, "b1")
    UnsyncedMark(disk, "b1", durable=False).note_failure()
    assert unsynced.may_lack_records(disk.after_crash("none", 1), "b1")


def test_a_mark_that_is_removed_does_not_come_back() -> None:
    disk = SimDisk()
    UnsyncedMark(disk, "b1", durable=False)
    unsynced.clear(disk)
    unsynced.clear(disk)
    assert not unsynced.may_lack_records(disk.after_crash("none", 1), "b2")


def test_the_names_of_a_boot_and_of_a_process_namespace() -> None:
    assert boot_identity()
    assert machine_identity().startswith(f"{boot_identity()}/")


def test_what_was_written_is_synced_in_the_segments_that_are_there() -> None:
    disk = SimDisk()
    directory = DataDirectory(disk, Manifest("n1", 1, "", "", "i"))
    disk.make_folder("journal")
    disk.sync_folder("")
    for sequence in (0, 7):
        directory.create_segment(sequence).write(0, [b"records"])
    sync_newest(directory, [0, 7, 9])
    after = disk.after_crash("none", 1)
    names = [name for name in after.files if name.endswith(".log")]
    assert len(names) == 2
    assert all(after.open_read(name).read(0, 10) == b"records" for name in names)
