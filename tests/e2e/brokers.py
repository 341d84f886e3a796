"""Brokers as processes under test: Holdfast, and Debian's Mosquitto as the second opinion."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import SOURCE, launch
from tests.support.ports import free_port, free_ports

START_S = 60.0
STOP_S = 20.0
PROCESSES = int(os.environ.get("HOLDFAST_PROCESSES", "1"))
"""The processes of every broker whose settings go with several. `make test-processes` runs the same
tests with two."""
ALONE = ("server", "cluster", "federation")
"""The tables of settings that go with one process only, or that choose the number."""
MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def toml(tables: dict[str, dict[str, Any]]) -> str:
    """Enough TOML for settings: JSON's scalars and lists are TOML's."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def one_process(reason: str) -> pytest.MarkDecorator:
    """Leaves a test out when brokers have several processes. `reason`: why it needs one."""
    return pytest.mark.skipif(PROCESSES > 1, reason=f"one process: {reason}")


def broker_toml(tables: dict[str, dict[str, Any]], processes: int = PROCESSES) -> str:
    """The settings of a broker, with PROCESSES: also those for a reload have them."""
    is_alone = tables.get("node", {}).get("standby") or any(each in tables for each in ALONE)
    if processes > 1 and not is_alone:
        tables = {"server": {"processes": processes}, **tables}
    return toml(tables)


class Broker:
    """A broker process on free ports of 127.0.0.1, started, killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.log = directory / "broker.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.source = SOURCE
        """The folder with the package that it runs."""
        self.environment: dict[str, str] = {}
        """More variables."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        return _accepts(self.port)

    def start(self) -> None:
        """Start and wait until it serves. Raises RuntimeError with its log when it does not."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        assert self.process is None, "already running"
        path = os.pathsep.join(
            filter(None, (str(self.source), os.environ.get("HOLDFAST_TEST_PATH")))
        )
        environment = dict(os.environ, PYTHONPATH=path, PYTHONUNBUFFERED="1") | self.environment
        with self.log.open("ab") as log:
            self.process = launch(self.command(), log, environment)

    def await_ready(self) -> None:
        """Raises RuntimeError with its log when it does not serve in time."""
        assert self.process is not None, "not launched"
        deadline = time.monotonic() + START_S
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                code = self.process.poll()
                self.kill()
                raise RuntimeError(f"not serving (exit code {code}):\n{self.log_text()[-4000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM and wait. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self.process = None
        return code

    def children(self) -> list[int]:
        """The process ids of its processes, if it has several."""
        assert self.process is not None
        parent = self.process.pid
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(each) for each in text.split()]

    def signal_all(self, number: int) -> None:
        """Sends a signal to the broker and each of its processes."""
        assert self.process is not None
        for pid in (self.process.pid, *self.children()):
            os.kill(pid, number)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def rss_bytes(self) -> int:
        assert self.process is not None
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Holdfast(Broker):
    """`settings`: the tables of a configuration file, e.g. {"log": {"durability": "memory"}}."""

    def __init__(
        self,
        directory: Path,
        settings: dict[str, dict[str, Any]] | None = None,
        data: Path | None = None,
    ) -> None:
        super().__init__(directory)
        self.processes = PROCESSES
        self.admin_port = free_ports(PROCESSES)
        self.data = data or directory / "data"
        self.settings = settings or {}

    def command(self) -> list[str]:
        configuration = self.directory / "holdfast.toml"
        configuration.write_text(broker_toml(self.settings, self.processes))
        return [
            *[sys.executable, "-m", "holdfast.cli.main", "serve", "-c", str(configuration)],
            *["--bind", "127.0.0.1", "-p", str(self.port), "--data", str(self.data)],
            *["--admin", f"127.0.0.1:{self.admin_port}"],
        ]

    def ready(self) -> bool:
        try:
            return self.admin("/readyz")[0] == 200 and _accepts(self.port)
        except OSError:
            return False

    def admin(self, path: str) -> tuple[int, str]:
        """Status and body of a GET from the admin port. Raises OSError when nothing listens."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.admin_port}{path}", timeout=5
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """The sum of a metric over the processes."""
        lines = self.admin("/metrics")[1].splitlines()
        found = [each for each in lines if each.startswith(f"holdfast_{name}{{")]
        assert found, f"no metric {name}"
        return sum(float(each.rsplit(" ", 1)[1]) for each in found)

    def directories(self) -> list[Path]:
        """Those of the processes."""
        return [self.data, *sorted(self.data.glob("processes/[0-9]*"))]

    def segments(self) -> list[Path]:
        return sorted(each for one in self.directories() for each in one.glob("journal/*.log"))


class Mosquitto(Broker):
    """No queue limits, so that what it drops cannot be the configuration's doing. `inflight_max`
    0 is no window: 2.0.11 sends out of order when one has been full; but its bridges announce the
    number as their receive maximum. `extra`: more lines of its configuration. Nothing is stored:
    it forgets everything when it ends."""

    def __init__(self, directory: Path, extra: str = "", inflight_max: int = 0) -> None:
        super().__init__(directory)
        self.extra = extra
        self.inflight_max = inflight_max

    def command(self) -> list[str]:
        assert MOSQUITTO is not None, "mosquitto is not installed"
        configuration = self.directory / "mosquitto.conf"
        configuration.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence false\n"
            f"max_queued_messages 0\nmax_inflight_messages {self.inflight_max}\n"
            f"user root\n{self.extra}\n"
        )
        return [MOSQUITTO, "-c", str(configuration)]
