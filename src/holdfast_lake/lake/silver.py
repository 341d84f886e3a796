"""Silver: rows made from the new rows of another table and a state of the rows before.

A step takes complete commits of the source. It commits rows, quarantine, the next state and the
position in the source together. So a deterministic function has an exactly-once effect without
further measures.

A table's expectations are checked on the rows of a step before they are committed. The counts are
in the same commit as the rows, so a repeated step counts nothing twice. A step that an expectation
stops has no effect: the next run checks the same rows again.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final

import msgspec
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, functions

from holdfast.client.log.lake.commits import (
    QUARANTINED,
    ROWS,
    STATE,
    Commit,
    Consumed,
    File,
    Replaced,
    changed,
    rows_of,
    spans,
    unseen_replacement,
)
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.parquet import WriteSpec
from holdfast_lake.lake.backfill.parts import TablePart, quarantined_files
from holdfast_lake.lake.engine import Engine, Step, usable
from holdfast_lake.lake.folding import build_folded
from holdfast_lake.lake.schema import (
    Names,
    check_declared,
    names_of,
    quarantine_columns,
    spark_type,
    stored_columns,
)
from holdfast_lake.lake.table import (
    QUARANTINE_COLUMNS,
    Expectation,
    GrainFold,
    Outputs,
    StreamFold,
    Table,
    TableError,
)

TIMES = ("timestamp", "store_time", "event_time", "window_start")
"""The columns that may have the time of a row, in order of preference."""


class ExpectationError(LakeError):
    """Rows fail an expectation that stops the table. The text says which, and shows one."""


def checked(frame: DataFrame, table: Table, step: Step) -> tuple[DataFrame, DataFrame | None]:
    """Counts the rows that fail the expectations of a table, and returns the good and the bad ones.

    The bad ones have the columns of the quarantine. None: no row is quarantined. Raises
    ExpectationError and TableError.
    """
    fails = {each: _fails(frame, table, each) for each in table.expectations}
    counted = frame.agg(*(functions.count_if(bad) for bad in fails.values())).collect()[0]
    counts = dict(zip(fails, counted, strict=True))
    for each, count in counts.items():
        if count:
            step.counts[f"failed {each.name}"] += count
            if each.on_fail == "stop":
                row = frame.where(fails[each]).select(_as_json()).limit(1).collect()[0][0]
                raise ExpectationError(
                    f"table {table.name}: {count:,} rows fail the expectation {each.name} "
                    f"({each.condition}), and nothing was written. One of them: {row[:500]}"
                )
    out = {
        each: bad for each, bad in fails.items() if each.on_fail == "quarantine" and counts[each]
    }
    if not out:
        return frame, None
    any_fails = reduce(or_, out.values())
    reasons = [
        functions.when(bad, functions.lit(f"fails {each.name}: {each.condition}"))
        for each, bad in out.items()
    ]
    reason = functions.concat_ws("; ", *reasons)
    return _without(frame, any_fails, table), _quarantined(frame.where(any_fails), reason)


def _without(frame: DataFrame, fails: SparkColumn, table: Table) -> DataFrame:
    """Returns the rows that do not fail. One that stands for its message is emptied instead.

    The tables of messages take the first reading of each. Without it a device that sends only
    implausible values would be down, and a gap before them would be forgotten.
    """
    if table.emptied is None:
        return frame.where(~fails)
    values = {
        name: functions.when(fails, functions.lit(value)).otherwise(frame[name]).alias(name)
        for name, value in table.emptied.values
    }
    kept = frame.where(~fails | functions.expr(table.emptied.condition))
    return kept.select(*(values.get(name, functions.col(name)) for name in frame.columns))


def _fails(frame: DataFrame, table: Table, each: Expectation) -> SparkColumn:
    """Returns the condition under which a row fails. Like a CHECK of SQL, null is no failure."""
    condition = functions.expr(each.condition)
    try:
        kind = frame.select(condition).schema.fields[0].dataType.simpleString()
    except (AnalysisException, ParseException) as error:
        text = str(error).strip().splitlines()[0]
        raise TableError(f"table {table.name}: expectation {each.name}: {text}") from None
    if kind != "boolean":
        raise TableError(
            f"table {table.name}: expectation {each.name} is of type {kind}; it must be true or "
            "false"
        )
    return functions.coalesce(~condition, functions.lit(False))


def _as_json() -> SparkColumn:
    return functions.to_json(functions.struct("*"))


def _quarantined(bad: DataFrame, reason: SparkColumn) -> DataFrame:
    """Returns failing rows as rows of the quarantine. Their payload is the row as JSON."""
    time = next((name for name in TIMES if name in bad.columns), None)
    found = {
        "reason": reason,
        "code": functions.lit("expectation"),
        "timestamp": functions.col(time) if time is not None else functions.lit(None),
        "payload": _as_json().cast("binary"),
    }
    for column in QUARANTINE_COLUMNS:
        if column.name not in found:
            there = column.name in bad.columns
            value = functions.col(column.name) if there else functions.lit(None)
            found[column.name] = value.cast(column.type)
    return bad.select(*(value.alias(name) for name, value in found.items()))


ROWS_PER_STEP: Final = 4_000_000
"""The most source rows of a step. A single commit with more is taken whole."""
ROWS_PER_FILE: Final = 200_000
"""The source rows up to which a step writes one file."""


def consumed_by(engine: Engine, table: Table, source: Commit) -> Consumed:
    """Returns the position of a table in its source.

    Raises LakeError if the source has been replaced by another table of that name since.
    """
    last = engine.log(table.name).last()
    if last is None or last.consumed is None:
        return Consumed(table=table.source, lineage=source.lineage, upto=0, rows=0)
    if last.consumed.lineage != source.lineage or last.consumed.table != table.source:
        raise LakeError(
            f"table {table.name} was made from another {last.consumed.table} than the "
            f"{table.source} that is there: build it again by `holdfast pipeline rebuild "
            f"{table.name}`"
        )
    newest = engine.log(table.source).next_version() - 1
    if last.consumed.upto > newest:
        raise LakeError(
            f"table {table.name} has read version {last.consumed.upto} of {table.source}, which "
            f"has only {newest}: commits were lost, so rows may be there twice. Build it again by "
            f"`holdfast pipeline rebuild {table.name}`"
        )
    return last.consumed


def next_files(files: Sequence[File], after: int, rows_max: int) -> tuple[list[File], int]:
    """Returns the files of the next commits after a version, at least those of one commit.

    The second result is the version at which they end. Raises LakeError, see `changed`.
    """
    taken: list[File] = []
    rows = 0
    for span in spans(changed(files, after)):
        if rows >= rows_max:
            break
        taken += span
        rows += rows_of(span)
    return taken, taken[-1].version if taken else after


def step_silver(engine: Engine, table: Table, rows_max: int = ROWS_PER_STEP) -> Commit | None:
    """Processes the next commits of the source, or follows a replacement of its rows.

    Returns None if the source has nothing new. Raises LakeError, TableError and the errors of
    Spark.
    """
    step = Step(engine, table.name)
    change = check_declared(table, step.last)
    source = usable(engine, table.source)
    if source is None:
        return None
    before = consumed_by(engine, table, source)
    if before.upto >= source.version:
        return None
    unseen = unseen_replacement(source, before)
    if unseen is not None:
        return _follow(engine, table, step, source, unseen)
    live = engine.log(table.source).live(source.version)
    files, upto = next_files(live, before.upto, rows_max)
    if not files and step.last is not None:
        return None  # commits without rows
    if upto == before.upto or len(files) == len(changed(live, before.upto)):
        upto = source.version  # the commits after the last file have no files
    engine.reached(f"{table.name} began")
    rows_in = rows_of(files)
    if rows_in:
        _build(engine, table, step, source, files)
    total = step.rows() + (step.last.rows_total if step.last is not None else 0)
    return step.commit(
        revision=table.revision,
        columns=names_of(stored_columns(table)),
        partition_by=table.partition_by,
        consumed=Consumed(
            table=table.source,
            lineage=source.lineage,
            upto=upto,
            rows=before.rows + rows_in,
            seen=source.version,
        ),
        rows_total=total,
        change=change,
    )


def replace_rows(engine: Engine, table: Table, part: TablePart, *, keeps_state: bool) -> Commit:
    """Makes a part of a table again from the rows that it has read, and replaces it in one commit.

    The position in the source stays. With `keeps_state` so does the state, which then belongs to
    the end of the table and not to that of the part. Raises LakeError, TableError and the errors of
    Spark.
    """
    step = Step(engine, table.name)
    source = usable(engine, table.source)
    if step.last is None or source is None:
        raise LakeError(f"table {table.name} has not been written yet: run it first")
    consumed = consumed_by(engine, table, source)
    if not table.date_of_source:
        part, keeps_state = TablePart(), False
    return _replace(engine, table, step, source, consumed, part, keeps_state=keeps_state)


def _follow(engine: Engine, table: Table, step: Step, source: Commit, unseen: Replaced) -> Commit:
    """Replaces the rows that were made from rows which the source has replaced since.

    All of the table is made again, unless its days are those of the source and it has read
    everything before the replacement. Counter-example: the source's commit 5 is of Monday and not
    read yet, and commit 6 replaces Sunday. A table that makes Sunday again and goes on behind
    commit 6 never gets Monday.
    """
    before = consumed_by(engine, table, source)
    part = TablePart.of(unseen)
    live = engine.log(table.source).live(source.version)
    unread = any(before.upto < file.version < unseen.version for file in live)
    if unread or not table.date_of_source:
        part = TablePart()
    consumed = Consumed(
        table=table.source,
        lineage=source.lineage,
        upto=unseen.version,
        rows=unseen.rows_total,
        seen=source.version,
    )
    return _replace(engine, table, step, source, consumed, part, keeps_state=part.days is not None)


def _replace(
    engine: Engine,
    table: Table,
    step: Step,
    source: Commit,
    consumed: Consumed,
    part: TablePart,
    *,
    keeps_state: bool,
) -> Commit:
    """Makes a part of a table again from the source's files up to `consumed`, and commits it."""
    assert step.last is not None
    change = check_declared(table, step.last)
    live = engine.log(table.source).live(source.version)
    files = [file for file in live if file.version <= consumed.upto and part.needs(file)]
    removed = [f for f in engine.log(table.name).live(step.version - 1) if part.has(f)]
    step.old_state, step.is_wanted = [], part.has
    engine.reached(f"{table.name} began")
    if rows_of(files):
        _build(engine, table, step, source, files)
    step.counts.clear()  # they include those of the days before
    if keeps_state:
        step.keep_state()
    replaced = part.replaced(engine.lake, step.last, step.rows(), removed)
    return step.commit(
        revision=table.revision,
        columns=names_of(stored_columns(table)),
        partition_by=table.partition_by,
        consumed=consumed,
        removed=[file.path for file in removed],
        rows_total=replaced.rows_total,
        change=part.told(removed, step.rows(), change),
        replaced=replaced,
        released=quarantined_files(engine.lake, table.name, part),
    )


