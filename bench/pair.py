"""Two nodes on one data directory: started, hurt in every way the benchmarks know, and revived."""

import contextlib
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

from bench.brokers import BrokerFailed

START_TIMEOUT_S: Final = 120.0
"""Until a node holds or follows; a journal of some gigabytes without a snapshot takes a while."""
STOP_TIMEOUT_S: Final = 30.0
THAW_TIMEOUT_S: Final = 10.0
"""How long a stopped holder may need, once it runs again, to see that it holds no more."""
ADMIN_TIMEOUT_S: Final = 1.0
PORT_MIN: Final = 10_000
PORT_ATTEMPTS: Final = 100
POLL_S: Final = 0.01
LOG_TAIL_LINES: Final = 12


class Fault(StrEnum):
    """What happens to the holder."""

    HANDOVER = "handover"
    """`holdfast cluster handover`: a planned stop."""
    TERMINATE = "SIGTERM"
    KILL = "kill -9"
    STOP = "SIGSTOP"


def quiet_port() -> int:
    """A free port of 127.0.0.1 that the kernel gives to no outgoing connection. A standby leaves
    its port alone for a long time, and a client that tries it meanwhile could be given just that
    one, and be connected to itself. Raises BrokerFailed."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(PORT_ATTEMPTS):
        port = random.randrange(PORT_MIN, max(PORT_MIN + 1, first_outgoing))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BrokerFailed(f"no free port from {PORT_MIN} to {first_outgoing}")


class Node:
    """One `holdfast serve --standby`."""

    def __init__(self, name: str, directory: Path, data: Path, program: list[str]) -> None:
        self.name = name
        self.data = data
        self.port = quiet_port()
        self.admin_port = quiet_port()
        self._log = directory / f"{name}.log"
        self._program = program
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [*self._program, "serve", "--standby", "--data", str(self.data)]
        command += ["--id", self.name, "--bind", "127.0.0.1", "-p", str(self.port)]
        command += ["--admin", f"127.0.0.1:{self.admin_port}"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def readiness(self) -> dict[str, object]:
        """What /readyz says, whatever its status; empty while it says nothing."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.admin_port, timeout=ADMIN_TIMEOUT_S
        )
        try:
            connection.request("GET", "/readyz")
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()
        return answer if isinstance(answer, dict) else {}

    def role(self) -> str:
        """ "holder" once it serves, "standby" once it has read what there is and follows, else
        ""."""
        if not self.is_running():
            return ""
        says = self.readiness()
        match says.get("role"):
            case "holder" if says.get("ready"):
                return "holder"
            case "standby" if says.get("loaded"):
                return "standby"
        return ""

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_ended(self, timeout_s: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Also one that was stopped by a signal, or does not want to end."""
        if not self.is_running():
            return
        self.send_signal(signal.SIGCONT)
        self.send_signal(signal.SIGTERM)
        if not self.wait_ended(STOP_TIMEOUT_S):
            self.send_signal(signal.SIGKILL)
            self.wait_ended(STOP_TIMEOUT_S)

    def describe(self) -> str:
        if self.process is None or self.process.returncode is None:
            return f"{self.name}, {self.role() or 'neither holder nor standby'}"
        return f"{self.name}, ended with code {self.process.returncode}"

    def log_tail(self) -> str:
        if not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


class Pair:
    """`with Pair(parent) as pair`: both nodes run, one holds, the other follows.

    `data`: a directory that is there already and stays; without it there is a new one.
    """

    def __init__(
        self, parent: Path, *, python: str = sys.executable, data: Path | None = None
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pair-", dir=parent))
        self.data = data or self.directory / "data"
        self._program = [python, "-m", "holdfast.cli.main"]
        self.nodes = [
            Node(name, self.directory, self.data, self._program) for name in ("one", "two")
        ]

    def __enter__(self) -> "Pair":
        try:
            for node in self.nodes:
                # In turn, so that the first one is the holder.
                node.start()
                self.holder()
            self.wait_complete()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # The standby first: it would take over from a holder that ends.
        for node in sorted(self.nodes, key=lambda node: node.role() == "holder"):
            node.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def servers(self) -> list[str]:
        return [node.server for node in self.nodes]

    def roles(self) -> list[str]:
        return [node.role() for node in self.nodes]

    def wait_complete(self) -> None:
        """Until one node holds and the other one follows. Raises BrokerFailed."""
        self._wait(lambda: sorted(self.roles()) == ["holder", "standby"])

    def _wait(self, condition: Callable[[], bool]) -> None:
        met = False

        def decided() -> bool:
            nonlocal met
            met = condition()
            return met or any(node.has_ended() for node in self.nodes)

        wait_until(decided, START_TIMEOUT_S)
        if met:
            return
        logs = "\n".join(f"{node.describe()}:\n{node.log_tail()}" for node in self.nodes)
        raise BrokerFailed(f"no holder and standby\n{logs}")

    def holder(self) -> Node:
        """Waits until there is one. Raises BrokerFailed."""
        found: list[Node] = []

        def one_holds() -> bool:
            found[:] = [node for node in self.nodes if node.role() == "holder"]
            return bool(found)

        self._wait(one_holds)
        return found[0]

    def other(self, node: Node) -> Node:
        return self.nodes[1 - self.nodes.index(node)]

    def hurt(self, holder: Node, fault: Fault) -> None:
        """Returns when the order has been given, not when it has had its effect."""
        match fault:
            case Fault.HANDOVER:
                command = [*self._program, "cluster", "handover", "--data", str(self.data)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise BrokerFailed(f"cluster handover: {done.stderr.strip()}")
            case Fault.TERMINATE:
                holder.send_signal(signal.SIGTERM)
            case Fault.KILL:
                holder.send_signal(signal.SIGKILL)
            case Fault.STOP:
                holder.send_signal(signal.SIGSTOP)

    def revive(self, node: Node, fault: Fault) -> None:
        """Makes the former holder a standby, started anew if it has ended."""
        if fault is Fault.STOP and node.is_running():
            # One that the new holder has killed meanwhile is gone between the two calls.
            with contextlib.suppress(ProcessLookupError):
                node.send_signal(signal.SIGCONT)
        wait_until(lambda: not node.is_running() or node.role() == "standby", THAW_TIMEOUT_S)
        if not node.is_running():
            node.start()
        self.wait_complete()
