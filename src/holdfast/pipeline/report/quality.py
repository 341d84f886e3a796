"""Reports what went wrong: repetitions, gaps, lateness, outages, quarantine."""

from typing import Any, Final

import pyarrow
import pyarrow.compute as pc

from holdfast.pipeline.lake.table import QUARANTINE
from holdfast.pipeline.report import charts
from holdfast.pipeline.report.data import Stored, most
from holdfast.pipeline.report.grain import MINUTE_S, grain_of, summed
from holdfast.pipeline.report.page import (
    TABLE_ROWS_MAX,
    Heading,
    Page,
    ReportPart,
    shortened,
    table,
)
from holdfast.pipeline.report.short_span import ShortSpan

MEASURES: Final = {
    "repetitions": ("repetitions, dropped", charts.SKY),
    "late": ("late", charts.ORANGE),
    "missing": ("numbers found missing", charts.RED),
    "filled": ("missing numbers that came later", charts.GREEN),
    "wrong_clock": ("clock not believed", charts.PINK),
}
"""The counts of the table `quality`, with their names and colours."""
DEVICES_MAX: Final = 25
"""The most devices with a line of their own in the chart of outages, and rows of the worst."""
SPANS_MAX: Final = 1000
"""The most outages in that chart, the longest ones."""
REASON_LENGTH: Final = 60
"""The characters of a reason that are shown. Rows of older versions, which have no code, are
grouped by them."""


