"""Reports a run's progress to the servers of its log, where operators and the console see it.

A report changes nothing in the log. A run never fails because of one. At its end it waits for the
servers, ANSWER_S for each request.
"""

import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from msgspec import Struct

from holdfast.api.pipeline.reports import (
    TABLES_MAX,
    PipelineReport,
    ReportState,
    TableReport,
)
from holdfast.client.admin_connection import AdminConnection, NoAnswer

if TYPE_CHECKING:
    from holdfast_lake.lake.lake import Lake
    from holdfast_lake.source.options import SourceOptions

EVERY_S: Final = 10.0
"""The seconds between two reports of a running job."""
ANSWER_S: Final = 5.0
"""The most seconds that one server is waited for."""
ERROR_CHARACTERS_MAX: Final = 500
NAME_CHARACTERS_MAX: Final = 100
_PATH: Final = "/api/v1/pipeline?name="


def pipeline_name(lake: str, host: str) -> str:
    """The name of a lake's pipeline: its last folder, with a digest of the place."""
    place = lake if "://" in lake else f"{host}:{lake}"
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", lake.rstrip("/").rpartition("/")[2])
    return f"{last[:NAME_CHARACTERS_MAX] or 'lake'}-{zlib.crc32(place.encode()):08x}"


class ReportReply(Struct):
    """The reply to a report."""


class StatusReporter:
    """The reports of one run, from a thread of its own. Use it in a `with` statement; `is_ok` says
    at the end whether all tables were made."""

    def __init__(
        self,
        lake: "Lake",
        source: "SourceOptions | None",
        errors: Mapping[str, str],
        *,
        trigger_s: float = 0.0,
        every_s: float = EVERY_S,
    ) -> None:
        """`source`: the options of the log; None: it is not known. `errors`: the present error of
        each failing table; other threads change it."""
        self.is_ok = False
        self._lake = lake
        self._errors = errors
        self._trigger_s = trigger_s
        self._every_s = every_s
        self._began_us = time.time_ns() // 1000
        self._host = socket.gethostname()
        place = str(lake.path)
        with suppress(AttributeError, OSError):
            place = str(lake.path.resolve())  # type: ignore[union-attr]
        self._place = place
        self._path = _PATH + quote(pipeline_name(place, self._host), safe="")
        self._connections = (
            [
                AdminConnection(server, access=source.access, timeout_s=ANSWER_S)
                for server in source.servers
            ]
            if source is not None
            else []
        )
        self._is_told = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def __enter__(self) -> "StatusReporter":
        if self._connections:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Sends the last report."""
        self._ending.set()
        if self._connections:
            self._thread.join()
            self._send("ended" if self.is_ok else "failed")
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        while True:
            self._send("running")
            if self._ending.wait(self._every_s):
                return

    def _send(self, state: ReportState) -> None:
        """Sends a report to the first server that takes it."""
        try:
            report = self.report(state)
            refusal = ""
            for connection in list(self._connections):
                try:
                    connection.exchange("POST", self._path, report, ReportReply)
                except NoAnswer as error:
                    refusal = refusal or str(error)
                    # The next report begins with the server that replied last.
                    self._connections.append(self._connections.pop(0))
                else:
                    return
        except Exception as error:  # noqa: BLE001 - a report must never end a run
            refusal = str(error) or repr(error)
        if not self._is_told:
            self._is_told = True
            line = refusal.splitlines()[0] if refusal else "no server"
            print(f"the progress is not reported to the servers: {line}", file=sys.stderr)

    def report(self, state: ReportState) -> PipelineReport:
        """The report of now."""
        status = self._lake.status(ask_servers=False, with_hints=False)
        errors = dict(self._errors)
        tables = [
            TableReport(
                table.name,
                table.layer,
                table.source,
                table.version,
                table.rows,
                table.quarantined,
                table.last_rows,
                table.last_commit_us,
                table.last_took_s,
                table.lag,
                table.lag_s,
                table.counts,
                errors.get(table.name, "")[:ERROR_CHARACTERS_MAX],
            )
            for table in status.tables
        ]
        tables.sort(key=lambda table: not table.error)
        return PipelineReport(
            self._place,
            self._host,
            state,
            self._began_us,
            self._every_s,
            self._trigger_s,
            tables[:TABLES_MAX],
            status.offsets,
            status.skipped_total,
        )
