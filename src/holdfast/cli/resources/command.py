"""`holdfast clients`, `sessions`, `subscriptions`, `groups` and `retained`.

Each is a list over the admin port of any node, and what an operator does with one row::

    holdfast clients list --search pump --sort queued --descending
    holdfast clients disconnect CLIENT
    holdfast clients bans --kind lockout
    holdfast clients ban CLIENT|--user NAME|--address NET --for 1h --reason TEXT
    holdfast clients unban CLIENT|--user NAME|--address NET
    holdfast sessions show|end|history CLIENT
    holdfast sessions move CLIENT end --dry-run
    holdfast subscriptions list --topic factory/1/state
    holdfast groups list
    holdfast retained list 'factory/#'
    holdfast retained delete 'factory/old/#' > deleted.json
    holdfast retained restore deleted.json

Lists are tables, and the result about one row is text. `--json` prints what the port has sent. A
list ends after `--most` rows and says so.
"""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from holdfast.cli.cluster.http import (
    AdminPort,
    add_admin_options,
)
from holdfast.cli.durations import DAY_S, duration_s
from holdfast.cli.resources.sentences import SENTENCES, fields_text, time_text
from holdfast.cli.resources.tables import Column, Row, escaped, table_lines
from holdfast.client.admin_connection import AdminError
from holdfast.client.log.position import resolve_place

DURATION_S_MAX: Final = 3650 * DAY_S


def add_ban_parsers(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> list[argparse.ArgumentParser]:
    """Adds the parsers of the three actions, and returns them."""
    listing = commands.add_parser("bans", help="list the bans and lock-outs")
    listing.add_argument("--search", metavar="TEXT", help="a part of the name or the reason")
    listing.add_argument("--scope", choices=("client", "user", "address"), help="of this scope")
    listing.add_argument("--kind", choices=("ban", "lockout"), help="of this kind")
    ban = commands.add_parser(
        "ban", help="end the connections of a client, user or address, and refuse new ones"
    )
    unban = commands.add_parser("unban", help="lift a ban and the lock-outs of a name")
    for each in (ban, unban):
        named = each.add_mutually_exclusive_group(required=True)
        named.add_argument("client", metavar="CLIENT", nargs="?", help="the client id")
        named.add_argument("--user", metavar="NAME", help="a user instead")
        named.add_argument(
            "--address", metavar="NET", help="an address or network instead, as 192.0.2.0/24"
        )
    ban.add_argument(
        "--for",
        dest="for_s",
        metavar="TIME",
        type=duration_s(DURATION_S_MAX),
        default=0,
        help="as 90d or 12h (default: until unban)",
    )
    ban.add_argument("--reason", metavar="TEXT", default="", help="a text for the client")
    return [listing, ban, unban]


def ban_request(args: argparse.Namespace) -> dict[str, str | int]:
    """The body of the request that bans a name."""
    wanted: dict[str, str | int] = {
        **banned_name(args),
        "duration_s": args.for_s,
        "reason": args.reason,
    }
    return {name: value for name, value in wanted.items() if value}


def banned_name(args: argparse.Namespace) -> dict[str, str]:
    """The name of a command, by its scope."""
    given = {"client": args.client, "user": args.user, "address": args.address}
    return {name: value for name, value in given.items() if value is not None}


EXIT_ERROR: Final = 2
PAGE: Final = 500
SORTS: Final = (
    "client", "user", "address", "queued", "inflight", "subscriptions", "log-lag", "dropped",
)  # fmt: skip
"""The orders of a list of sessions, as its headings have them."""
MOST: Final = 1000
"""The default of the most rows that a list prints."""


def _time(name: str, none: str = "") -> Callable[[Row], object]:
    def text(row: Row) -> object:
        value = row.get(name, 0)
        return time_text(value) if value else none

    return text


def _field(name: str) -> Callable[[Row], object]:
    return lambda row: row.get(name, "")


def _columns(*names: str) -> list[Column]:
    return [(name.replace("_", "-"), _field(name)) for name in names]


LISTS: Final[dict[str, tuple[str, list[Column]]]] = {
    "clients": (
        "sessions",
        _columns("client", "user", "node", "address", "listener", "protocol", "queued",
                 "inflight", "subscriptions"),
    ),
    "sessions": (
        "sessions",
        [*_columns("client", "user", "node", "connected", "subscriptions", "queued", "inflight",
                   "log_lag"), ("away-since", _time("away_since_us"))],
    ),
    "bans": (
        "bans",
        [*_columns("scope", "name", "kind"), ("until", _time("until_us", "unban")),
         *_columns("reason", "by", "node")],
    ),
    "subscriptions": (
        "subscriptions",
        _columns("filter", "qos", "client", "user", "node", "connected"),
    ),
    "groups": (
        "groups",
        _columns("group", "member_count", "connected_count", "coordinator", "log_lag"),
    ),
    "retained": (
        "messages",
        [*_columns("topic", "bytes", "qos", "publisher"), ("at", _time("at_us"))],
    ),
    "history": (
        "events",
        [("at", _time("at_us")), *_columns("event", "node"),
         ("fields", lambda row: fields_text(row["fields"]))],
    ),
    "delayed": (
        "messages",
        [("due", _time("due_us")), *_columns("partition", "offset", "topic", "client", "qos",
                                             "bytes")],
    ),
}  # fmt: skip
"""Each list: the field of its reply with the rows, and its columns."""

HELP: Final = {
    "clients": "list, disconnect or ban clients",
    "sessions": "list, show, move or end sessions",
    "subscriptions": "list subscriptions, or those that a topic reaches",
    "groups": "list, show or delete shared groups",
    "retained": "list, read, delete or restore retained messages",
    "delayed": "list or cancel delayed messages",
}


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str
) -> None:
    """Adds the parser of one of these commands."""
    parser = subparsers.add_parser(name, help=HELP[name], description=HELP[name] + ".")
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = commands.add_parser("list", help="print them")
    made = [listing, *_LIST_OPTIONS[name](listing, commands)]
    for each in made:
        if each.prog.split()[-1] in ("list", "bans"):
            each.add_argument("--most", type=int, default=MOST, metavar="N",
                              help=f"the most rows (default {MOST})")  # fmt: skip
        add_admin_options(each)
    parser.set_defaults(run=run, resource=name)


