"""Writes the report as one HTML file, and draws its charts over a common time axis.

It needs no network, and is for light and dark, narrow and wide screens. The colours (Okabe and Ito)
are distinct also for colour-blind readers, on light and dark ground.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import pyarrow

from holdfast_lake.report.data import (
    MINUTE_S,
    SECOND_US,
    Integers,
    TimeGrain,
    grain_of,
    time_of,
)

TABLE_ROWS_MAX: Final = 40
"""The most rows of a table in the report."""
TEXT_MAX: Final = 100
"""The most characters of a name in the report. A topic may have 65,535 bytes."""


@dataclass(frozen=True)
class Heading:
    """A column of a table in the report. `unit` and `digits` are for numbers."""

    name: str
    title: str
    unit: str = ""
    digits: int = 0


@dataclass
class ReportPart:
    """The HTML below one heading, made by the functions of this module."""

    title: str
    html: list[str] = field(default_factory=list)


class Page:
    """The page in progress: its parts and figures."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title = title
        self.subtitle = subtitle
        self._parts: list[ReportPart] = []
        self._figures: list[Any] = []

    def part(self, title: str, note: str = "") -> ReportPart:
        """Adds a part and returns it."""
        made = ReportPart(title, [f"<p class=note>{escape(note)}</p>"] if note else [])
        self._parts.append(made)
        return made

    def chart(self, part: ReportPart, title: str, figure: Any, caption: str) -> None:
        """Adds a plotly figure to a part."""
        title = shortened(title)
        number = len(self._figures)
        self._figures.append(_without_markup(json.loads(figure.to_json())))
        height = self._figures[number]["layout"].get("height")
        style = f' style="height:{height}px"' if height else ""
        part.html.append(
            f"<figure><h3>{escape(title)}</h3><div class=chart id=chart-{number}{style} role=img"
            f' aria-label="{escape(title)}"></div><figcaption>{escape(caption)}</figcaption>'
            "</figure>"
        )

    def render(self) -> str:
        """Returns the HTML of the page."""
        from plotly.offline import get_plotlyjs

        files = resources.files("holdfast_lake") / "report_assets"
        # Behind a name with `<!--<script>`, the end tag would be a part of the script.
        figures = json.dumps(self._figures).replace("<", "\\u003c")
        links = "".join(
            f"<a href=#part-{at}>{escape(part.title)}</a>" for at, part in enumerate(self._parts)
        )
        parts = "".join(
            f"<section id=part-{at}><h2>{escape(part.title)}</h2>{''.join(part.html)}</section>"
            for at, part in enumerate(self._parts)
        )
        script = f"<script>{get_plotlyjs()}</script>" if self._figures else ""
        return (
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1">'
            '<meta name=color-scheme content="light dark">'
            f"<title>{escape(self._title)}</title>"
            f"<style>{(files / 'report.css').read_text()}</style></head><body>"
            f"<header><h1>{escape(self._title)}</h1><p>{escape(self.subtitle)}</p>"
            f"<nav>{links}</nav></header><main>{parts}</main>{script}"
            f"<script type=application/json id=figures>{figures}</script>"
            f"<script>{(files / 'report.js').read_text()}</script></body></html>\n"
        )


