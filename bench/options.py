"""The options that the benchmarks share, and their result as JSON."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

Name = TypeVar("Name", bound=str)

SHARED: Final[dict[str, dict[str, Any]]] = {
    "--quick": {"action": "store_true", "help": "a short round of each"},
    "--directory": {
        "type": Path,
        "default": Path(tempfile.gettempdir()),
        "help": "where the data goes meanwhile; decides what fdatasync costs",
    },
    "--python": {"default": sys.executable, "help": "interpreter that runs Holdfast"},
}


def new_parser(program: str, text: str | None, *shared: str) -> argparse.ArgumentParser:
    """A parser with --json and those of the shared options that are named."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured there")
    for option in shared:
        parser.add_argument(option, **SHARED[option])
    return parser


def add_faults(parser: argparse.ArgumentParser, option: str, faults: Iterable[Name]) -> None:
    """Add the option of the faults to play, each with its number: a list of pairs."""
    parser.add_argument(
        option,
        type=_counted({str(fault): fault for fault in faults}),
        action="append",
        default=[],
        metavar="FAULT=COUNT",
        help=f"FAULT one of: {', '.join(faults)}; only those named are played; may be repeated",
    )


def _counted(faults: dict[str, Name]) -> Callable[[str], tuple[Name, int]]:
    def read(text: str) -> tuple[Name, int]:
        name, _, count = text.rpartition("=")
        if name not in faults or not count.isdecimal() or not int(count):
            example = f"{next(iter(faults))}=3"
            raise argparse.ArgumentTypeError(f"{text!r}: give FAULT=COUNT, as {example!r}")
        return faults[name], int(count)

    return read


def write_json(path: Path | None, figures: object) -> None:
    """Write the figures if a path is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
