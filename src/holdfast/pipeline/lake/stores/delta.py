"""Tables as Delta Lake tables, through delta-rs and without JVM packages.

Each commit becomes one Delta transaction per table. The transaction is marked with the table's
lineage and the commit's version, and an existing mark is not applied again. So applying is
idempotent. Delta readers see all rows of a commit at once. Replaced files stay for readers of older
versions until a user vacuums the table (`deltalake.DeltaTable(...).vacuum()`).
"""

import json
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from holdfast.pipeline.lake.files.commits import ROWS, Commit, File
from holdfast.pipeline.lake.schema import arrow_schema
from holdfast.pipeline.lake.stores.store import (
    StorePart,
    TableStore,
    partition_of,
    removed_by,
)
from holdfast.pipeline.lake.table import QUARANTINE


class DeltaStore(TableStore):
    """A store of Delta Lake tables, one object per lake and process. It keeps the opened tables."""

    name = "delta"

    def __init__(self, lake: Path) -> None:
        super().__init__(lake)
        self._tables: dict[str, DeltaTable] = {}

    def forget(self, table: str) -> None:
        """Remove a table and its quarantine."""
        quarantine = self._open(QUARANTINE)
        if quarantine is not None:
            quarantine.delete(f"\"table\" = '{table}'")
        self._tables.pop(table, None)
        super().forget(table)

    def _has(self, table: DeltaTable, commit: Commit) -> bool:
        return (table.transaction_version(commit.lineage) or 0) >= commit.version

    def publish(self, part: StorePart, commit: Commit) -> None:
        """Add one part of a commit to its Delta table, unless the table has it already."""
        properties = _properties(commit)
        schema = Schema.from_arrow(arrow_schema(part.columns))
        root = self.lake / part.name
        adds = [add_action(root, self.lake, file, part.output, commit) for file in part.files]
        partition_by = list(part.partition_by)
        table = self._open(part.name)
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
        if self._has(table, commit):
            return
        self._add_columns(table, schema)
        gone = self._removals(commit) if part.output == ROWS else []
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
        return [
            RemoveAction(
                path=file.path.split("/", 1)[1],
                data_change=not commit.merges,
                deletion_timestamp=commit.committed_at_us // 1000,
                size=file.bytes,
                partition_values=file.partition,
            )
            for file in removed_by(self.lake, commit)
        ]


def _properties(commit: Commit) -> CommitProperties:
    return CommitProperties(
        custom_metadata={"holdfast": f"{commit.table} {commit.version}"},
        app_transactions=[Transaction(commit.lineage, commit.version)],
    )


def add_action(root: Path, lake: Path, file: File, output: str, commit: Commit) -> AddAction:
    """Return Delta's action for an added file."""
    return AddAction(
        path=str((lake / file.path).relative_to(root)),
        size=file.bytes,
        partition_values=partition_of(commit, output, file),
        modification_time=int((lake / file.path).stat().st_mtime * 1000),
        data_change=not commit.merges,
        stats=json.dumps(statistics(file)),
    )


def statistics(file: File) -> dict[str, object]:
    """Return Delta's statistics of a file. Times are rounded outwards to milliseconds, so that none
    lies outside."""
    return {
        "numRecords": file.rows,
        "minValues": {name: _time(least // 1000) for name, (least, _) in file.times.items()},
        "maxValues": {name: _time(-(-most // 1000)) for name, (_, most) in file.times.items()},
    }


def _time(milliseconds: int) -> str:
    moment = pa.scalar(milliseconds, pa.timestamp("ms", tz="UTC")).as_py()
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03}Z"
