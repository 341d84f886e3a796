"""Tables and counts, for people."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def table(rows: Sequence[dict[str, str]], numbers: Collection[str]) -> Iterator[str]:
    """Yields a table with the columns of the first row, `numbers` aligned to the right."""
    if not rows:
        return
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for row in [{name: name for name in widths}, *rows]:
        cells = (
            row[name].rjust(width) if name in numbers else row[name].ljust(width)
            for name, width in widths.items()
        )
        yield "  ".join(cells).rstrip()


def count_text(count: int, noun: str) -> str:
    """Returns a count with its noun in singular or plural."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size_text(size_bytes: int) -> str:
    """Formats a size in decimal units with three digits."""
    size = float(size_bytes)
    unit = 0
    while size >= 999.5 and unit + 1 < len(_UNITS):
        size /= 1000
        unit += 1
    return f"{size_bytes} B" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"
