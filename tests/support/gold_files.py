"""Tables as the pipeline leaves them, written without Spark, for those who only read them."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow
import pyarrow.parquet

from holdfast.client.log.lake.commits import Commit, CommitLog, File
from holdfast_lake.lake.schema import names_of, stored_columns
from holdfast_lake.lake.table import Column, Table

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def write_table(lake: Path, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """One commit with all rows; columns that a row does not have are null. Of the partition
    columns only those that are declared."""
    write_rows(lake, table.name, stored_columns(table), table.partition_columns, rows)


def write_rows(
    lake: Path,
    name: str,
    columns: Sequence[Column],
    partition_columns: Sequence[str],
    rows: Sequence[dict[str, Any]],
) -> None:
    """The same of any table, such as `records`."""
    declared = [column.name for column in columns]
    partitions: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    by = [each for each in partition_columns if rows and each in rows[0]]
    for row in rows:
        partitions.setdefault(tuple(row[name] for name in by), []).append(row)
    files = []
    for number, (values, found) in enumerate(partitions.items()):
        path = f"{name}/{number}.parquet"
        names = [each for each in declared if each not in by and any(each in row for row in found)]
        arrays = {each: [row.get(each) for row in found] for each in names}
        (lake / name).mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(arrays), lake / path)
        size = (lake / path).stat().st_size
        partition: dict[str, str | None] = dict(zip(by, values, strict=True))
        files.append(
            File(
                path=path,
                rows=len(found),
                bytes=size,
                version=1,
                partition=partition,
                times=_times(arrays),
            )
        )
    commit = Commit(
        table=name,
        lineage="test",
        version=1,
        revision=1,
        columns=names_of(columns),
        partition_by=list(partition_columns),
        committed_at_us=0,
        took_s=0.0,
        rows=len(rows),
        quarantined=0,
        rows_total=len(rows),
        quarantined_total=0,
        files=files,
    )
    CommitLog(lake, name).record(commit)


def _times(arrays: dict[str, list[Any]]) -> dict[str, tuple[int, int]]:
    """The least and the greatest time of each column of times, in µs since 1970."""
    found = {}
    for name, values in arrays.items():
        times = [
            (value - EPOCH) // timedelta(microseconds=1)
            for value in values
            if isinstance(value, datetime)
        ]
        if times:
            found[name] = (min(times), max(times))
    return found
