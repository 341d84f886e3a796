"""`holdfast cluster plan`: the moves that are left, or that an operation would make."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from msgspec import Struct, convert, to_builtins
from msgspec.structs import asdict

from holdfast.cli.cluster.http import AdminPort, AdminRefused
from holdfast.cli.cluster.status import ClusterStatus, verdict
from holdfast.cli.text import count_text, size_text, table
from holdfast.client.admin_connection import AdminError

ACTIONS: Final = ("join", "leave", "drain", "undrain", "remove", "rebalance", "resize")
NOTHING: Final = "nothing"
AUTO: Final = "auto"
PLAN: Final = "/api/v1/cluster/plan"
NUMBERS: Final = ("capacity", "leaders", "replicas", "bytes")


class Loss(Struct):
    """The effect of the loss of a node, or of a zone if `node` is empty."""

    node: str
    zone: str
    leaders: int
    below_min_insync: int
    leaderless: int


class PlannedMoves(Struct):
    """The reply of `GET /api/v1/cluster/plan`, as far as it is printed."""

    copies: int
    leaders_moved: int
    copies_under_way: int
    bytes_to: dict[str, int]
    seconds: float
    paused: bool
    under_zoned: int
    losses: list[Loss] = []


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what an operation would move, how many bytes and for how long; nothing is changed."
        " Without an operation: the nodes, the moves that are left, and the effect of the loss of"
        " each node."
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        metavar="ACTION",
        help=f"{', '.join(ACTIONS)}; leave: the node is lost for good",
    )
    parser.add_argument("node", nargs="?", default="", metavar="NODE", help="its id; resize: auto")
    parser.add_argument("--zone", metavar="Z", help="the zone of the node that joins")
    parser.add_argument("--capacity", type=int, metavar="N", help="its capacity (default 100)")


def plan(port: AdminPort, args: argparse.Namespace) -> int:
    """Prints the plan."""
    status = port.status()
    if not status.initialised:
        raise AdminError(verdict(status).text)
    given: dict[str, object] = {"zone": args.zone, "capacity": args.capacity}
    given |= {"replication_factor": args.replication_factor, "min_insync": args.min_insync}
    if args.action == "resize" and args.node == AUTO:
        given["automatic"] = "true"
    else:
        given["node"] = args.node
    query = {name: str(value) for name, value in given.items() if value}
    found = ask_plan(port, args.action or NOTHING, query)
    lines = [
        *plan_lines(convert(found, PlannedMoves)),
        *_loss_lines(convert(found, PlannedMoves).losses),
    ]
    if args.action is None:
        sizes = port.get_json("/api/v1/cluster/replicas")["partitions"]
        rows = _node_rows(status, {row["partition"]: row["bytes"] for row in sizes})
        found["nodes"] = to_builtins(rows)
        lines = [*_node_tables(rows), "", *lines]
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines))
    return 0


def ask_plan(port: AdminPort, action: str, given: Mapping[str, str]) -> Any:
    """The plan of an operation, see `PlannedMoves`. Raises `AdminRefused` if it is not possible."""
    found = port.get_json(f"{PLAN}?{urlencode({'action': action, **given})}")
    if not found["possible"]:
        raise AdminRefused(str(found["reason"]))
    return found


def plan_lines(found: PlannedMoves) -> Iterator[str]:
    """The moves of a plan, for people."""
    if not found.copies and not found.leaders_moved and not found.copies_under_way:
        yield "no data is copied, and no leadership moves"
    if found.copies_under_way:
        yield f"{count_text(found.copies_under_way, 'replica')} being copied"
    if found.copies or found.leaders_moved:
        moved = count_text(found.leaders_moved, "leadership")
        yield f"{count_text(found.copies, 'replica')} to copy, {moved} to move"
    for node, size in sorted(found.bytes_to.items()):
        yield f"{node} receives {size_text(size)}"
    if found.seconds:
        end = datetime.now() + timedelta(seconds=found.seconds)
        at = end.strftime("%H:%M" if found.seconds < 12 * 3600 else "%Y-%m-%d %H:%M")
        took = str(timedelta(seconds=max(1, round(found.seconds))))
        yield f"copied in about {took} at catch_up_bytes_per_s, until {at}"
    if found.paused:
        yield "moves are paused: `holdfast cluster resume` begins them"
    if found.under_zoned:
        yield f"{count_text(found.under_zoned, 'partition')} with too many replicas in one zone"


class DataShare(Struct):
    """The parts that a data node, or a zone, has of the cluster."""

    node: str
    zone: str
    capacity: int
    leaders: int
    replicas: int
    bytes: int


def _node_rows(status: ClusterStatus, sizes: Mapping[int, int]) -> list[DataShare]:
    """The data nodes. `sizes`: the bytes by partition."""
    return [
        DataShare(
            node.node,
            node.zone,
            node.capacity,
            node.leaders,
            node.replicas,
            sum(
                sizes.get(each.partition, 0)
                for each in status.partitions
                if node.node in each.replicas
            ),
        )
        for node in status.nodes
        if node.role == "data"
    ]


def _node_tables(rows: Sequence[DataShare]) -> Iterator[str]:
    """A table of the nodes, and one of the zones if there are any."""
    yield from table([_texts(row) for row in rows], NUMBERS)
    totals = []
    for zone in sorted({row.zone for row in rows} - {""}):
        inside = [row for row in rows if row.zone == zone]
        sums = [sum(getattr(row, name) for row in inside) for name in NUMBERS]
        totals.append(_texts(DataShare("all", zone, *sums)))
    if totals:
        yield ""
        yield from table(totals, NUMBERS)


def _texts(row: DataShare) -> dict[str, str]:
    texts = {name: str(value) or "-" for name, value in asdict(row).items()}
    return texts | {"bytes": size_text(row.bytes)}


def _loss_lines(losses: Sequence[Loss]) -> Iterator[str]:
    """The effect of losses, at once."""
    columns = ("leaderships move", "publishes refused", "without a leader")
    rows = []
    for each in losses:
        counts = (each.leaders, each.below_min_insync, each.leaderless)
        texts = dict(zip(columns, map(str, counts), strict=True))
        rows.append({"if it is lost": each.node or f"zone {each.zone}"} | texts)
    if rows:
        yield ""
        yield from table(rows, columns)
