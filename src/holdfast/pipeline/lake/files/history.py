"""Records when a table was made, got columns, or was built again.

    LAKE/_history/<table>.jsonl    one entry a line, oldest first

Commits have the same facts, but a lake keeps only the last thousand of them, and a rebuild removes
them all. An entry is written after its commit; a run that finds it missing writes it again. So each
change is told once, wherever a run ends.
"""

from typing import Final

import msgspec

from holdfast.pipeline.lake.files.commits import Commit, CommitLog, is_replacement
from holdfast.pipeline.lake.files.files import write_atomically
from holdfast.pipeline.lake.objects.paths import LakePath

HISTORY: Final = "_history"


class TableChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the history."""

    table: str
    lineage: str
    version: int
    at_us: int
    """The time of the commit, in µs since 1970."""
    kind: str
    """`made`, `built again`, `backfill` or `columns`."""
    change: str = ""
    """The change, as text for people."""
    columns: list[tuple[str, str]] = []
    """All columns from then on, with their types."""


def note_change(lake: LakePath, commit: Commit) -> None:
    """Writes the entry of a commit, if it changes columns and has none yet."""
    if commit.version > 1 and not commit.change:
        return
    entries = _read(lake, commit.table)
    if any((each.lineage, each.version) == (commit.lineage, commit.version) for each in entries):
        return
    path = _path(lake, commit.table)
    path.parent.mkdir(exist_ok=True)
    lines = [msgspec.json.encode(each) for each in [*entries, _entry(commit, entries)]]
    write_atomically(path, b"\n".join(lines) + b"\n")


def history(lake: LakePath, table: str) -> list[TableChange]:
    """Returns the changes of a table, oldest first.

    Those of an older version of the pipeline are taken from the commits that are still there.
    """
    entries = _read(lake, table)
    log = CommitLog(lake, table)
    last = log.last()
    for version in log.kept() if last is not None else ():
        commit = log.read(version)
        known = {(each.lineage, each.version) for each in entries}
        if (version == 1 or commit.change) and (commit.lineage, version) not in known:
            older = [each for each in entries if each.at_us < commit.committed_at_us]
            entries.append(_entry(commit, older))
    return sorted(entries, key=lambda each: each.at_us)


def _entry(commit: Commit, before: list[TableChange]) -> TableChange:
    kind, change = "backfill" if is_replacement(commit) else "columns", commit.change
    if commit.version == 1:
        kind = "built again" if before else "made"
        change = _difference(before[-1].columns, commit.columns) if before else ""
    return TableChange(
        table=commit.table,
        lineage=commit.lineage,
        version=commit.version,
        at_us=commit.committed_at_us,
        kind=kind,
        change=change,
        columns=commit.columns,
    )


def _difference(before: list[tuple[str, str]], after: list[tuple[str, str]]) -> str:
    """Describes how columns differ; empty if they are the same."""
    old, new = dict(before), dict(after)
    parts = [f"added {name} {kind}" for name, kind in new.items() if name not in old]
    parts += [f"removed {name}" for name in old if name not in new]
    parts += [
        f"{name} {old[name]} became {kind}"
        for name, kind in new.items()
        if name in old and old[name] != kind
    ]
    return ", ".join(parts)


def _read(lake: LakePath, table: str) -> list[TableChange]:
    try:
        lines = _path(lake, table).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=TableChange) for line in lines if line]


def _path(lake: LakePath, table: str) -> LakePath:
    return lake / HISTORY / f"{table}.jsonl"
