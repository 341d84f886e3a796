"""`holdfast federation`: a broker's federation, and the two other programs of a federation.

status      a broker's member, its links, and the messages that wait for other members
mesh TOPIC  the members that want a topic, and the tree along which it reaches them
sidecar     run a member beside any MQTT broker
manager     run the topology manager, or request something from it

Exit codes: 0 success; 1 the member is down, or the broker has none or does not reply; 2 wrong
usage.
"""

import argparse
import json
import sys
from typing import Any, Final
from urllib.parse import quote

from holdfast.cli.cluster.http import AdminPort, add_admin_options
from holdfast.cli.text import count_text, table
from holdfast.client.admin_connection import AdminError
from holdfast_federation.cli import manager, sidecar

EXIT_FAILED: Final = 1
REFUSALS: Final = {"nobody": "no process listened at the address"}
"""The reasons whose word says too little."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "federation",
        help="a broker's federation; a member beside any broker; the manager of one",
        description="A broker with [federation], a member beside any broker, and the manager.",
    )
    commands = parser.add_subparsers(dest="federation_command", metavar="COMMAND", required=True)
    status = commands.add_parser("status", help="the member, its links, what waits for others")
    mesh = commands.add_parser("mesh", help="the members that want a topic, and its way to them")
    mesh.add_argument("topic", metavar="TOPIC")
    sidecar.add_parser(commands)
    manager.add_parser(commands)
    for each in (status, mesh):
        add_admin_options(each, "of the broker")


def run(args: argparse.Namespace) -> int:
    if args.federation_command == "sidecar":
        return sidecar.run(args)
    if args.federation_command == "manager":
        return manager.run(args)
    query = ""
    if args.federation_command == "mesh":
        query = f"?topic={quote(args.topic, safe='')}"
    try:
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        status = port.get_json(f"/api/v1/federation{query}")
    except AdminError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_FAILED
    shown = status["mesh"] if query else status
    if args.json:
        print(json.dumps(shown, indent=2))
    elif not status["running"]:
        reason = status["failure"] or f"node {status['node']} runs it, and does not reply"
        print(f"{status['federation']}: down: {reason}")
    else:
        print(
            "\n".join(mesh_lines(shown, status.get("names", {})) if query else status_lines(shown))
        )
    return 0 if status["running"] else EXIT_FAILED


def site_name(names: dict[str, str], node: str) -> str:
    """Returns a member's name with the beginning of its id, or its id."""
    return f"{names[node]} ({node[:8]})" if names.get(node) else node


def status_lines(status: dict[str, Any]) -> list[str]:
    """Returns a member's status as lines for people."""
    names = status.get("names", {})
    custody, interest, edge = status["custody"], status["interest"], status["edge"]
    lines = [
        f"member {site_name(names, status['id'])} of {status['federation']}, start"
        f" {status['epoch']}, at {status['address'] or 'no address'}",
        f"knows {count_text(status['members'], 'member')}, itself included; announces"
        f" {count_text(interest['local'], 'filter')}, others want"
        f" {count_text(interest['remote'], 'filter')}",
        f"in custody {count_text(custody['messages'], 'message')}; handed over"
        f" {edge['counts'].get('exported', 0)}, taken in {edge['counts'].get('imported', 0)}",
    ]
    if custody["disk_full"]:
        lines.append("the disk is full: nothing more is taken into custody")
    lines += status.get("problems", [])
    if not edge["is_up"]:
        lines.append("the broker's session is not open: nothing goes out or comes in")
    lines += [
        f"{count_text(count, 'message')}: {outcome}"
        for outcome, count in edge["counts"].items()
        if outcome not in ("exported", "imported")
    ]
    manager = status["manager"]
    if manager is not None:
        lines.append(
            f"member {manager['id']} of the manager at {manager['url']}"
            if manager["connected"]
            else f"the manager at {manager['url']} does not answer: the links stay as they are"
        )
    lines += [
        f"{count_text(count, 'connection')} refused:"
        f" {REFUSALS.get(reason, reason.replace('_', ' '))} (the log says more)"
        for reason, count in status["counters"]["refused"].items()
    ]
    rows = [
        {
            "link": site_name(names | {link["id"]: link.get("name", "")}, link["id"]),
            "remote": link["remote"],
            "rtt ms": "-" if link["rtt_ms"] is None else f"{link['rtt_ms']:.1f}",
            "up s": f"{link['up_s']:.0f}",
            "state": "busy" if link["busy"] else "up" if link["usable"] else "held down",
        }
        for link in status["links"]
    ]
    lines += list(table(rows, ("rtt ms", "up s"))) or ["no links"]
    queued = [
        {"waits for": site_name(names, node), "messages": str(count)}
        for node, count in custody["queued"].items()
    ]
    return [*lines, *table(queued, ("messages",))]


def mesh_lines(mesh: dict[str, Any], names: dict[str, str]) -> list[str]:
    """Returns the tree from the root, indented by two blanks per link.

    Members that only forward are in brackets.
    """
    if mesh["root"] is None:
        return [f"no member is subscribed to {mesh['topic']}"]
    members = set(mesh["members"])
    want = "wants" if len(members) == 1 else "want"
    lines = [f"{count_text(len(members), 'member')} {want} {mesh['topic']}"]
    waiting = [(mesh["root"], 0)]
    while waiting:
        node, depth = waiting.pop()
        text = site_name(names, node)
        lines.append("  " * depth + (text if node in members else f"({text})"))
        below = mesh["children"].get(node, [])
        waiting += [(child, depth + 1) for child in reversed(below)]
    reached = {*mesh["parents"], mesh["root"]}
    lines += [f"no way to {site_name(names, node)}" for node in sorted(members - reached)]
    return lines