def _build(engine: Engine, table: Table, step: Step, source: Commit, files: Sequence[File]) -> None:
    """Computes rows, quarantine and state from the new files of the source, and stages them."""
    if isinstance(table.build, StreamFold):
        build_folded(engine, table, step, source.columns, files)
        if table.expectations and step.rows():
            _check_staged(engine, table, step)
        return
    rows = engine.frame(source.columns, files, table.source)
    arguments = [rows]
    if table.state:
        state = engine.frame(names_of(table.state), step.old_state, f"_state/{table.name}")
        arguments.append(state)
    assert not isinstance(table.build, GrainFold)
    built = table.build(*arguments)
    outputs = built if isinstance(built, Outputs) else Outputs(built)
    shared = [frame.persist() for frame in outputs.shared]
    rows_in = rows_of(files)
    try:
        declared = names_of(table.columns)
        rows, bad = cast_to(outputs.rows, declared, table.name), None
        if table.expectations:
            shared.append(rows.persist())
            rows, bad = checked(rows, table, step)
        _stage_rows(engine, table, step, rows, rows_in)
        quarantine = outputs.quarantine
        if bad is not None:
            quarantine = bad if quarantine is None else quarantine.unionByName(bad, True)
        if quarantine is not None:
            _stage_quarantine(table, step, quarantine, rows_in)
        if table.state:
            _stage_state(table, step, outputs.state, rows_in)
    finally:
        for each in shared:
            each.unpersist()


