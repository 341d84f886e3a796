"""`holdfast access may`: may a client publish or subscribe, and by which rule."""

import argparse
import json
import sys
from typing import Final

from holdfast.cli.cluster.http import DEFAULT_ADMIN, AdminPort, add_access_options
from holdfast.cli.resources.command import path_of
from holdfast.cli.resources.tables import escaped
from holdfast.client.admin_connection import AdminError

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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--admin", metavar="ADDR:PORT", default=DEFAULT_ADMIN,
                        help=f"admin port of any node (default {DEFAULT_ADMIN})")  # fmt: skip
    add_access_options(parser)


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
