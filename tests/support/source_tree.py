"""Walks the source tree: the packages of the product, without the lab."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "holdfast"
SATELLITES: Final = ("holdfast_federation", "holdfast_lake")
"""The packages beside `holdfast`, which may import it."""


def place(name: str) -> Path:
    """The path of a module or a package, which is relative to `src/holdfast`, or to `src` for a
    satellite."""
    return (SOURCE.parent if name.split("/")[0] in SATELLITES else SOURCE) / name


def name_of(path: Path) -> str:
    base = SOURCE if path.is_relative_to(SOURCE) else SOURCE.parent
    return path.relative_to(base).as_posix()


BLOCKS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of nodes that hold statements, or what holds statements."""


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements within a node, at any depth: a tenth of what `ast.walk` yields."""
    for field in BLOCKS:
        for each in getattr(node, field, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from statements(each)


def modules(*packages: str) -> Iterator[tuple[str, Path]]:
    """Name and path of each module of these packages, or of all."""
    for package in packages or ("", *SATELLITES):
        for path in sorted(place(package).rglob("*.py")):
            yield name_of(path), path