Parsers = list[argparse.ArgumentParser]
Commands = Any


def _session_options(listing: argparse.ArgumentParser, commands: Commands) -> Parsers:
    listing.add_argument("--search", metavar="TEXT", help="a part of client id, user or address")
    listing.add_argument("--user", metavar="NAME", help="of this user only")
    listing.add_argument("--sort", metavar="FIELD", type=_sort_field, choices=SORTS,
                         help=f"the order: {', '.join(SORTS)}")  # fmt: skip
    listing.add_argument("--descending", action="store_true", help="the largest first")
    disconnect = commands.add_parser("disconnect", help="disconnect a client; its session stays")
    disconnect.add_argument("--reason", metavar="TEXT", help="a text for the client")
    show = commands.add_parser("show", help="one in full")
    end = commands.add_parser("end", help="end a session and forget its messages")
    move = commands.add_parser("move", help="skip messages in the log, or send them again")
    history = commands.add_parser("history", help="what happened to a client, the newest first")
    for each in (disconnect, show, end, move, history):
        each.add_argument("client", metavar="CLIENT", help="the client id")
    move.add_argument("to", choices=("start", "end", "time"), help="where it continues")
    move.add_argument("--at", metavar="TIME", help="with time, as 2026-01-31T12:00:00Z")
    move.add_argument("--dry-run", action="store_true", help="only count the messages")
    return [disconnect, show, end, move, history]


def _sort_field(text: str) -> str:
    """The heading of a column, also as the admin port writes it."""
    return text.replace("_", "-")


def _client_options(listing: argparse.ArgumentParser, commands: Commands) -> Parsers:
    return [*_session_options(listing, commands), *add_ban_parsers(commands)]


def _subscription_options(listing: argparse.ArgumentParser, commands: Commands) -> Parsers:
    listing.add_argument("--search", metavar="TEXT", help="a part of the filter")
    listing.add_argument("--topic", metavar="TOPIC", help="a topic that the filter matches")
    listing.add_argument("--client", metavar="CLIENT", help="of this client only")
    return []


def _group_options(listing: argparse.ArgumentParser, commands: Commands) -> Parsers:
    listing.add_argument("--search", metavar="TEXT", help="a part of the key")
    show = commands.add_parser("show", help="members and the oldest unfinished message")
    delete = commands.add_parser("delete", help="delete a queue that has no members")
    for each in (show, delete):
        text = "the key, $share/name/filter, or $queue/filter"
        each.add_argument("group", metavar="GROUP", help=text)
    return [show, delete]


def _retained_options(listing: argparse.ArgumentParser, commands: Commands) -> Parsers:
    listing.add_argument("filter", metavar="FILTER", nargs="?", default="#", help="default #")
    show = commands.add_parser("show", help="one with its payload")
    show.add_argument("topic", metavar="TOPIC")
    delete = commands.add_parser("delete", help="delete those of a filter; prints what restores")
    delete.add_argument("filter", metavar="FILTER")
    delete.add_argument("--dry-run", action="store_true", help="only print what would go")
    restore = commands.add_parser("restore", help="set deleted ones again, while the log has them")
    restore.add_argument("file", type=Path, metavar="FILE", help="the output of delete")
    return [show, delete, restore]


def _delayed_options(listing: argparse.ArgumentParser, commands: Commands) -> Parsers:
    listing.add_argument("--search", metavar="TEXT", help="a part of the topic or client id")
    cancel = commands.add_parser("cancel", help="do not publish one")
    for name in ("partition", "offset"):
        cancel.add_argument(name, metavar=name.upper(), type=int, help="as the list has it")
    return [cancel]


_LIST_OPTIONS: Final = {
    "clients": _client_options,
    "sessions": _session_options,
    "subscriptions": _subscription_options,
    "groups": _group_options,
    "retained": _retained_options,
    "delayed": _delayed_options,
}


