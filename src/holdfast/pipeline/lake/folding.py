"""Silver tables made by a StreamFold (see table.py): the tasks read files and write files.

Where a step is large enough for several tasks, it goes in two rounds. The first reads the source
and the states and writes what belongs to each *bucket* of streams into exchange files, next to
those that the step stages; the second folds one bucket in each task. It is a shuffle of Arrow
batches, without a row that has to be taken apart, and what is read from the files needs no memory
of its own. A small step is one task.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from holdfast.pipeline.lake.engine import Engine, Step
from holdfast.pipeline.lake.files.commits import QUARANTINED, ROWS, STATE, File, rows_of
from holdfast.pipeline.lake.files.writer import WriteSpec
from holdfast.pipeline.lake.fold_tasks import (
    FoldSpec,
    Pair,
    TaskShare,
    Unit,
    fold_bucket,
    fold_units,
    spread_units,
)
from holdfast.pipeline.lake.schema import Names, arrow_schema, names_of
from holdfast.pipeline.lake.table import StreamFold, Table

ROWS_PER_BUCKET: Final = 250_000
"""Of the source: what a task folds at most, if the streams are many."""
ROWS_PER_BUCKET_MIN: Final = 100_000
"""Fewer are not worth another task, and another file."""
BYTES_PER_BUCKET: Final = 32 << 20
"""Of the source's files, compressed."""
BUCKETS_MAX: Final = 1024
ROWS_PER_UNIT: Final = 131_072
"""Of the source or the state: what is read at a time."""
FILE_ROWS: Final = 1_000_000
"""Of the table in one file."""
OUTPUT_SCHEMA: Final = "output string, file string"
EXCHANGE: Final = "exchange"
ENCODING: Final = "DELTA_BINARY_PACKED"


def build_folded(
    engine: Engine, table: Table, step: Step, columns: Names, files: Sequence[File]
) -> None:
    """`columns`: names and types of the source's; `files`: its new ones."""
    fold = table.build
    assert isinstance(fold, StreamFold)
    old = step.last.state if step.last is not None else []
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
        exchange=step.stage_directory(EXCHANGE),
        file_rows=FILE_ROWS,
    )
    units = [*_units(engine.lake, files, False), *_units(engine.lake, old, True)]
    parallelism: int = engine.spark.sparkContext.defaultParallelism
    buckets = _buckets(files, parallelism)
    if buckets == 1:
        found = _run(engine, [units], lambda own, name: fold_units(spec, own, name))
    else:
        dealt = [units[at::parallelism] for at in range(parallelism) if units[at::parallelism]]
        spread = _run(engine, dealt, lambda own, name: spread_units(spec, own, name, buckets))
        shares = [msgspec.json.decode(text, type=TaskShare) for _, text in spread]
        each = range(buckets)
        found = _run(engine, each, lambda own, name: fold_bucket(spec, shares, own, name))
    for output in spec.outputs:
        step.staged(output, [text for name, text in found if name == output], replaced=False)


def fold_encodings(table: Table) -> dict[str, str]:
    """Whole numbers and times mostly differ little from one row to the next."""
    return {
        column.name: ENCODING for column in table.columns if column.type in ("timestamp", "bigint")
    }


def _oldest_us(files: Sequence[File]) -> int | None:
    return min((low for file in files for low, _ in file.times.values()), default=None)


def _units(lake: Path, files: Sequence[File], is_state: bool) -> Iterator[Unit]:
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
        wanted += -wanted % parallelism  # so that no task is left alone at the end
    return min(wanted, BUCKETS_MAX)


def _run(
    engine: Engine, tasks: Sequence[Any], work: Callable[[Any, str], list[Pair]]
) -> list[Pair]:
    """Call work(task, name of the attempt) for each task in a Spark task of its own."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        name = f"{context.partitionId():05}-{context.taskAttemptId()}"
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        pairs = [pair for number in numbers for pair in work(tasks[number], name)]
        columns = [pa.array([pair[at] for pair in pairs], pa.string()) for at in (0, 1)]
        yield pa.RecordBatch.from_arrays(columns, names=["output", "file"])

    frame = engine.spark.range(0, len(tasks), 1, len(tasks))
    return [(row[0], row[1]) for row in frame.mapInArrow(run, OUTPUT_SCHEMA).collect()]
