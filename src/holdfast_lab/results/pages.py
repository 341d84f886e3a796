"""Writes the report of a run of the lab: one HTML page without network."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from holdfast.pipeline.report.charts import Heading, Page, ReportPart, facts, number, table
from holdfast_lab.experiments import EXPERIMENTS
from holdfast_lab.results import pictures
from holdfast_lab.results.figures import MAIN, figure, study_of, title_of
from holdfast_lab.results.store import Chart, LabRun, Result


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
        page.chart(part, chart.title, pictures.drawn(chart), chart.caption)


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
