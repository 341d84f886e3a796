"""Writes the report of `holdfast pipeline report`: gold tables as charts in one file.

The file needs no network. The report reads the tables itself and starts no Spark.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from holdfast.pipeline.lake.catalog import Catalog
from holdfast.pipeline.lake.files.files import LakeError, write_atomically
from holdfast.pipeline.lake.objects.paths import LakePath
from holdfast.pipeline.report.data import Stored
from holdfast.pipeline.report.devices import add_devices
from holdfast.pipeline.report.page import Page, shortened
from holdfast.pipeline.report.quality import add_quality
from holdfast.pipeline.report.short_span import read_short_span


def write_report(
    lake: LakePath,
    catalog: Catalog,
    output: Path,
    run: str | None = None,
    devices: Sequence[str] = (),
) -> None:
    """Writes the report to a file. With `run` it is only about that test run, with `devices` only
    about the devices that match one of these patterns.

    Raises LakeError if there is nothing to show, and OSError.
    """
    write_atomically(output.absolute(), report(lake, catalog, run, devices).encode())


def report(
    lake: LakePath, catalog: Catalog, run: str | None = None, devices: Sequence[str] = ()
) -> str:
    """Returns the HTML of the report. Raises LakeError if there is nothing to show."""
    stored = Stored(lake, catalog.tables.values())
    if not any(catalog.is_gold(name) and stored.has(name) for name in catalog.tables):
        raise LakeError(
            f"{lake} has no gold tables yet: `holdfast pipeline run all` makes them "
            "(messages of QoS 0 are stored only on the topics in log.qos0)"
        )
    if run is not None and not catalog.report_parts:
        raise LakeError("only the tables of test runs have a run: give --tables holdfast_lab")
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    if devices:
        stored.choose_devices(devices)
    chosen = shortened(", ".join(devices))
    about = f"{lake.name}, {made}" + (f", only {chosen}" if devices else "")
    page = Page("Holdfast report", about)
    for add_to_report in catalog.report_parts:
        add_to_report(page, stored, run)
    if run is None:
        span = read_short_span(stored)
        add_devices(page, stored, span)
        add_quality(page, stored, span)
    if stored.cut:
        rows = "; ".join(f"{name}: {left_out}" for name, left_out in stored.cut.items())
        page.part("Not shown", f"Too many rows, so the oldest files were left out. {rows}.")
    return page.render()
