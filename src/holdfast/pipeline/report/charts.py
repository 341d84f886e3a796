"""The report's charts.

The colours (Okabe and Ito) are distinct also for colour-blind readers, on light and dark ground.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import plotly.graph_objects as go

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
RED: Final = "#D55E00"
PINK: Final = "#CC79A7"
COLOURS: Final = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
FAULT: Final = "rgba(213, 94, 0, 0.16)"


def figure(x_title: str, y_title: str, **layout: Any) -> go.Figure:
    """Return an empty chart with titles of the axes."""
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
    """Add a line to a chart."""
    style = {"color": colour, "width": 1.8, "dash": dash}
    mode = "lines+markers" if len(xs) < 30 else "lines"
    chart.add_scatter(x=list(xs), y=list(ys), name=name, mode=mode, line=style)


def bars(
    chart: go.Figure, name: str, xs: Sequence[Any], ys: Sequence[float | None], colour: str
) -> None:
    """Add bars to a chart."""
    chart.add_bar(x=list(xs), y=list(ys), name=name, marker={"color": colour})


def spans(
    chart: go.Figure, name: str, found: Sequence[tuple[str, datetime, datetime]], colour: str
) -> None:
    """Add spans of time to a chart, each in the row of its name."""
    chart.add_bar(
        orientation="h",
        y=[row for row, _, _ in found],
        base=[begin for _, begin, _ in found],
        x=[(end - begin).total_seconds() * 1000 for _, begin, end in found],
        name=name,
        marker={"color": colour},
        customdata=[f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S}" for _, begin, end in found],
        hovertemplate="%{y}<br>%{customdata}<extra>" + name + "</extra>",
    )
    chart.update_xaxes(type="date")


def shade(chart: go.Figure, spans: Sequence[tuple[float, float, str]]) -> None:
    """Shade the times of faults behind the lines. All faults share one trace, whatever their
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
    """Add points with texts to a chart."""
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
