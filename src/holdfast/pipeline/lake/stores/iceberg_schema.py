"""Writes a table's columns in the JSON form of Iceberg's specification."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

from holdfast.pipeline.lake.files.files import LakeError
from holdfast.pipeline.lake.schema import struct_type

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
