"""Test runs as data: events are records of the log, and Spark makes tables and a verdict from them.

docs/test-runs.md describes the events and the tables. `--tables holdfast_lab` adds the tables to
a lake, and their charts to its report. A program that only writes events needs no Spark, so both
are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast_lab.report import add_to_report
    from holdfast_lab.tables import TABLES

__all__ = ["TABLES", "add_to_report"]


def __getattr__(name: str) -> Any:
    if name == "TABLES":
        from holdfast_lab.tables import TABLES

        return TABLES
    if name == "add_to_report":
        from holdfast_lab.report import add_to_report

        return add_to_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
