"""Generate docs/conformance.md: normative MQTT statements, where they are met, what shows it.

The tags `[MQTT-3.1.2-24]` (MQTT 5.0 numbers) and `[MQTT3-3.3.5-2]` (statements that only MQTT
3.1.1 has) in src/ say where, the same tags in tests/ say what shows it. Places are named by file
and function, never by line, so that the table changes only when something moved.

    python tools/conformance.py           write the table
    python tools/conformance.py --check   fail when it is out of date or a tag is unknown
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATEMENTS = ROOT / "tools" / "mqtt5_statements.txt"
TABLE = ROOT / "docs" / "conformance.md"
TAG = re.compile(r"\[(MQTT3?)-(\d+\.\d+\.\d+-\d+)\]")
# Anything that was meant as a tag and would be overlooked.
ALMOST_TAG = re.compile(r"\[\s*MQTT[^\]\n]*\d+\.\d+[^\]\n]*\]")


@dataclass(frozen=True)
class Statement:
    number: str
    binds: str
    words: str


@dataclass(frozen=True)
class Tag:
    statement: str
    """With its prefix: MQTT-3.1.2-24."""
    file: str
    function: str
    """Qualified name; empty outside functions and classes."""


def sort_key(statement: str) -> tuple[str, list[int]]:
    prefix, _, number = statement.partition("-")
    return prefix, [int(part) for part in re.split(r"[.-]", number)]


def read_statements(text: str) -> dict[str, Statement]:
    """By tag. Raises ValueError for a line that is not `number whom words`."""
    found: dict[str, Statement] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        number, binds, words = line.split(" ", 2)
        if not re.fullmatch(r"\d+\.\d+\.\d+-\d+", number) or binds not in (
            "server",
            "client",
            "both",
        ):
            raise ValueError(f"not a statement: {line!r}")
        if f"MQTT-{number}" in found:
            raise ValueError(f"twice: {number}")
        found[f"MQTT-{number}"] = Statement(number, binds, words)
    return found


def _scopes(tree: ast.Module) -> list[tuple[int, int, str]]:
    """First line, last line and qualified name of every class and function, outer ones first.
    A scope begins at its decorators."""
    found: list[tuple[int, int, str]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(item.lineno for item in child.decorator_list)])
                found.append((first, child.end_lineno or first, name))
                walk(child, f"{name}.")
            else:
                walk(child, prefix)

    walk(tree, "")
    return found


def find_tags(source: str, file: str) -> Iterator[Tag]:
    """Raises ValueError for text that looks like a tag and is none."""
    if not ALMOST_TAG.search(source):
        return
    scopes = _scopes(ast.parse(source, file))
    for number, line in enumerate(source.splitlines(), 1):
        for near in ALMOST_TAG.finditer(line):
            if not TAG.fullmatch(near.group()):
                raise ValueError(
                    f"{file}:{number}: {near.group()} is not of the form [MQTT-1.2.3-4]"
                )
        for match in TAG.finditer(line):
            function = ""
            for first, last, name in scopes:
                if first <= number <= last:
                    function = name
            yield Tag(f"{match[1]}-{match[2]}", file, function)


def collect(folder: Path) -> list[Tag]:
    return [
        tag
        for path in sorted(folder.rglob("*.py"))
        for tag in find_tags(path.read_text(), path.relative_to(ROOT).as_posix())
    ]


def _places(tags: list[Tag]) -> str:
    """`file: function, function` for each file once."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for tag in tags:
        functions = by_file[tag.file]
        if tag.function and tag.function not in functions:
            functions.append(tag.function)
    lines = []
    for file, functions in sorted(by_file.items()):
        name = file.removeprefix("src/holdfast/").removeprefix("src/").removeprefix("tests/")
        lines.append(f"{name}: {', '.join(functions)}" if functions else name)
    return "<br>".join(f"`{line}`" for line in lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def render(statements: dict[str, Statement], source: list[Tag], tests: list[Tag]) -> str:
    met: dict[str, list[Tag]] = defaultdict(list)
    shown: dict[str, list[Tag]] = defaultdict(list)
    for tag in source:
        met[tag.statement].append(tag)
    for tag in tests:
        shown[tag.statement].append(tag)
    tagged = sorted(set(met) | set(shown), key=sort_key)
    open_ones = [name for name in statements if name not in met and name not in shown]
    both = [name for name in statements if name in met and name in shown]
    lines = [
        "# Conformance",
        "",
        "Generated by `tools/conformance.py` from the tags in `src/` and `tests/`; do not edit.",
        "Numbers are those of MQTT 5.0, appendix B; `MQTT3-` marks statements that only MQTT 3.1.1",
        "has. The words are reminders, not the specification's.",
        "",
        f"Of {len(statements)} statements {sum(name in met for name in statements)} are tagged in "
        f"the source, {sum(name in shown for name in statements)} in a test, {len(both)} in both; "
        f"{len(open_ones)} in neither.",
        "",
        "## Statements, where they are met and what shows it",
        "",
        _row("statement", "binds", "about", "met in", "shown by"),
        _row("---", "---", "---", "---", "---"),
    ]
    for name in tagged:
        known = statements.get(name)
        binds, words = (known.binds, known.words) if known else ("both", "MQTT 3.1.1 only")
        lines.append(_row(name, binds, words, _places(met[name]), _places(shown[name])))
    lines += ["", "## Statements without a tag", "", _row("statement", "binds", "about")]
    lines.append(_row("---", "---", "---"))
    for name in open_ones:
        lines.append(_row(name, statements[name].binds, statements[name].words))
    return "\n".join(lines) + "\n"


def unknown_tags(statements: dict[str, Statement], tags: list[Tag]) -> list[str]:
    """Tags with MQTT 5 numbers that do not exist: a typing error somewhere."""
    return sorted(
        f"{tag.file}: [{tag.statement}] is not a statement of MQTT 5.0"
        for tag in tags
        if tag.statement.startswith("MQTT-") and tag.statement not in statements
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate docs/conformance.md from the tags.")
    parser.add_argument("--check", action="store_true", help="fail when the table is out of date")
    options = parser.parse_args(arguments)
    statements = read_statements(STATEMENTS.read_text())
    try:
        source, tests = collect(ROOT / "src"), collect(ROOT / "tests")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    wrong = unknown_tags(statements, source + tests)
    for line in wrong:
        print(line, file=sys.stderr)
    text = render(statements, source, tests)
    if not options.check:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text)
    elif not TABLE.exists() or TABLE.read_text() != text:
        print(
            f"{TABLE.relative_to(ROOT)} is out of date: run tools/conformance.py", file=sys.stderr
        )
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
