"""Tables as Delta Lake tables, through delta-rs and without JVM packages.

Each commit becomes one Delta transaction per table. The transaction is marked with the table's
lineage and the commit's version, and an existing mark is not applied again. So applying is
idempotent. Delta readers see all rows of a commit at once. Replaced files stay for readers of older
versions until a user vacuums the table (`deltalake.DeltaTable(...).vacuum()`).
"""

import json
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from holdfast.client.log.lake.commits import QUARANTINED, ROWS, Commit, CommitLog, File
from holdfast.client.log.lake.errors import ObjectStoreError
from holdfast.client.log.lake.objects import LakePath, ObjectPath, has_plain_http
from holdfast.client.log.lake.parquet import partition_in
from holdfast_lake.lake.schema import arrow_schema
from holdfast_lake.lake.stores.store import (
    StorePart,
    TableStore,
    partition_of,
    removed_by,
)
from holdfast_lake.lake.table import QUARANTINE

ATTEMPTS_MAX: Final = 8
"""The most attempts of a transaction that other drivers' transactions conflict with."""


class DeltaStore(TableStore):
    """A store of Delta Lake tables, one object per lake and process. It keeps the opened tables."""

    name = "delta"

    def __init__(self, lake: LakePath) -> None:
        super().__init__(lake)
        self._tables: dict[str, DeltaTable] = {}
        self._options = _storage_options(lake)
        self._seen: set[str] = set()
        """The lineages whose files have been checked for bounds of some columns."""

    def apply(self, commit: Commit, before: Commit | None) -> None:
        """Makes the commit visible, and the first time in a process all rows before it to filters.

        Files of earlier versions have bounds of times alone, and delta-rs then finds no row by a
        filter on another column.
        """
        super().apply(commit, before)
        if commit.lineage not in self._seen:
            for name, own in ((commit.table, ""), (QUARANTINE, f"table={commit.table}/")):
                self._attempt(name, partial(self._mend, name, own, commit))
            self._seen.add(commit.lineage)

    def _mend(self, name: str, own: str, commit: Commit) -> None:
        """Adds files with bounds of some columns again, without bounds.

        The mark of the lineage lets Delta refuse the transaction if another driver has removed
        files meanwhile, and only the files of the commit's own table are added.
        """
        table = self._open(name)
        adds = [] if table is None else [add for add in _with_bounds(table)
                                         if add.path.startswith(own)]  # fmt: skip
        if table is None or not adds:
            return
        version = max(commit.version, table.transaction_version(commit.lineage) or 0)
        table.create_write_transaction(
            [*adds],
            "append",
            table.schema(),
            table.metadata().partition_columns,
            commit_properties=CommitProperties(
                custom_metadata={"holdfast": f"{commit.table} without bounds"},
                app_transactions=[Transaction(commit.lineage, version)],
            ),
        )

    def forget(self, table: str) -> None:
        """Removes a table and its quarantine."""
        quarantine = self._open(QUARANTINE) if isinstance(self.lake, Path) else None
        if quarantine is not None:
            quarantine.delete(f"\"table\" = '{table}'")
        self._tables.pop(table, None)
        super().forget(table)

    def _has(self, table: DeltaTable, commit: Commit) -> bool:
        return (table.transaction_version(commit.lineage) or 0) >= commit.version

    def publish(self, part: StorePart, commit: Commit) -> None:
        """Adds one part of a commit to its Delta table, unless the table has it already.

        Another driver may publish the same commit at the same time. Delta then refuses the second
        transaction with the same mark, and the next attempt finds the first one. Raises
        ObjectStoreError.
        """
        self._attempt(part.name, lambda: self._publish(part, commit))

    def _attempt(self, name: str, transaction: Callable[[], None]) -> None:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                transaction()
                return
            except (CommitFailedError, DeltaError) as error:
                self._tables.pop(name, None)
                if attempt == ATTEMPTS_MAX or not isinstance(self.lake, ObjectPath):
                    first = str(error).strip().splitlines()[0]
                    raise ObjectStoreError(f"table {name}: Delta commit: {first}") from error

    def _publish(self, part: StorePart, commit: Commit) -> None:
        properties = _properties(commit)
        schema = Schema.from_arrow(arrow_schema(part.columns))
        root = self.lake / part.name
        adds = [add_action(root, self.lake, file, part.output, commit) for file in part.files]
        partition_by = list(part.partition_by)
        table = self._open(part.name)
        if table is None:
            if commit.forgotten:
                return
            root.mkdir(exist_ok=True)
            create_table_with_add_actions(
                str(root),
                schema,
                adds,
                partition_by=partition_by,
                commit_properties=properties,
                storage_options=self._options,
            )
            return
        if self._has(table, commit):
            return
        if part.output == QUARANTINED and commit.forgotten:
            table.delete(f"\"table\" = '{commit.table}'", commit_properties=properties)
            return
        if self._begins_again(part, commit):
            # The table was built again: Delta's overwrite removes its rows and sets its columns.
            table.create_write_transaction(
                [*adds], "overwrite", schema, partition_by, commit_properties=properties
            )
            return
        self._add_columns(table, schema)
        gone = self._removals(commit, part.output)
        table.create_write_transaction(
            [*adds, *gone], "append", schema, partition_by, commit_properties=properties
        )

    def _open(self, name: str) -> DeltaTable | None:
        table = self._tables.get(name)
        if table is not None:
            table.update_incremental()
            return table
        try:
            table = self._tables[name] = DeltaTable(
                str(self.lake / name), storage_options=self._options
            )
        except TableNotFoundError:
            return None
        return table

    def _begins_again(self, part: StorePart, commit: Commit) -> bool:
        """Returns whether a commit is the first one after the end of a table of its name."""
        if part.output != ROWS or commit.version == 1 or not isinstance(self.lake, ObjectPath):
            return False
        return CommitLog(self.lake, commit.table).read(commit.version - 1).forgotten

    def _add_columns(self, table: DeltaTable, schema: Schema) -> None:
        there = {field.name for field in table.schema().fields}
        new: list[Field] = [field for field in schema.fields if field.name not in there]
        if new:
            table.alter.add_columns(new)

    def _removals(self, commit: Commit, output: str) -> list[RemoveAction]:
        return [
            RemoveAction(
                path=file.path.split("/", 1)[1],
                data_change=not commit.merges,
                deletion_timestamp=commit.committed_at_us // 1000,
                size=file.bytes,
                partition_values=partition_of(commit, output, file),
            )
            for file in removed_by(self.lake, commit, output)
        ]


