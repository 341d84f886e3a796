"""A broker under test, and the faults that can be injected into it."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

START_S: Final = 120.0
"""The longest start; a journal of some gigabytes without a snapshot takes a while."""
STOP_S: Final = 20.0
ADMIN_S: Final = 1.0
POLL_S: Final = 0.01
PORT_MIN: Final = 10_000
LOG_LINES: Final = 8
PROGRAM: Final = (sys.executable, "-m", "holdfast.cli.main")


class TargetError(Exception):
    """A target that cannot be started, or that does not do what it was told. The text says why."""


class Fault(StrEnum):
    """Fault of the broker, or to the node that serves."""

    PLANNED = "planned stop"
    KILL = "kill -9"
    PAUSE = "SIGSTOP"
    CUT = "cut off"
    MANAGER = "kill -9 of the manager"


@dataclass(frozen=True)
class Change:
    """Something that a broker did about a fault, at a time in seconds since 1970."""

    at_s: float
    what: str
    """ "detected": it knows of the fault. "elected": another node leads or holds the lease."""
    text: str


class Target(ABC):
    """A broker of one or several processes. `start` returns when it serves."""

    name = ""
    title = ""
    faults: tuple[Fault, ...] = ()
    """The faults that `inject` can do."""
    mqtt = 5
    """The protocol level of the clients: 4 is MQTT 3.1.1, 5 is 5.0."""
    user = ""
    """The name, and password, of clients where a broker wants one; "": they give none."""
    promise = ""
    """The state of a message of QoS 1 when its acknowledgement is sent; "": it is not said."""
    survives_faults = False
    """Whether another node takes over. If not, `heal` starts the broker again."""

    @property
    @abstractmethod
    def servers(self) -> list[str]:
        """The addresses for clients, `HOST:PORT`."""

    @abstractmethod
    def start(self) -> None:
        """Starts it. Raises `TargetError`."""

    @abstractmethod
    def stop(self) -> None:
        """Stops all its processes and removes its files."""

    @abstractmethod
    def version(self) -> str:
        """The program and its version, in a line."""

    def entered(self) -> AbstractContextManager[None]:
        """The network of the clients: that of this thread unless the target has its own."""
        return contextlib.nullcontext()

    def pids(self) -> list[int]:
        """The processes whose CPU and memory are measured; none if they are not known."""
        return []

    def inject(self, fault: Fault, topic: str) -> str:
        """Injects a fault into the node that serves the topic. Returns its name."""
        raise TargetError(f"{self.name}: {fault} is not possible")

    def changes(self, since_s: float) -> list[Change]:
        """The changes since a time, as far as the broker reports them."""
        return []

    def heal(self) -> None:
        """Makes it complete again after `inject`. Raises `TargetError` if that takes too long."""
        raise TargetError(f"{self.name}: there is nothing to heal")


class Program:
    """One process of a target, with its log file."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, port: int = 0) -> None:
        """`port`: it serves when this local port accepts connections; 0 if it has none.

        The log is `NAME.log` in the directory.
        """
        self.environment: dict[str, str] | None = None
        """Its variables; None: those of this process."""
        self.name = name
        self.command = list(command)
        self.port = port
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the process. Raises `TargetError` if the program is not there."""
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*_mortal(), *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                )
        except OSError as error:
            raise TargetError(f"{self.command[0]}: {error.strerror}") from error

    def is_listening(self) -> bool:
        """Whether it accepts connections at its port."""
        return not self.port or listens(self.port)

    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        """Its exit code; None if it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; a process that has ended meanwhile gets none."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end. Returns whether it came in time."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Stops it in order, or else with SIGKILL; also when it is paused."""
        if not self.is_running():
            return
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        if not self.wait(STOP_S):
            self.signal(signal.SIGKILL)
            self.wait(STOP_S)

    def log_lines(self) -> list[str]:
        """All lines of its output."""
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    def log_tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log_lines()[-LOG_LINES:])


def _mortal() -> list[str]:
    """The program that ends a process with this one, however this one ends, if it is there."""
    found = shutil.which("setpriv")
    return [] if found is None else [found, "--pdeathsig", "KILL", "--"]


def wait_until(condition: Callable[[], bool], programs: Sequence[Program], what: str) -> None:
    """Waits for a condition. Raises `TargetError` with the ends of the logs if it does not come."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline or not any(each.is_running() for each in programs):
            logs = "\n".join(f"{each.name}: {each.log_tail()}" for each in programs)
            raise TargetError(f"not within {START_S:g} s: {what}\n{logs}")
        time.sleep(POLL_S)


def listens(port: int) -> bool:
    """Whether a local process accepts connections at the port."""
    try:
        socket.create_connection(("127.0.0.1", port), ADMIN_S).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A free local port below those that the kernel gives to outgoing connections. A client that
    tries the port of a node that is down could otherwise be connected to itself."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(PORT_MIN, max(PORT_MIN + 1, first))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise TargetError(f"no free port from {PORT_MIN} to {first}")


def admin(port: int, path: str, method: str = "GET") -> Any:
    """The reply of an admin port, whatever its status; empty if there is none."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=ADMIN_S) as reply:
            found = json.load(reply)
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, OSError):
            found = json.load(error)
            return found if isinstance(found, dict) else {}
        return {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def first_line(command: Sequence[str]) -> str:
    """The first line that a program prints; its name if it prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return command[0]
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines else command[0]


def program_path(name: str) -> str:
    """The path of a program of Debian, also of one for root. Raises `TargetError`."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise TargetError(f"{name} is not installed (on Debian: apt install {name})")
    return found


LEVELS: Final = {"3.1.1": 4, "5": 5}
"""The protocol level of each version."""


class Remote(Target):
    """Any broker at `HOST:PORT`.

    `,pid=N` names its process here, for CPU and memory; `,mqtt=3.1.1` is for one without MQTT 5.
    """

    name = "remote"

    def __init__(self, text: str) -> None:
        """Raises `TargetError` for a text of another form."""
        address, *rest = text.split(",")
        host, _, port = address.rpartition(":")
        # A word without "=" has a value that is not allowed.
        more = {name: value if equals else "?" for name, equals, value in
                (each.partition("=") for each in rest)}  # fmt: skip
        pid, level = more.pop("pid", ""), more.pop("mqtt", "5")
        if (
            not host or not port.isdecimal() or more or level not in LEVELS
            or not (pid or "0").isdecimal()
        ):  # fmt: skip
            raise TargetError(
                f"target {text!r}: write HOST:PORT, and after it ,pid=N or ,mqtt=3.1.1"
            )
        self.title = address
        self.mqtt = LEVELS[level]
        self._server = address
        self._pids = [int(pid)] if pid else []

    @property
    def servers(self) -> list[str]:
        """Returns the addresses for clients."""
        return [self._server]

    def start(self) -> None:
        """Does nothing: it runs."""

    def stop(self) -> None:
        """Does nothing: it is not ours."""

    def version(self) -> str:
        """Returns the program and its version."""
        return self.title

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        return self._pids