def _stage_rows(engine: Engine, table: Table, step: Step, rows: DataFrame, rows_in: int) -> None:
    frame = _few_files(engine, rows, rows_in)
    if table.keys:
        frame = frame.sortWithinPartitions(*table.partition_by, *table.keys)
    spec = WriteSpec(step.stage_directory(ROWS), table.partition_by)
    step.stage(ROWS, frame, spec, rows_in, replaced=False)


def _check_staged(engine: Engine, table: Table, step: Step) -> None:
    """Checks the rows that a fold has staged. They are written again if some are quarantined."""
    frames = []
    columns = names_of(table.columns)
    for partition in {tuple(file.partition.items()) for file in step.files()}:
        files = [file for file in step.files() if tuple(file.partition.items()) == partition]
        frame = engine.frame(
            [each for each in columns if each[0] not in table.partition_by],
            [msgspec.structs.replace(file, path=file.staged) for file in files],
            "",
        )
        for name, value in partition:
            frame = frame.withColumn(name, functions.lit(value))
        frames.append(cast_to(frame, columns, table.name))
    rows, bad = checked(reduce(DataFrame.unionByName, frames), table, step)
    if bad is not None:
        count = step.rows()
        # The rows come last, because they may replace the files that both are read from.
        _stage_quarantine(table, step, bad, count)
        step.unstage(ROWS)
        _stage_rows(engine, table, step, rows, count)


