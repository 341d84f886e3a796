"""`holdfast pipeline report`: the gold tables of a lake and the test runs in it, as charts in one
HTML file that needs no network. Reads the files itself, so no Spark is started."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from holdfast.pipeline.lake.files.files import LakeError, write_whole
from holdfast.pipeline.lake.table import Table
from holdfast.pipeline.report.data import Stored
from holdfast.pipeline.report.devices import add_devices
from holdfast.pipeline.report.page import Page
from holdfast.pipeline.report.runs import add_comparison, add_run

RUNS_MAX: Final = 5
"""Without a choice, the newest ones are shown."""


def write_report(lake: Path, tables: Sequence[Table], output: Path, run: str | None = None) -> None:
    """`tables`: the declarations of what the lake may have. `run`: only that test run. Raises
    LakeError when there is nothing to show, OSError."""
    write_whole(output.absolute(), report(lake, tables, run).encode())


def report(lake: Path, tables: Sequence[Table], run: str | None = None) -> str:
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
