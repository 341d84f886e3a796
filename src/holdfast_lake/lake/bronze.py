"""Bronze: the records of the log as they are, partitioned by the day they were stored.

A step reads a range of offsets of every partition. The task that reads and decodes it also writes
the Parquet file, so no row crosses to the JVM and back. The commit contains the end of the range,
so the table's rows and its position in the log change together.

A structured streaming query is the rejected alternative. It keeps the offsets in a checkpoint of
its own, which must be matched with the sink's commits after a crash. It also takes 75 ms more per
micro-batch and moves every row twice between processes.
"""

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from datetime import date, timedelta
from typing import Final

import pyarrow as pa

from holdfast.client.admin_connection import AdminError
from holdfast.client.log.lake.commits import ROWS, Commit, File
from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.objects import LakePath, location
from holdfast.client.log.lake.parquet import WriteSpec, with_date, write_files
from holdfast.client.log.lake.states import (
    SavedState,
    remove_old,
    save_state,
    saved_states,
)
from holdfast.client.log.reading import offsets
from holdfast.client.log.reading.offsets import (
    DataLossError,
    OffsetRange,
    Offsets,
    PartitionBounds,
    RestoredError,
    generation_in,
    is_other_log,
)
from holdfast.log.columns.decode import SCHEMA
from holdfast_lake.lake.backfill.parts import DAY_US, Days, TablePart, offsets_in
from holdfast_lake.lake.engine import LOCAL_ROWS, LOCAL_TASK, Engine, Step
from holdfast_lake.lake.schema import RECORDS_COLUMNS, check_evolution, names_of
from holdfast_lake.lake.table import RECORDS
from holdfast_lake.source.options import SourceOptions, parse
from holdfast_lake.source.source import LogAccess, ReadWork, read_work
from holdfast_lake.workers import exclude_modules_from_collection

logger = logging.getLogger("holdfast")

RECORDS_PER_STEP: Final = 2_000_000
"""The most records of one step, unless maxRecordsPerTrigger sets another limit."""
RECORDS_PER_TASK_MIN: Final = 20_000
"""The fewest records that are worth another task and another file."""
REGISTER_S: Final = 60.0
"""The least seconds between two reports of the position to the servers. Each is some records."""
LOOK_S: Final = 30.0
"""The least seconds between two looks whether it is time to save the state of the log."""
NAME_CHARACTERS: Final = 64
"""The most characters of a lake's name in that of its group."""
PARTITIONS: Final = ("date",)
WRITTEN: Final = ["file", "skipped"]
WRITTEN_SCHEMA: Final = "file string, skipped string"
"""The result rows of a task. Each row has one of the two columns, as JSON."""
ENCODINGS: Final = {
    "payload": "PLAIN",
    "offset": "DELTA_BINARY_PACKED",
    "timestamp": "DELTA_BINARY_PACKED",
    "producer.sequence": "DELTA_BINARY_PACKED",
}


