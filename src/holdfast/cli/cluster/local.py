"""`holdfast cluster local`: a whole cluster on this machine, in the foreground, for trying.

Nodes that end are not restarted, so that the effect of a failure can be observed. SIGTERM, SIGINT
and SIGHUP stop all nodes in order, a second signal stops them at once. The nodes end whenever this
process ends.

Directory of a local cluster.

It contains `cluster.json`, `cluster.secret`, and per node a data directory and a log file.
`cluster.json` names nodes and ports, so that the cluster can be started again.
"""

import argparse
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

import msgspec

from holdfast.cli.cluster.http import AdminPort, AdminRefused
from holdfast.cli.cluster.status import ClusterStatus
from holdfast.cli.text import count_text, table
from holdfast.client.admin_connection import AdminError, NoAnswer
from holdfast.numbers import whole_number
from holdfast.process.children import CHILD_POLL_S, Child, stop_all
from holdfast.security.files import replace_file

LOG_TAIL_BYTES: Final = 2000


class LoggedChild(Child):
    """A node whose output goes to a log file."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        """Starts it. Its output is appended to `log`."""
        self._log = log
        with log.open("ab") as output:
            super().__init__(name, arguments, output)

    def log_end(self) -> str:
        """Returns the last LOG_TAIL_BYTES of the log file."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").rstrip()


NODES: Final = 3
NODES_MAX: Final = 32
ADMIN_DISTANCE: Final = 100
PEER_DISTANCE: Final = 200
"""The distance from a node's port for clients to its peer port, with a base port."""
BASE_PORT_MAX: Final = 65535 - PEER_DISTANCE - 2 * NODES_MAX
FREE_PORTS: Final = range(10_000, 32_000)
"""The ports to choose from.

They are below the range that systems use for outgoing connections, so a restarted node finds its
ports free.
"""
PLAN: Final = "cluster.json"
SECRET: Final = "cluster.secret"


class LayoutError(Exception):
    """The directory cannot be used. The text says why and what to do."""


class LocalNode(msgspec.Struct, frozen=True):
    """One node and its ports for clients, administration and peers."""

    node: str
    port: int
    admin: int
    peer: int
    role: str = "data"

    def ports(self) -> tuple[int, int, int]:
        return self.port, self.admin, self.peer


def plan(
    directory: Path, count: int | None, base_port: int | None, gateways: int | None = None
) -> list[LocalNode]:
    """Returns the nodes of the directory, with new ones up to `count` nodes with data and
    `gateways`, and saves them.

    Raises `LayoutError` if the arguments contradict the directory, `OSError` if it fails.
    """
    path = directory / PLAN
    nodes = _read(path)
    if nodes and base_port not in (None, nodes[0].port):
        raise LayoutError(f"{directory} has its ports already, see {path}: leave out --base-port")
    taken = {port for node in nodes for port in node.ports()}
    for role, wanted, least in (("data", count, NODES), ("gateway", gateways, 0)):
        present = sum(each.role == role for each in nodes)
        if wanted is not None and wanted < present:
            kind = "nodes" if role == "data" else "gateways"
            raise LayoutError(
                f"{directory} has a cluster of {present} {kind}: give --{kind} {present}, or"
                " another directory"
            )
        for index in range(present, wanted or present or least):
            if base_port is None:
                ports = [_free_port(taken) for _ in range(3)]
            else:
                first = base_port + len(nodes)
                ports = [first, first + ADMIN_DISTANCE, first + PEER_DISTANCE]
            name = f"{'n' if role == 'data' else 'g'}{index + 1}"
            nodes.append(LocalNode(name, ports[0], ports[1], ports[2], role))
    text = json.dumps(msgspec.to_builtins(nodes), indent=1) + "\n"
    replace_file(path, [text.encode()], lambda descriptor: os.fchmod(descriptor, 0o644))
    return nodes


def secret_file(directory: Path) -> Path:
    """Returns the secret's file, which is created if missing. Raises `OSError`."""
    path = directory / SECRET
    if not path.exists():
        replace_file(path, [secrets.token_hex(32).encode() + b"\n"])
    return path