def _without_markup(value: Any) -> Any:
    """A part of a figure without HTML: Plotly would make a link of a device's name. The templates
    of hovers are the report's own."""
    if isinstance(value, dict):
        return {
            key: each if key == "hovertemplate" else _without_markup(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_markup(each) for each in value]
    return value.replace("<", "&lt;") if isinstance(value, str) else value


def facts(values: Sequence[tuple[str, str, str]]) -> str:
    """Returns large figures as HTML: name, value, and "good", "bad" or ""."""
    cells = "".join(
        f"<div class='fact {kind}'><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value, kind in values
    )
    return f"<dl class=facts>{cells}</dl>"


def table(
    headings: Sequence[Heading], rows: Sequence[dict[str, Any]], title: str, empty: str = "none"
) -> str:
    """Returns the first `TABLE_ROWS_MAX` rows as HTML, and the number of the others."""
    if not rows:
        return f"<h3>{escape(title)}</h3><p class=empty>{escape(empty)}</p>"
    head = "".join(
        f"<th{_alignment(heading, rows)}>{escape(_title(heading))}</th>" for heading in headings
    )
    body = "".join(
        "<tr>" + "".join(_cell(heading, row.get(heading.name)) for heading in headings) + "</tr>"
        for row in rows[:TABLE_ROWS_MAX]
    )
    left_out = len(rows) - TABLE_ROWS_MAX
    more = f"<p class=note>{left_out:,} more rows are not shown.</p>" if left_out > 0 else ""
    return (
        f"<h3>{escape(title)}</h3><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{more}"
    )


def _alignment(heading: Heading, rows: Sequence[dict[str, Any]]) -> str:
    """Returns the class of a heading: above numbers it is on their side."""
    values = (row.get(heading.name) for row in rows)
    first = next((value for value in values if value is not None), None)
    is_number = isinstance(first, int | float) and not isinstance(first, bool)
    return " class=number" if is_number else ""


def _title(heading: Heading) -> str:
    return f"{heading.title} ({heading.unit})" if heading.unit else heading.title


def _cell(heading: Heading, value: object) -> str:
    if isinstance(value, bool) or value is None or not isinstance(value, int | float):
        return f"<td>{escape(text_of(value))}</td>"
    return f"<td class=number>{escape(number(value, heading.digits))}</td>"


def number(value: float | None, digits: int = 0) -> str:
    """Formats a number, or a dash for None."""
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:,.{digits}f}"  # without the sign of a zero


def text_of(value: object) -> str:
    """Formats any value for a cell."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return shortened(str(value))


def shortened(text: str) -> str:
    """Returns a text without its middle if it is longer than `TEXT_MAX`. Topics differ at their
    ends."""
    half = TEXT_MAX // 2
    return text if len(text) <= TEXT_MAX else f"{text[:half]}…{text[1 - half :]}"


BREAK_INTERVALS: Final = 1.5
"""A line breaks between two points that are further apart than this many usual intervals."""
USUAL_SHARE: Final = 0.9
"""The share of intervals that are not longer than the usual one."""
GAP_INTERVALS: Final = 5
"""The number of usual intervals without any message that is an interruption."""
INTERVALS_MIN: Final = 20
"""The fewest intervals from which a usual one is computed."""
GAP_US_MIN: Final = SECOND_US
"""The shortest interruption, in microseconds."""

Floats = npt.NDArray[np.float64]
Line = list[float | None]


@dataclass(frozen=True)
class Interruption:
    """A time without a message of any client."""

    from_us: int
    to_us: int

    @property
    def duration_us(self) -> int:
        """The length in microseconds."""
        return self.to_us - self.from_us

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """The last message before it and the first one after it."""
        return time_of(self.from_us), time_of(self.to_us)


def gaps_of(times_us: Integers) -> list[Interruption]:
    """Returns the times between two messages that are far longer than usual. `times_us` is
    sorted."""
    intervals = np.diff(times_us)
    if len(intervals) < INTERVALS_MIN:
        return []
    usual = float(np.quantile(intervals, USUAL_SHARE))
    places = np.flatnonzero(intervals > max(GAP_INTERVALS * usual, GAP_US_MIN))
    return [Interruption(int(times_us[at]), int(times_us[at + 1])) for at in places]


@dataclass(frozen=True)
class TimeAxis:
    """A span of time in equal steps."""

    begin_us: int
    end_us: int
    grain: TimeGrain
    gaps: list[Interruption] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The number of the first step, counted from 1970."""
        return self.begin_us // self.grain.us

    @property
    def count(self) -> int:
        """The number of steps."""
        return self.end_us // self.grain.us - self.first + 1

    @property
    def begins_us(self) -> Integers:
        """The begin of each step."""
        found: Integers = (self.first + np.arange(self.count, dtype=np.int64)) * self.grain.us
        return found

    @property
    def steps(self) -> list[datetime]:
        """The time at which each step is drawn: its begin, or its middle if it is shorter than a
        minute. Otherwise the first messages after a gap would seem to be in it."""
        shift_us = self.grain.us // 2 if self.grain.seconds < MINUTE_S else 0
        return [time_of(each + shift_us) for each in self.begins_us.tolist()]

    def longest_gaps(self, count: int) -> list[Interruption]:
        """Returns the longest gaps, in the order of time."""
        longest = sorted(self.gaps, key=lambda gap: -gap.duration_us)[:count]
        return sorted(longest, key=lambda gap: gap.from_us)

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """The begin of the first step and the end of the last one, so that each is in sight."""
        begins_us = self.begins_us
        return time_of(int(begins_us[0])), time_of(int(begins_us[-1]) + self.grain.us)

    def places(self, times_us: Integers) -> Integers:
        """Returns the number of the step of each time, from 0. Times outside have other numbers."""
        found: Integers = times_us // self.grain.us - self.first
        return found

    def quantiles(self, places: Integers, values: Floats, shares: Sequence[float]) -> list[Line]:
        """Returns some quantiles of the values of each step (nearest rank). A step without values
        has None. `places` are in the span."""
        order = np.lexsort((values, places))
        values = values[order]
        counts = np.bincount(places, minlength=self.count)
        firsts = np.cumsum(counts) - counts
        found = []
        for share in shares:
            ranks = firsts + np.maximum(np.ceil(share * counts).astype(np.int64) - 1, 0)
            found.append([
                float(values[rank]) if count else None
                for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True)
            ])  # fmt: skip
        return found

    def bridged(self, line: Line) -> Line:
        """Fills steps that are empty only because there is no value in every step, on the straight
        line between their neighbours. Longer silences and the gaps of all stay empty."""
        values = np.array([np.nan if value is None else value for value in line])
        known = np.flatnonzero(~np.isnan(values))
        if len(known) < 3:
            return line
        distances = np.diff(known)
        limit = max(BREAK_INTERVALS * float(np.quantile(distances, USUAL_SHARE, method="lower")), 1)
        is_empty = np.ones(len(values), np.bool_)
        for before, distance in zip(known.tolist(), distances.tolist(), strict=False):
            if distance <= limit:
                is_empty[before : before + distance + 1] = False
        for gap in self.gaps:
            before, after = self.places(np.array([gap.from_us, gap.to_us]))
            is_empty[before + 1 : after] = True
        is_empty[known] = False
        filled = np.interp(np.arange(len(values)), known, values[known])
        pairs = zip(filled.tolist(), is_empty.tolist(), strict=True)
        return [None if empty else value for value, empty in pairs]


