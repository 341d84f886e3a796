"""Options that several commands of `holdfast pipeline` share."""

import argparse
import re
from pathlib import Path
from typing import Final

from holdfast.addresses import split_address
from holdfast.numbers import whole_number

DEFAULT_LAKE: Final = Path("lake")
RULES: Final = Path("my_tables.py")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def add_lake(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lake",
        default=str(DEFAULT_LAKE),
        metavar="DIR",
        help=f"directory of the tables (default ./{DEFAULT_LAKE}), or s3://BUCKET/NAME, "
        "gs://BUCKET/NAME, abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/NAME",
    )


def add_what(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    parser.add_argument("what", nargs="*", default=["all"], metavar=metavar, help=text)


def add_tables(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tables",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file or package that declares more tables, such as holdfast_lab for those of "
        "test runs; may be given again; the lake keeps them with the first run",
    )


def add_session(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master", metavar="URL", help="Spark master (default local[*], or spark-submit's)"
    )
    parser.add_argument(
        "--conf",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of Spark; may be given again",
    )


def add_access(parser: argparse.ArgumentParser, *, is_remembered: bool = True) -> None:
    """Adds the options of admin ports with access and TLS. `is_remembered`: the lake keeps them."""
    more = "; its path is remembered by the lake" if is_remembered else ""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file of a token of the role reader (default: the variable HOLDFAST_TOKEN){more}",
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="PEM file of the signers of https:// admin ports"
    )


def access_options(args: argparse.Namespace) -> dict[str, str]:
    """The options of the data source for the options of `add_access`."""
    given = {"tokenFile": args.token_file, "caFile": args.ca_file}
    return {name: str(Path(value).absolute()) for name, value in given.items() if value}


def add_output(parser: argparse.ArgumentParser, default: Path, metavar: str, what: str) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=default,
        metavar=metavar,
        help=f"{what} (default ./{default})",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        dest="run_id",
        metavar="ID",
        help="only this test run (with --tables holdfast_lab)",
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="only this device, or those that match a pattern such as 'press-*'; may be given "
        "again",
    )


def add_watching(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prometheus", action="store_true", help="print metrics for Prometheus")
    parser.add_argument(
        "--fail-if-lag",
        type=duration_s,
        metavar="TIME",
        help="exit with 1 if a table is further behind than this, such as 60s, or if that is not "
        "known",
    )


def add_inference(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="admin ports of the servers (default: those of the lake)",
    )
    parser.add_argument(
        "--messages",
        type=positive,
        default=20_000,
        metavar="N",
        help="how many of the last messages are read (default 20000)",
    )
    parser.add_argument(
        "--profiles",
        type=Path,
        metavar="DIR",
        help="a folder with profiles of your own (*.toml), looked at before those of the package",
    )
    add_access(parser, is_remembered=False)
    add_output(parser, RULES, "FILE", "where to write the rules")


def pair(text: str) -> tuple[str, str]:
    """Parses NAME=VALUE. For argparse."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def address(text: str) -> tuple[str, int]:
    """Parses ADDR:PORT. For argparse."""
    try:
        host, port = split_address(text)
    except ValueError:
        host, port = "", 0
    if not host or not 0 <= port < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r} is not ADDR:PORT")
    return host, port


def duration_s(text: str) -> float:
    """Parses `500ms`, `1s`, `2m` or `1h`. A number without a unit is in seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 500ms, 1s or 2m")
    return float(match.group(1)) * _UNITS_S[match.group(2) or "s"]


def positive(text: str) -> int:
    """Parses a number of 1 or more. For argparse."""
    number = whole_number(text, 1 << 62, 1)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return number
