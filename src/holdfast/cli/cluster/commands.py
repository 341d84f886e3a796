"""The subcommands of `holdfast cluster` that use a node's admin port, except `watch`."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.cli.cluster.http import AdminPort
from holdfast.cli.cluster.status import ClusterStatus, NodeStatus, verdict
from holdfast.cli.cluster.text import node_table, partition_table, summary
from holdfast.cli.text import count_text
from holdfast.client.admin_connection import AdminError, NoAnswer, Unanswered
from holdfast.protocol.topics.names import decode_topic, has_wildcard
from holdfast.storage.partition import partition_of

EXIT_DEGRADED: Final = 1
POLL_S: Final = 0.2
INIT_WAIT_S: Final = 10.0
WAIT_MAX_S: Final = 3600.0


def show_status(port: AdminPort, args: argparse.Namespace) -> int:
    """Print a verdict on the cluster and its nodes. The exit code is the verdict's level."""
    status, values = port.status_as_sent()
    found = verdict(status)
    if args.json:
        _print_json(values | {"healthy": found.is_healthy, "verdict": found.text})
    else:
        heading = [found.text, summary(status)] if status.initialised else [found.text]
        _print_lines(*heading, *node_table(status))
    return _exit_code(status)


def show_nodes(port: AdminPort, args: argparse.Namespace) -> int:
    """Print the nodes of the cluster."""
    status, values = port.status_as_sent()
    if args.json:
        _print_json(values["nodes"])
    else:
        _print_lines(verdict(status).text, *node_table(status))
    return _exit_code(status)


def show_partitions(port: AdminPort, args: argparse.Namespace) -> int:
    """Print all partitions, or the one of a topic."""
    status = port.status()
    partitions = status.partitions
    if args.topic is not None:
        _initialised(status)
        partitions = [partitions[partition_of(args.topic.encode(), len(partitions))]]
    if args.json:
        _print_json(msgspec.to_builtins(partitions))
    else:
        heading = verdict(status).text
        if args.topic is not None:
            leader = partitions[0].leader
            led = f"led by {leader}" if leader else "which has no leader"
            heading = f"{args.topic} is in partition {partitions[0].partition}, {led}"
        _print_lines(heading, *partition_table(partitions))
    return _exit_code(status)


def topic_argument(text: str) -> str:
    """Parse a topic without wildcards. For argparse."""
    try:
        if has_wildcard(decode_topic(text.encode())):
            raise ValueError("a topic has no wildcards: each topic is in a partition of its own")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def wait_argument(text: str) -> float:
    """Parse a number of seconds up to WAIT_MAX_S. For argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= WAIT_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, from 0 to {WAIT_MAX_S:g}")
    return seconds


def make_cluster(port: AdminPort, args: argparse.Namespace) -> int:
    """Initialise a cluster with the requested node."""
    _init(port, args.wait, _quiet if args.json else _progress)
    status = port.status()
    _report(
        args,
        f"cluster {status.cluster_id} made, {status.node} is its first node; those that name it"
        " in --join come to it",
        {"cluster_id": status.cluster_id, "node": status.node},
    )
    return 0


def _init(port: AdminPort, wait_s: float, progress: Callable[[str], None]) -> None:
    """Initialise the cluster, waiting for a node that was just started.

    Raises `AdminError` when the node refuses or does not listen in time.
    """
    deadline = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            port.change("init")
            return
        except Unanswered:
            # Not repeated, because the node may have received the request.
            raise
        except NoAnswer as error:
            if time.monotonic() >= deadline:
                waited = f" (waited for {wait_s:g} s, see --wait)" if wait_s else ""
                raise NoAnswer(f"{error}{waited}") from None
            if not is_told:
                progress(f"nothing listens on {port.address} yet: waiting for up to {wait_s:g} s")
                is_told = True
        time.sleep(POLL_S)


def rebalance(port: AdminPort, args: argparse.Namespace) -> int:
    """Ask for the preferred leaders. The cluster moves them as their replicas come in sync."""
    _initialised(port.status())
    port.change("rebalance")
    _report(
        args,
        "accepted: every partition goes back to its first replica as soon as that is in sync",
        {"accepted": True},
    )
    return 0


def undrain(port: AdminPort, args: argparse.Namespace) -> int:
    """Let a draining node take part again."""
    node = _known(port.status(), args.node)
    if node.state != "draining":
        raise AdminError(f"{node.node} is not being drained, it is {node.state}")
    port.change("undrain", node.node)
    _report(args, f"{node.node} takes part again", {"node": node.node})
    return 0


def remove(port: AdminPort, args: argparse.Namespace) -> int:
    """Remove a node for good."""
    port.change("remove", args.node)
    _report(args, f"{args.node} removed", {"node": args.node, "removed": True})
    return 0


def unsafe_recover(port: AdminPort, args: argparse.Namespace) -> int:
    """Let a node lead leaderless partitions, after the operator has accepted the loss."""
    if not args.accept_loss:
        raise AdminError(
            f"{args.node} would lead the partitions without a leader; acknowledged messages that"
            " it does not have are lost for good: say so with --accept-loss"
        )
    port.change("unsafe-recover", args.node, accept_loss="true")
    _report(
        args, f"accepted: {args.node} leads the partitions that had no leader", {"accepted": True}
    )
    return 0


def drain(port: AdminPort, args: argparse.Namespace) -> int:
    """Drain a node and wait for the end. The exit code 1 means that the time was too short."""
    port.change("drain", args.node)
    if args.no_wait:
        _report(args, f"{args.node} is being drained", {"node": args.node, "done": False})
        return 0
    left = _await_drained(port, args.node, args.timeout, _quiet if args.json else _progress)
    _report(
        args,
        left or f"{args.node} is drained: it leads nothing and holds no replica",
        {"node": args.node, "done": not left, "left": left},
    )
    return EXIT_DEGRADED if left else 0


def _await_drained(
    port: AdminPort, name: str, timeout_s: float, progress: Callable[[str], None]
) -> str:
    """Wait until the node is drained. Returns "", or what is left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        try:
            node = _known(port.status(), name)
            if not node.leaders and not node.held:
                return ""
            text = (
                f"{name} leads {count_text(node.leaders, 'partition')},"
                f" holds {count_text(node.held, 'replica')}"
            )
        except NoAnswer as error:
            # The node may be unreachable only for a moment, and `timeout_s` limits the wait.
            text = str(error)
        if text != shown:
            progress(text)
            shown = text
        if time.monotonic() >= deadline:
            return f"not drained within {timeout_s:g} s, and still at it: {text}"
        time.sleep(POLL_S)


def _exit_code(status: ClusterStatus) -> int:
    return verdict(status).level


def _initialised(status: ClusterStatus) -> None:
    if not status.initialised:
        raise AdminError(verdict(status).text)


def _known(status: ClusterStatus, name: str) -> NodeStatus:
    _initialised(status)
    node = status.node_status(name)
    if node is None:
        names = ", ".join(each.node for each in status.nodes)
        raise AdminError(f"there is no node {name}: the cluster has {names}")
    return node


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def _print_lines(*lines: str) -> None:
    print("\n".join(lines))


def _report(args: argparse.Namespace, text: str, body: dict[str, object]) -> None:
    print(json.dumps(body) if args.json else text)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass
