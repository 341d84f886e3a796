"""Charts a short span in steps of seconds: messages, interruptions, latency."""

from typing import Final

import numpy as np
import pyarrow
import pyarrow.compute as pc

from holdfast.pipeline.report import charts
from holdfast.pipeline.report.axis import Floats, Line
from holdfast.pipeline.report.data import most
from holdfast.pipeline.report.grain import SECOND_US, Integers
from holdfast.pipeline.report.lines import Titles, latency_chart, readings_chart, time_chart
from holdfast.pipeline.report.page import TABLE_ROWS_MAX, Heading, Page, ReportPart, table
from holdfast.pipeline.report.short_span import ShortSpan

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
        "device": rows["device"], "metric": rows["metric"], "time": rows["event_time"],
        "mean": value, "min": value, "max": value, "numbers": numbers,
    })  # fmt: skip
    metrics = [row["metric"] for row in most(found, ["metric"], "numbers", found.num_rows)]
    for metric in metrics[:METRICS_MAX]:
        of_metric = found.filter(pc.equal(found["metric"], metric))
        readings_chart(page, part, span.axis, metric, of_metric)
    return metrics[METRICS_MAX:]


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
