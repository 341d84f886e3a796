"""Columns as Iceberg's specification has them."""

from itertools import count

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import types as t

from holdfast.client.log.lake.files import LakeError
from holdfast_lake.lake.schema import iceberg_type


def test_every_type_that_tables_have() -> None:
    plain = {
        t.BooleanType(): "boolean",
        t.ByteType(): "int",
        t.ShortType(): "int",
        t.IntegerType(): "int",
        t.LongType(): "long",
        t.FloatType(): "float",
        t.DoubleType(): "double",
        t.StringType(): "string",
        t.BinaryType(): "binary",
        t.DateType(): "date",
        t.TimestampType(): "timestamptz",
        t.TimestampNTZType(): "timestamp",
        t.DecimalType(12, 3): "decimal(12, 3)",
    }
    assert {kind: iceberg_type(kind, count(1)) for kind in plain} == plain


def test_nested_types_have_a_number_for_each_part() -> None:
    kind = t.StructType().add(
        "list", t.ArrayType(t.StructType().add("map", t.MapType(t.StringType(), t.LongType())))
    )
    mapping = {"type": "map", "key-id": 4, "key": "string"}
    mapping |= {"value-id": 5, "value": "long", "value-required": False}
    member = {"id": 3, "name": "map", "required": False, "type": mapping}
    element = {"type": "struct", "fields": [member]}
    many = {"type": "list", "element-id": 2, "element": element, "element-required": False}
    field = {"id": 1, "name": "list", "required": False, "type": many}
    assert iceberg_type(kind, count(1)) == {"type": "struct", "fields": [field]}


@pytest.mark.parametrize("kind", [t.VariantType(), t.DayTimeIntervalType(), t.NullType()])
def test_types_that_iceberg_has_not(kind: t.DataType) -> None:
    with pytest.raises(LakeError, match="which Iceberg tables cannot have; they can have boolean"):
        iceberg_type(kind, count(1))
