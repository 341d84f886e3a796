"""The report of `holdfast pipeline report`: gold tables and test runs as charts in one HTML file.

The file needs no network. The report reads the tables itself and starts no Spark.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from holdfast.pipeline.lake.files.files import LakeError, write_atomically
from holdfast.pipeline.lake.table import Table
from holdfast.pipeline.report.data import Stored
from holdfast.pipeline.report.devices import add_devices
from holdfast.pipeline.report.page import Page
from holdfast.pipeline.report.runs import add_comparison, add_run

RUNS_MAX: Final = 5
"""The most runs that are shown without a choice, the newest ones."""


def write_report(lake: Path, tables: Sequence[Table], output: Path, run: str | None = None) -> None:
    """Write the report to a file.

    `tables` are the declarations of the tables that the lake may have. With `run`, the report is
    only about that test run. Raises LakeError if there is nothing to show, and OSError.
    """
    write_atomically(output.absolute(), report(lake, tables, run).encode())


def report(lake: Path, tables: Sequence[Table], run: str | None = None) -> str:
    """Return the HTML of the report. Raises LakeError if there is nothing to show."""
    stored = Stored(lake, tables)
    written = [table.name for table in tables if table.layer == "gold" and stored.has(table.name)]
    if not written:
        raise LakeError(f"{lake} has no gold tables yet: `holdfast pipeline run all` makes them")
    runs = stored.runs()
    if run is not None and run not in runs:
        known = ", ".join(runs[:10]) or "none"
        raise LakeError(f"{lake} has no test run {run}; there are: {known}")
    shown = [run] if run is not None else runs[:RUNS_MAX]
    page = Page("Holdfast report", _subtitle(lake, runs, shown))
    for name in shown:
        add_run(page, stored, name)
    if run is None:
        if len(runs) > 1:
            add_comparison(page, stored, runs)
        add_devices(page, stored)
    if stored.cut:
        rows = ", ".join(f"{count:,} of {name}" for name, count in stored.cut.items())
        page.part("Not shown", f"Too many rows: the oldest files were left out: {rows}.")
    return page.render()


def _subtitle(lake: Path, runs: Sequence[str], shown: Sequence[str]) -> str:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = f"{lake.name}, {made}"
    if len(runs) > len(shown):
        text += f"; {len(shown)} of {len(runs)} test runs in detail"
    return text
