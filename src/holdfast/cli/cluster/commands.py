"""Subcommands of `holdfast cluster` that use a node's admin port."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from holdfast.cli.cluster.http import AdminPort
from holdfast.cli.cluster.status import ClusterStatus, NodeStatus, PartitionStatus, changes, verdict
from holdfast.cli.text import count_text, table
from holdfast.client.admin_connection import AdminError, NoAnswer, Unanswered
from holdfast.log.partition import partition_of
from holdfast.protocol.topics.names import decode_topic, has_wildcard

WATCH_POLL_S: Final = 0.5
WATCH_TIMEOUT_S: Final = 2.0
"""The time in seconds after which a node without a response counts as down."""


def watch(port: AdminPort, args: argparse.Namespace) -> int:
    """Runs the command until Ctrl-C."""
    try:
        ClusterWatch(port, args.json).run()
    except KeyboardInterrupt:
        pass
    return 0


class ClusterWatch:
    """Polls one node at a time and prints changes and new verdicts.

    When the requested node ends, it continues with another node, whose admin address the last
    status contained.
    """

    def __init__(self, port: AdminPort, as_json: bool) -> None:
        self._as_json = as_json
        self._port = port
        self._first = self._address = port.address
        self._others: list[str] = []
        """The admin addresses of the other nodes."""
        self._is_silent = False
        self._last: ClusterStatus | None = None

    def run(self) -> None:
        """Polls until interrupted. Raises `AdminError` if the first request fails.

        The first request has the time of any command, because there is no other node to ask yet.
        """
        self._take(self._port.status())
        while True:
            time.sleep(WATCH_POLL_S)
            self._poll()

    def _poll(self) -> None:
        candidates = dict.fromkeys([self._address, self._first, *self._others])
        for address in candidates:
            try:
                status = self._port.sibling(address, WATCH_TIMEOUT_S).status()
            except AdminError as error:
                if address == self._address and not self._is_silent:
                    self._print(str(error))
                continue
            if address != self._address:
                self._print(f"asking {status.node} at {address} now")
                self._address = address
            elif self._is_silent:
                self._print(f"{address} answers again")
            self._is_silent = False
            self._take(status)
            return
        self._is_silent = True

    def _take(self, status: ClusterStatus) -> None:
        last = self._last
        self._last = status
        self._others = [node.admin_address for node in status.nodes if node.admin_address]
        if last is not None:
            for line in changes(last, status):
                self._print(line)
        if last is None or verdict(last) != verdict(status):
            self._print(verdict(status).text)

    def _print(self, text: str) -> None:
        at = datetime.now().astimezone()
        if self._as_json:
            line = json.dumps({"time": at.isoformat(timespec="milliseconds"), "text": text})
        else:
            line = f"{at:%H:%M:%S}.{at.microsecond // 100_000} {text}"
        print(line, flush=True)


NODE_NUMBERS: Final = ("leaders", "replicas", "in sync")
PARTITION_NUMBERS: Final = ("partition", "epoch", "high watermark")


def summary(status: ClusterStatus) -> str:
    """Returns one line about the cluster, as the requested node sees it."""
    wanted = status.replication
    automatic = " (auto)" if wanted is not None and wanted.automatic else ""
    resizing = f"; {status.resizing}" if status.resizing else ""
    return (
        f"cluster {status.cluster_id}, metadata led by {status.metadata_leader or 'nobody'},"
        f" version {status.version}, replication factor {status.replication_factor},"
        f" at least {status.min_insync} in sync{automatic}, as {status.node} sees it{resizing}"
    )


def node_table(status: ClusterStatus) -> Iterator[str]:
    rows = [_node_row(node, node.node == status.node) for node in status.nodes]
    if not any(node.zone for node in status.nodes):
        for row in rows:
            del row["zone"]
    return table(rows, NODE_NUMBERS)


def partition_table(partitions: Iterable[PartitionStatus]) -> Iterator[str]:
    return table([_partition_row(partition) for partition in partitions], PARTITION_NUMBERS)


def _node_row(node: NodeStatus, is_asked: bool) -> dict[str, str]:
    return {
        "node": node.node,
        "state": node.state,
        "role": node.role,
        "zone": node.zone or "-",
        "votes": "yes" if node.voter else "no",
        "link": _link(node, is_asked),
        "version": node.program or "-",
        "leaders": str(node.leaders),
        "replicas": str(node.replicas),
        "in sync": str(node.in_sync),
        "clients": node.client_address or "-",
        "peers": node.peer_address or "-",
        "admin": node.admin_address or "-",
    }


def _link(node: NodeStatus, is_asked: bool) -> str:
    if is_asked:
        return "self"
    return f"through {node.through}" if node.through else "yes" if node.connected else "no"


def _partition_row(partition: PartitionStatus) -> dict[str, str]:
    return {
        "partition": str(partition.partition),
        "leader": partition.leader or "nobody",
        "epoch": str(partition.epoch),
        "replicas": _names(partition.replicas),
        "in sync": _names(partition.in_sync),
        "adding": _names(partition.adding),
        "high watermark": str(partition.high_watermark),
    }


def _names(nodes: list[str]) -> str:
    return " ".join(nodes) or "-"


EXIT_DEGRADED: Final = 1
POLL_S: Final = 0.2
INIT_WAIT_S: Final = 10.0
WAIT_MAX_S: Final = 3600.0
PACE_MAX: Final = 1_000_000
CLIENTS: Final = "/api/v1/cluster/clients"


def show_status(port: AdminPort, args: argparse.Namespace) -> int:
    """Prints a verdict on the cluster and its nodes. The exit code is the verdict's level."""
    status, values = port.status_as_sent()
    found = verdict(status)
    body = values | {"healthy": found.is_healthy, "verdict": found.text}
    heading = [found.text, summary(status)] if status.initialised else [found.text]
    _print(args, body, *heading, *node_table(status))
    return found.level


