"""Tables and counts, for people."""

from collections.abc import Collection, Iterator, Sequence


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
