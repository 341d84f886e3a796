"""Spark side of Holdfast: the data source `holdfast`, its sink and the lake.

`pyspark_holdfast` lets Spark find the source automatically. Names are loaded on first use, because
tasks import this package and need only some of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.pipeline.lake.lake import Lake as Lake
    from holdfast.pipeline.lake.table import Column as Column
    from holdfast.pipeline.lake.table import Grain as Grain
    from holdfast.pipeline.lake.table import Outputs as Outputs
    from holdfast.pipeline.lake.table import Table as Table
    from holdfast.pipeline.lake.table import expect as expect
    from holdfast.pipeline.properties import decode_properties as decode_properties
    from holdfast.pipeline.session import spark_session as spark_session
    from holdfast.pipeline.source.source import HoldfastSource as HoldfastSource

_NAMES: Final = {
    "holdfast.pipeline.lake.lake": ("Lake",),
    "holdfast.pipeline.lake.table": ("Column", "Grain", "Outputs", "Table", "expect"),
    "holdfast.pipeline.properties": ("decode_properties",),
    "holdfast.pipeline.session": ("spark_session",),
    "holdfast.pipeline.source.source": ("HoldfastSource",),
}
"""The modules of the names that are loaded when they are first used."""
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
