"""Adds the device tables to the report."""

from dataclasses import replace
from html import escape
from typing import Final

import numpy as np
import pyarrow
import pyarrow.compute as pc

from holdfast.pipeline.report import charts, seconds
from holdfast.pipeline.report.axis import Line, TimeAxis, axis_of_rows
from holdfast.pipeline.report.data import Stored, most, where
from holdfast.pipeline.report.grain import HOUR_S, MINUTE_S
from holdfast.pipeline.report.lines import Titles, latency_chart, readings_chart, time_chart
from holdfast.pipeline.report.page import (
    TABLE_ROWS_MAX,
    Heading,
    Page,
    ReportPart,
    shortened,
    table,
)
from holdfast.pipeline.report.seconds import METRICS_MAX
from holdfast.pipeline.report.short_span import ShortSpan

OTHERS_MAX: Final = 20
"""The most rows in a table of the worst or busiest."""
NAMES_MAX: Final = 40
"""The most metrics without a chart that are named."""


def add_devices(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    """Adds the parts of the device tables that exist, by seconds if the span is short."""
    if span is not None or stored.has("topics"):
        _messages(page, stored, span)
    if span is not None:
        seconds.add_gaps(page, span)
    if stored.has("device_minutes"):
        _readings(page, stored, span)
    if stored.has("latency"):
        _latency(page, stored, span)
    if stored.has("availability"):
        _availability(page, stored)
    if stored.has("missing"):
        _missing(page, stored)


def _messages(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    if stored.devices is not None and span is None:  # a topic is no device
        return
    part = page.part("Messages")
    if span is not None:
        seconds.add_messages(page, part, span)
    if not stored.has("topics") or stored.devices is not None:
        return
    rows = stored.read("topics", ["topic", "window_start", "messages", "rate"])
    if not rows.num_rows:
        part.html.append("<p class=empty>No messages yet.</p>")
        return
    if span is None:
        axis = axis_of_rows(rows["window_start"])
        caption = f"Mean of each {axis.grain.name}, over the part of it that was observed."
        titles = Titles("Messages a second, all topics", "messages a second")
        lines = [("messages", axis.bridged(_rates(rows, axis)), charts.BLUE)]
        time_chart(page, part, axis, titles, lines, caption)
    busiest = most(rows, ["topic"], "messages", OTHERS_MAX)
    count = len(rows["topic"].unique())
    headings = [Heading("topic", "topic"), Heading("messages_sum", "messages")]
    title = f"Topics, busiest first: {len(busiest)} of {count:,}"
    part.html.append(table(headings, busiest, title))


def _rates(rows: pyarrow.Table, axis: TimeAxis) -> Line:
    """Returns the messages a second of each step, by the observed seconds of its minutes."""
    # All topics of a minute have the same observed part. A minute without a rate is too short.
    observed = pc.divide(rows["messages"].cast(pyarrow.float64()), rows["rate"])
    minutes = (
        rows.append_column("seconds", observed)
        .group_by("window_start")
        .aggregate([("messages", "sum"), ("seconds", "max")])
    )
    minutes = minutes.filter(pc.is_valid(minutes["seconds_max"]))
    places = axis.places(minutes["window_start"].cast(pyarrow.int64()).to_numpy())
    counts = np.bincount(places, minutes["messages_sum"].to_numpy(), axis.count)
    lengths = np.bincount(places, minutes["seconds_max"].to_numpy(), axis.count)
    pairs = zip(counts.tolist(), lengths.tolist(), strict=True)
    return [count / length if length else None for count, length in pairs]


def _readings(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    part = page.part("Readings")
    if span is not None:
        others = seconds.add_readings(page, part, span)
    else:
        columns = ["device", "metric", "window_start", "numbers", "mean", "min", "max"]
        name, row_s = _readings_table(stored, part)
        rows = stored.read(name, columns)
        if not rows.num_rows:
            part.html.append("<p class=empty>No readings yet.</p>")
            return
        rows = rows.filter(pc.and_(pc.greater(rows["numbers"], 0), pc.is_valid(rows["mean"])))
        rows = rows.rename_columns({"window_start": "time"})
        metrics = [row["metric"] for row in most(rows, ["metric"], "numbers", rows.num_rows)]
        for metric in metrics[:METRICS_MAX]:
            of_metric = where(rows, metric=metric)
            axis = replace(axis_of_rows(of_metric["time"], row_s), gaps=[])
            readings_chart(page, part, axis, metric, of_metric)
        others = metrics[METRICS_MAX:]
    if others:
        names = ", ".join(shortened(each) for each in others[:NAMES_MAX])
        if len(others) > NAMES_MAX:
            names += f" and {len(others) - NAMES_MAX:,} more"
        part.html.append(f"<p class=note>Metrics with fewer readings: {escape(names)}.</p>")


def _readings_table(stored: Stored, part: ReportPart) -> tuple[str, int]:
    """Returns the table of the readings' charts, and the seconds of its rows: that of minutes, or
    that of hours if the other is too large."""
    minutes, hours = "device_minutes", "device_hours"
    if not stored.is_too_large(minutes) or not stored.has(hours):
        return minutes, MINUTE_S
    note = f"From the table {hours}: {minutes} has {stored.rows_of(minutes):,} rows."
    part.html.append(f"<p class=note>{note}</p>")
    return hours, HOUR_S


def _latency(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    part = page.part("Publish to store", "Of payloads that say when they were published.")
    if span is not None:
        seconds.add_latency(page, part, span)
        return
    rows = stored.read("latency", ["device", "window_start", "p50_ms", "p99_ms", "max_ms"])
    rows = rows.filter(pc.is_valid(rows["p50_ms"]))
    if not rows.num_rows:
        part.html.append("<p class=empty>No payload says when it was published.</p>")
        return
    axis = replace(axis_of_rows(rows["window_start"]), gaps=[])
    places = axis.places(rows["window_start"].cast(pyarrow.int64()).to_numpy())
    lines = []
    for name, column, colour in (
        ("p50", "p50_ms", charts.BLUE), ("p99", "p99_ms", charts.ORANGE),
        ("longest", "max_ms", charts.PINK),
    ):  # fmt: skip
        (line,) = axis.quantiles(places, rows[column].to_numpy(), (1.0,))
        lines.append((name, axis.bridged(line), colour))
    caption = f"Of each {axis.grain.name}: the worst of its devices and minutes."
    latency_chart(page, part, axis, "Latency of the worst device", lines, caption)


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
    found.sort(key=lambda row: (row["percent"], row["device"] or ""))
    headings = [
        Heading("device", "device"), Heading("percent", "available", "%", 3),
        Heading("outages_sum", "outages"), Heading("down_s_sum", "down", "s", 1),
    ]  # fmt: skip
    down = [row for row in found if row["down_s_sum"] or row["outages_sum"]]
    shown = down[:OTHERS_MAX]
    title = f"Devices, longest down first: {len(shown)} of {len(found):,}"
    empty = f"Of {len(found):,} devices, none was down." if found else "No device is known yet."
    part.html.append(table(headings, shown, title if shown else "Devices", empty))


def _missing(page: Page, stored: Stored) -> None:
    rows = stored.read(
        "missing", ["device", "stream", "first", "last", "count", "opened_at", "window_start"]
    )
    part = page.part("Missing messages", "From the table missing: numbers that never came.")
    found = rows.sort_by([("count", "descending")]).slice(0, TABLE_ROWS_MAX).to_pylist()
    headings = [
        Heading("device", "device"), Heading("stream", "stream"), Heading("first", "first"),
        Heading("last", "last"), Heading("count", "count"), Heading("opened_at", "noticed (UTC)"),
    ]  # fmt: skip
    title = f"Ranges, longest first: {len(found)} of {rows.num_rows:,}"
    part.html.append(table(headings, found, title if found else "Ranges", "No number is missing."))
