"""Which offsets a step of bronze takes: over a journal in real files, without Spark."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("pyspark.sql")

from holdfast.client.log.lake.commits import SKIPPED_KEPT, CommitLog, newly_skipped
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast_lake.lake.bronze import Bronze
from holdfast_lake.lake.engine import Engine
from holdfast_lake.lake.stores.store import ParquetStore
from tests.support.journal_files import Journal, record


class Steps:
    """Bronze over a journal; instead of files it notes the ranges that would be written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = Journal(folder / "data", partitions=2, segment_bytes=500)
        self.lake = folder / "lake"
        self.written: list[tuple[int, int, int]] = []
        monkeypatch.setattr(Bronze, "_write", self._write)

    def _write(self, ranges: Any, spec: Any) -> tuple[list[str], list[Any]]:
        self.written += [(each.partition, each.start, each.end) for each in ranges]
        return [], []

    def append(self, partition: int, count: int) -> None:
        for _ in range(count):
            self.journal.append(partition, [record()])

    def bronze(self, **options: str) -> Bronze:
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
        engine = Engine(spark, self.lake, ParquetStore(self.lake))
        return Bronze(engine, {"servers": self.journal.address, **options})

    def taken(self) -> list[tuple[int, int, int]]:
        found, self.written = self.written, []
        return found


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(tmp_path, monkeypatch)


def test_everything_once(steps: Steps) -> None:
    bronze = steps.bronze()
    assert bronze.step() is None  # an empty log
    steps.append(0, 3)
    assert bronze.step() is not None
    assert steps.taken() == [(0, 0, 3)]
    assert bronze.step() is None
    steps.append(0, 1)
    steps.append(1, 2)
    again = steps.bronze()  # another process
    commit = again.step()
    assert commit is not None
    assert steps.taken() == [(0, 3, 4), (1, 0, 2)]
    assert commit.offsets == {"0": 4, "1": 2}
    assert (again.step(), again.lag()) == (None, 0)


def test_bounded_steps_up_to_a_target(steps: Steps) -> None:
    steps.append(0, 10)
    bronze = steps.bronze(maxRecordsPerTrigger="4")
    target = bronze.target()
    steps.append(0, 5)
    steps.append(1, 5)  # a partition that was not there
    while bronze.step(target) is not None:
        pass
    assert steps.taken() == [(0, 0, 4), (0, 4, 8), (0, 8, 10)]
    assert bronze.lag() == 10
    assert bronze.step() is not None
    assert sum(end - start for _, start, end in steps.taken()) == 4


@pytest.mark.parametrize(
    "options", [{"startingOffsets": "latest"}, {"startingTimestamp": "2100-01-01"}]
)
def test_a_start_is_fixed_when_it_is_asked_for(steps: Steps, options: dict[str, str]) -> None:
    steps.append(0, 5)
    bronze = steps.bronze(**options)
    first = bronze.step()
    assert first is not None
    assert (first.offsets["0"], first.rows) == (5, 0)
    assert bronze.step() is None
    steps.append(0, 2)
    steps.append(1, 1)
    assert steps.bronze(**options).step() is not None
    assert steps.taken() == [(0, 5, 7), (1, 0, 1)]


def test_records_that_are_gone(steps: Steps) -> None:
    steps.append(0, 3)
    steps.bronze().step()
    steps.taken()
    steps.append(0, 60)
    while len(steps.journal.segments()) > 1:
        steps.journal.remove_first_segment()
    with pytest.raises(DataLossError, match="of partition 0 were asked for, the log has"):
        steps.bronze().step()
    first = steps.journal.first_offset[0]
    commit = steps.bronze(failOnDataLoss="false").step()
    assert commit is not None
    assert first > 3
    assert steps.taken() == [(0, first, 63)]
    assert commit.offsets["0"] == 63
    (skipped,) = commit.skipped
    assert (skipped.partition, skipped.first, skipped.end) == (0, 3, first)
    assert (skipped.version, skipped.at_us) == (2, commit.committed_at_us)
    assert newly_skipped(commit) == [skipped]
    # What comes later still tells.
    steps.append(0, 1)
    later = steps.bronze().step()
    assert later is not None
    assert (later.skipped, later.skipped_total, newly_skipped(later)) == ([skipped], first - 3, [])
    assert CommitLog(steps.lake, "records").last() == later


def test_what_tasks_found_missing_is_told(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [OffsetRange(1, 0, 2), OffsetRange(0, 7, 8), OffsetRange(0, 8, 9)]
    monkeypatch.setattr(Bronze, "_write", lambda *_: ([], lost))
    steps.append(0, 10)
    steps.append(1, 2)
    commit = steps.bronze().step()
    assert commit is not None
    told = [(each.partition, each.first, each.end) for each in commit.skipped]
    assert told == [(0, 7, 9), (1, 0, 2)]
    assert commit.skipped_total == 4


def test_of_many_losses_the_last_are_told_and_all_counted(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [OffsetRange(0, 2 * number, 2 * number + 1) for number in range(SKIPPED_KEPT + 5)]
    monkeypatch.setattr(Bronze, "_write", lambda *_: ([], lost))
    steps.append(0, 3 * SKIPPED_KEPT)
    commit = steps.bronze().step()
    assert commit is not None
    assert (len(commit.skipped), commit.skipped[0].first) == (SKIPPED_KEPT, 10)
    assert commit.skipped_total == SKIPPED_KEPT + 5


def test_a_log_that_was_restored(steps: Steps) -> None:
    """The table has ten records, and the log was put back to its first six."""
    steps.append(0, 10)
    assert steps.bronze().step() is not None
    steps.taken()
    files = steps.journal.files
    files.write_manifest(replace(files.manifest, generation=5, former=((0, (6, 0)),)))
    steps.append(0, 3)
    with pytest.raises(LakeError, match=r"from offset 6 of partition 0 on.*failOnDataLoss=false"):
        steps.bronze().step()
    commit = steps.bronze(failOnDataLoss="false").step()
    assert commit is not None
    assert steps.taken() == [(0, 6, 13)]
    assert commit.log.endswith(" generation 5")
    assert steps.bronze().step() is None
    # A table that ends where the log was cut, or before, goes on.
    files.write_manifest(replace(files.manifest, generation=7, former=((5, (13, 0)),)))
    steps.append(0, 1)
    assert steps.bronze().step() is not None
    assert steps.taken() == [(0, 13, 14)]
