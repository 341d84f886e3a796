"""`holdfast access audit`: who changed what over the admin port, or by a command of a client."""

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.cli.cluster.http import DEFAULT_ADMIN, AdminPort, add_access_options
from holdfast.cli.resources.command import path_of
from holdfast.cli.resources.tables import escaped
from holdfast.cli.text import table
from holdfast.client.admin_connection import AdminError

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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--admin", metavar="ADDR:PORT", default=DEFAULT_ADMIN,
                        help=f"admin port of any node (default {DEFAULT_ADMIN})")  # fmt: skip
    add_access_options(parser)


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
