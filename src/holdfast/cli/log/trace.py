"""`holdfast log trace`, `why` and `groups`, over the admin port of any node."""

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.cli.cluster.http import (
    AdminPort,
    add_admin_options,
)
from holdfast.cli.resources.command import path_of, time_us
from holdfast.cli.resources.tables import escaped
from holdfast.client.admin_connection import AdminError

EXIT_ERROR: Final = 2


def add_parsers(commands: Any) -> None:
    """Adds the parsers of both commands."""
    trace = commands.add_parser("trace", help="the way of one message, over the admin port")
    trace.add_argument("message", metavar="PARTITION/OFFSET|TOPIC",
                       help="its place in the log, or its topic")  # fmt: skip
    why = commands.add_parser("why", help="why a client has, or has not, received a message")
    why.add_argument("client", metavar="CLIENT", help="the client id")
    why.add_argument("topic", metavar="TOPIC")
    groups = commands.add_parser("groups", help="consumer groups and lakes, with what they lack")
    groups.add_argument("--remove", metavar="GROUP", default="",
                        help="forget a group, or a lake that is gone")  # fmt: skip
    add_admin_options(groups)
    for each in (trace, why):
        each.add_argument("--at", metavar="TIME",
                          help="the message of the topic nearest to this time, as"
                          " 2026-01-31T12:00:00Z, local without the Z, or --at=-15m"
                          " (default: now)")  # fmt: skip
        add_admin_options(each)


def run_trace(args: argparse.Namespace) -> int:
    """Prints the way of a message."""
    partition, _, offset = args.message.partition("/")
    try:
        if partition.isdecimal() and offset.isdecimal():
            path = path_of("trace", partition=partition, offset=offset)
        else:
            path = path_of("trace", topic=args.message, time_us=_time_us(args))
        found = _port(args).get_json(path)
    except (AdminError, ValueError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(json.dumps(found, ensure_ascii=False) if args.json else "\n".join(_lines(found)))
    return 0


def run_why(args: argparse.Namespace) -> int:
    """Prints one sentence."""
    try:
        path = path_of("trace/why", client=args.client, topic=args.topic, time_us=_time_us(args))
        found = _port(args).get_json(path)
    except (AdminError, ValueError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(json.dumps(found, ensure_ascii=False) if args.json else escaped(found["sentence"]))
    return 0


def run_groups(args: argparse.Namespace) -> int:
    """Prints the consumer groups of the log, or removes one."""
    port = _port(args)
    try:
        if args.remove:
            port.exchange("DELETE", path_of("log/group", group=args.remove))
            print(f"removed {escaped(args.remove)}")
            return 0
        found: list[dict[str, Any]] = []
        page = port.get_json(path_of("log/groups"))
        found += page["groups"]
        while page["next"]:
            page = port.get_json(path_of("log/groups", after=page["next"]))
            found += page["groups"]
    except (AdminError, ValueError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_ERROR
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
        return 0
    if not found:
        print(
            "no groups: no consumer commits here (a lake does with log.retention.keep_until_lake)"
        )
    for group in found:
        newest_us = max((each["at_us"] for each in group["offsets"]), default=0)
        print(f"{escaped(group['group']):40}  {group['lag']:>12,} behind  {_text(newest_us)}")
    return 0


def _port(args: argparse.Namespace) -> AdminPort:
    return AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)


def _time_us(args: argparse.Namespace) -> int | None:
    return None if args.at is None else time_us(args.at)


def _lines(found: dict[str, Any]) -> list[str]:
    record = found["record"]
    lines = [f"{record['partition']}/{record['offset']}  {escaped(record['topic'])}"]
    for step in found["steps"]:
        when = f" {_text(step['at_us'])}" if step["at_us"] else ""
        mark = "" if step["known"] else "not known: "
        lines.append(f"{step['step']:12}{mark}{escaped(step['text'])}{when}")
    for each in found["sessions"]:
        name = f"{escaped(each['client'])} at {escaped(each['node'])}"
        lines.append(f"{'session':12}{name}: {each['status']}: {escaped(each['text'])}")
    for each in found["groups"]:
        lines.append(f"{'group':12}{escaped(each['group'])}: {each['status']}")
    counts = ", ".join(f"{count} {status}" for status, count in sorted(found["counts"].items()))
    lines.append(f"{'sessions':12}{counts or 'none subscribes to the topic now'}")
    lines += [f"{'not in log':12}{text}" for text in found["unknown"]]
    return lines


def _text(timestamp_us: int) -> str:
    return datetime.fromtimestamp(timestamp_us / 1e6, UTC).isoformat(timespec="milliseconds")


COMMANDS: Final = {"trace": run_trace, "why": run_why, "groups": run_groups}
"""The subcommands of `holdfast log` that ask a broker."""
