"""Tables made by a StreamFold or a GrainFold (see table.py): the tasks read files and write files.

A step that is large enough for several tasks has two rounds. The first reads the source and the
states, and divides them by *bucket* of streams into exchange files beside the staged files. The
second folds one bucket per task. It is a shuffle of Arrow batches: no row is taken apart, and
memory-mapped files need no memory of their own. A small step is one task.

All rows of a stream must reach one task together with its state. If two tasks folded one stream,
each would continue from the same old state.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame

from holdfast.client.log.lake.commits import COUNTS, QUARANTINED, ROWS, STATE, File, rows_of
from holdfast.client.log.lake.objects import LakePath
from holdfast.client.log.lake.parquet import WriteSpec
from holdfast_lake.lake.engine import LOCAL_ROWS, LOCAL_TASK, Engine, Step
from holdfast_lake.lake.fold_tasks import (
    FoldSpec,
    Grains,
    Pair,
    TaskShare,
    Unit,
    fold_bucket,
    fold_units,
    spread_units,
)
from holdfast_lake.lake.schema import Names, arrow_schema, names_of
from holdfast_lake.lake.table import GrainFold, StreamFold, Table
from holdfast_lake.workers import exclude_modules_from_collection

ROWS_PER_BUCKET: Final = 250_000
"""The most source rows that a task folds, if there are enough streams."""
ROWS_PER_BUCKET_MIN: Final = 100_000
"""The fewest source rows that are worth another task and another file."""
BYTES_PER_BUCKET: Final = 32 << 20
"""The most bytes of the source's compressed files per bucket."""
BUCKETS_MAX: Final = 1024
"""The most buckets of a step."""
ROWS_PER_UNIT: Final = 131_072
"""The rows of the source or the state that one unit has."""
FILE_ROWS: Final = 1_000_000
"""The rows of the table in one file."""
FOLDED: Final = "folded"
"""The directory of a step with the folded rows of a GrainFold."""
OUTPUT_SCHEMA: Final = "output string, file string"
ENCODING: Final = "DELTA_BINARY_PACKED"


def build_folded(
    engine: Engine, table: Table, step: Step, columns: Names, files: Sequence[File]
) -> None:
    """Folds the new files of the source and stages the outputs.

    `columns` are the names and types of the source's columns.
    """
    fold = table.build
    assert isinstance(fold, StreamFold)
    source = arrow_schema(columns)
    spec = FoldSpec(
        fold=fold,
        rows_schema=pa.schema([source.field(name) for name in fold.columns]),
        state_schema=arrow_schema(names_of(table.state)),
        oldest_us=_oldest_us(files),
        keys=(*table.partition_by, *table.keys),
        outputs={
            ROWS: WriteSpec(
                step.stage_directory(ROWS), table.partition_by, encodings=fold_encodings(table)
            ),
            QUARANTINED: WriteSpec(step.stage_directory(QUARANTINED), ("date",)),
            STATE: WriteSpec(step.stage_directory(STATE)),
        },
        exchange=step.exchange_directory(),
        file_rows=FILE_ROWS,
    )
    found = _fold_files(engine, spec, files, step.old_state)
    for output, text in found:
        if output == COUNTS:
            step.counts.update(msgspec.json.decode(text, type=dict[str, int]))
    for output in spec.outputs:
        step.staged(output, [text for name, text in found if name == output], replaced=False)


def fold_grains(
    engine: Engine,
    fold: GrainFold,
    step: Step,
    columns: Names,
    files: Sequence[File],
    grains: Grains | None,
) -> DataFrame:
    """Folds files of the source, and returns the rows of a gold table that are made of the result.

    `columns` are the names and types of the source's columns. Only rows of `grains` are folded, or
    all. The folded rows are in files of the step until it ends.
    """
    source = arrow_schema(columns)
    spec = FoldSpec(
        fold=fold,
        rows_schema=pa.schema([source.field(name) for name in fold.columns]),
        state_schema=pa.schema([]),
        oldest_us=None,
        keys=(),
        outputs={ROWS: WriteSpec(step.stage_directory(FOLDED))},
        exchange=step.exchange_directory(),
        file_rows=FILE_ROWS,
        grains=grains,
    )
    texts = [text for output, text in _fold_files(engine, spec, files, ()) if output == ROWS]
    return fold.finish(step.frame_of(FOLDED, fold.folded, texts))


def _fold_files(
    engine: Engine, spec: FoldSpec, files: Sequence[File], states: Sequence[File]
) -> list[Pair]:
    """Folds files of the source with files of the state, in as many tasks as they are worth."""
    units = [*_units(engine.lake, files, False), *_units(engine.lake, states, True)]
    parallelism: int = engine.spark.sparkContext.defaultParallelism
    buckets = _buckets(files, parallelism)
    if buckets == 1 and rows_of(files) <= LOCAL_ROWS:
        return fold_units(spec, units, LOCAL_TASK)
    if buckets == 1:
        return _run(engine, [units], lambda own, name: fold_units(spec, own, name))
    dealt = [units[at::parallelism] for at in range(parallelism) if units[at::parallelism]]
    spread = _run(engine, dealt, lambda own, name: spread_units(spec, own, name, buckets))
    shares = [msgspec.json.decode(text, type=TaskShare) for _, text in spread]
    each = range(buckets)
    return _run(engine, each, lambda own, name: fold_bucket(spec, shares, own, name))


def fold_encodings(table: Table) -> dict[str, str]:
    """Returns the encodings for whole numbers and times, which differ little from row to row."""
    return {
        column.name: ENCODING for column in table.columns if column.type in ("timestamp", "bigint")
    }


def _oldest_us(files: Sequence[File]) -> int | None:
    return min((low for file in files for low, _ in file.times.values()), default=None)


def _units(lake: LakePath, files: Sequence[File], is_state: bool) -> Iterator[Unit]:
    for file in files:
        parts = max(1, -(-file.rows // ROWS_PER_UNIT))
        for part in range(parts):
            yield Unit(str(lake / file.path), is_state, part, parts)


def _buckets(files: Sequence[File], parallelism: int) -> int:
    rows, size = rows_of(files), sum(file.bytes for file in files)
    wanted = max(
        -(-rows // ROWS_PER_BUCKET),
        min(rows // ROWS_PER_BUCKET_MIN, parallelism),
        -(-size // BYTES_PER_BUCKET),
        1,
    )
    if wanted > parallelism:
        wanted += -wanted % parallelism  # whole rounds: no task runs alone at the end
    return min(wanted, BUCKETS_MAX)


def _run(
    engine: Engine, tasks: Sequence[Any], work: Callable[[Any, str], list[Pair]]
) -> list[Pair]:
    """Calls work(task, name of the attempt) for each task, in a Spark task each."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        exclude_modules_from_collection()
        context = TaskContext.get()
        assert context is not None
        name = f"{context.partitionId():05}-{context.taskAttemptId()}"
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        pairs = [pair for number in numbers for pair in work(tasks[number], name)]
        columns = [pa.array([pair[at] for pair in pairs], pa.string()) for at in (0, 1)]
        yield pa.RecordBatch.from_arrays(columns, names=["output", "file"])

    frame = engine.spark.range(0, len(tasks), 1, len(tasks))
    return [(row[0], row[1]) for row in frame.mapInArrow(run, OUTPUT_SCHEMA).collect()]
