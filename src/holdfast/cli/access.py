"""`holdfast access`: the users and tokens of the admin port.

With `--data DIR` the command changes the file in a data directory, whether a broker serves it or
not; a running broker uses the change within a second. Otherwise it asks the admin port of a running
broker, which writes the change to the audit.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from holdfast.cli.cluster.http import (
    DEFAULT_ADMIN,
    AdminPort,
    add_access_options,
    add_admin_options,
)
from holdfast.cli.durations import duration_s
from holdfast.cli.passwd import PasswordInputError, ask_password
from holdfast.cli.resources.command import path_of
from holdfast.cli.resources.tables import escaped
from holdfast.cli.text import table
from holdfast.client.admin_connection import AdminError
from holdfast.security.access import changes
from holdfast.security.access.access_file import AccessError, AccessFile
from holdfast.security.access.scopes import ROLES

EXIT_DENIED: Final = 1
EXIT_ERROR: Final = 2


def add_may_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the parser of the command."""
    parser = commands.add_parser(
        "may",
        help="whether a client may publish or subscribe, and by which rule",
        description="Say whether a client may publish to a topic, subscribe to a filter, or begin"
        " in the past with it, and by which rule and line. Exits with 0 if it may, also in part,"
        " and with 1 if not.",
    )
    parser.add_argument("client", metavar="CLIENT", help="the client id")
    parser.add_argument("action", choices=("publish", "subscribe", "history"))
    parser.add_argument("topic", metavar="TOPIC", help="the topic, or the filter")
    parser.add_argument("--user", metavar="NAME", help="in place of the user of its session")
    add_admin_options(parser)


def run_may(args: argparse.Namespace) -> int:
    """Runs the command."""
    path = path_of("may", client=args.client, action=args.action, topic=args.topic, user=args.user)
    try:
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        found = port.get_json(path)
    except (AdminError, ValueError, OSError) as error:
        print(f"holdfast access: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(json.dumps(found, indent=2, ensure_ascii=False) if args.json
          else escaped(found["sentence"]))  # fmt: skip
    for each in found["missing"]:
        text = f"node {escaped(each['node'])} is missing: {escaped(each['reason'])}"
        print(f"holdfast access: {text}", file=sys.stderr)
    return EXIT_DENIED if found["verdict"] == "denied" else 0


PAGE_MAX: Final = 500
"""The most entries of one reply."""


