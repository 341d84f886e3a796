"""A lake whose tables are made here, without Spark: many small commits, and what reads them."""

import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from msgspec.structs import replace

from holdfast.client.log.lake.commits import Commit, CommitLog, Consumed, File
from holdfast.client.log.lake.parquet import PartitionedWriter, WriteSpec
from holdfast_lake.lake.compaction import Compaction
from holdfast_lake.lake.engine import do_nothing, finish
from holdfast_lake.lake.silver import next_files
from holdfast_lake.lake.stores.store import ParquetStore, is_applied

TABLE = "records"
READER = "made"
COLUMNS = [
    ("n", "bigint"),
    ("partition", "int"),
    ("offset", "bigint"),
    ("time", "timestamp"),
    ("date", "string"),
]


class SmallFiles:
    """Rows are numbered in the order of their commits."""

    def __init__(self, lake: Path, *, partitioned: bool = True) -> None:
        self.lake = lake
        self.partition_by = ("date",) if partitioned else ()
        self.log = CommitLog(lake, TABLE)
        self.store = ParquetStore(lake)
        self.next = 0

    def grow(self, days: list[int], rows: int = 3) -> None:
        """One commit with some rows of each of some days."""
        last = self.log.last()
        version = last.version + 1 if last is not None else 1
        staged = f"_work/{TABLE}/{version:08}"
        (self.lake / staged).mkdir(parents=True)
        writer = PartitionedWriter(WriteSpec(str(self.lake / staged), self.partition_by), "0")
        for day in days:
            numbers = list(range(self.next, self.next + rows))
            self.next += rows
            times = pa.array([n * 1_000_000 for n in numbers], pa.timestamp("us", "UTC"))
            batch = pa.RecordBatch.from_pydict(
                {
                    "n": numbers,
                    "partition": pa.array([0] * rows, pa.int32()),
                    "offset": numbers,
                    "time": times,
                    "date": [f"d{day}"] * rows,
                }
            )
            writer.write(batch)
        files = []
        for at, file in enumerate(writer.close()):
            place = self.store.final_path("rows", TABLE, version, at, file, replaced=False)
            source = f"{staged}/{file.staged}"
            files.append(replace(file, path=place, version=version, staged=source))
        commit = Commit(
            table=TABLE,
            lineage="first",
            version=version,
            revision=1,
            columns=COLUMNS,
            partition_by=list(self.partition_by),
            committed_at_us=time.time_ns() // 1000,
            took_s=0.0,
            rows=rows * len(days),
            quarantined=0,
            rows_total=self.next,
            quarantined_total=0,
            offsets={"0": self.next},
            files=files,
        )
        self.log.record(commit)
        self.store.apply(commit, last)

    def copy_to(self, lake: Path) -> "SmallFiles":
        shutil.copytree(self.lake, lake)
        copy = SmallFiles(lake, partitioned=bool(self.partition_by))
        copy.next = self.next
        return copy

    def read_upto(self, upto: int, name: str = READER, rows: int = 0) -> None:
        """A table that is made from this one has read so far."""
        log = CommitLog(self.lake, name)
        last = log.last()
        log.record(
            Commit(
                table=name,
                lineage=name,
                version=last.version + 1 if last is not None else 1,
                revision=1,
                columns=[("n", "bigint")],
                partition_by=[],
                committed_at_us=0,
                took_s=0.0,
                rows=0,
                quarantined=0,
                rows_total=rows,
                quarantined_total=0,
                consumed=Consumed(table=TABLE, lineage="first", upto=upto, rows=0),
            )
        )

    def read_on(self, name: str, after: int, rows_max: int) -> int:
        """A step of a table that has read up to a version; up to where it has read then."""
        last = self.log.last()
        assert last is not None
        upto = next_files(self.log.live(last.version), after, rows_max)[1]
        self.read_upto(upto, name)
        return upto

    def compaction(self) -> Compaction:
        return Compaction(self.lake, self.store, self.log, {}, do_nothing)

    def recover(self) -> None:
        self.log = CommitLog(self.lake, TABLE)
        finish(self.lake, self.store, self.log)

    def listed(self) -> list[int]:
        """The rows as someone sees them who knows only the files."""
        found = ds.dataset(self.lake / TABLE, partitioning="hive").to_table(columns=["n"])
        return sorted(found.column("n").to_pylist())

    def by_commits(self) -> list[int]:
        """The rows of the newest commit whose files are in their places, as the engine reads."""
        log = CommitLog(self.lake, TABLE)
        last = log.last()
        assert last is not None
        if not is_applied(self.lake, last):
            last = log.read(last.version - 1)
        return sorted(self.numbers(log.live(last.version)))

    def numbers(self, files: list[File]) -> list[int]:
        return [n for file in files for n in pq.read_table(self.lake / file.path)["n"].to_pylist()]

    def everything(self) -> list[int]:
        return list(range(self.next))

    def steps(self, after: int, rows_max: int) -> list[list[int]]:
        """The rows of each step of a table that has read up to a version."""
        last = self.log.last()
        assert last is not None
        live = self.log.live(last.version)
        found: list[list[int]] = []
        while True:
            files, upto = next_files(live, after, rows_max)
            if not files:
                return found
            found.append(sorted(self.numbers(files)))
            after = upto

    def rows_behind(self, version: int) -> list[int]:
        """The rows of the commits behind a version that added any."""
        at = 0
        for each in range(1, version + 1):
            at += self.log.read(each).rows
        return list(range(at, self.next))


def grow_at_random(site: SmallFiles, rng: random.Random) -> None:
    """Mostly the day of today; sometimes one before, too."""
    today = site.next // 40
    days = [today] if rng.random() < 0.7 else [max(0, today - rng.randint(1, 2)), today]
    site.grow(days, rng.randint(1, 4))


def is_ordered(steps: list[list[int]]) -> bool:
    """Whether no step has rows from before those of an earlier one."""
    ends = [rows[-1] for rows in steps]
    begins = [rows[0] for rows in steps]
    return all(end < begin for end, begin in zip(ends, begins[1:], strict=False))
