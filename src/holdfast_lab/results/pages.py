"""Writes the report of a run of the lab: one HTML page without network."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from holdfast_lab.experiments import EXPERIMENTS
from holdfast_lab.results.figures import MAIN, figure, study_of, title_of
from holdfast_lab.results.store import Chart, LabRun, Result
from holdfast_lake.report import charts
from holdfast_lake.report.charts import Heading, Page, ReportPart, facts, number, table

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


def html(run: LabRun, verdicts: Mapping[str, str]) -> str:
    """The page. `verdicts`: the text of the pipeline's verdict by file of events."""
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    page = Page("The lab", f"{run.started} · {machine} · {run.command}")
    _summary(page, run, verdicts)
    for name, experiment in EXPERIMENTS.items():
        results = [each for each in run.results if each.experiment == name]
        if not results:
            continue
        part = page.part(title_of(name), f"{experiment.question} Source: {experiment.source}.")
        for chart in merged(results):
            _draw(page, part, chart)
        part.html.append(_figures_table(results))
        for result in results:
            _remarks(part, result, verdicts)
    return page.render()


def _summary(page: Page, run: LabRun, verdicts: Mapping[str, str]) -> None:
    part = page.part("Summary", "Each experiment, beside what its study found.")
    broken = sum(len(each.broken) for each in run.results)
    problems = sum(len(each.problems) for each in run.results)
    part.html.append(
        facts(
            [
                ("experiments", number(len({each.experiment for each in run.results})), ""),
                ("targets", number(len({each.target for each in run.results})), ""),
                ("broken promises", number(broken), "bad" if broken else "good"),
                ("missing figures", number(problems), ""),
            ]
        )
    )
    headings = [
        Heading("experiment", "experiment"), Heading("target", "target"),
        Heading("figure", "figure"), Heading("ours", "value"), Heading("study", "the study"),
    ]  # fmt: skip
    part.html.append(table(headings, list(_summary_rows(run)), "Main figures"))


def _summary_rows(run: LabRun) -> Iterator[dict[str, Any]]:
    for name in EXPERIMENTS:
        for result in run.results:
            if result.experiment != name:
                continue
            for name_of in MAIN.get(name, ()):
                if name_of in result.figures:
                    yield {
                        "experiment": title_of(name),
                        "target": result.title,
                        "figure": name_of,
                        "ours": figure(result.figures[name_of]),
                        "study": study_of(name, name_of),
                    }


def merged(results: list[Result]) -> list[Chart]:
    """The charts of an experiment, with the lines of all targets in each. A line that two targets
    have, such as the study's, is drawn once."""
    found: dict[str, Chart] = {}
    for result in results:
        for chart in result.charts:
            known = found.get(chart.title)
            if known is None:
                series = list(chart.series)
                found[chart.title] = Chart(
                    chart.title, chart.x_title, chart.y_title, chart.caption, series, chart.kind
                )
            else:
                names = {each.name for each in known.series}
                known.series += [each for each in chart.series if each.name not in names]
    return list(found.values())


def _draw(page: Page, part: ReportPart, chart: Chart) -> None:
    if any(len(each.xs) for each in chart.series):
        page.chart(part, chart.title, drawn(chart), chart.caption)


def _figures_table(results: list[Result]) -> str:
    names: dict[str, None] = {}
    for result in results:
        names.update(dict.fromkeys(result.figures))
    heads = "".join(f"<th class=number>{escape(each.title)}</th>" for each in results)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td class=number>{figure(each.figures.get(name))}</td>" for each in results)
        + "</tr>"
        for name in names
    )
    return (
        f"<h3>Figures</h3><div class=scroll><table><thead><tr><th></th>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _remarks(part: ReportPart, result: Result, verdicts: Mapping[str, str]) -> None:
    parameters = ", ".join(f"{name} {value}" for name, value in result.parameters.items())
    rows = [{"what": "version", "text": result.version}, {"what": "how", "text": parameters}]
    rows += [{"what": "no figure", "text": text} for text in result.problems]
    rows += [{"what": "BROKEN PROMISE", "text": text} for text in result.broken]
    if result.events in verdicts:
        rows.append({"what": "judged by Spark", "text": verdicts[result.events]})
    headings = [Heading("what", ""), Heading("text", "")]
    part.html.append(table(headings, rows, result.title))


def comparison(before: LabRun, after: LabRun) -> list[dict[str, str]]:
    """The figures that both runs have, with their ratio."""
    rows: list[dict[str, str]] = []
    known = {(each.experiment, each.target): each for each in before.results}
    for result in after.results:
        old = known.get((result.experiment, result.target))
        for name, value in result.figures.items() if old is not None else ():
            was = old.figures.get(name) if old is not None else None
            if value is None or was is None:
                continue
            ratio = f"{value / was:.2f}" if was else "–"
            rows.append(
                {
                    "experiment": result.experiment, "target": result.target, "figure": name,
                    "before": figure(was), "after": figure(value), "ratio": ratio,
                }
            )  # fmt: skip
    return rows