def show_nodes(port: AdminPort, args: argparse.Namespace) -> int:
    """Prints the nodes of the cluster."""
    status, values = port.status_as_sent()
    _print(args, values["nodes"], verdict(status).text, *node_table(status))
    return verdict(status).level


def show_partitions(port: AdminPort, args: argparse.Namespace) -> int:
    """Prints all partitions, or the one of a topic."""
    status = port.status()
    partitions = status.partitions
    heading = verdict(status).text
    if args.topic is not None:
        require_cluster(status)
        partitions = [partitions[partition_of(args.topic.encode(), len(partitions))]]
        leader = partitions[0].leader
        led = f"led by {leader}" if leader else "which has no leader"
        heading = f"{args.topic} is in partition {partitions[0].partition}, {led}"
    _print(args, msgspec.to_builtins(partitions), heading, *partition_table(partitions))
    return verdict(status).level


def topic_argument(text: str) -> str:
    """Parses a topic without wildcards. For argparse."""
    try:
        if has_wildcard(decode_topic(text.encode())):
            raise ValueError("a topic has no wildcards: each topic is in a partition of its own")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def number_argument(what: str, most: float) -> Callable[[str], float]:
    """Parses a number from 0. For argparse."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: give {what}, from 0 to {most:g}")
        return number

    return parse


def make_cluster(port: AdminPort, args: argparse.Namespace) -> int:
    """Initialises a cluster with the requested node."""
    _init(port, args.wait, progress_of(args))
    status = port.status()
    report(
        args,
        f"cluster {status.cluster_id} made, {status.node} is its first node; those that name it"
        " in --join come to it",
        {"cluster_id": status.cluster_id, "node": status.node},
    )
    return 0


def _init(port: AdminPort, wait_s: float, progress: Callable[[str], None]) -> None:
    """Initialises the cluster, waiting for a node that was just started.

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
    """Asks for the preferred leaders. The cluster moves them as their replicas come in sync."""
    require_cluster(port.status())
    if args.connections:
        return _rebalance_connections(port, args)
    if args.clients_per_s is not None:
        raise AdminError("--clients-per-s goes with --connections")
    port.change("rebalance")
    report(
        args,
        "accepted: every partition goes back to its first replica as soon as that is in sync",
        {"accepted": True},
    )
    return 0


def _rebalance_connections(port: AdminPort, args: argparse.Namespace) -> int:
    """Sends the clients above each node's share to other nodes, and waits for that."""
    query = "" if args.clients_per_s is None else f"?clients_per_s={args.clients_per_s:g}"
    progress = progress_of(args)
    found = port.exchange("POST", f"{CLIENTS}/balance{query}")
    shown = ""
    while moving := [each for each in found["nodes"] if each["leaving"]]:
        text = ", ".join(f"{each['node']} {each['leaving']}" for each in moving)
        if not shown:
            pace = max(each["clients_per_s"] for each in moving)
            progress(f"each node sends at most {pace:g} clients away a second")
        if text != shown:
            progress(f"clients to be sent to other nodes: {text}")
            shown = text
        time.sleep(POLL_S)
        found = port.get_json(CLIENTS)
    clients = {each["node"]: each["clients"] for each in found["nodes"]}
    text = ", ".join(f"{node} {count}" for node, count in clients.items())
    state = "stopped" if args.clients_per_s == 0 else "no node has clients to send away"
    report(args, f"{state}; clients now: {text}", {"clients": clients})
    return 0


def pause(port: AdminPort, args: argparse.Namespace) -> int:
    """Pauses the moves of replicas, or resumes them."""
    require_cluster(port.status())
    is_paused = args.cluster_command == "pause"
    port.change(args.cluster_command)
    waiting = "no replica is made or moved, not even for a node that is lost"
    report(args, waiting if is_paused else "replicas are moved", {"paused": is_paused})
    return 0


