"""Tables as Iceberg tables, through Iceberg's Java library in Spark's own process.

A table is in its directory of the lake (Iceberg's path-based tables: no catalogue). Its files are
those that the tasks have written; a name mapping connects their columns to Iceberg's ids.

Each commit becomes one Iceberg transaction. It sets the table property `holdfast.version.<lineage>`
to the commit's version, together with the snapshot. So applying is idempotent, even after snapshots
were expired. Replaced files stay for readers of older snapshots until those expire, which this
store does every EXPIRE_EVERY commits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from holdfast.client.log.lake.commits import ROWS, Commit, CommitLog, File
from holdfast.client.log.lake.files import LakeError
from holdfast.client.log.lake.objects import LakePath
from holdfast_lake.lake.readers import exclusively
from holdfast_lake.lake.schema import schema_json
from holdfast_lake.lake.stores.store import (
    StorePart,
    TableStore,
    partition_of,
    removed_by,
)
from holdfast_lake.lake.table import QUARANTINE

PACKAGE: Final = "org.apache.iceberg:iceberg-spark-runtime-<Spark's version>_2.13:<version>"
VERSION: Final = "holdfast.version."
MAPPING: Final = "schema.name-mapping.default"
PROPERTIES: Final = {
    "format-version": "2",
    # One commit per second would make gigabytes of metadata, see EXPIRE_EVERY.
    "history.expire.max-snapshot-age-ms": "3600000",
    "history.expire.min-snapshots-to-keep": "100",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
"""The properties of a new table. A user who needs older snapshots changes them."""
EXPIRE_EVERY: Final = 100
"""The commits of a table between two expirations of snapshots."""


class IcebergStore(TableStore):
    """A store of Iceberg tables."""

    name = "iceberg"

    def __init__(self, lake: Path, session: Callable[[], SparkSession]) -> None:
        """`session` is called when the store first needs Spark, before it writes."""
        super().__init__(lake)
        self._session = session

    def check(self) -> None:
        """Checks that the session has Iceberg's library. Raises LakeError."""
        _ = self._java

    def publish(self, part: StorePart, commit: Commit) -> None:
        """Adds one part of a commit to its Iceberg table, unless the table has it already."""
        with self._sole_writer(part.name):
            self._commit(part, commit)

    def forget(self, table: str) -> None:
        """Removes a table and its quarantine."""
        last = CommitLog(self.lake, table).last()
        with self._sole_writer(QUARANTINE):
            quarantine = self._load(QUARANTINE)
            if quarantine is not None and last is not None:
                transaction = quarantine.newTransaction()
                transaction.updateProperties().remove(VERSION + last.lineage).commit()
                mine = self._java.expressions.Expressions.equal("table", table)
                transaction.newDelete().deleteFromRowFilter(mine).commit()
                transaction.commitTransaction()
        super().forget(table)

    def _sole_writer(self, name: str) -> AbstractContextManager[None]:
        """Returns the lock for writing to a table.

        Several processes write to the quarantine, and Iceberg cannot detect a concurrent rename on
        a plain file system. Each other table has only one writer, by the table's lock.
        """
        return exclusively(self.lake, name) if name == QUARANTINE else nullcontext()

    @cached_property
    def _java(self) -> Any:
        """The Java package org.apache.iceberg. Raises LakeError if it is not available."""
        from py4j.java_gateway import JavaClass

        jvm = getattr(self._session(), "_jvm", None)
        if jvm is None:
            raise LakeError(
                "the store iceberg needs a Spark session in this process, not one of Spark Connect"
            )
        package = jvm.org.apache.iceberg
        if not isinstance(package.hadoop.HadoopTables, JavaClass):
            raise LakeError(
                "the store iceberg needs Iceberg's jar in Spark, and there is none: give "
                f"--conf spark.jars.packages={PACKAGE}, or --conf spark.jars=FILE of such a jar"
            )
        return package

    @cached_property
    def _tables(self) -> Any:
        context: Any = self._session().sparkContext
        return self._java.hadoop.HadoopTables(context._jsc.hadoopConfiguration())

    def _load(self, name: str) -> Any:
        """Returns Iceberg's table, or None if there is none."""
        location = _location(self.lake / name)
        return self._tables.load(location) if self._tables.exists(location) else None

    def _create(self, part: StorePart) -> Any:
        java = self._java
        schema = java.SchemaParser.fromJson(schema_json(part.columns))
        spec = java.PartitionSpec.builderFor(schema)
        for column in part.partition_by:
            spec = spec.identity(column)
        location = _location(self.lake / part.name)
        order = java.SortOrder.unsorted()
        return self._tables.create(schema, spec.build(), order, PROPERTIES, location)

    def _commit(self, part: StorePart, commit: Commit) -> None:
        table = self._load(part.name)
        if table is None:
            table = self._create(part)
        if int(table.properties().get(VERSION + commit.lineage) or 0) >= commit.version:
            return
        transaction = table.newTransaction()
        self._set_properties(transaction, commit)
        if not commit.merges:
            self._add_columns(transaction, part.columns)
        removed = removed_by(self.lake, commit, part.output)
        if part.files or removed:
            self._change(transaction, commit, part, removed)
        transaction.commitTransaction()
        if part.output == ROWS and commit.version % EXPIRE_EVERY == 0:
            table.expireSnapshots().commit()

    def _set_properties(self, transaction: Any, commit: Commit) -> None:
        java = self._java
        update = transaction.updateProperties()
        update.set(VERSION + commit.lineage, str(commit.version))
        table = transaction.table()
        if table.properties().get(MAPPING) is None:
            names = java.mapping.MappingUtil.create(table.schema())
            update.set(MAPPING, java.mapping.NameMappingParser.toJson(names))
        update.commit()

    def _add_columns(self, transaction: Any, columns: Sequence[tuple[str, str]]) -> None:
        there = transaction.table().schema()
        new = [name for name, _ in columns if there.findField(name) is None]
        if not new:
            return
        schema = self._java.SchemaParser.fromJson(schema_json(columns))
        update = transaction.updateSchema()
        for name in new:
            update.addColumn(name, schema.findType(name))
        update.commit()

    def _change(
        self, transaction: Any, commit: Commit, part: StorePart, removed: Sequence[File]
    ) -> None:
        """Makes the snapshot of a commit."""
        table = transaction.table()
        if commit.merges:
            update = transaction.newRewrite()
        elif removed:
            update = transaction.newOverwrite()
        else:
            update = transaction.newAppend()
        for file in removed:
            partition = partition_of(commit, part.output, file)
            update.deleteFile(self._data_file(table, partition, file, None))
        for file in part.files:
            partition = partition_of(commit, part.output, file)
            added = self._data_file(table, partition, file, self._metrics(table, file))
            if commit.merges or removed:
                update.addFile(added)
            else:
                update.appendFile(added)
        update.set("holdfast.table", commit.table)
        update.set("holdfast.version", str(commit.version))
        update.commit()

    def _data_file(
        self, table: Any, partition: Mapping[str, str | None], file: File, metrics: Any
    ) -> Any:
        spec = table.spec()
        builder = (
            self._java.DataFiles.builder(spec)
            .withPath(_location(self.lake / file.path))
            .withFormat("parquet")
            .withFileSizeInBytes(file.bytes)
            .withRecordCount(file.rows)
        )
        if metrics is not None:
            builder = builder.withMetrics(metrics)
        if spec.isPartitioned():
            names = [each.name() for each in spec.fields()]
            builder = builder.withPartitionValues([partition[name] for name in names])
        return builder.build()

    def _metrics(self, table: Any, file: File) -> Any:
        """Returns counts and bounds of the columns, from the file's footer."""
        java = self._java
        mapping = java.mapping.NameMappingParser.fromJson(table.properties().get(MAPPING))
        source = table.io().newInputFile(_location(self.lake / file.path))
        config = java.MetricsConfig.forTable(table)
        return java.parquet.ParquetUtil.fileMetrics(source, config, mapping)


def _location(path: LakePath) -> str:
    """Returns a path with a scheme, because Spark's default file system may be another one."""
    return f"file://{path}"