def _stage_quarantine(table: Table, step: Step, frame: DataFrame, rows_in: int) -> None:
    for name in ("client_id", "code"):
        if name not in frame.columns:
            frame = frame.withColumn(name, functions.lit(None))
    frame = cast_to(frame, names_of(QUARANTINE_COLUMNS), f"{table.name} (quarantine)")
    dated = frame.withColumn("date", functions.to_date("timestamp")).coalesce(1)
    dated = dated.sortWithinPartitions("date", "partition", "offset")
    spec = WriteSpec(step.stage_directory(QUARANTINED), ("date",))
    step.stage(QUARANTINED, dated, spec, rows_in, replaced=False)
    assert {column.name for column in quarantine_columns()} >= set(dated.columns)


def _stage_state(table: Table, step: Step, frame: DataFrame | None, rows_in: int) -> None:
    if frame is None:
        raise TableError(f"table {table.name} has state columns, but its build returned no state")
    frame = cast_to(frame, names_of(table.state), f"{table.name} (state)").coalesce(1)
    spec = WriteSpec(step.stage_directory(STATE))
    step.stage(STATE, frame, spec, rows_in, replaced=False)


def _few_files(engine: Engine, frame: DataFrame, rows_in: int) -> DataFrame:
    """Reduces the number of files of a small step. A large step keeps its parallelism."""
    wanted = -(-rows_in // ROWS_PER_FILE)
    if wanted < engine.spark.sparkContext.defaultParallelism:
        return frame.coalesce(max(1, wanted))
    return frame


def cast_to(frame: DataFrame, columns: Names, what: str) -> DataFrame:
    """Returns the declared columns in order, with types. Raises TableError for a missing one."""
    there = {name.lower() for name in frame.columns}
    missing = [name for name, _ in columns if name.lower() not in there]
    if missing:
        raise TableError(
            f"table {what}: build returned no column {', '.join(missing)}; it returned "
            f"{', '.join(frame.columns)}"
        )
    # A value that does not fit becomes null, whatever rules of casts the session has.
    return frame.select(*[functions.col(f"`{name}`").try_cast(spark_type(kind)).alias(name)
                          for name, kind in columns])  # fmt: skip
