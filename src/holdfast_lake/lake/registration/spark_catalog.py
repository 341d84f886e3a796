"""Tables in the catalog of a Spark session: in memory, or in a Hive metastore.

A table is external: it lists the directory of the lake each time, so it needs no update after a
commit, and dropping it removes no file.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.registration.iceberg_catalog import (
    PREFIX,
    VERSION,
    ListedTable,
    comment_of,
    listed,
)

LISTS_FILES: Final = "spark.sql.hive.manageFilesourcePartitions"
"""With `false`, a table in a Hive metastore has no partitions of its own that go out of date."""


def register_in_spark(
    spark: SparkSession,
    lake: Path,
    catalog: Catalog,
    source: Mapping[str, str],
    database: str,
    names: Sequence[str] = (),
) -> Iterator[tuple[str, int]]:
    """Registers tables of a parquet lake in a database of the session's catalog.

    Yields each table with its version. Raises LakeError and TableError.
    """
    for name in names:
        if name not in catalog.names():
            catalog.table(name)
    before = spark.conf.get(LISTS_FILES, "true")
    spark.conf.set(LISTS_FILES, "false")
    try:
        spark.sql(f"CREATE DATABASE IF NOT EXISTS {quoted(database)}")
        for name in names or catalog.names():
            table = listed(lake, catalog, source, name)
            if table is not None:
                _register(spark, lake, database, table)
                yield name, table.version
    finally:
        spark.conf.set(LISTS_FILES, before or "true")


def unregister_in_spark(
    spark: SparkSession, lake: Path, database: str, names: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Removes tables from a database. Yields each, and whether it was there. Raises LakeError."""
    for name in names:
        full = f"{quoted(database)}.{quoted(name)}"
        is_there = spark.catalog.tableExists(full)
        if is_there:
            _check_own(spark, lake, full)
            spark.sql(f"DROP TABLE {full}")
        yield name, is_there


def _register(spark: SparkSession, lake: Path, database: str, table: ListedTable) -> None:
    full = f"{quoted(database)}.{quoted(table.name)}"
    if spark.catalog.tableExists(full):
        _check_own(spark, lake, full)
        # The location is not the catalog's to remove: only the entry is made again.
        spark.sql(f"DROP TABLE {full}")
    partitions = set(table.partition_by)
    ordered = [
        *(each for each in table.columns if each.name not in partitions),
        *(each for each in table.columns if each.name in partitions),
    ]
    columns = ", ".join(
        f"{quoted(each.name)} {each.type} COMMENT {text(comment_of(each))}" for each in ordered
    )
    properties = ", ".join(
        f"{text(name)} = {text(value)}"
        for name, value in table.properties.items()
        if name != VERSION  # the rows are those of any later version
    )
    partitioned = ", ".join(quoted(name) for name in table.partition_by)
    spark.sql(
        f"CREATE TABLE {full} ({columns}) USING parquet"
        + (f" PARTITIONED BY ({partitioned})" if partitioned else "")
        + f" LOCATION {text(f'file://{lake / table.name}')}"
        + f" COMMENT {text(table.description)} TBLPROPERTIES ({properties})"
    )


def _check_own(spark: SparkSession, lake: Path, full: str) -> None:
    rows = spark.sql(f"SHOW TBLPROPERTIES {full}").collect()
    owner = {row["key"]: row["value"] for row in rows}.get(f"{PREFIX}lake")
    if owner != str(lake):
        whose = f"of the lake {owner}" if owner else "made by another program"
        raise LakeError(f"table {full} is {whose}, not of {lake}: choose another --namespace")


def quoted(name: str) -> str:
    """Returns a name as SQL."""
    return f"`{name.replace('`', '``')}`"


def text(value: str) -> str:
    """Returns a text as a literal of Spark's SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
