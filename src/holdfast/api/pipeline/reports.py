"""Keeps the reports that jobs of data pipelines send to this node.

A broker does not own a lake, and cannot read one on another machine. So each job reports its tables
to a server of its log. The newest report of each pipeline is in memory and in a file of the data
directory, not in the log: a record for each report would be one more record that the lake lacks.
"""

import logging
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

logger = logging.getLogger("holdfast")

FOLDER: Final = "pipelines"
SUFFIX: Final = ".json"
PIPELINES_MAX: Final = 32
"""The most pipelines whose reports a node keeps. One more replaces the one with the oldest."""
REPORT_BYTES_MAX: Final = 65_536
TABLES_MAX: Final = 500
"""The most tables of a report. Those with an error come first."""
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")

Name = Annotated[str, Meta(max_length=200)]
ReportState = Literal["running", "ended", "failed"]
Address = Annotated[str, Meta(max_length=4096)]


class TableReport(Struct):
    """One table of a lake, with the fields of `holdfast pipeline status --json`."""

    name: Name
    layer: Name
    source: Name
    version: int = 0
    rows: int = 0
    """The rows ever added (bronze, silver), or the present rows (gold)."""
    quarantined: int = 0
    """The rows that could not be decoded."""
    last_rows: int = 0
    last_commit_us: int | None = None
    last_took_s: float = 0.0
    """The duration of the last trigger that committed."""
    lag: int | None = None
    """The offsets, or rows of the source, that the table lacked at the report. None: not known."""
    lag_s: float | None = None
    counts: dict[str, int] = {}
    """The counts of the steps besides rows, such as repetitions."""
    error: Address = ""
    """The error that the table has failed with; empty: none."""


class PipelineReport(Struct):
    """The status of a lake, as its job reports it."""

    lake: Address
    host: Name
    """The machine of the job."""
    state: ReportState
    began_us: int
    """Start of the job, in microseconds since 1970."""
    every_s: Annotated[float, Meta(gt=0, le=86_400)]
    """A running job reports again within so many seconds."""
    trigger_s: Annotated[float, Meta(ge=0)] = 0.0
    """The seconds between two steps of a table; 0: the job ends when it has everything."""
    tables: Annotated[list[TableReport], Meta(max_length=TABLES_MAX)] = []
    offsets: dict[str, int] = {}
    """The offset of each partition up to which the lake has the log."""
    skipped_total: int = 0
    """The offsets of the log that are in no table."""


class StoredReport(Struct):
    """A report with its name, time and sender."""

    name: str
    at_us: int
    by: str
    node: str
    """The node that has received it."""
    report: PipelineReport


class PipelineReports:
    """The newest report of each pipeline that has reported to this node. Its methods block."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the data directory."""
        self._folder = directory / FOLDER
        self._reports: dict[str, StoredReport] | None = None

    def all(self) -> list[StoredReport]:
        """The reports by name."""
        reports = self._loaded()
        return [reports[name] for name in sorted(reports)]

    def keep(self, stored: StoredReport) -> None:
        """Replaces the report of a pipeline. Raises `OSError`; then memory has it all the same."""
        reports = self._loaded()
        reports[stored.name] = stored
        if len(reports) > PIPELINES_MAX:
            self.forget(min(reports, key=lambda name: reports[name].at_us))
        self._folder.mkdir(mode=0o750, exist_ok=True)
        path = self._folder / (stored.name + SUFFIX)
        part = path.with_suffix(".part")
        # Without fsync: the next report replaces one that a crash loses.
        part.write_bytes(msgspec.json.encode(stored))
        os.replace(part, path)

    def forget(self, name: str) -> bool:
        """Removes the report of a pipeline. False: there was none."""
        was_there = self._loaded().pop(name, None) is not None
        (self._folder / (name + SUFFIX)).unlink(missing_ok=True)
        return was_there

    def _loaded(self) -> dict[str, StoredReport]:
        if self._reports is None:
            self._reports = {}
            paths = sorted(self._folder.glob("*" + SUFFIX)) if self._folder.is_dir() else []
            for path in paths[:PIPELINES_MAX]:
                try:
                    stored = msgspec.json.decode(path.read_bytes(), type=StoredReport)
                except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    # The job sends another one.
                    logger.warning("pipeline_report_unreadable path=%r error=%r", path, str(error))
                    continue
                if NAME.fullmatch(stored.name) and path.name == stored.name + SUFFIX:
                    self._reports[stored.name] = stored
        return self._reports