def is_free(port: int) -> bool:
    """Returns whether a port of 127.0.0.1 can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _read(path: Path) -> list[LocalNode]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LocalNode])
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise LayoutError(f"{path}: {error}: mend it, or take another directory") from None


def _free_port(taken: set[int]) -> int:
    """Returns a free port and adds it to `taken`. Raises `LayoutError` if there is none."""
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if port not in taken and is_free(port):
            taken.add(port)
            return port
    raise LayoutError("there are no free ports")


START_TIMEOUT_S: Final = 60.0
REQUEST_TIMEOUT_S: Final = 2.0
EXIT_FAILED: Final = 1

T = TypeVar("T")


class NotStarted(Exception):
    """The cluster did not start. The text says why."""


class NotYet(Exception):
    """A condition is not met yet. The text names it."""


class Stopped(Exception):
    """A signal arrived before the cluster was ready."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=lambda text: _option_number(text, NODES_MAX),
        metavar="N",
        help=f"how many (default {NODES}, or as many as DIR has)",
    )
    parser.add_argument(
        "--gateways",
        type=lambda text: _option_number(text, NODES_MAX),
        metavar="N",
        help="further nodes, which serve clients and store no messages (default: none)",
    )
    parser.add_argument(
        "--zones",
        type=lambda text: _option_number(text, NODES_MAX),
        metavar="N",
        help="so many zones, which the nodes are in by turns (default: none)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="keep the data here (default: a temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per node, when ready")
    parser.add_argument(
        "--base-port",
        type=lambda text: _option_number(text, BASE_PORT_MAX),
        metavar="P",
        help=f"clients on P, P+1, ...; admin on P+{ADMIN_DISTANCE}, ...; peers on"
        f" P+{PEER_DISTANCE}, ... (default: free ones)",
    )
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="of every node")
    parser.add_argument(
        "--timeout",
        type=float,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait until all are ready (default {START_TIMEOUT_S:g})",
    )


def _option_number(text: str, maximum: int) -> int:
    number = whole_number(text, maximum, 1)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to {maximum}")
    return number


def run(args: argparse.Namespace) -> int:
    """Runs the cluster until a signal arrives or all nodes have ended."""
    signals = _Signals()
    directory = args.data
    try:
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="holdfast-cluster-"))
        directory.mkdir(parents=True, exist_ok=True)
        return LocalCluster(directory.absolute(), args, signals).run()
    except Stopped:
        return 0
    except (NotStarted, LayoutError, AdminError) as error:
        _tell(f"holdfast: {error}")
    except OSError as error:
        _tell(f"holdfast: {error.filename or directory}: {error.strerror or error}")
    finally:
        if args.data is None and directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    return EXIT_FAILED


