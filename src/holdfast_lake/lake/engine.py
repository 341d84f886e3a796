"""One step of a table: stage its files, record the commit, apply it.

The step is the same in every layer. The layers differ in the rows they read and in what they make
of them: see bronze.py, silver.py and gold.py. A step may be interrupted at three points:

staged     the commit is not recorded yet: the step has no effect, and its files are thrown away
recorded   the commit counts; the next process that opens the table applies it
applied    the step is complete

The order is the invariant. If files moved to their final places before the commit was recorded, a
crash between the two would leave rows that the next step writes again.
"""

import fcntl
import os
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, SparkSession

from holdfast.client.log.lake.commits import (
    QUARANTINED,
    ROWS,
    SKIPPED_KEPT,
    STATE,
    Commit,
    CommitLog,
    Consumed,
    File,
    LogRestore,
    Replaced,
    Skipped,
    is_replacement,
    note_change,
    rows_of,
)
from holdfast.client.log.lake.errors import RaceError
from holdfast.client.log.lake.files import LakeError, remove_all, remove_tree, sync_names
from holdfast.client.log.lake.objects import LakePath, ListedObject, ObjectPath
from holdfast.client.log.lake.parquet import FILE_SCHEMA, WriteSpec, object_frame, write_files
from holdfast.client.log.reading.offsets import OffsetRange
from holdfast_lake.lake.readers import exclusively, lock_directory
from holdfast_lake.lake.schema import struct_type
from holdfast_lake.lake.stores.store import (
    WORK,
    TableStore,
    is_applied,
    newest_applied,
    paths_of,
)
from holdfast_lake.workers import exclude_modules_from_collection

EXCHANGE: Final = "exchange"
LOCAL_TASK: Final = "00000-0"
"""The name of the driver as a task, in names of files."""
LOCAL_ROWS: Final = 50_000
"""The most source rows of a step whose files the driver writes itself. A Python process of Spark
needs seconds to start and 40 ms per task, which is longer than these rows take."""


LEFTOVER_S: Final = 3600.0
"""The seconds after which the files of a step that was not recorded are removed from an object
store."""


def do_nothing(_: str) -> None:
    """Does nothing: the default of `Engine.reached`."""


@dataclass
class Engine:
    """The session, lake and store that all steps of a run share."""

    spark: SparkSession
    lake: LakePath
    store: TableStore
    reached: Callable[[str], None] = do_nothing
    """A function that is called with `<table> <point>` at the points above and at `began`. Tests
    crash there."""
    logs: dict[str, CommitLog] = field(default_factory=dict)

    def log(self, table: str) -> CommitLog:
        """Returns the commit log of a table, made on first use."""
        if table not in self.logs:
            self.logs[table] = CommitLog(self.lake, table)
        return self.logs[table]

    def frame(
        self, columns: Sequence[tuple[str, str]], files: Sequence[File], table: str
    ) -> DataFrame:
        """Returns the rows of some files of a table. A column that a file lacks is null there."""
        schema = struct_type(columns)
        if not files:
            return self.spark.createDataFrame([], schema)
        if isinstance(self.lake, ObjectPath):
            return object_frame(self.spark, self.lake, schema, files)
        reader = self.spark.read.schema(schema).option("basePath", str(self.lake / table))
        return reader.parquet(*paths_of(self.lake, files))


