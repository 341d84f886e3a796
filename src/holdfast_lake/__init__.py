"""Spark side of Holdfast: the data source `holdfast`, its sink and the lake.

`pyspark_holdfast` lets Spark find the source automatically. Names are loaded on first use, because
tasks import this package and need only some of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast_lake.lake.lake import Lake as Lake
    from holdfast_lake.lake.table import Column as Column
    from holdfast_lake.lake.table import Grain as Grain
    from holdfast_lake.lake.table import Outputs as Outputs
    from holdfast_lake.lake.table import Table as Table
    from holdfast_lake.lake.table import expect as expect
    from holdfast_lake.properties import decode_properties as decode_properties
    from holdfast_lake.session import spark_session as spark_session
    from holdfast_lake.source.columnar import read_messages as read_messages
    from holdfast_lake.source.source import HoldfastSource as HoldfastSource

_NAMES: Final = {
    "holdfast_lake.lake.lake": ("Lake",),
    "holdfast_lake.lake.table": ("Column", "Grain", "Outputs", "Table", "expect"),
    "holdfast_lake.properties": ("decode_properties",),
    "holdfast_lake.session": ("spark_session",),
    "holdfast_lake.source.columnar": ("read_messages",),
    "holdfast_lake.source.source": ("HoldfastSource",),
}
"""The modules of the names that are loaded when they are first used."""
_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
