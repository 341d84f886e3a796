"""`holdfast cluster`: nodes that replicate one log, or that share a data directory.

The subcommands for a cluster use a node's admin port (`--admin`):

    init        initialise a cluster with this node
    status      a verdict, and every node; exit code 0 healthy, 1 degraded, 2 error,
                3 no majority
    nodes       every node
    partitions  every partition; with --topic the one of a topic
    drain       move leaderships and replicas away from a node; undrain: let it take part again
    remove      remove a node for good that is drained or down
    resize      change the replication factor and min_insync while the cluster serves
    plan        what an operation would move, and for how long; or what is left to move
    pause       make and move no replicas; resume: do it again
    rebalance   give every partition its preferred leader; with --connections every node its share
                of the clients
    unsafe-recover  let a node lead partitions that have lost every disk with all records
    watch       changes, one per line
    accept-older-copy  let a stopped node go on with a disk that the others have rejected
    adopt       copy the directory of an earlier version in the form of this one
    diverged    the records that a node has set aside; publish them again
    local       a whole cluster on this machine, for trying

The subcommands for a shared data directory (`--data`) are status and handover. See
`holdfast.cli.cluster.pair`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.cli.cluster import adopt, diverged, older_copy
from holdfast.cli.cluster import commands as cluster_commands
from holdfast.cli.cluster import local as cluster_local
from holdfast.cli.cluster import pair as cluster_pair
from holdfast.cli.cluster import plan as cluster_plan
from holdfast.cli.cluster import resize as cluster_resize
from holdfast.cli.cluster.http import DEFAULT_ADMIN, AdminPort, add_admin_options
from holdfast.client.admin_connection import AdminError

EXIT_ERROR: Final = 2
WAIT_S: Final = 600.0
SHARED_DEFAULT: Final = Path("holdfast-data")

Command = Callable[[AdminPort, argparse.Namespace], int]

_COMMANDS: Final[dict[str, tuple[Command, str]]] = {
    "init": (cluster_commands.make_cluster, "make a cluster of this node; others join it"),
    "status": (cluster_commands.show_status, "is it healthy; every node; or of a shared directory"),
    "nodes": (cluster_commands.show_nodes, "every node"),
    "partitions": (cluster_commands.show_partitions, "every partition, or that of a topic"),
    "drain": (cluster_commands.drain, "take leaderships and replicas away from a node"),
    "undrain": (cluster_commands.undrain, "let a drained node take part again"),
    "remove": (cluster_commands.remove, "remove a node that is drained or dead, for good"),
    "resize": (cluster_resize.resize, "change how many replicas there are and must be in sync"),
    "plan": (cluster_plan.plan, "what an operation would move; or what is left to move"),
    "pause": (cluster_commands.pause, "make and move no replicas until `resume`"),
    "resume": (cluster_commands.pause, "make and move replicas again"),
    "rebalance": (cluster_commands.rebalance, "give each partition its leader, or balance clients"),
    "unsafe-recover": (
        cluster_commands.unsafe_recover,
        "let a node lead lost partitions with what it has: messages may be lost",
    ),
    "watch": (cluster_commands.watch, "print what changes, until Ctrl-C"),
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "cluster",
        help="nodes that replicate one log, or share a data directory",
        description="Make, look at and change a cluster; or the nodes of a shared data directory.",
    )
    commands = parser.add_subparsers(dest="cluster_command", metavar="COMMAND", required=True)
    parsers = {name: commands.add_parser(name, help=text) for name, (_, text) in _COMMANDS.items()}
    for each in parsers.values():
        add_admin_options(each, "admin port of a node of the cluster")
        each.set_defaults(admin=None)
    parsers["status"].add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"look at a shared data directory instead (default ./{SHARED_DEFAULT}, if shared)",
    )
    for name in ("drain", "undrain", "remove", "unsafe-recover"):
        parsers[name].add_argument("node", metavar="NODE", help="its id")
    parsers["partitions"].add_argument(
        "--topic", type=cluster_commands.topic_argument, metavar="T", help="only where this one is"
    )
    parsers["unsafe-recover"].add_argument(
        "--accept-loss", action="store_true", help="you know that messages are lost for good"
    )
    parsers["init"].add_argument(
        "--wait",
        type=cluster_commands.number_argument("seconds", cluster_commands.WAIT_MAX_S),
        default=cluster_commands.INIT_WAIT_S,
        metavar="SECONDS",
        help="how long a node that has just been started has to open its admin port"
        f" (default {cluster_commands.INIT_WAIT_S:g})",
    )
    for name in ("drain", "resize"):
        _add_wait_options(parsers[name])
    cluster_resize.add_options(parsers["resize"])
    cluster_plan.add_options(parsers["plan"])
    cluster_resize.add_numbers(parsers["plan"])
    parsers["rebalance"].add_argument(
        "--connections",
        action="store_true",
        help="send the clients above each node's even share to the other nodes, not the leaders",
    )
    for name in ("drain", "rebalance"):
        parsers[name].add_argument(
            "--clients-per-s",
            type=cluster_commands.number_argument("clients a second", cluster_commands.PACE_MAX),
            metavar="N",
            help="clients that a node sends away in a second (default: cluster.drain_clients_per_s)"
            + ("; 0: all at once" if name == "drain" else "; 0: stop"),
        )
    _add_handover(commands)
    for module in (older_copy, adopt, diverged):
        module.add_parser(commands)
    cluster_local.add_options(
        commands.add_parser("local", help="run a whole cluster on this machine, for trying")
    )
    parser.set_defaults(run=run)


def _add_wait_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    parser.add_argument(
        "--timeout",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"how long to wait; the cluster goes on (default {WAIT_S:g})",
    )


def _add_handover(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    handover = commands.add_parser(
        "handover", help="of a shared directory: let the holder hand over to a standby"
    )
    handover.add_argument(
        "--timeout",
        type=float,
        default=cluster_pair.HANDOVER_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for the new holder (default {cluster_pair.HANDOVER_TIMEOUT_S:g})",
    )
    handover.add_argument(
        "--data",
        type=Path,
        default=SHARED_DEFAULT,
        metavar="DIR",
        help=f"the shared data directory (default ./{SHARED_DEFAULT})",
    )


def run(args: argparse.Namespace) -> int:
    name = args.cluster_command
    try:
        if name == "local":
            return cluster_local.run(args)
        if name == "accept-older-copy":
            return older_copy.run(args)
        if name == "adopt":
            return adopt.run(args)
        if name == "diverged":
            return diverged.run(args)
        if name == "handover" or (name == "status" and _asks_for_directory(args)):
            return cluster_pair.run(args)
        args.admin = args.admin or DEFAULT_ADMIN
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        return _COMMANDS[name][0](port, args)
    except AdminError as error:
        print(f"holdfast: {error}", file=sys.stderr)
    return EXIT_ERROR


def _asks_for_directory(args: argparse.Namespace) -> bool:
    """Returns whether the command concerns a shared data directory.

    The working directory's `./holdfast-data` counts without an option if it is shared. Raises
    `AdminError` for contradicting options.
    """
    if args.data is not None and args.admin is not None:
        raise AdminError("give --admin for a cluster, or --data for a shared directory")
    if args.data is None and args.admin is None and cluster_pair.is_shared(SHARED_DEFAULT):
        args.data = SHARED_DEFAULT
    return args.data is not None
