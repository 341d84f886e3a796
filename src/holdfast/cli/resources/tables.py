"""Tables of rows from the admin port, without the control characters of a client id or topic."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], object]]
"""The heading of a column, and its value in a row."""


def escaped(value: object) -> str:
    """A value as text, in which characters that are not printable are escaped."""
    text = "yes" if value is True else "no" if value is False else str(value)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def table_lines(rows: Iterable[Row], columns: Sequence[Column]) -> list[str]:
    """The lines of a table with a heading, its columns as wide as needed."""
    cells = [[heading for heading, _ in columns]]
    cells += [[escaped(value(row)) or "-" for _, value in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