def add_audit_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the parser of the command."""
    parser = commands.add_parser(
        "audit",
        help="who changed what, the newest first",
        description="Print the newest entries of the audit of all nodes, with the role admin.",
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, default=50, help="the most entries (default 50)"
    )
    add_admin_options(parser)


def run_audit(args: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if the port does not reply."""
    found: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    before: str | None = None
    try:
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        while len(found) < args.limit:
            limit = min(PAGE_MAX, args.limit - len(found))
            page = port.get_json(path_of("audit", limit=limit, before=before))
            found += page["entries"]
            missing.update({each["node"]: each["reason"] for each in page["missing"]})
            before = page["next"]
            if before is None:
                break
    except (AdminError, ValueError, OSError) as error:
        print(f"holdfast access: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(table([_row(each) for each in found], ())) or "nothing was changed")
    for node, reason in sorted(missing.items()):
        print(f"holdfast access: without the entries of {node}: {reason}", file=sys.stderr)
    return 0


def _row(entry: dict[str, Any]) -> dict[str, str]:
    at = datetime.fromtimestamp(entry["time_us"] / 1_000_000, UTC)
    error, parameters = entry.get("error", ""), entry.get("parameters", "")
    what = entry.get("action") or f"{entry['method']} {entry['path']}"
    done = "tried (dry run)" if entry.get("dry") else "done"
    row = {
        "time": f"{at:%Y-%m-%dT%H:%M:%SZ}",
        "who": entry["who"],
        "from": entry["remote"],
        "node": entry["node"],
        "what": f"{what}: {parameters}" if parameters else what,
        "result": f"refused: {error}" if error else done,
    }
    return {name: escaped(value) for name, value in row.items()}


EXIT_FAILED: Final = 1

Row: TypeAlias = Mapping[str, str | int]
"""A user or token, with times in seconds since 1970."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "access",
        help="users, tokens and audit of the admin port; the rights of a client",
        description="Manage the users and tokens of the admin port. As soon as there is one, every"
        " request to the port needs credentials.",
    )
    kinds = parser.add_subparsers(dest="access_kind", metavar="KIND", required=True)
    user = kinds.add_parser("user", help="people, who log in with a password")
    users = user.add_subparsers(dest="access_command", metavar="COMMAND", required=True)
    token = kinds.add_parser("token", help="programs, which send a token")
    tokens = token.add_subparsers(dest="access_command", metavar="COMMAND", required=True)
    user_parsers = {
        "add": users.add_parser("add", help="add a user; asks for the password"),
        "list": users.add_parser("list", help="all users"),
        "role": users.add_parser("role", help="give a user another role"),
        "passwd": users.add_parser("passwd", help="give a user another password"),
        "remove": users.add_parser("remove", help="remove a user"),
    }
    for name in ("add", "role", "passwd", "remove"):
        user_parsers[name].add_argument("name", metavar="NAME")
    user_parsers["role"].add_argument("role", choices=ROLES)
    user_parsers["add"].add_argument("--role", choices=ROLES, required=True)
    token_parsers = {
        "create": tokens.add_parser("create", help="print a new token, which nothing shows again"),
        "list": tokens.add_parser("list", help="all tokens, without their secrets"),
        "remove": tokens.add_parser("remove", help="remove a token"),
    }
    create = token_parsers["create"]
    create.add_argument("--role", choices=ROLES, required=True)
    create.add_argument(
        "--expires",
        metavar="TIME",
        type=duration_s(changes.VALID_S_MAX),
        default=0,
        help="as 90d or 12h (default: never)",
    )
    create.add_argument("--note", metavar="TEXT", default="", help="what the token is for")
    token_parsers["remove"].add_argument("id", metavar="ID")
    for each in (*user_parsers.values(), *token_parsers.values()):
        _add_place(each)
    for each in (user_parsers["list"], token_parsers["list"]):
        each.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    add_may_parser(kinds)
    add_audit_parser(kinds)


def _add_place(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--data", metavar="DIR", type=Path, help="the data directory, without the admin port"
    )
    place.add_argument(
        "--admin",
        metavar="ADDR:PORT",
        default=DEFAULT_ADMIN,
        help=f"admin port of the broker (default {DEFAULT_ADMIN})",
    )
    add_access_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 1 with one line on standard error if it cannot do its work."""
    if args.access_kind == "may":
        return run_may(args)
    if args.access_kind == "audit":
        return run_audit(args)
    try:
        place: FilePlace | PortPlace
        if args.data is not None:
            place = FilePlace(args.data)
        else:
            port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
            place = PortPlace(port)
        _carry_out(place, args)
    except (AccessError, AdminError, PasswordInputError) as error:
        print(f"holdfast access: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def become_owner(directory: Path) -> None:
    """Gives up the rights of root for those of the owner of a directory, for the rest of the
    process.

    The owner can replace each name in the directory by a link while root works there. So root would
    read, write or give away files that the owner may not touch.
    """
    try:
        found = directory.stat()
    except OSError:
        return
    if os.geteuid() == 0 and found.st_uid != 0:
        os.setgroups([])
        os.setgid(found.st_gid)
        os.setuid(found.st_uid)


class FilePlace:
    """The file of users and tokens in a data directory."""

    def __init__(self, directory: Path) -> None:
        become_owner(directory)
        self._file = AccessFile(directory)

    def add_user(self, name: str, role: str, password: str) -> None:
        hashed = changes.hash_admin_password(password)
        self._file.change(changes.add_user(name, role, hashed, int(time.time())))

    def change_user(self, name: str, role: str, password: str) -> None:
        hashed = changes.hash_admin_password(password) if password else ""
        self._file.change(changes.change_user(name, role, hashed))

    def remove_user(self, name: str) -> None:
        self._file.change(changes.remove_user(name))

    def users(self) -> list[Row]:
        used = self._file.read_uses().used_s
        return [
            {"name": name, "role": user.role, "created_s": user.created_s,
             "used_s": used.get(f"user {name}", 0)}
            for name, user in sorted(self._file.read().users.items())
        ]  # fmt: skip

    def add_token(self, role: str, valid_s: int, note: str) -> str:
        make = changes.add_token(role, int(time.time()), valid_s, note, "command line")
        return self._file.change(make)[1]

    def remove_token(self, id: str) -> None:
        self._file.change(changes.remove_token(id))

    def tokens(self) -> list[Row]:
        used = self._file.read_uses().used_s
        return [
            {"id": id, "role": token.role, "note": token.note, "created_s": token.created_s,
             "created_by": token.created_by, "expires_s": token.expires_s,
             "used_s": used.get(f"token {id}", 0)}
            for id, token in self._file.read().tokens.items()
        ]  # fmt: skip


class PortPlace:
    """The users and tokens of a running broker, over its admin port."""

    def __init__(self, port: AdminPort) -> None:
        self._port = port

    def add_user(self, name: str, role: str, password: str) -> None:
        body = {"name": name, "role": role, "password": password}
        self._port.exchange("POST", "/api/v1/users", body)

    def change_user(self, name: str, role: str, password: str) -> None:
        body = {"role": role, "password": password}
        self._port.exchange("PUT", f"/api/v1/users/{quote(name, safe='')}", body)

    def remove_user(self, name: str) -> None:
        self._port.exchange("DELETE", f"/api/v1/users/{quote(name, safe='')}")

    def users(self) -> list[Row]:
        found: list[Row] = self._port.exchange("GET", "/api/v1/users")
        return found

    def add_token(self, role: str, valid_s: int, note: str) -> str:
        body = {"role": role, "valid_s": valid_s, "note": note}
        return str(self._port.exchange("POST", "/api/v1/tokens", body)["token"])

    def remove_token(self, id: str) -> None:
        self._port.exchange("DELETE", f"/api/v1/tokens/{quote(id, safe='')}")

    def tokens(self) -> list[Row]:
        found: list[Row] = self._port.exchange("GET", "/api/v1/tokens")
        return found


def _carry_out(place: FilePlace | PortPlace, args: argparse.Namespace) -> None:
    match args.access_kind, args.access_command:
        case "user", "add":
            place.add_user(args.name, args.role, ask_password())
        case "user", "role":
            place.change_user(args.name, args.role, "")
        case "user", "passwd":
            place.change_user(args.name, "", ask_password())
        case "user", "remove":
            place.remove_user(args.name)
        case "user", "list":
            _show(place.users(), args.json)
        case "token", "create":
            print(place.add_token(args.role, args.expires, args.note))
        case "token", "remove":
            place.remove_token(args.id)
        case "token", "list":
            _show(place.tokens(), args.json)


def _show(found: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    rows = [
        {
            key.removesuffix("_s"): _time(int(value)) if key.endswith("_s") else str(value)
            for key, value in each.items()
        }
        for each in found
    ]
    print("\n".join(table(rows, ())) or "none: the admin port serves its own machine only")


def _time(seconds: int) -> str:
    if not seconds:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
