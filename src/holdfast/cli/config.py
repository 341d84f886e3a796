"""`holdfast config`: check, show and explain a broker's configuration, or import Mosquitto's."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.config.explain import DEFAULT, NoSuchKey, explain, settings_of
from holdfast.config.load import load
from holdfast.config.mosquitto import MosquittoImport, import_configuration
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Config
from holdfast.security.dynamic.document import parse

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
WIDTH: Final = 80
DATA_FOLDER: Final = "data"
USERS_FILE: Final = "dynamic-security.json"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "config",
        help="check, show, explain or import a configuration",
        description="Check, show, explain or import the configuration of a broker.",
    )
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="check all values, and every file that a start opens")
    check.set_defaults(run_command=run_check)
    show = commands.add_parser("show", help="print each value with its source")
    show.add_argument(
        "--changed", action="store_true", help="only values that differ from the default"
    )
    show.add_argument("--json", action="store_true", help="print a JSON array")
    show.set_defaults(run_command=run_show)
    explained = commands.add_parser("explain", help="print everything about one key")
    explained.add_argument("key", metavar="KEY", help="for example limits.sessions")
    explained.set_defaults(run_command=run_explain)
    for each in (check, show, explained):
        way = each.add_mutually_exclusive_group()
        way.add_argument("-c", "--config", type=Path, metavar="FILE", help="TOML configuration")
        if each is not explained:
            way.add_argument("plain", nargs="?", type=Path, metavar="FILE", help="the same")
    imported = commands.add_parser(
        "import",
        help="translate a mosquitto.conf",
        description="Translate a mosquitto.conf. What cannot be carried over is listed by line.",
    )
    imported.add_argument("file", type=Path, metavar="FILE", help="mosquitto.conf")
    imported.add_argument(
        "--out", type=Path, metavar="DIR", help="write holdfast.toml here (default: print it)"
    )
    imported.set_defaults(run_command=run_import)


def run(args: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = args.run_command
    return command(args)


def run_check(args: argparse.Namespace) -> int:
    """Prints one line for each problem, or that there is none."""
    try:
        config = load(args.plain or args.config, os.environ)
    except ConfigError as error:
        return _fail(EXIT_CONFIG, *error.problems)
    return check_files(config)


def check_files(config: Config) -> int:
    """Prints one line for each file that a start could not use, and for each warning of a start."""
    from holdfast.api.census import file_warnings
    from holdfast.config.check import warnings
    from holdfast.process.file_check import file_problems

    for warning in (*warnings(config), *file_warnings(config)):
        print(f"holdfast: warning: {warning}", file=sys.stderr)
    problems = file_problems(config)
    if problems:
        return _fail(EXIT_CONFIG, *problems)
    print("configuration is fine")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Prints the settings as TOML keys with comments, or as JSON."""
    try:
        settings = settings_of(args.plain or args.config, os.environ, {})
    except ConfigError as error:
        return _fail(EXIT_CONFIG, *error.problems)
    if args.changed:
        settings = [each for each in settings if not each.is_default]
    if args.json:
        print(json.dumps([{"key": s.key, "value": s.value, "origin": s.origin} for s in settings]))
        return 0
    lines = [(f"{each.key} = {json.dumps(each.value)}", each.origin) for each in settings]
    width = max((len(left) for left, _ in lines), default=0)
    for left, origin in lines:
        print(left if origin == DEFAULT else f"{left:<{width}}  # {origin}")
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """Prints the value, source, range, default and meaning of one key."""
    try:
        found = explain(args.key, args.config, os.environ, {})
    except NoSuchKey as error:
        return _fail(EXIT_CONFIG, str(error))
    except ConfigError as error:
        return _fail(EXIT_CONFIG, *error.problems)
    for each in found.settings:
        print(f"{each.key} = {json.dumps(each.value)}  # {each.origin}")
    if not found.settings:
        print(f"{found.key} is not set")
    print(f"  allowed:     {found.allowed}")
    print(f"  default:     {json.dumps(found.default)}")
    print(f"  environment: {found.variable}")
    if found.text:
        print(textwrap.indent(textwrap.fill(found.text, WIDTH), "  "))
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Writes or prints the configuration, and lists what could not be carried over."""
    try:
        made = import_configuration(args.file)
        if args.out is None:
            if made.users is not None:
                _read_users(made.users)
            print(made.toml())
        else:
            _write(made, args.out)
    except OSError as error:
        return _fail(EXIT_FAILED, f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return _fail(EXIT_FAILED, str(error))
    for note in made.notes:
        print(f"holdfast: {note}", file=sys.stderr)
    return 0


def _read_users(path: Path) -> str:
    """The text of a file of users, as this broker writes it. Raises `OSError` and `ValueError`."""
    return b"".join(parse(path.read_bytes(), str(path)).chunks()).decode()


def _write(made: MosquittoImport, directory: Path) -> None:
    """Writes the files. Raises `OSError` if one of them exists already."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    if made.users is not None:
        security = made.tables.setdefault("security", {})
        security["dynamic_security_file"] = str((directory / USERS_FILE).absolute())
        files[USERS_FILE] = _read_users(made.users)
    made.tables = {"node": {"data": str((directory / DATA_FOLDER).absolute())}, **made.tables}
    files["holdfast.toml"] = made.toml()
    for name, text in files.items():
        # The files have hashes of passwords, so only the owner may read them.
        handle = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        print(directory / name)


def _fail(code: int, *lines: str) -> int:
    for line in lines:
        print(f"holdfast: {line}", file=sys.stderr)
    return code
