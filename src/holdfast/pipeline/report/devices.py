"""The report's part about the device tables."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

import pyarrow
import pyarrow.compute as pc

from holdfast.pipeline.report import charts
from holdfast.pipeline.report.data import POINTS_MAX, Stored, most, thinned, where
from holdfast.pipeline.report.grain import TimeGrain, grain_of
from holdfast.pipeline.report.page import Heading, Page, ReportPart, table

LINES_MAX: Final = 6
"""The most lines in a chart."""
METRICS_MAX: Final = 16
"""The most metrics with a chart."""
OTHERS_MAX: Final = 20
"""The most rows in a table of the worst or busiest."""


def add_devices(page: Page, stored: Stored) -> None:
    """Add the parts of the device tables that exist."""
    if stored.has("topics") and stored.devices is None:  # a topic is no device
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
    columns = ["topic", "window_start", "messages", "rate"]
    rows = stored.read("topics", columns)
    part = page.part("Messages", "From the table topics: each topic and minute.")
    if not rows.num_rows:
        part.html.append("<p class=empty>No messages yet.</p>")
        return
    grain = grain_of([pc.min(rows["window_start"]).as_py(), pc.max(rows["window_start"]).as_py()])
    steps, rates = _rates(rows, grain)
    title = "Messages a second, all topics"
    caption = f"Mean of each {grain.name}, over the part of it that was observed."
    _lines(page, part, title, "messages a second", [("messages", steps, rates)], caption)
    busiest = most(rows, ["topic"], "messages", OTHERS_MAX)
    count = len(rows["topic"].unique())
    headings = [Heading("topic", "topic"), Heading("messages_sum", "messages")]
    title = f"Topics, busiest first: {len(busiest)} of {count:,}"
    part.html.append(table(headings, busiest, title))


def _rates(rows: pyarrow.Table, grain: TimeGrain) -> tuple[list[datetime], list[float | None]]:
    """Return the messages a second of each step, by the observed seconds of its minutes."""
    # All topics of a minute have the same observed part. A minute without a rate is too short.
    seconds = pc.divide(rows["messages"].cast(pyarrow.float64()), rows["rate"])
    minutes = (
        rows.append_column("seconds", seconds)
        .group_by("window_start")
        .aggregate([("messages", "sum"), ("seconds", "max")])
    )
    minutes = minutes.filter(pc.is_valid(minutes["seconds_max"]))
    if not minutes.num_rows:
        return [], []
    stepped = minutes.append_column("step", grain.steps(minutes["window_start"]))
    found = stepped.group_by("step").aggregate([("messages_sum", "sum"), ("seconds_max", "sum")])
    found = found.sort_by("step").to_pydict()
    pairs = zip(found["messages_sum_sum"], found["seconds_max_sum"], strict=True)
    return found["step"], [count / length if length else None for count, length in pairs]


def _readings(page: Page, stored: Stored) -> None:
    columns = ["device", "metric", "window_start", "numbers", "mean", "min", "max"]
    rows = stored.read("device_minutes", columns)
    part = page.part("Readings", "From the table device_minutes.")
    if not rows.num_rows:
        part.html.append("<p class=empty>No readings yet.</p>")
        return
    every = [row for row in most(rows, ["metric"], "numbers", rows.num_rows) if row["numbers_sum"]]
    for metric in every[:METRICS_MAX]:
        of_metric = where(rows, metric=metric["metric"])
        devices = most(of_metric, ["device"], "numbers", LINES_MAX)
        if not devices or not devices[0]["numbers_sum"]:
            continue
        series = []
        for device in devices:
            one = where(of_metric, device=device["device"]).sort_by("window_start").to_pydict()
            series.append((device["device"], one["window_start"], one["mean"]))
        count = len(of_metric["device"].unique())
        caption = "Mean of each minute."
        if count > len(devices):
            caption += f" {len(devices)} of {count:,} devices, those with the most readings."
        _lines(page, part, metric["metric"], "", series, caption)
    if every[METRICS_MAX:]:
        names = ", ".join(metric["metric"] for metric in every[METRICS_MAX:])
        part.html.append(f"<p class=note>Metrics with fewer readings: {escape(names)}.</p>")


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
    down = [row for row in found if row["down_s_sum"] or row["outages_sum"]]
    shown = down[:OTHERS_MAX]
    title = f"Devices, longest down first: {len(shown)} of {len(found):,}"
    empty = f"None of {len(found):,} devices was down." if found else "No device is known yet."
    part.html.append(table(headings, shown, title if shown else "Devices", empty))


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