def axis_of_rows(times: pyarrow.ChunkedArray, row_s: int = MINUTE_S) -> TimeAxis:
    """Returns the axis of a table whose rows are of minutes, or of `row_s` seconds, with those that
    are missing."""
    row_us = row_s * SECOND_US
    found = np.unique(times.cast(pyarrow.int64()).to_numpy())
    intervals = np.diff(found)
    gaps = []
    if len(intervals):
        usual = float(np.quantile(intervals, USUAL_SHARE, method="lower"))
        places = np.flatnonzero(intervals > BREAK_INTERVALS * usual)
        gaps = [Interruption(int(found[at]) + row_us, int(found[at + 1])) for at in places]
    grain = grain_of([time_of(found[0]), time_of(found[-1])], row_s)
    return TimeAxis(int(found[0]), int(found[-1]) + row_us - 1, grain, gaps)


BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
RED: Final = "#D55E00"
PINK: Final = "#CC79A7"
COLOURS: Final = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKER: Final = 5
"""The size of the points of a line, in pixels."""
FAULT: Final = "rgba(213, 94, 0, 0.16)"


def figure(x_title: str, y_title: str, **layout: Any) -> go.Figure:
    """Returns an empty chart with titles of the axes."""
    made = go.Figure()
    made.update_layout(
        template="none",
        margin={"l": 56, "r": 12, "t": 12, "b": 44},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#1b2430", "font": {"color": "#ffffff"}},
        xaxis={"title": {"text": x_title}, "automargin": True},
        yaxis={"title": {"text": y_title}, "automargin": True, "rangemode": "tozero"},
        **layout,
    )
    return made


def line(
    chart: go.Figure,
    name: str,
    xs: Sequence[Any],
    ys: Sequence[float | None],
    colour: str,
    dash: str = "solid",
) -> None:
    """Adds a line to a chart."""
    style = {"color": colour, "width": 1.8, "dash": dash}
    # A point between two gaps has no line.
    is_alone = any(
        y is not None
        and (at == 0 or ys[at - 1] is None)
        and (at + 1 == len(ys) or ys[at + 1] is None)
        for at, y in enumerate(ys)
    )
    mode = "lines+markers" if len(xs) < 30 or is_alone else "lines"
    chart.add_scatter(
        x=list(xs), y=list(ys), name=shortened(name), mode=mode, line=style, marker={"size": MARKER}
    )


