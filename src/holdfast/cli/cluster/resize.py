"""`holdfast cluster resize`: other numbers of replicas while the cluster serves."""

import argparse
import sys
from functools import partial
from typing import Any, Final

from msgspec import convert

from holdfast.cli.cluster.commands import (
    EXIT_DEGRADED,
    await_end,
    progress_of,
    report,
    require_cluster,
)
from holdfast.cli.cluster.http import AdminPort
from holdfast.cli.cluster.plan import AUTO, PlannedMoves, ask_plan, plan_lines
from holdfast.cli.cluster.status import ClusterStatus
from holdfast.client.admin_connection import AdminError
from holdfast.numbers import whole_number

REPLICAS_MAX: Final = 7


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Change how many replicas each partition has, and how many of them must be in sync. The"
        " cluster copies what is missing while clients publish. Without waiting for copies,"
        " min_insync falls first and rises last."
    )
    parser.add_argument(
        "mode",
        nargs="?",
        choices=(AUTO,),
        metavar=AUTO,
        help="let both follow the number of data nodes: 1/1, 2/1, 3/2",
    )
    add_numbers(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan, and change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask before one copy is left")


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Adds the options with the two numbers."""
    for name, text in (
        ("replication-factor", "replicas of each partition"),
        ("min-insync", "replicas in sync below which QoS 1 and 2 publishes are refused"),
    ):
        parser.add_argument(f"--{name}", type=_count, default=0, metavar="N", help=text)


def _count(text: str) -> int:
    number = whole_number(text, REPLICAS_MAX, 1)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to {REPLICAS_MAX}")
    return number


def resize(port: AdminPort, args: argparse.Namespace) -> int:
    """Shows the plan and carries it out. The exit code 1 means that the time was too short."""
    status = port.status()
    require_cluster(status)
    if status.replication is None:
        raise AdminError(f"the version of {status.node} cannot resize: upgrade the nodes first")
    given = _given(args)
    plan = ask_plan(port, "resize", given)
    factor, least = _aim(status, args)
    lines = _described(status, args, plan, factor, least)
    if args.dry_run:
        body = {"replication_factor": factor, "min_insync": least, "plan": plan}
        report(args, "\n".join(lines), body)
        return 0
    for line in lines:
        progress_of(args)(line)
    _ask(status, factor, least, args)
    port.change("resize", **given)
    left = "" if args.no_wait else _await(port, (factor, least), args)
    done = "the change is agreed" if args.no_wait else "done"
    text = left or f"{done}: replication factor {factor}, min_insync {least}"
    body = {
        "replication_factor": factor,
        "min_insync": least,
        "done": not left and not args.no_wait,
        "left": left,
    }
    report(args, text, body)
    return EXIT_DEGRADED if left else 0


def _given(args: argparse.Namespace) -> dict[str, str]:
    """The parameters of the request."""
    numbers = {"replication_factor": args.replication_factor, "min_insync": args.min_insync}
    given = {name: str(number) for name, number in numbers.items() if number}
    if args.mode == AUTO:
        if given:
            raise AdminError("auto takes no numbers: both follow the number of data nodes")
        return {"automatic": "true"}
    if not given:
        raise AdminError("give auto, --replication-factor N, --min-insync N, or both numbers")
    return given


def _aim(status: ClusterStatus, args: argparse.Namespace) -> tuple[int, int]:
    """The wanted replication factor and `min_insync`."""
    wanted = status.replication
    assert wanted is not None
    if args.mode == AUTO:
        nodes = sum(each.role == "data" and each.state != "draining" for each in status.nodes)
        return (min(max(nodes, 1), 3), 2 if nodes >= 3 else 1)
    return (
        args.replication_factor or wanted.replication_factor,
        args.min_insync or wanted.min_insync,
    )


def _described(
    status: ClusterStatus, args: argparse.Namespace, plan: dict[str, Any], factor: int, least: int
) -> list[str]:
    """The plan for people: the settings, the copies, and the effect on clients."""
    automatic = ", which follow the number of data nodes" if args.mode == AUTO else ""
    lines = [
        f"replication factor {status.replication_factor} -> {factor},"
        f" min_insync {status.min_insync} -> {least}{automatic}"
    ]
    lines += plan_lines(convert(plan, PlannedMoves))
    if factor < status.replication_factor:
        lines.append(f"each partition gives up the replicas above {factor}")
    lines.append("clients stay connected, and publishes are acknowledged all the time")
    if least > status.min_insync:
        lines.append(
            f"afterwards QoS 1 and 2 publishes are refused while fewer than {least} replicas of a"
            " partition are in sync"
        )
    return lines


def _ask(status: ClusterStatus, factor: int, least: int, args: argparse.Namespace) -> None:
    """Asks before a message may be on one disk only: a disk that is lost then takes it along.
    Raises `AdminError` unless the operator agrees."""
    if factor == 1 < status.replication_factor:
        text = "one copy of each message is left, so the loss of a disk loses messages"
    elif least == 1 < status.min_insync:
        text = "a message that one disk has is acknowledged, so the loss of that disk may lose it"
    else:
        return
    if args.yes:
        return
    if args.json or not sys.stdin.isatty():
        raise AdminError(f"{text}: confirm it with --yes")
    print(f"{text}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise AdminError("nothing was changed")


class Overtaken(AdminError):
    """Another operator has asked for other settings meanwhile."""


def _left(port: AdminPort, aim: tuple[int, int], args: argparse.Namespace) -> str:
    """Returns the steps that are left, or "". Raises `Overtaken`."""
    status = port.status()
    wanted = status.replication
    if (
        args.mode != AUTO
        and wanted is not None
        and (wanted.replication_factor, wanted.min_insync) != aim
    ):
        raise Overtaken(f"replication factor {aim[0]} and min_insync {aim[1]} are wanted no more")
    return status.resizing


def _await(port: AdminPort, aim: tuple[int, int], args: argparse.Namespace) -> str:
    """Waits until the replication is reached. Returns "", or what is left after the time."""
    try:
        return await_end(partial(_left, port, aim, args), "done", args.timeout, progress_of(args))
    except Overtaken as error:
        return str(error)
