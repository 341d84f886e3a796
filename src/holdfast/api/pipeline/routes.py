"""Routes of data pipelines: the status of all, the report of one, and its end."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import LogSource
from holdfast.api.pipeline.reports import (
    NAME,
    REPORT_BYTES_MAX,
    PipelineReport,
    PipelineReports,
    StoredReport,
    TableReport,
)
from holdfast.api.views.pages import AbsentNode
from holdfast.log.batch import Batch
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

SILENT: Final = "silent"
SILENT_PERIODS: Final = 3
"""A running job that has not reported for so many of its periods is silent."""
PIPELINE: Final = Text("name", "the pipeline: letters, digits and ._-", required=True, most=128)


class PipelineStatus(Struct, kw_only=True):
    """A pipeline: the last report of its job, and its lag as this log sees it now."""

    name: str
    lake: str
    host: str
    """The machine of the job."""
    state: str
    """running, ended, failed, or silent: a running job that does not report any more."""
    began_us: int
    reported_us: int
    age_s: float
    """The seconds since the report."""
    by: str
    """The caller who has reported."""
    node: str
    """The node that has the report."""
    trigger_s: float
    """The seconds between two steps of a table; 0: the job ends when it has everything."""
    lag: int | None = None
    """The records of the log that the lake lacks now, of all kinds. None: not known, because the
    lake has read another log, or one that has lost its end."""
    lag_s: float | None = None
    """The seconds for which the oldest of them has been in the log. None: not known."""
    rows: int = 0
    """The rows of the bronze table."""
    quarantined: int = 0
    """The quarantined rows of all tables."""
    skipped_total: int = 0
    tables: list[TableReport]
    offsets: dict[str, int]
    ends: dict[str, int]
    """The end of each partition now."""


class Pipelines(Struct):
    """The pipelines that have reported to this log."""

    pipelines: list[PipelineStatus]
    missing: list[AbsentNode] = []
    """The nodes whose reports are not in this reply."""


class ReportsQuestion(Struct):
    """The question for the reports of a node. `forget`: a name whose report is removed first."""

    forget: str = ""


class ReportsAnswer(Struct):
    """The reports of a node."""

    reports: list[StoredReport]
    was_forgotten: bool = False


class PipelineRoutes:
    """The routes of pipelines."""

    def __init__(self, view: OwnNode, everywhere: Everywhere) -> None:
        self._view = view
        self._everywhere = everywhere
        self._lock = asyncio.Lock()
        self._reports = PipelineReports(Path(view.server.config.node.data))
        everywhere.offer("pipelines", ReportsQuestion, self._reports_here)

    def endpoints(self) -> list[Endpoint]:
        v1 = "/api/v1/pipeline"
        return [
            Endpoint("GET", v1, Scope.VIEWER, "the data pipelines: tables, lag, quarantine",
                     self._list, Pipelines, refusals=(503,)),
            # The progress of a reader is no change of the broker, as with consumer groups.
            Endpoint("POST", v1, Scope.READER, "report the status of a pipeline, from its job",
                     self._keep, None, (PIPELINE,), PipelineReport, REPORT_BYTES_MAX,
                     refusals=(503,), reads_only=True),
            Endpoint("DELETE", v1, Scope.OPERATOR, "forget the reports of a pipeline",
                     self._forget, None, (PIPELINE,), refusals=(404, 503)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> Pipelines:
        question = ReportsQuestion()
        others, missing = await self._everywhere.ask_others("pipelines", question, ReportsAnswer)
        newest: dict[str, StoredReport] = {}
        for answer in [await self._reports_here(question), *others]:
            for stored in answer.reports:
                known = newest.get(stored.name)
                if known is None or stored.at_us > known.at_us:
                    newest[stored.name] = stored
        found = [await self._status(newest[name]) for name in sorted(newest)]
        return Pipelines(found, missing)

    async def _keep(self, call: Call) -> None:
        name = _checked(call[PIPELINE])
        state = self._view.state
        report = call.body(PipelineReport)
        node = self._view.node_id
        stored = StoredReport(name, state.wall_us, call.caller.name, node, report)
        async with self._lock:
            try:
                await asyncio.to_thread(self._reports.keep, stored)
            except OSError as error:
                raise ApiRefusal(503, f"the report was not saved: {error.strerror}") from None

    async def _forget(self, call: Call) -> None:
        name = _checked(call[PIPELINE])
        question = ReportsQuestion(name)
        others, missing = await self._everywhere.ask_others("pipelines", question, ReportsAnswer)
        answers = [await self._reports_here(question), *others]
        if not any(answer.was_forgotten for answer in answers):
            if missing:
                nodes = ", ".join(each.node for each in missing)
                raise ApiRefusal(503, f"no report of {shown(name)} here; not asked: {nodes}")
            raise ApiRefusal(404, f"no pipeline {shown(name)} has reported")
        call.before = {"name": name}

    async def _reports_here(self, question: ReportsQuestion) -> ReportsAnswer:
        async with self._lock:
            was_there = bool(question.forget) and await asyncio.to_thread(
                self._reports.forget, _checked(question.forget)
            )
            return ReportsAnswer(await asyncio.to_thread(self._reports.all), was_there)

    async def _status(self, stored: StoredReport) -> PipelineStatus:
        report = stored.report
        broker = self._view.broker
        now_us = self._view.state.wall_us
        age_s = max(0.0, (now_us - stored.at_us) / 1e6)
        is_silent = report.state == "running" and age_s > SILENT_PERIODS * report.every_s
        ends = self._view.committed()
        lag, lag_s = _lag(report.offsets, ends), None
        if lag == 0:
            lag_s = 0.0
        elif lag is not None and broker.runtime.believes_disk:
            log = await self._view.log()
            oldest_us = await log.in_thread(partial(_oldest_us, log, report.offsets, log.ends))
            lag_s = None if oldest_us is None else round(max(0, now_us - oldest_us) / 1e6, 1)
        bronze = next((each for each in report.tables if each.layer == "bronze"), None)
        return PipelineStatus(
            name=stored.name,
            lake=report.lake,
            host=report.host,
            state=SILENT if is_silent else report.state,
            began_us=report.began_us,
            reported_us=stored.at_us,
            age_s=round(age_s, 1),
            by=stored.by,
            node=stored.node,
            trigger_s=report.trigger_s,
            lag=lag,
            lag_s=lag_s,
            rows=0 if bronze is None else bronze.rows,
            quarantined=sum(each.quarantined for each in report.tables),
            skipped_total=report.skipped_total,
            tables=report.tables,
            offsets=report.offsets,
            ends={str(partition): end for partition, end in enumerate(ends)},
        )


def _lag(offsets: dict[str, int], ends: list[int]) -> int | None:
    """The records behind the offsets. None: they are of another log."""
    own = {str(partition) for partition in range(len(ends))}
    for partition, offset in offsets.items():
        if partition not in own or offset > ends[int(partition)]:
            return None
    return sum(end - offsets.get(str(partition), 0) for partition, end in enumerate(ends))


def _oldest_us(reader: LogSource, offsets: dict[str, int], ends: list[int]) -> int | None:
    """The time of the oldest batch that a lake lacks. Runs in the reading thread."""
    oldest: int | None = None
    for partition, end in enumerate(ends):
        start = max(offsets.get(str(partition), 0), reader.first_offset(partition))
        if start >= end:
            continue
        for data in reader.read_batches(partition, start, start + 1, 1)[:1]:
            batch = Batch(data, check=False)
            at_us = batch.record(max(0, start - batch.base_offset)).timestamp_us
            oldest = at_us if oldest is None else min(oldest, at_us)
    return oldest


def _checked(name: str) -> str:
    """The name of a pipeline. Raises `ApiRefusal` (400)."""
    if not NAME.fullmatch(name):
        raise bad_request(f"name={shown(name)}: 1 to 128 letters, digits and ._-")
    return name
