"""Checks a table's expectations on the rows of a step before they are committed.

The counts are in the same commit as the rows, so a repeated step counts nothing twice. A step that
an expectation stops has no effect: the next run checks the same rows again.
"""

from functools import reduce
from operator import or_

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, functions

from holdfast.pipeline.lake.engine import Step
from holdfast.pipeline.lake.files.files import LakeError
from holdfast.pipeline.lake.table import QUARANTINE_COLUMNS, Expectation, Table, TableError

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
