"""The `holdfast` command: imports the chosen subcommand alone, and prints errors as one line.

A subcommand's module has `add_parser(subparsers)` and `run(args) -> int`. `pub` and `sub` use the
options of mosquitto (`-h` is the host, not help). They have `main(arguments) -> int` and receive
their arguments unchanged.

Exit codes: 0 success; 1 the work failed; 2 wrong usage or wrong configuration; 130 interrupted;
141 the reader of a pipe has closed it. `pub` and `sub` use mosquitto's own.
"""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141
INTERRUPT_AGAIN_S: Final = 0.01
"""The time in seconds in which the destruction of an object ends."""

COMMANDS: Final = {
    "serve": "run a broker",
    "pub": "publish messages (options of mosquitto_pub)",
    "sub": "subscribe and print messages (options of mosquitto_sub)",
    "cluster": "make, look at and change a cluster; try one on this machine",
    "log": "inspect, dump or follow a data directory; trace a message",
    "backup": "copy a data directory at one moment, by hard links",
    "restore": "make a data directory from a backup, whole or up to a time",
    "clients": "list or disconnect the connected clients",
    "sessions": "list, show, move or end sessions",
    "subscriptions": "list subscriptions, or those that a topic reaches",
    "groups": "list, show or delete shared groups",
    "retained": "list, read, delete or restore retained messages",
    "delayed": "list or cancel delayed messages",
    "show": "disks, limits, drops or reconnects of all nodes",
    "pipeline": "the log as tables, made and kept up to date by Spark",
    "federation": "a broker's federation; a member beside any broker; the manager of one",
    "config": "check, show, explain or import a configuration",
    "access": "users and tokens of the admin port",
    "passwd": "manage a password file (options of mosquitto_passwd)",
    "bench": "load any MQTT broker at a fixed rate, and measure latencies",
    "lab": "repeat the experiments of the published studies on any broker",
    "completion": "print the completion of bash, zsh or fish",
}
"""The help text of each command."""

_RESOURCES: Final = ("clients", "sessions", "subscriptions", "groups", "retained", "delayed")
"""The commands of one module, which receives the name as well."""

_MODULES: Final = {
    "pub": "pubsub.pub",
    "sub": "pubsub.sub",
    "cluster": "cluster.command",
    "log": "log.command",
    **dict.fromkeys(_RESOURCES, "resources.command"),
    "show": "resources.show",
    "bench": "bench.command",
    "backup": "backup.command",
}
"""The modules in holdfast.cli of commands with another name than their module."""

_SATELLITES: Final = {
    "pipeline": "holdfast_lake.cli.command",
    "federation": "holdfast_federation.cli.command",
}
"""The modules of commands that stand beside this package, which imports nothing else of them."""

OWN_OPTIONS: Final = frozenset({"pub", "sub"})
"""The commands that parse their arguments themselves."""


def version_text() -> str:
    """Returns version, build of the hot modules, Python and event loop in one line."""
    import platform

    from holdfast import __version__

    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"holdfast {__version__} ({_form()}, {python}, {_event_loop()})"


def _form() -> str:
    spec = find_spec("holdfast.protocol.mqtt.publish")
    origin = spec.origin if spec is not None else None
    return "compiled" if origin is not None and origin.endswith((".so", ".pyd")) else "interpreted"


def _event_loop() -> str:
    if find_spec("uvloop") is None:
        return "asyncio"
    from importlib.metadata import version

    return f"uvloop {version('uvloop')}"


def _command_module(command: str) -> Any:
    if command in _SATELLITES:
        return import_module(_SATELLITES[command])
    return import_module(f"holdfast.cli.{_MODULES.get(command, command)}")


class CommandParser(argparse.ArgumentParser):
    """A parser that answers unknown arguments with the usage of its own subcommand.

    argparse passes them up to the outermost parser, whose usage names no option of the subcommand.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def build_parser(commands: list[str]) -> argparse.ArgumentParser:
    """Makes the parser with the given subcommands. Each one costs the import of its module."""
    parser = CommandParser(
        prog="holdfast",
        description="An MQTT broker that keeps what it has acknowledged.",
        epilog="commands:\n"
        + "\n".join(f"  {name:14}{text}" for name, text in COMMANDS.items())
        + "\n\n`holdfast COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    if commands:
        subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
        for name in commands:
            names = (name,) if name in _RESOURCES else ()
            _command_module(name).add_parser(subparsers, *names)
    else:
        parser.add_argument("command", nargs="?", metavar="COMMAND", help="see below")
    return parser


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in OWN_OPTIONS:
        return int(_command_module(command).main(arguments[1:]))
    if command in COMMANDS:
        args = build_parser([command]).parse_args(arguments)
        return int(_command_module(command).run(args))
    parser = build_parser([])
    # A wrong command is reported before its options, which only its own parser could know.
    if command and not command.startswith("-"):
        parser.error(f"unknown command {command!r}; choose from {', '.join(COMMANDS)}")
    if parser.parse_args(arguments).version:
        print(version_text())
        return 0
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _replace_closed_streams() -> None:
    """Opens the null device for each standard stream that the caller has closed (`2>&-`).

    Counter-example without it: a segment of the log is the next file that is opened, gets the
    number 2, and receives what a library writes to stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _stop_again(unraisable: Any) -> None:
    """Repeats a signal that came while an object was destroyed, where Python drops exceptions.

    The exception of a signal other than SIGINT has its `number`.
    """
    kind = unraisable.exc_type
    number = getattr(kind, "number", signal.SIGINT if issubclass(kind, KeyboardInterrupt) else None)
    if number is None:
        sys.__unraisablehook__(unraisable)
    else:
        from threading import Timer

        Timer(INTERRUPT_AGAIN_S, os.kill, (os.getpid(), number)).start()


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. argparse itself raises SystemExit."""
    _replace_closed_streams()
    sys.unraisablehook = _stop_again
    # Modules make no garbage while they load, and the search for it takes a seventh of a start.
    gc.set_threshold(50_000, 20, 100)
    try:
        code = _dispatch(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout at exit and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except Exception as error:
        from holdfast.config.problem import ConfigError

        if not isinstance(error, ConfigError):
            raise
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