class Step:
    """A step in progress.

    Invariant: if it ends with an exception before the commit is recorded, it has no effect. After
    that point the step counts, and `recover` finishes it.
    """

    def __init__(self, engine: Engine, table: str) -> None:
        self.engine = engine
        self.table = table
        newest = newest_applied(engine.store, engine.log(table))
        self.last = None if newest is None or newest.forgotten else newest
        self.version = engine.log(table).next_version()
        self.began_s = time.monotonic()
        self._directory = f"{WORK}/{table}/{self.version:08}-{secrets.token_hex(4)}"
        self._staged: dict[str, list[File]] = {ROWS: [], QUARANTINED: [], STATE: []}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.counts: Counter[str] = Counter()
        """The step's counts besides rows."""
        self.log = self.last.log if self.last is not None else ""
        """The identity of the log that bronze reads."""
        self.old_state: list[File] = self.last.state if self.last is not None else []
        """The files of the state from which the step continues."""
        self.is_wanted: Callable[[File], bool] = lambda _: True
        """Whether the commit has a staged file of rows or quarantine. Others are thrown away."""

    def exchange_directory(self) -> str:
        """Makes and returns the directory in which the tasks of this step exchange files."""
        lake, spark = self.engine.lake, self.engine.spark
        if isinstance(lake, ObjectPath) and str(spark.sparkContext.master).startswith("local"):
            self._scratch = tempfile.TemporaryDirectory(prefix="holdfast-step-")
            return self._scratch.name
        return self.stage_directory(EXCHANGE)

    def stage_directory(self, output: str) -> str:
        """Makes and returns the directory for the staged files of one output."""
        path = self.engine.lake / self._directory / output
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def stage(
        self, output: str, frame: DataFrame, spec: WriteSpec, rows_in: int, *, replaced: bool
    ) -> None:
        """Computes a frame and writes it to staged files of an output.

        `rows_in` are the rows that it is made from. Few rows come to the driver, which writes them.
        """
        if rows_in <= LOCAL_ROWS:
            found = write_files(frame.toArrow().to_batches(), spec, LOCAL_TASK)
            texts = [text for batch in found for text in batch.column(0).to_pylist()]
            self.staged(output, texts, replaced=replaced)
            return

        def write(batches: Iterable[Any]) -> Iterator[Any]:
            """Writes the batches of one Spark task, and yields the files that they are in."""
            from pyspark import TaskContext

            exclude_modules_from_collection()
            context = TaskContext.get()
            assert context is not None
            prefix = f"{context.partitionId():05}-{context.taskAttemptId()}"
            return write_files(batches, spec, prefix)

        rows = frame.mapInArrow(write, FILE_SCHEMA).collect()
        self.staged(output, [row[0] for row in rows], replaced=replaced)

    def staged(self, output: str, texts: Sequence[str], *, replaced: bool) -> None:
        """Gives the files that tasks have written their final paths.

        The order of the files depends only on their partitions and on the numbers of the tasks.
        """
        found = [msgspec.json.decode(text, type=File) for text in texts]
        files = [file for file in found if output == STATE or self.is_wanted(file)]
        files.sort(key=lambda file: (list(map(str, file.partition.values())), file.staged))
        for index, file in enumerate(files):
            place = self.engine.store.final_path(
                output, self.table, self.version, index, file, replaced=replaced
            )
            self._staged[output].append(
                msgspec.structs.replace(
                    file,
                    path=place,
                    version=self.version,
                    staged=f"{self._directory}/{output}/{file.staged}",
                )
            )

    def frame_of(
        self, output: str, columns: Sequence[tuple[str, str]], texts: Sequence[str]
    ) -> DataFrame:
        """Returns the rows of files that tasks have written to a directory of the step and that the
        commit does not have."""
        found = [msgspec.json.decode(text, type=File) for text in texts]
        at = f"{self._directory}/{output}"
        files = [msgspec.structs.replace(file, path=f"{at}/{file.staged}") for file in found]
        return self.engine.frame(columns, files, at)

    def unstage(self, output: str) -> None:
        """Leaves the staged files of an output out of the commit."""
        self._staged[output] = []

    def keep_state(self) -> None:
        """Leaves the state as the last commit left it."""
        old = self.last.state if self.last is not None else []
        self._staged[STATE] = [msgspec.structs.replace(file, staged="") for file in old]

    def rows(self) -> int:
        """Returns the number of staged rows of the table."""
        return rows_of(self._staged[ROWS])

    def files(self) -> list[File]:
        """Returns the staged files of the table's rows."""
        return self._staged[ROWS]

    def commit(
        self,
        *,
        revision: int,
        columns: Sequence[tuple[str, str]],
        partition_by: Sequence[str],
        consumed: Consumed | None = None,
        offsets: Mapping[str, int] | None = None,
        begins: Mapping[str, int] | None = None,
        restored: Mapping[str, int] | None = None,
        skipped: Sequence[OffsetRange] = (),
        removed: Sequence[str] = (),
        rows_total: int,
        change: str = "",
        replaced: Replaced | None = None,
        released: Sequence[File] = (),
    ) -> Commit:
        """Records the staged files as the next commit of the table, and applies it.

        `begins` are the offsets at which partitions begin that the table does not have yet.
        `restored` are those from which its older rows are of an earlier generation of the log.

        `replaced` is given by a commit that replaces rows, with the quarantine files that it
        removes.
        """
        last = self.last
        now_us = time.time_ns() // 1000
        new = [
            Skipped(
                partition=each.partition,
                first=each.start,
                end=each.end,
                version=self.version,
                at_us=now_us,
            )
            for each in skipped
        ]
        staged = self._staged
        quarantined = rows_of(staged[QUARANTINED])
        commit = Commit(
            table=self.table,
            lineage=last.lineage if last is not None else f"{self.table}-{secrets.token_hex(8)}",
            version=self.version,
            revision=revision,
            columns=list(columns),
            partition_by=list(partition_by),
            committed_at_us=now_us,
            took_s=round(time.monotonic() - self.began_s, 3),
            rows=rows_of(staged[ROWS]),
            quarantined=quarantined,
            rows_total=rows_total,
            quarantined_total=quarantined
            + (last.quarantined_total if last is not None else 0)
            - rows_of(released),
            consumed=consumed,
            offsets=dict(offsets or {}),
            log=self.log,
            begins={**(begins or {}), **(last.begins if last is not None else {})},
            restored=[
                *(last.restored if last is not None else ()),
                *([LogRestore(version=self.version, offsets=dict(restored))] if restored else ()),
            ],
            skipped=[*(last.skipped if last is not None else ()), *new][-SKIPPED_KEPT:],
            skipped_total=(last.skipped_total if last is not None else 0)
            + sum(each.records for each in skipped),
            files=staged[ROWS],
            quarantine=staged[QUARANTINED],
            state=staged[STATE],
            removed=list(removed),
            replaced=replaced or (last.replaced if last is not None else None),
            released=list(released),
            counts=dict(self.counts),
            counts_total=dict(self.counts + Counter(last.counts_total if last is not None else ())),
            change=change,
        )
        self._make_count(commit)
        return commit

    def _make_count(self, commit: Commit) -> None:
        """Records a commit and applies it. Raises RaceError."""
        engine = self.engine
        # The names of the files are synced before the commit is recorded. Otherwise a power failure
        # could keep the commit and lose the files.
        sync_names(engine.lake, self._directory)
        engine.reached(f"{self.table} staged")
        # The files of a replacement vanish at once: no step may be reading them.
        with exclusively(engine.lake, self.table) if is_replacement(commit) else nullcontext():
            try:
                engine.log(self.table).record(commit)
            except RaceError:
                remove_tree(engine.lake / self._directory)
                raise
            engine.reached(f"{self.table} recorded")
            engine.store.apply(commit, self.last)
        engine.reached(f"{self.table} applied")
        note_change(engine.lake, commit)
        engine.log(self.table).save_live()
        remove_tree(engine.lake / self._directory)