def _storage_options(lake: LakePath) -> dict[str, str] | None:
    """Returns the options of delta-rs besides those that it takes from the environment."""
    if not isinstance(lake, ObjectPath):
        return None
    options = {"conditional_put": "etag"} if lake.root.startswith("s3:") else {}
    return {**options, "allow_http": "true"} if has_plain_http() else options


def _with_bounds(table: DeltaTable) -> list[AddAction]:
    """Returns the files that have bounds of some columns and counts of nulls of none, as only this
    store wrote them, without the bounds."""
    files = pa.table(table.get_add_actions(flatten=True))
    there = {
        kind: [pc.is_valid(files[name]) for name in files.column_names if name.startswith(kind)]
        for kind in ("min.", "null_count.")
    }
    if not there["min."] or not files.num_rows:
        return []
    is_partial = reduce(pc.or_, there["min."])
    if there["null_count."]:
        is_partial = pc.and_not(is_partial, reduce(pc.or_, there["null_count."]))
    names = ["path", "size_bytes", "modification_time", "num_records"]
    return [
        AddAction(
            path=path,
            size=size,
            partition_values=partition_in(path),
            modification_time=modified,
            data_change=False,
            stats=json.dumps({"numRecords": rows}),
        )
        for path, size, modified, rows in zip(
            *files.filter(is_partial).select(names).to_pydict().values(), strict=True
        )
    ]


def _properties(commit: Commit) -> CommitProperties:
    return CommitProperties(
        custom_metadata={"holdfast": f"{commit.table} {commit.version}"},
        app_transactions=[Transaction(commit.lineage, commit.version)],
    )


def add_action(
    root: LakePath, lake: LakePath, file: File, output: str, commit: Commit
) -> AddAction:
    """Returns Delta's action for an added file."""
    return AddAction(
        path=str(lake / file.path)[len(str(root)) + 1 :],
        size=file.bytes,
        partition_values=partition_of(commit, output, file),
        modification_time=commit.committed_at_us // 1000,
        data_change=not commit.merges,
        # With bounds of some columns, delta-rs finds no row by a filter on another one.
        stats=json.dumps({"numRecords": file.rows}),
    )
