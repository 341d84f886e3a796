"""The report's charts.

The colours (Okabe and Ito) are distinct also for colour-blind readers, on light and dark ground.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import plotly.graph_objects as go

from holdfast.pipeline.report.page import shortened

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
