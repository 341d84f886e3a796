"""Iceberg for tests: settings of a Spark that can write its tables, and the tables as pyiceberg
reads them, which is no Spark.

Both come in Python packages that may not be installed: see iceberg_jar.py, and `pyiceberg`.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.iceberg_jar import PACKAGE, iceberg_jars

MISSING = "needs the packages pyiceberg and snowpark-connect-deps-iceberg"


def can_test_iceberg() -> bool:
    return find_spec(PACKAGE) is not None and find_spec("pyiceberg") is not None


def iceberg_settings(folder: Path) -> dict[str, str]:
    """Of a Spark session in which Iceberg tables can be written, if they can here. `folder`: see
    iceberg_jars."""
    jars = iceberg_jars(folder) if can_test_iceberg() else []
    return {"spark.jars": ",".join(map(str, jars))} if jars else {}


def iceberg_table(directory: Path) -> Any:
    from pyiceberg.table import StaticTable

    version = (directory / "metadata/version-hint.text").read_text().strip()
    return StaticTable.from_metadata(str(directory / f"metadata/v{version}.metadata.json"))


def iceberg_rows(directory: Path) -> Any:
    """A pyarrow table."""
    return iceberg_table(directory).scan().to_arrow()
