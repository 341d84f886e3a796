"""Columns of tables as types of Spark, Arrow and Iceberg, and the check of stored columns against a
declaration.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Final

from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

from holdfast.client.log.lake.commits import Commit
from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake.table import QUARANTINE_COLUMNS, Column, Table, TableError

Names = Sequence[tuple[str, str]]

DATE: Final = Column("date", "date", "UTC day of the grain")
HOUR: Final = Column("hour", "int", "UTC hour of the day, 0 to 23")

RECORDS_COLUMNS: Final = (
    Column("topic", "string", "topic of the message"),
    Column("payload", "binary", "the payload as it came"),
    Column("partition", "int", "log partition; a topic is always in the same one"),
    Column("offset", "bigint", "place in the log partition; (partition, offset) is unique"),
    Column("timestamp", "timestamp", "when the broker stored the message"),
    Column("qos", "tinyint", "QoS with which it was published"),
    Column("retain", "boolean", "whether it was published with RETAIN"),
    Column("properties", "binary", "MQTT 5 properties, raw: see decode_properties; may be empty"),
    Column("client_id", "string", "client that published it"),
    Column(
        "producer",
        "struct<id: string, epoch: bigint, sequence: bigint>",
        "producer sequence of publish queues; null without one",
    ),
    Column("date", "date", "UTC day of `timestamp`"),
)
RECORDS_DESCRIPTION: Final = "Every message of the log as it is stored, once."
QUARANTINE_DESCRIPTION: Final = "Rows that a table's build could not use, and why."

_SIMPLE_TYPES: Final = {
    "bigint": "LongType",
    "binary": "BinaryType",
    "boolean": "BooleanType",
    "date": "DateType",
    "double": "DoubleType",
    "int": "IntegerType",
    "string": "StringType",
    "timestamp": "TimestampType",
    "tinyint": "ByteType",
}
"""The classes of pyspark.sql.types, by the names of the types in SQL."""
_SIMPLE_STRUCT: Final = re.compile(r"struct<\w+: \w+(, \w+: \w+)*>", re.ASCII)


def quarantine_columns() -> tuple[Column, ...]:
    """Returns the columns of the stored quarantine table."""
    return (
        *QUARANTINE_COLUMNS,
        Column("table", "string", "whose build it was"),
        Column("date", "date", "UTC day of `timestamp`"),
    )


def stored_columns(table: Table) -> tuple[Column, ...]:
    """Returns the declared columns, and those that the grain adds."""
    unit = table.grain.unit if table.grain is not None else None
    extra = {"hour": (DATE, HOUR), "day": (DATE,)}.get(unit or "", ())
    return (*table.columns, *extra)


def names_of(columns: Iterable[Column]) -> list[tuple[str, str]]:
    """Returns the names and types of columns."""
    return [(column.name, column.type) for column in columns]


def struct_type(columns: Names) -> Any:
    """Returns Spark's StructType of columns. Raises TableError for a type that Spark does not
    know."""
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    result = StructType()
    for name, kind in columns:
        try:
            result.add(name, spark_type(kind))
        except (ParseException, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise TableError(f"column {name} has type {kind!r}: {first}") from None
    return result


def spark_type(kind: str) -> Any:
    """Returns the Spark type of a SQL type.

    Simple types, and structs of these, need no parser. Spark's SQL parser takes a second of
    processor time to load, which is felt in a short run. Raises ParseException and ValueError for a
    type that Spark does not know.
    """
    from pyspark.sql import types

    if kind in _SIMPLE_TYPES:
        return getattr(types, _SIMPLE_TYPES[kind])()
    if _SIMPLE_STRUCT.fullmatch(kind):
        members = [member.split(": ") for member in kind[len("struct<") : -1].split(", ")]
        if all(member_kind in _SIMPLE_TYPES for _, member_kind in members):
            return struct_type([(name, member_kind) for name, member_kind in members])
    return types.DataType.fromDDL(kind)


def arrow_schema(columns: Names) -> Any:
    """Returns the Arrow schema of columns. Timestamps are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(struct_type(columns), timezone="UTC")


def same_type(one: str, other: str) -> bool:
    """Returns whether two spellings name the same Spark type."""
    return one == other or bool(spark_type(one) == spark_type(other))


def check_evolution(table: str, last: Commit, columns: Names, partition_by: Sequence[str]) -> str:
    """Checks that a stored table can continue with these columns.

    They must be the same, or have additional ones at any place in the list. Returns the additions
    as text for the commit. Raises LakeError.
    """
    before = dict(last.columns)
    now = dict(columns)
    advice = (
        f"Declare it as it was, rename the table, or build it again: "
        f"`holdfast pipeline rebuild {table}`"
    )
    gone = [name for name in before if name not in now]
    if gone:
        raise LakeError(
            f"table {table} is stored with {_list(gone)}, which is not declared. {advice}"
        )
    for name, kind in before.items():
        if not same_type(kind, now[name]):
            raise LakeError(
                f"column {name} of table {table} is stored as {kind}, declared as {now[name]}. "
                + advice
            )
    if list(partition_by) != last.partition_by:
        raise LakeError(
            f"table {table} is partitioned by {_list(last.partition_by)}, declared with "
            f"{_list(partition_by)}. {advice}"
        )
    new = [f"{name} {kind}" for name, kind in now.items() if name not in before]
    return f"added {', '.join(new)}" if new else ""


def check_declared(table: Table, last: Commit | None) -> str:
    """Checks that a declaration can continue the stored table, see `check_evolution`. Raises
    LakeError."""
    if last is None:
        return ""
    if table.revision != last.revision:
        raise LakeError(
            f"table {table.name} is stored in revision {last.revision}, declared in revision "
            f"{table.revision}: build it again by `holdfast pipeline rebuild {table.name}`"
        )
    return check_evolution(
        table.name, last, names_of(stored_columns(table)), table.partition_columns
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


NAMES: Final = {
    "boolean": "boolean",
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}


def schema_json(columns: Sequence[tuple[str, str]]) -> str:
    """Returns the JSON schema of columns, all of them optional.

    Raises LakeError for a type that Iceberg lacks, and TableError.
    """
    return json.dumps({"schema-id": 0, **iceberg_type(struct_type(columns), count(1))})


def iceberg_type(kind: DataType, ids: Iterator[int]) -> Any:
    """Returns Iceberg's form of a type. `ids` yields numbers that are unique in the schema. Raises
    LakeError."""
    if isinstance(kind, StructType):
        fields = [
            {
                "id": next(ids),
                "name": member.name,
                "required": False,
                "type": iceberg_type(member.dataType, ids),
            }
            for member in kind.fields
        ]
        return {"type": "struct", "fields": fields}
    if isinstance(kind, ArrayType):
        return {
            "type": "list",
            "element-id": next(ids),
            "element-required": False,
            "element": iceberg_type(kind.elementType, ids),
        }
    if isinstance(kind, MapType):
        return {
            "type": "map",
            "key-id": next(ids),
            "key": iceberg_type(kind.keyType, ids),
            "value-id": next(ids),
            "value-required": False,
            "value": iceberg_type(kind.valueType, ids),
        }
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision}, {kind.scale})"
    name = kind.simpleString()
    if name not in NAMES:
        raise LakeError(
            f"a column has the type {name}, which Iceberg tables cannot have; they can have "
            f"{', '.join(NAMES)}, decimal, and structs, arrays and maps of these"
        )
    return NAMES[name]
