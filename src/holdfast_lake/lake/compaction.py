"""Compaction: merges the many files of a table's small commits into few. No row changes.

A commit marked `merges` replaces files of one partition by merged ones and does not advance the
position in the source. Only files that every dependent table has read are merged. Counter-example:
a dependent table has read commit 5, and commits 5 and 6 are merged. It can neither read the merged
file (commit 5 twice) nor skip it (commit 6 never). A merged file counts as added by the last commit
whose rows it has.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.client.log.lake.commits import (
    RECORDS,
    ROWS,
    Commit,
    CommitLog,
    File,
    made_from,
    rows_of,
    spans,
)
from holdfast.client.log.lake.files import LakeError, readable, remove_tree, sync_names
from holdfast.client.log.lake.objects import LakePath
from holdfast.client.log.lake.parquet import (
    PartitionFile,
    WriteSpec,
    parquet_file,
    partition_path,
)
from holdfast_lake.lake.readers import exclusively
from holdfast_lake.lake.stores.store import WORK, TableStore, newest_applied

TARGET_BYTES: Final = 128 << 20
"""The approximate size of a merged file in bytes."""
SMALL_BYTES: Final = 64 << 20
"""The size in bytes from which a file is left alone."""
WINDOW_ROWS: Final = 4_000_000
"""The rows of the commits that are merged together. A table that is rebuilt reads all of them in
one step."""
READ_ROWS: Final = 32_768
COMPRESSION_LEVEL: Final = 3
FORMERLY_BUILT_IN: Final = "experiment_events"
"""A table that every lake had once, mostly without rows. A run makes it only if it is asked to, so
without this exception it would end the compaction of `records` in such a lake."""
THREADS_MAX: Final = 4
"""The most files made at the same time. Each takes the memory of a row group
(writer.ROW_GROUP_BYTES)."""


@dataclass(frozen=True)
class Merge:
    """Files of one partition that become one, in the order of their commits."""

    files: tuple[File, ...]

    @property
    def version(self) -> int:
        """The last commit whose rows the merged file has."""
        return max(file.version for file in self.files)

    @property
    def since(self) -> int:
        """The first commit whose rows the merged file has."""
        return min(file.since or file.version for file in self.files)


def plan(live: Sequence[File], upto: int, parted: Sequence[int] = ()) -> list[list[Merge]]:
    """Plans the merges of the files of commits up to a version.

    Each inner list has the merges of one partition in one window, which are committed together.
    `parted`: versions that are not merged with any before them, because the log was restored.
    """
    found: list[list[Merge]] = []
    for window in _windows([file for file in live if file.version <= upto], parted):
        partitions: dict[str, list[File]] = {}
        for file in window:
            if file.bytes < SMALL_BYTES:
                partitions.setdefault(partition_path(file.partition), []).append(file)
        found += [merges for files in partitions.values() if (merges := _packed(files))]
    return found


def _windows(files: Sequence[File], parted: Sequence[int]) -> Iterator[list[File]]:
    window: list[File] = []
    rows = 0
    for span in spans(files):
        if window and any(window[-1].version < each <= span[0].version for each in parted):
            yield window
            window, rows = [], 0
        window += span
        rows += rows_of(span)
        if rows >= WINDOW_ROWS:
            yield window
            window, rows = [], 0
    yield window


def _packed(files: Sequence[File]) -> list[Merge]:
    packs: list[list[File]] = [[]]
    size = 0
    for file in files:
        packs[-1].append(file)
        size += file.bytes
        if size >= TARGET_BYTES:
            packs.append([])
            size = 0
    return [Merge(tuple(pack)) for pack in packs if len(pack) > 1]


def read_by_all(lake: LakePath, last: Commit) -> int:
    """Returns the version up to which every dependent table has read this one.

    An empty FORMERLY_BUILT_IN does not count.
    """
    upto = last.version
    for commit in made_from(lake, last):
        is_former = commit.table == FORMERLY_BUILT_IN and not commit.rows_total
        if commit.consumed is not None and not is_former:
            upto = min(upto, commit.consumed.upto)
    return upto


@dataclass
class Compaction:
    """The compaction of one table. The caller holds the table's lock."""

    lake: LakePath
    store: TableStore
    log: CommitLog
    encodings: Mapping[str, str]
    """The field of the same name in `WriteSpec`."""
    reached: Callable[[str], None]
    """The field of the same name in `Engine`."""

    def small_files(self) -> int:
        """Returns the number of files that are small enough to merge."""
        last = self.log.last()
        live = self.log.live(last.version) if last is not None else []
        return sum(file.bytes < SMALL_BYTES for file in live)

    def run(self) -> Iterator[Commit]:
        """Merges files and yields each commit after it was made.

        Raises LakeError and BusyError. The commits made before an error stay.
        """
        last = self.log.last()
        if last is None:
            return
        with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1)) as threads:
            parted = [each.version for each in last.restored]
            for merges in plan(self.log.live(last.version), read_by_all(self.lake, last), parted):
                commit = self._commit(merges, threads)
                if commit is None:
                    return
                yield commit

    def _commit(self, merges: Sequence[Merge], threads: ThreadPoolExecutor) -> Commit | None:
        """Makes one commit. Returns None if a new table has begun to read this one from before
        these commits."""
        began_s = time.monotonic()
        last = newest_applied(self.store, self.log)
        if last is None or last.forgotten:
            return None
        version = last.version + 1
        staged = f"{WORK}/{last.table}/{version:08}-merged"
        remove_tree(self.lake / staged)
        (self.lake / staged).mkdir(parents=True)
        self.reached(f"{last.table} began")
        names = [name for name, _ in last.columns]
        files = []
        spec = WriteSpec(
            str(self.lake / staged),
            encodings=self.encodings,
            compression_level=COMPRESSION_LEVEL,
            notes_offsets=last.table == RECORDS,
        )
        jobs = [(merge, f"{staged}/{at:04}.parquet") for at, merge in enumerate(merges)]
        written = threads.map(
            lambda job: self._merge(job[0], self.lake / job[1], names, spec), jobs
        )
        for at, (file, (merge, path)) in enumerate(zip(written, jobs, strict=True)):
            place = self.store.final_path(ROWS, last.table, version, at, file, replaced=False)
            files.append(
                msgspec.structs.replace(
                    file, path=place, staged=path, version=merge.version, since=merge.since
                )
            )
        commit = msgspec.structs.replace(
            last,
            version=version,
            committed_at_us=time.time_ns() // 1000,
            took_s=round(time.monotonic() - began_s, 3),
            rows=0,
            quarantined=0,
            files=files,
            quarantine=[],
            state=[msgspec.structs.replace(file, staged="") for file in last.state],
            removed=[file.path for merge in merges for file in merge.files],
            released=[],
            merges=True,
            change="",
        )
        sync_names(self.lake, staged)
        self.reached(f"{last.table} staged")
        with exclusively(self.lake, last.table):
            if read_by_all(self.lake, last) < max(merge.version for merge in merges):
                remove_tree(self.lake / staged)
                return None
            self.log.record(commit)
            self.reached(f"{last.table} recorded")
            self.store.apply(commit, last)
        self.reached(f"{last.table} applied")
        self.log.save_live()
        remove_tree(self.lake / staged)
        return commit

    def _merge(self, merge: Merge, path: LakePath, names: Sequence[str], spec: WriteSpec) -> File:
        """Writes one merged file.

        The number of rows is compared with the commits, so that a damaged file does not lose rows
        silently.
        """
        paths = [self.lake / file.path for file in merge.files]
        schema = _union([pq.read_schema(readable(each)) for each in paths], names)
        result = PartitionFile(path, spec, merge.files[0].partition)
        try:
            for each in paths:
                with parquet_file(each) as reader:
                    for batch in reader.iter_batches(READ_ROWS, use_threads=False):
                        result.add(_with_columns(batch, schema))
            file = result.close()
        finally:
            result.abandon()
        wanted = rows_of(merge.files)
        if file.rows != wanted:
            raise LakeError(
                f"the files from {merge.files[0].path} to {merge.files[-1].path} have {file.rows} "
                f"rows, their commits say {wanted}: restore them, or build the table again"
            )
        return file


def _union(schemas: Sequence[pa.Schema], names: Sequence[str]) -> pa.Schema:
    """Returns all columns in the table's order. A file may be older than a column."""
    fields = {field.name: field for schema in schemas for field in schema}
    return pa.schema([fields[name] for name in names if name in fields])


def _with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
