"""Test runs as data: events are records of the log, and Spark makes tables and a verdict from them.

docs/experiments.md describes the events and the tables. A program that only writes events needs no
Spark, so `TABLES` is loaded on first use.
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