_LIST_PARAMETERS: Final = (
    "search", "user", "sort", "descending", "topic", "client", "filter", "scope", "kind",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs one of these commands."""
    try:
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        if args.action == "list":
            return _list(port, args, args.resource)
        if args.action == "bans":
            return _list(port, args, "bans")
        if args.action == "history":
            return _history(port, args)
        reply = _ACTIONS[args.action](port, args)
        text = SENTENCES.get((args.resource, args.action))
        if args.json or text is None:
            print(json.dumps(reply, indent=2, ensure_ascii=False))
        else:
            print(text(reply))
    except (AdminError, ValueError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def path_of(resource: str, **parameters: object) -> str:
    """The path of a request with those parameters that are given."""
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in parameters.items()
        if value not in (None, "", False)
    }
    query = urlencode(given, quote_via=quote)
    return f"/api/v1/{resource}" + (f"?{query}" if query else "")


def _list(port: AdminPort, args: argparse.Namespace, name: str) -> int:
    field, columns = LISTS[name]
    wanted = {key: getattr(args, key, None) for key in _LIST_PARAMETERS}
    if wanted["sort"]:
        wanted["sort"] = wanted["sort"].replace("-", "_")
    rows: list[Row] = []
    after, missing = "", {}
    while len(rows) < args.most:
        limit = min(PAGE, args.most - len(rows))
        page = port.get_json(path_of(name, limit=limit, after=after, **wanted))
        rows += page[field]
        missing = {each["node"]: each["reason"] for each in page.get("missing", [])}
        after = page.get("next", "")
        if not after:
            break
    if args.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    else:
        print("\n".join(table_lines(rows, columns)))
    if after:
        print(f"there are more than {args.most}: --most N", file=sys.stderr)
    for node, reason in missing.items():
        print(f"holdfast: node {escaped(node)} is missing: {escaped(reason)}", file=sys.stderr)
    return 0


def _history(port: AdminPort, args: argparse.Namespace) -> int:
    events = port.get_json(path_of("session/history", client=args.client))["events"]
    if args.json:
        print(json.dumps(events, indent=2, ensure_ascii=False))
    else:
        print("\n".join(table_lines(events, LISTS["history"][1])))
    return 0


def _show(port: AdminPort, args: argparse.Namespace) -> object:
    if args.resource == "groups":
        return port.get_json(path_of("group", group=args.group))
    if args.resource == "retained":
        return port.get_json(path_of("retained/message", topic=args.topic))
    return port.get_json(path_of("session", client=args.client))


def _disconnect(port: AdminPort, args: argparse.Namespace) -> object:
    path = path_of("session/disconnect", client=args.client, reason=args.reason)
    return port.exchange("POST", path)


def _ban(port: AdminPort, args: argparse.Namespace) -> object:
    return port.exchange("POST", path_of("ban"), ban_request(args))


def _unban(port: AdminPort, args: argparse.Namespace) -> object:
    return port.exchange("DELETE", path_of("ban", **banned_name(args)))


def _end(port: AdminPort, args: argparse.Namespace) -> object:
    return port.exchange("DELETE", path_of("session", client=args.client))


def _move(port: AdminPort, args: argparse.Namespace) -> object:
    plan = {"to": args.to, "dry_run": args.dry_run}
    if args.to == "time":
        if not args.at:
            raise ValueError("move CLIENT time: give --at TIME")
        plan["time_us"] = time_us(args.at)
    return port.exchange("POST", path_of("session/move", client=args.client), plan)


def _delete(port: AdminPort, args: argparse.Namespace) -> object:
    if args.resource == "groups":
        return port.exchange("DELETE", path_of("group", group=args.group))
    path = path_of("retained", filter=args.filter, dry_run=args.dry_run)
    return port.exchange("DELETE", path)


def _cancel(port: AdminPort, args: argparse.Namespace) -> object:
    path = path_of("delayed", partition=str(args.partition), offset=str(args.offset))
    return port.exchange("DELETE", path)


def _restore(port: AdminPort, args: argparse.Namespace) -> object:
    try:
        deleted = json.loads(args.file.read_bytes())["deleted"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{args.file} is not what `holdfast retained delete` prints") from None
    return port.exchange("POST", path_of("retained/restore"), {"deleted": deleted})


def time_us(text: str) -> int:
    """A time in ISO 8601, which is local without a zone, or a span before now. Raises
    `ValueError`."""
    try:
        if text.startswith("-"):
            found_us = resolve_place("time", text)
        else:
            found_us = int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1_000_000)
    except (ValueError, OverflowError):
        found_us = -1
    if not isinstance(found_us, int) or found_us < 0:
        raise ValueError(f"{text!r} is no time like 2026-01-31T12:00:00Z or -15m")
    return found_us


_ACTIONS: Final[dict[str, Callable[[AdminPort, argparse.Namespace], Any]]] = {
    "show": _show,
    "disconnect": _disconnect,
    "ban": _ban,
    "unban": _unban,
    "end": _end,
    "move": _move,
    "delete": _delete,
    "cancel": _cancel,
    "restore": _restore,
}
