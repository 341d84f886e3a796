"""Test runs as data: what happened is written as events, the events are records of the log, and
Spark makes the tables and the verdict from them. docs/experiments.md describes the events and
the tables.

Who only writes events needs no Spark: `TABLES` is loaded when it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.pipeline.experiments.tables import TABLES

__all__ = ["TABLES"]


def __getattr__(name: str) -> Any:
    if name != "TABLES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.pipeline.experiments.tables import TABLES

    return TABLES
