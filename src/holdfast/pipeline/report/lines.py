"""Lines over time: any values, and the readings of one device or of a thousand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow

from holdfast.pipeline.report import charts
from holdfast.pipeline.report.axis import Floats, Line, TimeAxis
from holdfast.pipeline.report.page import Page, ReportPart

LINES_MAX: Final = 6
"""The most devices with a line of their own. Of more there are bands."""
GAPS_MAX: Final = 50
"""The most gaps that are shaded."""
SHADED: Final = " Shaded: no message of any client was stored."
LOGARITHMIC: Final = 50
"""Ratio of a peak to the median from which the axis is logarithmic."""
LEAST_MS: Final = 0.1
"""The least latency on a logarithmic axis. Clocks that differ make it zero or less."""
MIDDLE: Final = (0.1, 0.5, 0.9)
"""The shares of devices below the band, the line and the end of the band."""


@dataclass(frozen=True)
class Titles:
    """The titles of a chart and of its y axis, and whether that axis is logarithmic."""

    chart: str
    y: str = ""
    is_logarithmic: bool = False


def time_chart(
    page: Page,
    part: ReportPart,
    axis: TimeAxis,
    titles: Titles,
    lines: Sequence[tuple[str, Line, str]],
    caption: str,
    bands: Sequence[tuple[str, Line, Line, float]] = (),
) -> None:
    """Adds a chart over the whole axis, with its gaps."""
    chart = charts.figure("time (UTC)", titles.y)
    chart.update_layout(xaxis={"range": list(axis.ends), "type": "date"})
    if titles.is_logarithmic:
        chart.update_layout(yaxis={"type": "log", "dtick": 1, "rangemode": "normal"})
    if not titles.y:  # a reading may be far from zero
        chart.update_layout(yaxis={"rangemode": "normal"})
    shaded = axis.longest_gaps(GAPS_MAX)
    charts.mark_gaps(chart, [gap.ends for gap in shaded])
    for name, low, high, share in bands:
        charts.band(chart, name, axis.steps, low, high, share)
    for name, values, colour in lines:
        charts.line(chart, name, axis.steps, values, colour)
    if shaded:
        caption += SHADED
    if len(shaded) < len(axis.gaps):
        caption += f" These are the longest {len(shaded)} of {len(axis.gaps):,} such times."
    page.chart(part, titles.chart, chart, caption)


def latency_chart(
    page: Page,
    part: ReportPart,
    axis: TimeAxis,
    title: str,
    lines: Sequence[tuple[str, Line, str]],
    caption: str,
) -> None:
    """Adds a chart of milliseconds. The axis is logarithmic if a peak would hide all else."""
    known = [value for _, line, _ in lines for value in line if value is not None]
    is_logarithmic = max(known) > LOGARITHMIC * max(float(np.median(known)), LEAST_MS)
    if is_logarithmic:
        caption += f" Below {LEAST_MS:g} ms a point is drawn at {LEAST_MS:g} ms."
        lines = [
            (name, [None if each is None else max(each, LEAST_MS) for each in line], colour)
            for name, line, colour in lines
        ]
    titles = Titles(title, "milliseconds", is_logarithmic)
    time_chart(page, part, axis, titles, lines, caption)


def readings_chart(
    page: Page, part: ReportPart, axis: TimeAxis, metric: str, rows: pyarrow.Table
) -> None:
    """Adds the chart of one metric. `rows` has device, time, mean, min, max, and numbers: how many
    readings the row is made of."""
    places = axis.places(rows["time"].cast(pyarrow.int64()).to_numpy())
    inside = (places >= 0) & (places < axis.count)
    column = rows["device"].combine_chunks().dictionary_encode()
    names: list[str] = column.dictionary.to_pylist()
    codes = column.indices.to_numpy()[inside].astype(np.int64)
    mean, low, high, weight = (
        rows[name].to_numpy()[inside].astype(np.float64)
        for name in ("mean", "min", "max", "numbers")
    )
    places = places[inside]
    keys, of_key = np.unique(codes * axis.count + places, return_inverse=True)
    means: Floats = np.bincount(of_key, mean * weight) / np.bincount(of_key, weight)
    steps, devices = keys % axis.count, keys // axis.count
    (least,) = axis.quantiles(places, low, (0.0,))
    (most,) = axis.quantiles(places, high, (1.0,))
    caption = f"Mean of each {axis.grain.name}."
    if len(names) > LINES_MAX:
        tenth, middle, ninth = axis.quantiles(steps, means, MIDDLE)
        bands = [("all values", least, most, 0.16), ("8 of 10 devices", tenth, ninth, 0.36)]
        caption += f" Median and bands of {len(names):,} devices."
        lines = [("median of the devices", axis.bridged(middle), charts.ORANGE)]
    else:
        bands, lines = [], []
        if least != most:
            bands = [("least to greatest value", least, most, 0.2)]
        for at in sorted(range(len(names)), key=names.__getitem__):
            line: Line = [None] * axis.count
            is_it = devices == at
            pairs = zip(steps[is_it].tolist(), means[is_it].tolist(), strict=True)
            for step, value in pairs:
                line[step] = value
            colour = charts.COLOURS[len(lines) % len(charts.COLOURS)]
            lines.append((names[at], axis.bridged(line), colour))
    time_chart(page, part, axis, Titles(metric), lines, caption, bands)
