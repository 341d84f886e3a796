"""The Spark side of Holdfast: the data source `holdfast`, its sink and the lake.

`pyspark_holdfast` lets Spark find the source automatically. Names are loaded on first use, because
tasks import this package and need only some of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.pipeline.lake.lake import Lake
    from holdfast.pipeline.lake.table import Column, Grain, Outputs, Table
    from holdfast.pipeline.properties import decode_properties
    from holdfast.pipeline.session import spark_session
    from holdfast.pipeline.source.source import HoldfastSource

__all__ = [
    "Column",
    "Grain",
    "HoldfastSource",
    "Lake",
    "Outputs",
    "Table",
    "decode_properties",
    "spark_session",
]

_HOMES = {
    "Column": "holdfast.pipeline.lake.table",
    "Grain": "holdfast.pipeline.lake.table",
    "HoldfastSource": "holdfast.pipeline.source.source",
    "Lake": "holdfast.pipeline.lake.lake",
    "Outputs": "holdfast.pipeline.lake.table",
    "Table": "holdfast.pipeline.lake.table",
    "decode_properties": "holdfast.pipeline.properties",
    "spark_session": "holdfast.pipeline.session",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
