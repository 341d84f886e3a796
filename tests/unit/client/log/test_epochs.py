"""Spark's reader on a shared directory: it follows the epochs and never reads behind a seal."""

import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from holdfast.client.log.reading import journal_index as journal_map
from holdfast.client.log.reading.journal_index import JournalMap
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast.client.log.reading.reader_path import read_pieces
from holdfast.client.log.reading.scan import Coverage
from holdfast.log.columns.decode import decode_rows
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.epoch_folders import (
    CLAIM_BYTES,
    CLAIMED_NAME,
    Epoch,
    epoch_folder,
    write_epoch,
)
from holdfast.log.record import Record
from tests.support.journal_files import Journal, record


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "data", partitions=2, segment_bytes=1500)


def fill(journal: Journal, count: int, text: str) -> None:
    for number in range(count):
        journal.append(number % 2, [record(f"t/{number}", f"{text} {number}".encode())])


def claim(journal: Journal, number: int) -> None:
    root = OsFileSystem(journal.directory)
    root.make_folder("lease")
    if "epochs" not in root.list("lease"):
        root.open_write(CLAIMED_NAME, create=True).close()
    root.open_write(CLAIMED_NAME, create=False).write(number * CLAIM_BYTES, [b"12345678"])


def take_over(journal: Journal, number: int, old: str = "journal") -> None:
    """The journal goes on in the epoch's folder, sealed where it is now."""
    root = OsFileSystem(journal.directory)
    folder = f"{epoch_folder(number)}/journal"
    root.make_folder(folder)
    for name in root.list(old):
        root.link(f"{old}/{name}", f"{folder}/{name}")
    sealed = {int(journal.segment.stem): journal.segment.stat().st_size}
    write_epoch(root, Epoch(number, "b", "", sealed))
    journal.folder = journal.directory / folder
    journal.segment = journal.folder / f"{journal.sequence:020d}.log"
    journal.segment.touch()
    journal.index = ActiveIndex(journal.sequence, journal.next_offset)


def rows(found: JournalMap, start: dict[int, int] | None = None) -> list[tuple[int, int, bytes]]:
    ranges = [
        OffsetRange(p, (start or {}).get(p, bound.first), bound.end)
        for p, bound in found.bounds().items()
    ]
    coverage = Coverage([each for each in ranges if each.records], fail_on_data_loss=True)
    return [
        (row["partition"], row["offset"], row["payload"])
        for chunk in read_pieces(found.pieces(ranges), coverage)
        for batch in decode_rows(chunk)
        for row in batch.to_pylist()
    ]


def expected(records: list[Record]) -> list[tuple[int, int, bytes]]:
    return [(item.partition, item.offset, item.payload) for item in records]


def test_goes_on_in_the_next_epoch(journal: Journal) -> None:
    fill(journal, 30, "old")
    found = JournalMap(str(journal.directory))
    found.refresh()
    assert rows(found) == expected(journal.records())
    claim(journal, 1)
    take_over(journal, 1)
    fill(journal, 30, "new")
    # With what it has mapped so far, and as one that begins now.
    for each in (found, JournalMap(str(journal.directory))):
        each.refresh()
        assert rows(each) == expected(journal.records())


def test_nothing_behind_a_seal_is_read(journal: Journal) -> None:
    """The deposed holder adds to the segment, and begins others: the same offsets, other words."""
    fill(journal, 11, "old")
    stale = Journal.__new__(Journal)
    stale.__dict__.update(journal.__dict__)
    stale.next_offset = list(journal.next_offset)
    stale.batches = []
    claim(journal, 1)
    take_over(journal, 1)
    fill(stale, 40, "never promised")
    found = JournalMap(str(journal.directory))
    found.refresh()
    assert rows(found) == expected(journal.records())
    fill(journal, 15, "new")
    fill(stale, 10, "never promised")
    found.refresh()
    assert rows(found) == expected(journal.records())


def test_what_a_task_was_given_is_found_in_the_next_epoch(journal: Journal) -> None:
    """The folder that the driver has planned with may be gone when the task comes to it."""
    fill(journal, 30, "old")
    found = JournalMap(str(journal.directory))
    found.refresh()
    bounds = found.bounds()
    ranges = [OffsetRange(p, bound.first, bound.end) for p, bound in bounds.items()]
    pieces = found.pieces(ranges)
    before = expected(journal.records())
    for number, old in ((1, "journal"), (2, "epochs/0000000001/journal")):
        claim(journal, number)
        take_over(journal, number, old)
        shutil.rmtree(journal.directory / old)
        coverage = Coverage(ranges, fail_on_data_loss=True)
        got = [
            (row["partition"], row["offset"], row["payload"])
            for chunk in read_pieces(pieces, coverage)
            for batch in decode_rows(chunk)
            for row in batch.to_pylist()
        ]
        assert got == before
        pieces = pieces if number == 1 else found.pieces(ranges)
        found.refresh()
        pieces = found.pieces(ranges)


def test_waits_while_somebody_takes_over(journal: Journal) -> None:
    """Between the claim and the seal nobody knows what will count."""
    fill(journal, 11, "old")
    found = JournalMap(str(journal.directory))
    claim(journal, 1)
    done = threading.Event()

    def refresh() -> None:
        found.refresh()
        done.set()

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        assert not done.wait(0.2)
        take_over(journal, 1)
        fill(journal, 5, "new")
        assert done.wait(30)
    finally:
        thread.join()
    assert found.directory.epoch.number == 1
    assert rows(found)[:11] == expected(journal.records())[:11]


def test_a_claim_that_came_to_nothing_does_not_stop_readers(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_map, "CLAIM_LOOKS", 3)
    fill(journal, 11, "old")
    claim(journal, 1)
    found = JournalMap(str(journal.directory))
    found.refresh()
    assert rows(found) == expected(journal.records())
