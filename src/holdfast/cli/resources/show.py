"""`holdfast show`: disks, limits, drops or reconnects of all nodes, over the admin port of one."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from holdfast.cli.cluster.http import (
    AdminPort,
    add_admin_options,
)
from holdfast.cli.resources.sentences import fields_text, time_text
from holdfast.cli.resources.tables import Column, Row, escaped, table_lines
from holdfast.client.admin_connection import AdminError

EXIT_ERROR: Final = 2
NOTES_MAX: Final = 500
"""The lines of the logs that are searched for reconnects, the most of one request."""
REPEATERS_MAX: Final = 50
"""The most clients in the table of reconnects."""
MEBIBYTE: Final = 1 << 20


def _columns(*names: str) -> list[Column]:
    return [(name.replace("_", "-"), partial(_cell, name)) for name in names]


def _cell(name: str, row: Row) -> object:
    return row.get(name, "")


def _storage(reply: dict[str, Any]) -> list[list[str]]:
    rows: list[Row] = [
        {
            "node": each["node"],
            "log": f"{each['log_bytes'] / MEBIBYTE:.1f} MiB",
            "free": f"{each['free_bytes'] / MEBIBYTE:.0f} MiB",
            "reserve": f"{each['reserve_bytes'] / MEBIBYTE:.0f} MiB",
            "oldest": time_text(each["oldest_us"]) if each["oldest_us"] else "",
            "growth": f"{each['growth_bytes_per_s']:.0f} B/s",
            "full_in": "never" if each["full_in_s"] is None else f"{each['full_in_s']:.0f} s",
            "state": "; ".join(each["obstacles"].values()) or "serves",
        }
        for each in reply["nodes"]
    ]
    names = ("node", "log", "free", "reserve", "oldest", "growth", "full_in", "state")
    return [table_lines(rows, _columns(*names))]


def _limits(reply: dict[str, Any]) -> list[list[str]]:
    rows = [
        {
            "node": node["node"],
            **each,
            "most": each["most"] or "no limit",
            "share": f"{100 * each['used'] / each['most']:.0f} %" if each["most"] else "",
        }
        for node in reply["nodes"]
        for each in node["limits"]
    ]
    return [table_lines(rows, _columns("node", "name", "used", "most", "share"))]


def _drops(reply: dict[str, Any]) -> list[list[str]]:
    counts = [
        {"node": node["node"], "what": what, "reason": reason, "count": count}
        for node in reply["nodes"]
        for what in ("dropped", "refused")
        for reason, count in node[what].items()
        if count
    ]
    cases = [
        {
            "at": time_text(each["at_us"]),
            "node": node["node"],
            "event": each["event"],
            "fields": fields_text(each["fields"]),
        }
        for node in reply["nodes"]
        for each in node["cases"]
    ]
    cases.sort(key=lambda row: row["at"], reverse=True)
    return [
        table_lines(counts, _columns("node", "what", "reason", "count")),
        table_lines(cases, _columns("at", "node", "event", "fields")),
    ]


def _reconnects(reply: dict[str, Any]) -> list[list[str]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for note in reply["notes"]:
        if note["event"] == "connected":
            found.setdefault(note["fields"]["client"], []).append(note)
    rows = [
        {
            "client": client,
            "connects": len(notes),
            "last": time_text(notes[0]["at_us"]),
            "node": notes[0]["node"],
            "remote": notes[0]["fields"].get("remote", ""),
        }
        for client, notes in found.items()
        if len(notes) > 1
    ]
    rows.sort(key=lambda row: row["connects"], reverse=True)
    return [
        table_lines(rows[:REPEATERS_MAX], _columns("client", "connects", "last", "node", "remote"))
    ]


WHAT: Final[dict[str, tuple[str, Callable[[dict[str, Any]], list[list[str]]]]]] = {
    "storage": ("the log and the disk of each node, and when it is full", _storage),
    "limits": ("the limits of each node and their use", _limits),
    "drops": ("what was dropped or refused, with the last cases", _drops),
    "reconnects": (
        f"the clients that connected most often in the last {NOTES_MAX} lines of the logs",
        _reconnects,
    ),
}
"""Each view: its help, and the tables of its reply."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "disks, limits, drops or reconnects of all nodes"
    parser = subparsers.add_parser("show", help=text, description=f"Show {text}.")
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (help, _) in WHAT.items():
        each = commands.add_parser(name, help=help, description=help)
        add_admin_options(each)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints one of these views."""
    try:
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        path = f"notes?limit={NOTES_MAX}" if args.what == "reconnects" else args.what
        reply = port.get_json(f"/api/v1/{path}")
    except AdminError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_ERROR
    if args.json:
        print(json.dumps(reply, ensure_ascii=False))
    else:
        tables = WHAT[args.what][1](reply)
        print("\n\n".join("\n".join(lines) for lines in tables))
    for each in reply.get("missing", []):
        text = f"node {escaped(each['node'])} is missing: {escaped(each['reason'])}"
        print(f"holdfast: {text}", file=sys.stderr)
    return 0
