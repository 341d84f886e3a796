"""Gold tables as the pipeline leaves them, written without Spark, for those who only read them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from holdfast.pipeline.lake.files.commits import Commit, CommitLog, File
from holdfast.pipeline.lake.schema import names_of, stored_columns
from holdfast.pipeline.lake.table import Table


def write_table(lake: Path, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """One commit with all rows; columns that a row does not have are null. Of the partition
    columns only those that are declared."""
    declared = [column.name for column in table.columns]
    partitions: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    by = [name for name in table.partition_columns if name in declared]
    for row in rows:
        partitions.setdefault(tuple(row[name] for name in by), []).append(row)
    files = []
    for number, (values, found) in enumerate(partitions.items()):
        path = f"{table.name}/{number}.parquet"
        names = [name for name in declared if name not in by and any(name in row for row in found)]
        arrays = {name: [row.get(name) for row in found] for name in names}
        (lake / table.name).mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(arrays), lake / path)
        size = (lake / path).stat().st_size
        partition: dict[str, str | None] = dict(zip(by, values, strict=True))
        files.append(File(path=path, rows=len(found), bytes=size, version=1, partition=partition))
    commit = Commit(
        table=table.name,
        lineage="test",
        version=1,
        revision=1,
        columns=names_of(stored_columns(table)),
        partition_by=list(table.partition_columns),
        committed_at_us=0,
        took_s=0.0,
        rows=len(rows),
        quarantined=0,
        rows_total=len(rows),
        quarantined_total=0,
        files=files,
    )
    CommitLog(lake, table.name).record(commit)
