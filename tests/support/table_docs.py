"""A table's declaration as docs/tables.md has it."""

from textwrap import fill

from holdfast_lake.lake.table import Grain, Table

COLUMNS = 100
_UNITS = {"hour": "each hour", "day": "each day", "all": "whenever its source has changed"}


def rendered(table: Table) -> str:
    text = fill(f"{table.description}. {_making(table)}", COLUMNS, break_on_hyphens=False)
    lines = [f"### `{table.name}`", "", text, ""]
    lines += ["| column | type | |", "|---|---|---|"]
    for column in table.columns:
        lines.append(f"| `{column.name}` | {column.type} | {column.description} |")
    return "\n".join(lines)


def _making(table: Table) -> str:
    text = f"From `{table.source}`; sorted by {', '.join(f'`{key}`' for key in table.keys)}"
    if table.grain is None:
        by = ", ".join(f"`{name}`" for name in table.partition_by)
        return text + (f"; partitioned by {by}." if by else ".")
    return f"{text}; recomputed for {_grain(table.grain)}."


def _grain(grain: Grain) -> str:
    before = {0: "", 1: ", with the rows of the one before"}[grain.before]
    return f"{_UNITS[grain.unit]} of the source's `{grain.source_time}` with new rows{before}"
