"""The report's part about the device tables."""

from collections.abc import Sequence
from typing import Any, Final

import pyarrow

from holdfast.pipeline.report import charts
from holdfast.pipeline.report.data import POINTS_MAX, Stored, most, thinned, where
from holdfast.pipeline.report.page import Heading, Page, ReportPart, table

LINES_MAX: Final = 6
"""The most lines in a chart."""
OTHERS_MAX: Final = 20
"""The most rows in a table of the worst or busiest."""


def add_devices(page: Page, stored: Stored) -> None:
    """Add the parts of the device tables that exist."""
    if stored.has("topics"):
        _topics(page, stored)
    if stored.has("device_minutes"):
        _readings(page, stored)
    if stored.has("latency"):
        _latency(page, stored)
    if stored.has("availability"):
        _availability(page, stored)
    if stored.has("missing"):
        _missing(page, stored)


def _lines(
    page: Page,
    part: ReportPart,
    title: str,
    y_title: str,
    series: Sequence[tuple[str, Sequence[Any], Sequence[float | None]]],
    caption: str,
) -> None:
    chart = charts.figure("time (UTC)", y_title)
    chart.update_layout(yaxis={"rangemode": "normal"})
    longest = 0
    for at, (name, xs, ys) in enumerate(series):
        longest = max(longest, len(xs))
        charts.line(chart, name, *thinned(xs, ys), charts.COLOURS[at % len(charts.COLOURS)])
    if longest > POINTS_MAX:
        caption += (
            f" Of up to {longest:,} points a line, the lowest and the highest of each stretch are "
            "shown."
        )
    page.chart(part, title, chart, caption)


def _topics(page: Page, stored: Stored) -> None:
    columns = ["topic", "window_start", "messages", "bytes"]
    rows = stored.read("topics", columns)
    part = page.part("Messages", "From the table topics: each topic and minute.")
    if not rows.num_rows:
        part.html.append("<p class=empty>No messages yet.</p>")
        return
    by_minute = rows.group_by("window_start").aggregate([("messages", "sum")])
    by_minute = by_minute.sort_by("window_start").to_pydict()
    rates = [count / 60 for count in by_minute["messages_sum"]]
    title = "Messages a second, all topics"
    _lines(
        page, part, title, "messages a second",
        [("messages", by_minute["window_start"], rates)], "Mean of each minute.",
    )  # fmt: skip
    busiest = most(rows, ["topic"], "messages", OTHERS_MAX)
    count = len(rows["topic"].unique())
    headings = [Heading("topic", "topic"), Heading("messages_sum", "messages")]
    part.html.append(table(headings, busiest, f"The busiest of {count:,} topics"))


def _readings(page: Page, stored: Stored) -> None:
    columns = ["device", "metric", "window_start", "numbers", "mean", "min", "max"]
    rows = stored.read("device_minutes", columns)
    part = page.part("Readings", "From the table device_minutes.")
    if not rows.num_rows:
        part.html.append("<p class=empty>No readings yet.</p>")
        return
    metrics = most(rows, ["metric"], "numbers", LINES_MAX)
    for metric in metrics:
        of_metric = where(rows, metric=metric["metric"])
        devices = most(of_metric, ["device"], "numbers", LINES_MAX)
        if not devices or not devices[0]["numbers_sum"]:
            continue
        series = []
        for device in devices:
            one = where(of_metric, device=device["device"]).sort_by("window_start").to_pydict()
            series.append((device["device"], one["window_start"], one["mean"]))
        count = len(of_metric["device"].unique())
        caption = f"Mean of each minute; {len(devices)} of {count:,} devices, those with the most."
        _lines(page, part, metric["metric"], "", series, caption)


def _latency(page: Page, stored: Stored) -> None:
    columns = ["device", "window_start", "messages", "p50_ms", "p99_ms", "max_ms"]
    rows = stored.read("latency", columns)
    part = page.part("Publish to store", "From the table latency: payloads that have their time.")
    if not rows.num_rows:
        part.html.append("<p class=empty>No payload says when it was published.</p>")
        return
    worst = _worst_by_window(rows)
    series = [
        (name, worst["window_start"], worst[f"{column}_max"])
        for name, column in (("p50", "p50_ms"), ("p99", "p99_ms"), ("max", "max_ms"))
    ]
    _lines(page, part, "Latency of the worst device", "milliseconds", series, "Of each window.")


def _worst_by_window(rows: pyarrow.Table) -> dict[str, list[Any]]:
    names = [(name, "max") for name in ("p50_ms", "p99_ms", "max_ms")]
    found = rows.group_by("window_start").aggregate(names).sort_by("window_start")
    columns: dict[str, list[Any]] = found.to_pydict()
    return columns


def _availability(page: Page, stored: Stored) -> None:
    rows = stored.read("availability", ["device", "window_start", "up_s", "down_s", "outages"])
    part = page.part("Availability of devices", "From the table availability: all days together.")
    sums = rows.group_by("device").aggregate(
        [("up_s", "sum"), ("down_s", "sum"), ("outages", "sum")]
    )
    found = []
    for row in sums.sort_by("device").to_pylist():
        up_s, down_s = row["up_s_sum"] or 0.0, row["down_s_sum"] or 0.0
        if up_s + down_s:
            percent = 100 * up_s / (up_s + down_s)
            found.append({**row, "percent": percent})
    found.sort(key=lambda row: (row["percent"], row["device"]))
    headings = [
        Heading("device", "device"), Heading("percent", "available", "%", 3),
        Heading("outages_sum", "outages"), Heading("down_s_sum", "down", "s", 1),
    ]  # fmt: skip
    title = f"The worst of {len(found):,} devices"
    part.html.append(table(headings, found[:OTHERS_MAX], title, "no device is known yet"))


def _missing(page: Page, stored: Stored) -> None:
    rows = stored.read(
        "missing", ["device", "stream", "first", "last", "count", "opened_at", "window_start"]
    )
    part = page.part("Missing messages", "From the table missing: numbers that never came.")
    found = rows.to_pylist()
    headings = [
        Heading("device", "device"), Heading("stream", "stream"), Heading("first", "first"),
        Heading("last", "last"), Heading("count", "count"), Heading("opened_at", "noticed (UTC)"),
    ]  # fmt: skip
    part.html.append(table(headings, found, "Ranges", "No number is missing."))
