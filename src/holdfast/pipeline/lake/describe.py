"""Descriptions of tables as plain data, for the command line and the documentation."""

from collections.abc import Sequence
from typing import Any

from holdfast.pipeline.lake.catalog import Catalog
from holdfast.pipeline.lake.schema import (
    QUARANTINE_DESCRIPTION,
    RECORDS_COLUMNS,
    RECORDS_DESCRIPTION,
    quarantine_columns,
    stored_columns,
)
from holdfast.pipeline.lake.table import QUARANTINE, RECORDS, Column


def described(catalog: Catalog, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the descriptions of all tables, or of some. Raises TableError for an unknown name."""
    everything = [
        _entry(RECORDS, "bronze", "the log", RECORDS_DESCRIPTION, RECORDS_COLUMNS, ("date",), ())
    ]
    for name, table in catalog.tables.items():
        everything.append(
            _entry(
                name,
                table.layer,
                table.source,
                table.description,
                stored_columns(table),
                table.partition_columns,
                table.keys,
            )
        )
    everything.append(
        _entry(
            QUARANTINE,
            "silver",
            "every silver table's source",
            QUARANTINE_DESCRIPTION,
            quarantine_columns(),
            ("table", "date"),
            (),
        )
    )
    for name in names:
        if name != QUARANTINE and name != RECORDS:
            catalog.table(name)
    return [entry for entry in everything if not names or entry["name"] in names]


def _entry(
    name: str,
    layer: str,
    source: str,
    description: str,
    columns: Sequence[Column],
    partition_by: Sequence[str],
    keys: Sequence[str],
) -> dict[str, Any]:
    return {
        "name": name,
        "layer": layer,
        "source": source,
        "description": description,
        "partition_by": list(partition_by),
        "keys": list(keys),
        "columns": [
            {"name": c.name, "type": c.type, "description": c.description} for c in columns
        ],
    }