def undrain(port: AdminPort, args: argparse.Namespace) -> int:
    """Lets a draining node take part again."""
    node = _known(port.status(), args.node)
    if node.state != "draining":
        raise AdminError(f"{node.node} is not being drained, it is {node.state}")
    port.change("undrain", node.node)
    report(args, f"{node.node} takes part again", {"node": node.node})
    return 0


def remove(port: AdminPort, args: argparse.Namespace) -> int:
    """Removes a node for good."""
    port.change("remove", args.node)
    report(args, f"{args.node} removed", {"node": args.node, "removed": True})
    return 0


def unsafe_recover(port: AdminPort, args: argparse.Namespace) -> int:
    """Lets a node lead leaderless partitions, after the operator has accepted the loss."""
    if not args.accept_loss:
        raise AdminError(
            f"{args.node} would lead the partitions without a leader; acknowledged messages that"
            " it does not have are lost for good: say so with --accept-loss"
        )
    port.change("unsafe-recover", args.node, accept_loss="true")
    report(
        args, f"accepted: {args.node} leads the partitions that had no leader", {"accepted": True}
    )
    return 0


def drain(port: AdminPort, args: argparse.Namespace) -> int:
    """Drains a node and waits for the end. The exit code 1 means that the time was too short."""
    if args.clients_per_s is not None:
        query = urlencode({"node": args.node, "clients_per_s": f"{args.clients_per_s:g}"})
        port.exchange("POST", f"{CLIENTS}/pace?{query}")
    port.change("drain", args.node)
    found = _clients_of(port, args.node)
    said: dict[str, object] = {"node": args.node}
    sent = ""
    if found is not None:
        pace = said["clients_per_s"] = found["clients_per_s"]
        sent = f": its clients are sent away {f'at {pace:g} a second' if pace else 'at once'}"
    if args.no_wait:
        report(args, f"{args.node} is being drained{sent}", {**said, "done": False})
        return 0
    progress = progress_of(args)
    if sent:
        progress(f"{args.node}{sent}")
    left = await_end(partial(_left_to_drain, port, args.node), "drained", args.timeout, progress)
    report(
        args,
        left or f"{args.node} is drained: it leads nothing and holds no replica, and has no client",
        {**said, "done": not left, "left": left},
    )
    return EXIT_DEGRADED if left else 0


def _left_to_drain(port: AdminPort, name: str) -> str:
    """Returns the clients and partitions that a node still has to give away, or ""."""
    status = port.status()
    node = _known(status, name)
    found = _clients_of(port, name)
    # A node that is down, or is asked in vain, has none that could be waited for.
    clients = 0 if found is None else int(found["clients"])
    if not node.leaders and not node.held and not clients:
        return ""
    text = (
        f"{name} leads {count_text(node.leaders, 'partition')},"
        f" holds {count_text(node.held, 'replica')}"
    )
    if clients:
        text += f", has {count_text(clients, 'client')}"
    return text + "; moves are paused, see `holdfast cluster resume`" * status.paused


def await_end(
    left: Callable[[], str], done: str, timeout_s: float, progress: Callable[[str], None]
) -> str:
    """Waits until nothing is left, and shows each change. Returns "", or what is left after
    `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    shown = ""
    while True:
        try:
            text = left()
        except NoAnswer as error:
            # The node may be unreachable only for a moment, and `timeout_s` limits the wait.
            text = str(error)
        if not text:
            return ""
        if text != shown:
            progress(text)
            shown = text
        if time.monotonic() >= deadline:
            return f"not {done} within {timeout_s:g} s, and still at it: {text}"
        time.sleep(POLL_S)


def _clients_of(port: AdminPort, name: str) -> dict[str, Any] | None:
    """The clients of a node, or None if it does not reply."""
    try:
        nodes: list[dict[str, Any]] = port.get_json(CLIENTS)["nodes"]
    except NoAnswer:
        raise
    except AdminError:
        # The version of the node that is asked has no such route.
        return None
    return next((each for each in nodes if each["node"] == name), None)


def require_cluster(status: ClusterStatus) -> None:
    if not status.initialised:
        raise AdminError(verdict(status).text)


def _known(status: ClusterStatus, name: str) -> NodeStatus:
    require_cluster(status)
    node = status.node_status(name)
    if node is None:
        names = ", ".join(each.node for each in status.nodes)
        raise AdminError(f"there is no node {name}: the cluster has {names}")
    return node


def _print(args: argparse.Namespace, value: object, *lines: str) -> None:
    print(json.dumps(value, indent=1) if args.json else "\n".join(lines))


def report(args: argparse.Namespace, text: str, body: object) -> None:
    print(json.dumps(body) if args.json else text)


def progress_of(args: argparse.Namespace) -> Callable[[str], None]:
    """Prints progress to people, and none beside JSON."""

    def show(text: str) -> None:
        if not args.json:
            print(text, file=sys.stderr, flush=True)

    return show