def add_quality(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    """Adds the parts of the tables that exist, by seconds if the span is short."""
    if stored.has("quality"):
        _quality(page, stored, span)
    if stored.has("outages"):
        _outages(page, stored)
    if stored.devices is None:  # what could not be read has no device
        _quarantine(page, stored)


def _quality(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    rows = stored.read("quality", ["device", "window_start", "messages", *MEASURES])
    part = page.part(
        "Data quality", "Messages that came again, late, with gaps, or with a wrong clock."
    )
    if not rows.num_rows:
        part.html.append("<p class=empty>No messages yet.</p>")
        return
    totals = {name: pc.sum(rows[name]).as_py() or 0 for name in MEASURES}
    seen = [name for name, total in totals.items() if total]
    if not seen:
        part.html.append(
            "<p class=empty>No repetitions, no gaps, nothing late, no wrong clock.</p>"
        )
        return
    timed = rows if span is None else span.quality()
    least_s = MINUTE_S if span is None else 1
    measures = {name: MEASURES[name] for name in seen}
    _bars(page, part, "What was wrong", timed, "window_start", measures, least_s)
    found = rows.append_column("all", _sum_of(rows, seen))
    worst = [row["device"] for row in most(found, ["device"], "all", DEVICES_MAX) if row["all_sum"]]
    sums = rows.group_by("device").aggregate([(n, "sum") for n in ("messages", *seen)]).to_pylist()
    of_device = {row["device"]: row for row in sums}
    headings = [Heading("device", "device"), Heading("messages_sum", "messages")]
    headings += [Heading(f"{name}_sum", MEASURES[name][0]) for name in seen]
    title = f"Devices, worst first: {len(worst)} of {len(sums):,}"
    part.html.append(table(headings, [of_device[name] for name in worst], title))


def _sum_of(rows: pyarrow.Table, names: list[str]) -> pyarrow.ChunkedArray:
    total = pc.fill_null(rows[names[0]], 0)
    for name in names[1:]:
        total = pc.add(total, pc.fill_null(rows[name], 0))
    return total


def _bars(
    page: Page,
    part: ReportPart,
    title: str,
    rows: pyarrow.Table,
    time: str,
    measures: dict[str, tuple[str, str]],
    least_s: int = 1,
) -> None:
    """Adds a chart of stacked counts over time, in steps that fit the span."""
    grain = grain_of([pc.min(rows[time]).as_py(), pc.max(rows[time]).as_py()], least_s)
    steps, sums = summed(rows, time, list(measures), grain)
    chart = charts.figure("time (UTC)", f"each {grain.name}")
    chart.update_layout(barmode="stack", bargap=0.1)
    for name, (text, colour) in measures.items():
        charts.bars(chart, text, steps, sums[name], colour)
    page.chart(part, title, chart, f"Counts of each {grain.name}.")


def _outages(page: Page, stored: Stored) -> None:
    columns = ["device", "outage_from", "outage_to", "duration_s", "cause", "is_open"]
    rows = stored.read("outages", columns)
    part = page.part("Outages", "From the table outages: each device and day.")
    if not rows.num_rows:
        part.html.append("<p class=empty>No device was down.</p>")
        return
    worst = most(rows, ["device"], "duration_s", DEVICES_MAX)
    names = [row["device"] for row in worst]
    count = len(rows["device"].unique())
    chart = charts.figure("time (UTC)", "")
    of_worst = rows.filter(pc.is_in(rows["device"], pyarrow.array(names)))
    longest = of_worst.sort_by([("duration_s", "descending")]).slice(0, SPANS_MAX)
    for cause, colour in (("offline", charts.RED), ("silence", charts.ORANGE)):
        of_cause = longest.filter(pc.equal(longest["cause"], cause)).to_pylist()
        charts.spans(chart, cause, [
            (row["device"], row["outage_from"], row["outage_to"]) for row in of_cause
        ], colour)  # fmt: skip
    chart.update_layout(
        barmode="overlay", hovermode="closest", height=120 + 22 * len(names),
        yaxis={"categoryorder": "array", "automargin": True,
               "categoryarray": [shortened(name) for name in reversed(names)]},
    )  # fmt: skip
    caption = f"{len(names)} of {count:,} devices with outages, those that were down longest."
    if longest.num_rows < of_worst.num_rows:
        caption += f" The longest {SPANS_MAX:,} of their {of_worst.num_rows:,} outages."
    page.chart(part, "When devices were down", chart, caption)
    if count > len(names):
        _bars(page, part, "Outages of all devices", rows.append_column(
            "count", pyarrow.array([1] * rows.num_rows)
        ), "outage_from", {"count": ("outages that begin", charts.RED)})  # fmt: skip
    order = [("outage_from", "descending"), ("device", "ascending")]
    newest = rows.sort_by(order).slice(0, TABLE_ROWS_MAX).to_pylist()
    headings = [
        Heading("device", "device"), Heading("outage_from", "from (UTC)"),
        Heading("outage_to", "to (UTC)"), Heading("duration_s", "duration", "s", 1),
        Heading("cause", "cause"), Heading("is_open", "not over on this day"),
    ]  # fmt: skip
    title = f"Outages, newest first: {len(newest)} of {rows.num_rows:,}"
    part.html.append(table(headings, newest, title))


def _quarantine(page: Page, stored: Stored) -> None:
    rows = stored.read_quarantine()
    part = page.part("Quarantine", f"From the table {QUARANTINE}: values that could not be used.")
    if not rows.num_rows:
        part.html.append("<p class=empty>Nothing is in the quarantine.</p>")
        return
    counted = rows.append_column("count", pyarrow.array([1] * rows.num_rows))
    _bars(page, part, "Quarantined", counted, "timestamp", {"count": ("rows", charts.RED)})
    groups: dict[str, dict[str, Any]] = {}
    for row in rows.sort_by("timestamp").to_pylist():
        reason, code = _short(row["reason"] or ""), row["code"] or ""
        group = groups.setdefault(code or reason, {"code": code, "count": 0, "topics": set()})
        group["count"] += 1
        group["topics"].add(row["topic"])
        group |= {"last": row["timestamp"], "topic": row["topic"], "client_id": row["client_id"],
                  "reason": reason}  # fmt: skip
    found = sorted(groups.values(), key=lambda group: (-group["count"], group["code"]))
    shown = [{**group, "topics": len(group["topics"])} for group in found]
    headings = [
        Heading("code", "code"), Heading("count", "rows"), Heading("topics", "topics"),
        Heading("last", "last (UTC)"), Heading("reason", "its reason"),
        Heading("topic", "its topic"),
        Heading("client_id", "its client"),
    ]  # fmt: skip
    part.html.append(table(headings, shown, "Reasons"))


def _short(reason: str) -> str:
    return reason if len(reason) <= REASON_LENGTH else f"{reason[:REASON_LENGTH]}…"