class _Signals:
    """Counts the signals since its creation."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Under nohup the end of the terminal must not stop the cluster.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class LocalCluster:
    """The nodes of one directory as child processes."""

    def __init__(self, directory: Path, args: argparse.Namespace, signals: _Signals) -> None:
        """Plans the nodes. Raises `LayoutError` or `OSError` if the directory is unusable."""
        self._directory = directory
        self._args = args
        self._signals = signals
        self._nodes = plan(directory, args.nodes, args.base_port, args.gateways)
        self._secret_file = secret_file(directory)
        self._children: list[LoggedChild] = []

    def run(self) -> int:
        """Starts the nodes, initialises the cluster and waits for the end.

        Raises `Stopped` after a signal, and `NotStarted`, `AdminError` or `OSError` if the start
        fails.
        """
        started = time.monotonic()
        try:
            for node in self._nodes:
                _check_ports(node)
            for node in self._nodes:
                self._children.append(self._start(node))
            self._await_ready(started + self._args.timeout)
            self._print_nodes(time.monotonic() - started)
            return self._attend()
        finally:
            for child in stop_all(self._children, lambda: self._signals.count > 1):
                _tell(f"{child.name} did not stop in time, and was killed")

    def _start(self, node: LocalNode) -> LoggedChild:
        others = [f"127.0.0.1:{each.peer}" for each in self._nodes if each.node != node.node]
        arguments = [
            *["serve", "--node-id", node.node, "--data", str(self._directory / node.node)],
            *["--bind", "127.0.0.1", "--port", str(node.port)],
            *["--admin", f"127.0.0.1:{node.admin}", "--peer-bind", f"127.0.0.1:{node.peer}"],
            *["--cluster-secret-file", str(self._secret_file)],
        ]
        if node.role != "data":
            arguments += ["--role", node.role]
        if self._args.zones:
            arguments += ["--zone", f"zone-{self._nodes.index(node) % self._args.zones + 1}"]
        if others:
            arguments += ["--join", ",".join(others)]
        if self._args.config is not None:
            arguments += ["--config", str(self._args.config)]
        return LoggedChild(node.node, arguments, self._directory / f"{node.node}.log")

    def _await_ready(self, deadline: float) -> None:
        ports = [AdminPort(f"127.0.0.1:{node.admin}", REQUEST_TIMEOUT_S) for node in self._nodes]
        self._until(deadline, lambda: _make_cluster(ports))
        self._until(deadline, lambda: _check_ready(ports))

    def _until(self, deadline: float, attempt: Callable[[], T]) -> T:
        """Repeats `attempt` until it succeeds, and returns its result.

        Raises `Stopped` after a signal, `NotStarted` when a node has ended or at the deadline.
        """
        while not self._signals.count:
            for child in self._children:
                if not child.is_alive():
                    raise NotStarted(f"{child.name} {child.end_text()}:\n{child.log_end()}")
            try:
                return attempt()
            except (NoAnswer, AdminRefused, NotYet) as error:
                if time.monotonic() > deadline:
                    raise NotStarted(f"not ready in time: {error}\n{self._log_ends()}") from None
            time.sleep(CHILD_POLL_S)
        raise Stopped

    def _log_ends(self) -> str:
        return "\n".join(f"log of {each.name} ends:\n{each.log_end()}" for each in self._children)

    def _print_nodes(self, took_s: float) -> None:
        rows = [
            {"node": node.node, "port": node.port, "admin": node.admin, "pid": child.pid}
            for node, child in zip(self._nodes, self._children, strict=True)
        ]
        if self._args.json:
            print("\n".join(json.dumps(row) for row in rows), flush=True)
            return
        texts = [{name: str(value) for name, value in row.items()} for row in rows]
        print("\n".join(table(texts, ("port", "admin", "pid"))))
        print(f"ready after {took_s:.1f} s, data in {self._directory}; Ctrl-C stops it", flush=True)

    def _attend(self) -> int:
        living = list(self._children)
        while living and not self._signals.count:
            time.sleep(CHILD_POLL_S)
            for child in [each for each in living if not each.is_alive()]:
                living.remove(child)
                _tell(
                    f"{child.name} (pid {child.pid}) {child.end_text()},"
                    f" {count_text(len(living), 'node')} left; to start it again:\n"
                    f"  {shlex.join(child.command)}"
                )
        return 0 if living else EXIT_FAILED


def _check_ports(node: LocalNode) -> None:
    for port in node.ports():
        if not is_free(port):
            raise NotStarted(f"port {port} of {node.node} is taken: does it run already?")


def _make_cluster(ports: list[AdminPort]) -> None:
    """Initialises the cluster unless one node has it already. Raises `AdminError`."""
    statuses = [port.status() for port in ports]
    if not any(status.initialised for status in statuses):
        ports[0].change("init")


def _check_ready(ports: list[AdminPort]) -> None:
    """Raises `NotYet` or `AdminError` unless every node is ready."""
    status = ports[0].status()
    wanted = min(status.replication_factor, len(ports))
    if text := _awaited(status, wanted):
        raise NotYet(text)
    for port in ports:
        if not port.is_ready():
            raise NotYet(f"{port.address} is not ready")


def _awaited(status: ClusterStatus, wanted: int) -> str:
    if not status.partitions:
        return "there are no partitions yet"
    for partition in status.partitions:
        if not partition.leader:
            return f"partition {partition.partition} has no leader"
        if len(partition.in_sync) < wanted:
            found = len(partition.in_sync)
            return f"partition {partition.partition} has {found} of {wanted} in sync"
    return ""


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
