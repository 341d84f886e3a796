"""Writes the report as one HTML file: without network, in light and dark, narrow and wide."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any, Final

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

        files = resources.files("holdfast.pipeline") / "report_assets"
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
