"""Writes the report of `holdfast pipeline report`: gold tables as charts in one file.

The file needs no network. The report reads the tables itself and starts no Spark.

The gold tables have a row for each minute, which is a point or two for a short test. So for
messages that span at most an hour, the report counts the rows of `records` and `readings`
themselves, at most ROWS_MAX of each, in steps of seconds.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow
import pyarrow.compute as pc

from holdfast.client.log.lake.files import LakeError, write_atomically
from holdfast.client.log.lake.objects import LakePath
from holdfast_lake.lake.catalog import Catalog
from holdfast_lake.lake.status import hints
from holdfast_lake.lake.table import QUARANTINE, RECORDS
from holdfast_lake.report import charts
from holdfast_lake.report.charts import (
    TABLE_ROWS_MAX,
    Floats,
    Heading,
    Line,
    Page,
    ReportPart,
    TimeAxis,
    Titles,
    axis_of_rows,
    gaps_of,
    latency_chart,
    readings_chart,
    shortened,
    table,
    time_chart,
)
from holdfast_lake.report.data import (
    HOUR_S,
    MINUTE_S,
    SECOND_US,
    STEPS_MAX,
    Integers,
    Stored,
    grain_of,
    most,
    summed,
    time_of,
    where,
)
from holdfast_lake.tables.stream import REPEATED

ROWS_MAX: Final = 1_000_000
"""The most rows of a table that are counted by seconds. With more the report has minutes."""
READINGS: Final = "readings"
COLUMNS: Final = (
    "device", "metric", "event_time", "value_double", "unit", "store_time", "sent_time",
    "claimed_time", "position", "gap_before", "gap_opened_at", "is_late", "is_historical",
)  # fmt: skip
"""The columns of `readings` that the report needs."""
SPAN_US_MAX: Final = STEPS_MAX * 15 * SECOND_US
"""The longest span whose steps are shorter than a minute."""
_LATENCY_US: Final = (-300_000_000, 86_400_000_000)
"""The latencies that are believed, as in the table `latency`."""


class ShortSpan:
    """The rows of a lake, and the steps of its time axes."""

    def __init__(self, stored_us: Integers, readings: pyarrow.Table) -> None:
        """`stored_us`: the time at which the broker stored each message, in µs since 1970, sorted;
        not empty."""
        self.stored_us = stored_us
        self.readings = readings
        begin_us, end_us = int(stored_us[0]), int(stored_us[-1])
        grain = grain_of([time_of(begin_us), time_of(end_us)], 1)
        self.axis = TimeAxis(begin_us, end_us, grain, gaps_of(stored_us))

    def rates(self) -> Line:
        """Returns the messages a second of each step. A step without any in a gap has none. Neither
        have the first and the last step, of which only a part was observed."""
        axis = self.axis
        counts = np.bincount(axis.places(self.stored_us), minlength=axis.count)
        found: Line = (counts / axis.grain.seconds).tolist()
        begins = axis.begins_us
        for gap in axis.gaps:
            inside = (begins >= gap.from_us) & (begins + axis.grain.us <= gap.to_us)
            for at in np.flatnonzero(inside).tolist():
                found[at] = None
        if len(found) > 2:
            found[0] = found[-1] = None
        return found

    def messages(self) -> pyarrow.Table:
        """Returns one row of `readings` for each message and device, without repetitions."""
        first = pc.equal(self.readings["position"], 0)
        is_new = pc.not_equal(self.readings["metric"], REPEATED)
        return self.readings.filter(pc.and_(first, is_new))

    def quality(self) -> pyarrow.Table:
        """Returns one row for each message and device, with the counts of the table `quality`."""
        rows = self.readings.filter(pc.equal(self.readings["position"], 0))
        missing = pc.fill_null(rows["gap_before"], 0)
        was_missing = pc.and_(pc.is_valid(rows["gap_opened_at"]), pc.equal(missing, 0))
        found = {
            "repetitions": pc.equal(rows["metric"], REPEATED),
            "late": pc.fill_null(rows["is_late"], False),
            "missing": missing,
            "filled": was_missing,
            "wrong_clock": pc.is_valid(rows["claimed_time"]),
        }
        counts = {name: values.cast(pyarrow.int64()) for name, values in found.items()}
        return pyarrow.table({"window_start": rows["store_time"], **counts})

    def latencies(self) -> pyarrow.Table:
        """Returns the messages that say when they were published, with `latency_us`."""
        rows = self.messages()
        rows = rows.filter(pc.and_(
            pc.and_(pc.is_valid(rows["sent_time"]), pc.is_null(rows["claimed_time"])),
            pc.invert(pc.fill_null(rows["is_historical"], False)),
        ))  # fmt: skip
        stored, sent = (rows[name].cast(pyarrow.int64()) for name in ("store_time", "sent_time"))
        rows = rows.append_column("latency_us", pc.subtract(stored, sent))
        least, most = _LATENCY_US
        return rows.filter(pc.and_(pc.greater_equal(rows["latency_us"], least),
                                   pc.less_equal(rows["latency_us"], most)))  # fmt: skip


def read_short_span(stored: Stored) -> ShortSpan | None:
    """Returns the rows of a lake whose messages span little. None: they span more, there are too
    many, or the tables are not there. Raises LakeError."""
    if READINGS not in stored.tables:
        return None
    span = stored.span(RECORDS, "timestamp")
    if span is None or span[1] - span[0] >= SPAN_US_MAX:
        return None
    readings = stored.rows(READINGS, COLUMNS, ROWS_MAX)
    if readings is None:
        return None
    if stored.devices is not None:
        first = readings.filter(pc.equal(readings["position"], 0))
        times = first["store_time"]
    else:
        records = stored.rows(RECORDS, ["timestamp"], ROWS_MAX)
        if records is None:
            return None
        times = records["timestamp"]
    stored_us = np.sort(times.cast(pyarrow.int64()).to_numpy())
    return ShortSpan(stored_us, readings) if len(stored_us) else None


METRICS_MAX: Final = 16
"""The most metrics with a chart."""
SLOWEST_MAX: Final = 20
"""The devices in the table of the slowest."""
LATENCIES: Final = (
    ("p50", 0.5, charts.BLUE), ("p99", 0.99, charts.ORANGE), ("longest", 1.0, charts.PINK),
)  # fmt: skip
"""The quantiles of the latency that are shown."""


def add_messages(page: Page, part: ReportPart, span: ShortSpan) -> None:
    """Adds the rate of all messages, and the number of devices that sent any."""
    axis = span.axis
    time_chart(
        page, part, axis, Titles("Messages a second", "messages a second"),
        [("messages", span.rates(), charts.BLUE)], f"Mean of each {axis.grain.name}.",
    )  # fmt: skip
    rows = span.messages()
    if not rows.num_rows:
        return
    names, devices = _devices(rows)
    if len(names) < 2:
        return
    places = axis.places(_micros(rows["store_time"]))
    found = np.unique(np.stack([places, devices]), axis=1)[0]
    counts: Line = list(np.bincount(found, minlength=axis.count).tolist())
    time_chart(
        page, part, axis, Titles("Devices that sent a message", "devices"),
        [("devices", counts, charts.GREEN)],
        f"Of {len(names):,} devices, in each {axis.grain.name}.",
    )  # fmt: skip


def add_gaps(page: Page, span: ShortSpan) -> None:
    """Adds the times without any message, and the messages that waited for their end."""
    part = page.part(
        "Interruptions",
        "Times without a message of any client, longer than 5 usual intervals and a second. A "
        "restart or a failover of the broker looks like this.",
    )
    late = span.latencies()
    sent, stored = _micros(late["sent_time"]), _micros(late["store_time"])
    rows = []
    shown = span.axis.longest_gaps(TABLE_ROWS_MAX)
    for gap in shown:
        waited = (sent > gap.from_us) & (sent < gap.to_us) & (stored >= gap.to_us)
        longest_us = int((stored - sent)[waited].max()) if waited.any() else None
        begin, end = gap.ends
        rows.append({
            "from": f"{begin:%Y-%m-%d %H:%M:%S.%f}"[:-3],
            "to": f"{end:%H:%M:%S.%f}"[:-3],
            "duration": gap.duration_us / SECOND_US,
            "waited": int(waited.sum()),
            "longest": None if longest_us is None else longest_us / SECOND_US,
        })  # fmt: skip
    headings = [
        Heading("from", "last message before (UTC)"), Heading("to", "first message after"),
        Heading("duration", "duration", "s", 3),
        Heading("waited", "messages published meanwhile"),
        Heading("longest", "longest wait", "s", 3),
    ]  # fmt: skip
    count = len(span.axis.gaps)
    title = f"Interruptions: {count:,}"
    if len(shown) < count:
        title = f"Interruptions: the longest {len(shown)} of {count:,}"
    part.html.append(table(headings, rows, title, "There was none."))


def add_readings(page: Page, part: ReportPart, span: ShortSpan) -> list[str]:
    """Adds a chart of each metric. Returns the metrics without one: others have more readings."""
    rows = span.readings.filter(pc.is_valid(span.readings["value_double"]))
    rows = rows.filter(pc.invert(pc.starts_with(rows["metric"], "$")))
    value = rows["value_double"]
    numbers = pyarrow.array(np.ones(rows.num_rows, np.int64))
    found = pyarrow.table({
        "device": rows["device"], "metric": _with_units(rows), "time": rows["event_time"],
        "mean": value, "min": value, "max": value, "numbers": numbers,
    })  # fmt: skip
    metrics = [row["metric"] for row in most(found, ["metric"], "numbers", found.num_rows)]
    for metric in metrics[:METRICS_MAX]:
        of_metric = found.filter(pc.equal(found["metric"], metric))
        readings_chart(page, part, span.axis, metric, of_metric)
    return metrics[METRICS_MAX:]


def _with_units(rows: pyarrow.Table) -> pyarrow.ChunkedArray:
    """Returns the metric with its unit, so that no chart has several: `temperature (°C)`."""
    metric, unit = (rows[name].cast(pyarrow.string()) for name in ("metric", "unit"))
    named = pc.binary_join_element_wise(metric, " (", unit, ")", "")
    return pc.coalesce(named, metric)


def add_latency(page: Page, part: ReportPart, span: ShortSpan) -> None:
    """Adds the latency of all messages, and the slowest devices."""
    rows = span.latencies()
    if not rows.num_rows:
        part.html.append("<p class=empty>No payload says when it was published.</p>")
        return
    axis = span.axis
    ms: Floats = rows["latency_us"].to_numpy() / 1000.0
    places = axis.places(_micros(rows["store_time"]))
    found = axis.quantiles(places, ms, [share for _, share, _ in LATENCIES])
    latency_chart(
        page, part, axis, "Latency of all devices",
        [(name, axis.bridged(line), colour)
         for (name, _, colour), line in zip(LATENCIES, found, strict=True)],
        f"Of the messages stored in each {axis.grain.name}.",
    )  # fmt: skip
    names, devices = _devices(rows)
    order = np.lexsort((ms, devices))
    counts = np.bincount(devices)
    firsts = np.cumsum(counts) - counts
    slowest = np.argsort(-ms[order][firsts + counts - 1], kind="stable")[:SLOWEST_MAX]
    of_devices = []
    for at in slowest.tolist():
        count = int(counts[at])
        values = ms[order[firsts[at] : firsts[at] + count]]
        ranks = {name: max(int(np.ceil(share * count)) - 1, 0) for name, share, _ in LATENCIES}
        quantiles = {name: float(values[rank]) for name, rank in ranks.items()}
        of_devices.append({"device": names[at], "messages": count, **quantiles})
    headings = [Heading("device", "device"), Heading("messages", "messages")]
    headings += [Heading(name, name, "ms", 1) for name, _, _ in LATENCIES]
    title = f"Devices, slowest first: {len(of_devices)} of {len(names):,}"
    part.html.append(table(headings, of_devices, title))


def _devices(rows: pyarrow.Table) -> tuple[list[str], Integers]:
    """Returns the names of the devices, and the index of the name of each row."""
    column = rows["device"].combine_chunks().dictionary_encode()
    return column.dictionary.to_pylist(), column.indices.to_numpy().astype(np.int64)


def _micros(column: pyarrow.ChunkedArray) -> Integers:
    found: Integers = column.cast(pyarrow.int64()).to_numpy()
    return found


OTHERS_MAX: Final = 20
"""The most rows in a table of the worst or busiest."""
NAMES_MAX: Final = 40
"""The most metrics without a chart that are named."""


def add_devices(page: Page, stored: Stored, span: ShortSpan | None) -> None:
    """Adds the parts of the device tables that exist, by seconds if the span is short."""
    if span is not None or stored.has("topics"):
        _messages(page, stored, span)
    if span is not None:
        add_gaps(page, span)
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
        add_messages(page, part, span)
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
        others = add_readings(page, part, span)
    else:
        columns = ["device", "metric", "window_start", "numbers", "unit", "mean", "min", "max"]
        name, row_s = _readings_table(stored, part)
        rows = stored.read(name, columns)
        if not rows.num_rows:
            part.html.append("<p class=empty>No readings yet.</p>")
            return
        rows = rows.filter(pc.and_(pc.greater(rows["numbers"], 0), pc.is_valid(rows["mean"])))
        rows = rows.set_column(rows.schema.get_field_index("metric"), "metric", _with_units(rows))
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
        add_latency(page, part, span)
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
    rows = stored.read(
        "availability", ["device", "window_start", "up_s", "down_s", "outages", "availability"]
    )
    count = len(rows["device"].unique())
    rows = rows.filter(rows["availability"].is_valid())
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
    if count > len(found):
        part.html.append(
            f"<p>{count - len(found):,} more devices are not judged: they report neither online "
            "nor offline, and their messages come at uneven times, or there are few.</p>"
        )
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


def add_hints(page: Page, lines: Sequence[str]) -> None:
    """Adds what looks wrong in the tables, if anything does."""
    if lines:
        part = page.part("Hints", "What looks wrong in the tables, and what may mend it.")
        part.html.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")


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
        add_hints(page, hints(lake, catalog))
        span = read_short_span(stored)
        add_devices(page, stored, span)
        add_quality(page, stored, span)
    if stored.cut:
        rows = "; ".join(f"{name}: {left_out}" for name, left_out in stored.cut.items())
        page.part("Not shown", f"Too many rows, so the oldest files were left out. {rows}.")
    return page.render()