class Bronze:
    """The maker of the table `records`. It keeps its connection to the log between steps."""

    def __init__(self, engine: Engine, source: Mapping[str, str]) -> None:
        """`source` are options of the data source, see holdfast_lake/source/options.py."""
        self.engine = engine
        self.options = parse(source)
        if self.options.lake and location(self.options.lake).absolute() == engine.lake:
            raise LakeError(f"the lake {engine.lake} is no source of itself: leave the option lake")
        self.records_max = self.options.records_per_trigger_max or RECORDS_PER_STEP
        parallelism: int = engine.spark.sparkContext.defaultParallelism
        self.tasks_max = self.options.tasks or parallelism
        self._access = LogAccess(self.options)
        self._registered_s = -REGISTER_S
        self._state_due_s = 0.0
        self._state_problem = ""
        # Whether the table has messages behind the position that the servers know.
        self._is_grown = False
        self.end: Offsets = {}
        """The end of the log at the last look."""

    def close(self) -> None:
        """Closes the connection to the log. The servers learn the position that they lack."""
        last = self.engine.log(RECORDS).last() if self._is_grown else None
        if last is not None:
            self._register(last)
        self._access.close()

    def position(self) -> Offsets:
        """Returns the position in the log up to which the table has it. Empty before the first
        step."""
        last = self.engine.log(RECORDS).last()
        return offsets.from_json(last.offsets) if last is not None else {}

    def target(self) -> Offsets:
        """Returns the current end of the log. The state of the log is saved before, if it is time:
        a run that reaches the end can then be restored from."""
        self._save_state()
        self.end = {p: bound.end for p, bound in self._access.log.bounds().items()}
        return self.end

    def lag(self) -> int:
        """Returns the number of offsets between the table and the end of the log at the last
        look."""
        position = self.position()
        return sum(max(0, end - position.get(p, 0)) for p, end in self.end.items())

    def step(self, target: Offsets | None = None) -> Commit | None:
        """Appends up to `records_max` records, none at or above `target`.

        Returns None if the log has no new record. Raises DataLossError and the errors of the
        source.
        """
        step = Step(self.engine, RECORDS)
        columns = names_of(RECORDS_COLUMNS)
        change = ""
        if step.last is not None:
            change = check_evolution(RECORDS, step.last, columns, PARTITIONS)
        if target is None:
            self._save_state()
        bounds = self._access.log.bounds(self.position())
        self._check_log(step)
        self.end = {p: bound.end for p, bound in bounds.items()}
        begin = self._begin(step, bounds)
        end = self._end(begin, bounds, target)
        # If the options set a start, a commit without rows fixes it. Otherwise `latest` would be
        # later at each attempt, and records between two attempts would be lost.
        # A commit without rows also notes that the table goes on in another generation of the log.
        goes_on = step.last is not None and step.last.log in ("", step.log)
        starts = (self.options.starting_offsets, self.options.starting_timestamp_us)
        if end == begin and (goes_on or (step.last is None and starts == (None, None))):
            return None
        skipped: list[OffsetRange] = []
        ranges = self._access.ranges(begin, end, bounds, skipped=skipped)
        self.engine.reached(f"{RECORDS} began")
        if ranges:
            spec = write_spec(step)
            files, damaged = self._write(ranges, spec)
            step.staged(ROWS, files, replaced=False)
            skipped += damaged
        total = step.rows() + (step.last.rows_total if step.last is not None else 0)
        older = offsets.from_json(step.last.offsets) if step.last is not None else {}
        commit = step.commit(
            revision=1,
            columns=columns,
            partition_by=PARTITIONS,
            offsets=offsets.to_json(end),
            begins=offsets.to_json(
                {p: begin.get(p, bounds[p].first) for p in end if p not in older}
            ),
            restored=offsets.to_json({p: at for p, at in begin.items() if at < older.get(p, at)}),
            skipped=offsets.joined(skipped),
            rows_total=total,
            change=change,
        )
        self._is_grown |= commit.rows > 0
        if time.monotonic() - self._registered_s >= REGISTER_S:
            self._register(commit)
        return commit

    def _save_state(self) -> None:
        """Saves the state of the log beside the table, if it is time. A failure delays only that.

        The end of the log is looked up after the state was received, so the state is about nothing
        behind it. Counter-example: a session of the state has received offset 90, and the table
        ends at 80. Restored, the log has another message at 90, which the session never gets.
        """
        if time.monotonic() < self._state_due_s:
            return
        self._state_due_s = time.monotonic() + LOOK_S
        lake, log, last = self.engine.lake, self._access.log, self.engine.log(RECORDS).last()
        try:
            ends = {p: bound.end for p, bound in log.bounds(self.position()).items()}
            identity, now_us = log.identity(), time.time_ns() // 1000
            own = [each for each in saved_states(lake) if each.log == identity]
            # The step refuses another log, or notes that this one was restored.
            is_other = last is not None and last.log not in ("", identity)
            if is_other or not any(ends.values()) or (own and own[-1].ends == ends):
                return
            if own and not (own[-1].fits(self.position()) and own[-1].is_due(now_us)):
                return

            def describe(size_bytes: int) -> SavedState:
                """Returns the description of the state that was received."""
                later = {p: bound.end for p, bound in log.bounds(ends).items()}
                if log.identity() != identity:
                    raise LakeError("the log was restored while its state was received")
                return SavedState(log=identity, taken_us=now_us, ends=later, bytes=size_bytes)

            save_state(lake, self._access.write_state, describe, now_us)
            if last is not None:
                remove_old(lake, last)
        except (AdminError, LakeError, OSError) as error:
            if str(error) != self._state_problem:
                self._state_problem = str(error)
                logger.warning("state_not_saved lake=%s error=%r", lake, str(error))

    def _register(self, commit: Commit) -> None:
        """Reports to the servers how far the lake has the log, so that retention may remove it. A
        failure delays only that."""
        words = re.sub(r"[^A-Za-z0-9_-]+", "-", self.engine.lake.name)[:NAME_CHARACTERS]
        name = f"lake.{words}.{commit.lineage[-8:]}"
        position = offsets.from_json(commit.offsets)
        try:
            self._access.register(name, position, is_grown=self._is_grown)
        except AdminError as error:
            logger.warning("lake_not_registered lake=%s error=%r", name, str(error))
            return
        self._registered_s, self._is_grown = time.monotonic(), False

    def replace(self, days: Days) -> Commit:
        """Reads some days of the log again and replaces them in one commit. The position stays.

        Raises LakeError if the log does not have all of them any more, and the errors of the
        source.
        """
        step = Step(self.engine, RECORDS)
        if step.last is None:
            raise LakeError(f"{RECORDS} has not been written yet: run it first")
        bounds = self._access.log.bounds(self.position())
        self._check_log(step)
        if step.last.log and generation_in(step.last.log) != generation_in(step.log):
            raise LakeError(f"the log was restored since the last step: run {RECORDS} first")
        offsets.available(self.position(), bounds, fail_on_data_loss=True)  # another log?
        own = self.engine.log(RECORDS).live(step.version - 1)
        removed = [file for file in own if days.has(file)]
        wanted = self._offsets_of(days, removed, bounds)
        if not wanted:
            raise LakeError(f"the log has nothing of {days}, and neither has {RECORDS}")
        part = TablePart(days)
        step.is_wanted = part.has
        self.engine.reached(f"{RECORDS} began")
        spec = write_spec(step)
        files, damaged = self._write(wanted, spec)
        if damaged:
            raise DataLossError(f"the log is damaged: it lacks {damaged[0]}", damaged[0])
        step.staged(ROWS, files, replaced=False)
        replaced = part.replaced(self.engine.lake, step.last, step.rows(), removed)
        return step.commit(
            revision=1,
            columns=names_of(RECORDS_COLUMNS),
            partition_by=PARTITIONS,
            offsets=step.last.offsets,
            removed=[file.path for file in removed],
            rows_total=replaced.rows_total,
            change=part.told(removed, step.rows()),
            replaced=replaced,
        )

    def _offsets_of(
        self, days: Days, removed: Sequence[File], bounds: Mapping[int, PartitionBounds]
    ) -> list[OffsetRange]:
        """Returns the ranges of the log that have the records of some days, and those of the files
        that are replaced.

        Both are needed: a clock that was set back puts a record of Monday behind those of Tuesday,
        and the log finds times by their order. Raises LakeError if the log lacks a part.
        """
        starts = self._access.log.offsets_at(days.start_us)
        ends = self._access.log.offsets_at(days.end_us) if days.end_us is not None else {}
        there = offsets_in(self.engine.log(RECORDS), removed)
        found = []
        for partition, end in self.position().items():
            bound = bounds.get(partition, PartitionBounds(end, end))
            start = starts.get(partition, bound.end)
            low, high = there.get(partition, (start, start))
            start, stop = min(start, low), min(end, max(ends.get(partition, end), high))
            is_empty = bound.first == bound.end and partition not in there
            if 0 < bound.first >= start and not is_empty:
                raise LakeError(
                    f"the log may not have all of {days} any more: partition {partition} begins at "
                    f"offset {bound.first}, and retention has removed what was before. "
                    f"{self._first_day(bounds)}. {RECORDS} keeps the rows that it has; to make "
                    "other tables from those, name them instead"
                )
            if start < stop:
                found.append(OffsetRange(partition, start, stop))
        return found

    def _first_day(self, bounds: Mapping[int, PartitionBounds]) -> str:
        """Says which days the log has completely."""
        cut = {p: bound.first for p, bound in bounds.items() if 0 < bound.first < bound.end}
        low, high = 0, time.time_ns() // (1000 * DAY_US) + 1
        while low < high:
            middle = (low + high) // 2
            at = self._access.log.offsets_at(middle * DAY_US)
            is_whole = all(at.get(p, first + 1) > first for p, first in cut.items())
            low, high = (low, middle) if is_whole else (middle + 1, high)
        if low > time.time_ns() // (1000 * DAY_US):
            return "It has no complete day"
        return f"It has all of the days from {date(1970, 1, 1) + timedelta(days=low)} on"

    def _check_log(self, step: Step) -> None:
        """Checks that the log is the one that the table was made from. Raises LakeError."""
        check_same_log(self._access, self.engine.lake, step.log)
        step.log = self._access.log.identity() or step.log

    def _begin(self, step: Step, bounds: Mapping[int, PartitionBounds]) -> Offsets:
        """Returns the position at which the step begins. Raises LakeError."""
        if step.last is not None:
            return continued(self._access, self.engine.lake, step.last, bounds)
        options = self.options
        if options.starting_timestamp_us is not None:
            at = self._access.log.offsets_at(options.starting_timestamp_us)
            return {p: min(max(at.get(p, b.first), b.first), b.end) for p, b in bounds.items()}
        return offsets.resolve(options.starting_offsets or offsets.EARLIEST, bounds)

    def _end(
        self, begin: Offsets, bounds: Mapping[int, PartitionBounds], target: Offsets | None
    ) -> Offsets:
        keep_all = self.options.fail_on_data_loss
        end = offsets.available(begin, bounds, fail_on_data_loss=keep_all)
        if target is not None:
            end = {p: max(begin.get(p, 0), min(o, target.get(p, 0))) for p, o in end.items()}
        floor = {partition: bound.first for partition, bound in bounds.items()}
        admitted = offsets.admit(begin, end, floor, self.records_max)
        # A new, empty partition does not count as progress.
        return {p: o for p, o in admitted.items() if p in begin or o > floor[p]}

    def _write(
        self, ranges: list[OffsetRange], spec: WriteSpec
    ) -> tuple[list[str], list[OffsetRange]]:
        """Writes the ranges, and returns the files and the ranges that the log did not have after
        all."""
        options = self.options
        records = sum(each.records for each in ranges)
        tasks = min(self.tasks_max, -(-records // RECORDS_PER_TASK_MIN))
        work = self._access.plan_tasks(ranges, whole=False, tasks=tasks)
        if len(work) == 1 and records <= LOCAL_ROWS:
            lost: list[OffsetRange] = []
            written = write_files(dated(options, work, lost), spec, LOCAL_TASK)
            return [text for batch in written for text in batch.column(0).to_pylist()], lost

        def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext

            exclude_modules_from_collection()
            context = TaskContext.get()
            assert context is not None
            numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
            prefix = f"{context.partitionId():05}-{context.taskAttemptId()}"
            skipped: list[OffsetRange] = []
            rows = dated(options, [work[n] for n in numbers], skipped)
            for batch in write_files(rows, spec, prefix):
                missing = pa.nulls(len(batch), pa.string())
                yield pa.RecordBatch.from_arrays([batch.column(0), missing], names=WRITTEN)
            texts = pa.array([json.dumps(astuple(each)) for each in skipped], pa.string())
            missing = pa.nulls(len(texts), pa.string())
            yield pa.RecordBatch.from_arrays([missing, texts], names=WRITTEN)

        frame = self.engine.spark.range(0, len(work), 1, len(work))
        found = frame.mapInArrow(write, WRITTEN_SCHEMA).collect()
        return (
            [row[0] for row in found if row[0] is not None],
            [OffsetRange(*json.loads(row[1])) for row in found if row[1] is not None],
        )


def check_same_log(access: LogAccess, lake: LakePath, before: str) -> None:
    """Checks that a log is the one with an identity that a lake has noted. Raises LakeError.

    Offsets of two logs are alike. So without this check, rows of one log would follow those of
    another without a word. `continued` compares the generations.
    """
    now, options = access.log.identity(), access.options
    if is_other_log(before, now):
        where = ", ".join(f"{h}:{p}" for h, p, *_ in options.servers)
        raise LakeError(
            f"{RECORDS} of {lake} was made from another log ({before}) than that of "
            f"{where or options.lake} ({now}). Give the source of that log, or choose another "
            "directory for a new lake"
        )


def continued(
    access: LogAccess, lake: LakePath, last: Commit, bounds: Mapping[int, PartitionBounds]
) -> Offsets:
    """Returns the position at which a lake goes on after its last commit. Raises LakeError if it
    has messages that the log has lost, because it was restored, unless it is told to go on."""
    before = generation_in(last.log)[1] if last.log else None
    try:
        return access.carried(offsets.from_json(last.offsets), before, bounds)
    except RestoredError as error:
        first = error.lost
        raise LakeError(
            f"{RECORDS} of {lake} has messages that the log has lost, because it was restored:"
            f" those from offset {first.start if first else 0} of partition"
            f" {first.partition if first else 0} on. To keep them and go on with the messages that"
            " the log has there now, run once with failOnDataLoss=false; otherwise make a new lake"
            " in another directory"
        ) from None


def write_spec(step: Step) -> WriteSpec:
    """Returns how a step writes its rows."""
    return WriteSpec(
        step.stage_directory(ROWS), PARTITIONS, encodings=ENCODINGS, notes_offsets=True
    )


def dated(
    options: SourceOptions, works: Iterable[ReadWork], skipped: list[OffsetRange]
) -> Iterator[pa.RecordBatch]:
    """Reads some work inside a task, and yields its rows with the column `date`.

    The missing ranges are appended to `skipped`.
    """
    for work in works:
        for batch in read_work(options, work, SCHEMA, skipped):
            yield with_date(batch, "timestamp")
