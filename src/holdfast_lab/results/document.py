"""Writes a run's results as a document: for each experiment a table of the study, ours and others.

`docs/experiments.md` and `docs/brokers.md` are such documents. Their results are kept beside them
without their charts, and a test makes the documents from them again.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import Final

from holdfast_lab.experiments import EXPERIMENTS
from holdfast_lab.results.figures import MAIN, figure, study_of, title_of
from holdfast_lab.results.store import FILE, LabRun, Result, load, save

COLUMNS: Final = 100
"""The width of a line of text."""
COLUMNS_MAX: Final = 6
"""The most targets that are columns of a table; more of them are its rows."""
HEAD: Final = """\
# {title}

This page has the experiments of the published studies, measured by [the lab](lab.md). The columns
are the study's figure, Holdfast's targets and other brokers. A dash is a figure that the study does
not give, or that was not measured. The page is generated from the results in `{kept}`:

```sh
{command}
```

"""


def document(run: LabRun, kept: str, page: str = "experiments") -> str:
    """Returns the document of a run. `kept` is the directory of its results, `page` the name of the
    document."""
    command = f"holdfast lab report {kept} --document docs/{page}.md"
    machine = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    lines = [
        f"- measured: {run.started[:16].replace('T', ' ')} UTC",
        f"- command: `{run.command}`",
        f"- machine: {machine}",
        *(f"- {version}" for version in dict.fromkeys(_versions(run.results))),
        "",
    ]
    for name in EXPERIMENTS:
        results = [each for each in run.results if each.experiment == name]
        if results:
            lines += _experiment(name, results)
    text = HEAD.format(title=page.capitalize(), command=command, kept=kept) + "\n".join(lines)
    return "\n".join(_wrapped(line) for line in text.split("\n"))


def _wrapped(line: str) -> str:
    """A line in the width of documents. Tables and commands stay as they are."""
    if len(line) <= COLUMNS or line.startswith(("|", "holdfast ")):
        return line
    indent = "  " if line.startswith("- ") else ""
    parts = wrap(
        line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(parts)


def _versions(results: Iterable[Result]) -> Iterator[str]:
    return (each.version for each in results if each.version and each.version != each.title)


def _experiment(name: str, results: list[Result]) -> list[str]:
    experiment = EXPERIMENTS[name]
    targets = " ".join(f"--target {each.target}" for each in results)
    titles = [each.title for each in results]
    lines = [
        f"## {title_of(name)}", "", f"{experiment.question} Source: {experiment.source}.", "",
        "```sh", f"holdfast lab run {name} {targets}", "```", "",
    ]  # fmt: skip
    table = [["figure", "the study", *titles]]
    for row in MAIN.get(name, ()):
        if any(row in each.figures for each in results):
            cells = [figure(each.figures.get(row)) for each in results]
            table.append([row, study_of(name, row), *cells])
    if any(each.promise for each in results):
        table.append(["acknowledged means", "–", *(each.promise or "–" for each in results)])
    if len(results) > COLUMNS_MAX:
        table = [list(row) for row in zip(*table, strict=True)]
    head, *rows = (f"| {' | '.join(row)} |" for row in table)
    lines += [head, "|" + "---|" * len(table[0]), *rows, ""]
    parameters = {f"{key} {value}" for each in results for key, value in each.parameters.items()}
    lines.append(f"Parameters: {', '.join(sorted(parameters))}.")
    remarks = [
        f"- {each.title}: {text}"
        for each in results
        for text in (*(f"broken promise: {one}" for one in each.broken), *each.problems)
    ]
    return [*lines, "", *([*remarks, ""] if remarks else [])]


def keep(run: LabRun, page: Path) -> None:
    """Writes the document of a run, and its results without charts into the directory beside it."""
    directory = page.with_suffix("")
    directory.mkdir(exist_ok=True)
    for each in run.results:
        each.charts = []
        each.events = ""
    save(run, directory)
    page.write_text(_page(directory))


def _page(directory: Path) -> str:
    return document(load(directory), f"docs/{directory.name}", directory.name)


def is_kept(page: Path) -> bool:
    """Returns whether a document is the one that its kept results make."""
    directory = page.with_suffix("")
    return (directory / FILE).exists() and page.read_text() == _page(directory)
