"""Stored charts as figures of plotly, in the style of the pipeline's report."""

from typing import Any, Final

from holdfast.pipeline.report import charts
from holdfast_lab.results.store import Chart

LOGARITHMIC: Final = frozenset(
    {"Downtime", "Latency by clients", "Latency of federated publications"}
)
"""The charts whose values differ by more than a factor of ten."""
GRAPH_COLOURS: Final = {"link": charts.SKY, "link of 8": charts.RED, "member": charts.BLUE}
EVENT_COLOURS: Final = {
    "fault": charts.RED,
    "detected": charts.ORANGE,
    "elected": charts.BLUE,
    "connected": charts.SKY,
    "disconnected": "#7a8699",
    "service": charts.GREEN,
    "silence": charts.PINK,
}


def drawn(chart: Chart) -> Any:
    """The figure of a chart."""
    draw = {"heat": _heat, "graph": _graph, "points": _points}.get(chart.kind, _lines)
    figure = charts.figure(chart.x_title, chart.y_title)
    draw(figure, chart)
    return figure


def _lines(figure: Any, chart: Chart) -> None:
    draw: Any = charts.bars if chart.kind == "bar" else charts.line
    for place, series in enumerate(chart.series):
        colour = charts.COLOURS[place % len(charts.COLOURS)]
        draw(figure, series.name, series.xs, series.ys, colour)
    if chart.title in LOGARITHMIC:
        figure.update_yaxes(type="log", rangemode="normal")
    if chart.title.startswith("Distribution"):
        figure.update_xaxes(type="log")
        figure.update_layout(hovermode="closest")


def _heat(figure: Any, chart: Chart) -> None:
    figure.add_heatmap(
        x=list(chart.series[0].xs),
        y=[float(series.name) for series in chart.series],
        z=[list(series.ys) for series in chart.series],
        colorscale="Viridis",
        colorbar={"title": {"text": "messages"}},
        hovertemplate="%{x:.1f} s, about %{y:.3g} ms: %{z} messages<extra></extra>",
    )
    figure.update_yaxes(type="log", rangemode="normal")
    figure.update_layout(hovermode="closest")


def _graph(figure: Any, chart: Chart) -> None:
    for series in chart.series:
        colour = GRAPH_COLOURS.get(series.name, charts.BLUE)
        if not series.texts:
            width = 3 if series.name == "link of 8" else 1.5
            figure.add_scatter(
                x=list(series.xs), y=list(series.ys), name=series.name, mode="lines",
                line={"color": colour, "width": width}, hoverinfo="skip",
            )  # fmt: skip
            continue
        figure.add_scatter(
            x=list(series.xs), y=list(series.ys), name=series.name, mode="markers+text",
            text=[text.split(",")[0] for text in series.texts], hovertext=list(series.texts),
            textfont={"color": "#ffffff"}, hoverinfo="text",
            marker={"color": colour, "size": 26},
        )  # fmt: skip
    hidden = {"visible": False, "range": [-1.25, 1.25]}
    figure.update_layout(
        xaxis=hidden, yaxis={**hidden, "scaleanchor": "x"}, hovermode="closest", height=380
    )


def _points(figure: Any, chart: Chart) -> None:
    for place, series in enumerate(chart.series):
        colour = EVENT_COLOURS.get(series.name, charts.COLOURS[place % len(charts.COLOURS)])
        if series.texts:
            charts.points(figure, series.name, series.xs, series.ys, series.texts, colour)
        else:
            figure.add_scatter(
                x=list(series.xs), y=list(series.ys), name=series.name, mode="lines",
                line={"color": colour, "width": 8}, opacity=0.55, hoverinfo="skip",
            )  # fmt: skip
    figure.update_yaxes(type="category", autorange="reversed", rangemode="normal")
    # A lower one has too little room for the legend on a narrow page.
    figure.update_layout(height=360)
