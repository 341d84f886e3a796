"""Tables as Delta Lake tables, through delta-rs: no JVM packages.

A commit of ours becomes one Delta transaction per table it touches, marked with an application
transaction (the table's lineage, the commit's version); one that is there already is left out, so
applying again does nothing. Delta readers see a commit's rows all at once. Replaced files stay for
readers of older versions until someone vacuums the table (`deltalake.DeltaTable(...).vacuum()`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from holdfast.pipeline.jobs.commits import QUARANTINED, ROWS, Commit, CommitLog, File
from holdfast.pipeline.jobs.schema import arrow_schema, quarantine_columns
from holdfast.pipeline.jobs.store import forget_rows, move_staged, numbered_place, remove_old_state
from holdfast.pipeline.jobs.table import QUARANTINE

QUARANTINE_PARTITIONS: Final = ["table", "date"]
"""Of the Delta table that has all tables' quarantine."""


class DeltaStore:
    """See the module. One object per lake and process: it keeps the opened tables."""

    name = "delta"

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self._tables: dict[str, DeltaTable] = {}

    def place(
        self, output: str, table: str, version: int, index: int, file: File, *, replaced: bool
    ) -> str:
        return numbered_place(output, table, version, index, file)

    def apply(self, commit: Commit, before: Commit | None) -> None:
        move_staged(self.lake, commit)
        if commit.quarantine:
            columns = [(column.name, column.type) for column in quarantine_columns()]
            self._commit(
                QUARANTINE, QUARANTINED, commit, columns, QUARANTINE_PARTITIONS, commit.quarantine
            )
        if commit.files or commit.removed or before is None:
            columns = commit.columns
            self._commit(commit.table, ROWS, commit, columns, commit.partition_by, commit.files)
        remove_old_state(self.lake, commit, before)

    def forget(self, table: str) -> None:
        quarantine = self._open(QUARANTINE)
        if quarantine is not None:
            quarantine.delete(f"\"table\" = '{table}'")
        self._tables.pop(table, None)
        forget_rows(self.lake, table)

    def _commit(
        self,
        name: str,
        output: str,
        commit: Commit,
        columns: Sequence[tuple[str, str]],
        partition_by: list[str],
        files: Sequence[File],
    ) -> None:
        properties = CommitProperties(
            custom_metadata={"holdfast": f"{commit.table} {commit.version}"},
            app_transactions=[Transaction(commit.lineage, commit.version)],
        )
        schema = Schema.from_arrow(arrow_schema(columns))
        root = self.lake / name
        adds = [add_action(root, self.lake, file, output, commit.table) for file in files]
        table = self._open(name)
        if table is None:
            root.mkdir(exist_ok=True)
            create_table_with_add_actions(
                str(root),
                schema,
                adds,
                partition_by=partition_by,
                commit_properties=properties,
            )
            return
        if (table.transaction_version(commit.lineage) or 0) >= commit.version:
            return
        self._add_columns(table, schema)
        gone = self._removals(commit) if output == ROWS else []
        table.create_write_transaction(
            [*adds, *gone], "append", schema, partition_by, commit_properties=properties
        )

    def _open(self, name: str) -> DeltaTable | None:
        table = self._tables.get(name)
        if table is not None:
            table.update_incremental()
            return table
        try:
            table = self._tables[name] = DeltaTable(str(self.lake / name))
        except TableNotFoundError:
            return None
        return table

    def _add_columns(self, table: DeltaTable, schema: Schema) -> None:
        there = {field.name for field in table.schema().fields}
        new: list[Field] = [field for field in schema.fields if field.name not in there]
        if new:
            table.alter.add_columns(new)

    def _removals(self, commit: Commit) -> list[RemoveAction]:
        if not commit.removed:
            return []
        files = {
            file.path: file for file in CommitLog(self.lake, commit.table).live(commit.version - 1)
        }
        return [
            RemoveAction(
                path=path.split("/", 1)[1],
                data_change=True,
                deletion_timestamp=commit.committed_at_us // 1000,
                size=files[path].bytes if path in files else None,
                partition_values=files[path].partition if path in files else None,
            )
            for path in commit.removed
        ]


def add_action(root: Path, lake: Path, file: File, output: str, table: str) -> AddAction:
    partition = dict(file.partition)
    if output == QUARANTINED:
        partition = {"table": table, **partition}
    return AddAction(
        path=str((lake / file.path).relative_to(root)),
        size=file.bytes,
        partition_values=partition,
        modification_time=int((lake / file.path).stat().st_mtime * 1000),
        data_change=True,
        stats=json.dumps(statistics(file)),
    )


def statistics(file: File) -> dict[str, object]:
    """Delta's: times in whole milliseconds, so that none lies outside."""
    return {
        "numRecords": file.rows,
        "minValues": {name: _time(least // 1000) for name, (least, _) in file.times.items()},
        "maxValues": {name: _time(-(-most // 1000)) for name, (_, most) in file.times.items()},
    }


def _time(milliseconds: int) -> str:
    moment = pa.scalar(milliseconds, pa.timestamp("ms", tz="UTC")).as_py()
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03}Z"