def recover(engine: Engine, table: str) -> None:
    """Finishes the step that an interrupted run has recorded, and throws away one that it has not.

    The caller holds the table's lock.
    """
    finish(engine.lake, engine.store, engine.log(table))


def finish(lake: LakePath, store: TableStore, log: CommitLog) -> None:
    """Recovers a table like `recover`, without an engine."""
    last = log.newest()
    if last is not None:
        before = log.read(last.version - 1) if last.version > 1 else None
        store.apply(last, before)
        note_change(lake, last)
        log.save_live()
    if isinstance(lake, ObjectPath):
        _remove_leftovers(lake / WORK / log.table, last.version if last is not None else 0)
    else:
        remove_tree(lake / WORK / log.table)


def _remove_leftovers(work: ObjectPath, version: int) -> None:
    """Removes what killed drivers have left of steps that can never be recorded.

    Another driver may be at work, so the step of the next version stays. A step of a version that
    is recorded cannot be recorded again. Its files are removed only after LEFTOVER_S, so that a
    driver that has lost the race finds its files until it notices.
    """
    steps: dict[str, list[ListedObject]] = {}
    for each in work.objects():
        steps.setdefault(PurePosixPath(each.path.key[len(work.key) + 1 :]).parts[0], []).append(
            each
        )
    for name, objects in steps.items():
        if int(name.split("-")[0]) <= version and min(o.age_s for o in objects) > LEFTOVER_S:
            remove_all(each.path for each in objects)


def usable(engine: Engine, table: str) -> Commit | None:
    """Returns the newest commit of a table whose files are all in their places.

    Another process may still be moving the files of the last commit. Then the commit before it is
    returned.
    """
    log = engine.log(table)
    last = log.last()
    if last is None or is_applied(engine.lake, last):
        return last
    before = log.read(last.version - 1) if last.version > 1 else None
    return None if before is None or before.forgotten else before


@contextmanager
def locked(lake: LakePath, tables: Sequence[str]) -> Iterator[None]:
    """Holds the locks of some tables, so that no other process writes to them.

    Raises LakeError, which names the other process.
    """
    directory = lock_directory(lake)
    files = []
    try:
        for table in sorted(tables):
            file = open(directory / f"{table}.lock", "a+")  # noqa: SIM115 - closed below
            files.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise LakeError(
                    f"table {table} of {lake} is being written by {file.read().strip() or '?'}: "
                    "stop that run first, or wait for its end"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
    finally:
        for file in files:
            with suppress(OSError):
                file.close()