def band(
    chart: go.Figure,
    name: str,
    xs: Sequence[Any],
    low: Sequence[float | None],
    high: Sequence[float | None],
    share: float,
) -> None:
    """Adds the area between two lines to a chart. `share` is how opaque it is. Each stretch without
    a gap is a closed shape, and a point without a value parts it from the next one."""
    filled = f"rgba(86, 180, 233, {share:g})"
    around: list[Any] = []
    edge: list[float | None] = []
    begin = 0
    for at in range(len(xs) + 1):
        if at < len(xs) and low[at] is not None:
            continue
        if at > begin:
            stretch = slice(begin, at)
            if around:
                around.append(xs[begin])
                edge.append(None)
            around += [*xs[stretch], *reversed(xs[stretch])]
            edge += [*high[stretch], *reversed(low[stretch])]
        begin = at + 1
    chart.add_scatter(
        x=around, y=edge, name=name, hoverinfo="skip", mode="lines", line={"width": 0},
        fill="toself", fillcolor=filled,
    )  # fmt: skip


def mark_gaps(chart: go.Figure, ends: Sequence[tuple[datetime, datetime]]) -> None:
    """Shades the times without any message."""
    for begin, end in ends:
        chart.add_vrect(x0=begin, x1=end, fillcolor=FAULT, line_width=0, layer="below")


def bars(
    chart: go.Figure, name: str, xs: Sequence[Any], ys: Sequence[float | None], colour: str
) -> None:
    """Adds bars to a chart."""
    chart.add_bar(x=list(xs), y=list(ys), name=name, marker={"color": colour})


def spans(
    chart: go.Figure, name: str, found: Sequence[tuple[str, datetime, datetime]], colour: str
) -> None:
    """Adds spans of time to a chart, each in the row of its name."""
    chart.add_bar(
        orientation="h",
        y=[shortened(row) for row, _, _ in found],
        base=[begin for _, begin, _ in found],
        x=[(end - begin).total_seconds() * 1000 for _, begin, end in found],
        name=name,
        marker={"color": colour},
        customdata=[f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}" for _, begin, end in found],
        hovertemplate="%{y}<br>%{customdata}<extra>" + name + "</extra>",
    )
    chart.update_xaxes(type="date")


def shade(chart: go.Figure, spans: Sequence[tuple[float, float, str]]) -> None:
    """Shades the times of faults behind the lines. All faults share one trace, whatever their
    number."""
    for begin, end, _ in spans:
        chart.add_vrect(x0=begin, x1=end, fillcolor=FAULT, line_width=0, layer="below")
    if spans:
        middles = [(begin + end) / 2 for begin, end, _ in spans]
        chart.add_scatter(
            x=middles,
            y=[0] * len(spans),
            mode="markers",
            marker={"symbol": "square", "size": 9, "color": FAULT},
            name="fault",
            text=[name for _, _, name in spans],
            hovertemplate="%{text}<extra>fault</extra>",
        )


def points(
    chart: go.Figure,
    name: str,
    xs: Sequence[Any],
    ys: Sequence[Any],
    texts: Sequence[str],
    colour: str,
) -> None:
    """Adds points with texts to a chart."""
    chart.add_scatter(
        x=list(xs),
        y=list(ys),
        text=list(texts),
        name=name,
        mode="markers",
        marker={"color": colour, "size": 9, "opacity": 0.75},
        hovertemplate="%{text}<extra></extra>",
    )
    chart.update_layout(hovermode="closest")


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
    chart = figure("time (UTC)", titles.y)
    chart.update_layout(xaxis={"range": list(axis.ends), "type": "date"})
    if titles.is_logarithmic:
        chart.update_layout(yaxis={"type": "log", "dtick": 1, "rangemode": "normal"})
    if not titles.y:  # a reading may be far from zero
        chart.update_layout(yaxis={"rangemode": "normal"})
    shaded = axis.longest_gaps(GAPS_MAX)
    mark_gaps(chart, [gap.ends for gap in shaded])
    for name, low, high, share in bands:
        band(chart, name, axis.steps, low, high, share)
    for name, values, colour in lines:
        line(chart, name, axis.steps, values, colour)
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
        lines = [("median of the devices", axis.bridged(middle), ORANGE)]
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
            colour = COLOURS[len(lines) % len(COLOURS)]
            lines.append((names[at], axis.bridged(line), colour))
    time_chart(page, part, axis, Titles(metric), lines, caption, bands)
