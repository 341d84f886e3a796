"""Mosquitto brokers with a federator beside each, as processes."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.brokers import SOURCE, Mosquitto
from tests.support.forking import launch
from tests.support.ports import free_port

START_S = 30.0
STOP_S = 20.0


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
    """Raises AssertionError with `what` when it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


class Sidecar:
    """`options`: more of `holdfast federator`."""

    def __init__(self, directory: Path, broker_port: int, options: list[str]) -> None:
        self.directory = directory
        self.broker = f"mqtt://127.0.0.1:{broker_port}"
        self.port = free_port()
        self.admin_port = free_port()
        self.options = options
        self.environment: dict[str, str] = {}
        """More variables."""
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "federator.log"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [
            *[sys.executable, "-m", "holdfast.cli.main", "federation", "sidecar"],
            *["--broker", self.broker],
            *["--data-dir", str(self.directory / "federation"), "--listen", self.address],
            *["--admin", f"127.0.0.1:{self.admin_port}", *self.options],
        ]

    def start(self) -> None:
        """Returns at once."""
        assert self.process is None, "already running"
        environment = dict(os.environ, PYTHONPATH=str(SOURCE), PYTHONUNBUFFERED="1")
        environment |= self.environment
        with self.log.open("ab") as log:
            self.process = launch(self.command(), log, environment)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        self.process = None
        return code

    def get(self, path: str) -> str | None:
        """None: it does not answer, or says no."""
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except (OSError, urllib.error.HTTPError):
            return None

    def status(self) -> dict[str, Any]:
        """Empty while it does not answer."""
        text = self.get("/api/v1/federation")
        return json.loads(text) if text is not None else {}

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Site:
    """Federated Mosquittos; each federator is told of the one before it, or of a manager.
    `own_options`: more of single ones. `everybody_takes`: each has something that others want, from
    the start."""

    def __init__(
        self,
        directory: Path,
        count: int,
        options: list[str],
        mosquitto_lines: str = "",
        own_options: dict[int, list[str]] | None = None,
        everybody_takes: bool = True,
        manager: str = "",
    ) -> None:
        self.everybody_takes = everybody_takes
        self.brokers: list[Mosquitto] = []
        self.sidecars: list[Sidecar] = []
        for number in range(count):
            place = directory / str(number)
            place.mkdir()
            self.brokers.append(Mosquitto(place, mosquitto_lines))
            more = [*options, *(own_options or {}).get(number, [])]
            if number and not manager:
                more += ["--peer", self.sidecars[number - 1].address]
            self.sidecars.append(Sidecar(place, self.brokers[-1].port, more))
            if manager:
                self.sidecars[-1].environment = {
                    "HOLDFAST_FEDERATION__MANAGER": manager,
                    "HOLDFAST_FEDERATION__BROKER": f"tcp://127.0.0.1:{self.brokers[-1].port}",
                    "HOLDFAST_FEDERATION__HELLO_S": "1",
                    "HOLDFAST_FEDERATION__CAPACITY": "5",
                    "HOLDFAST_EDGE__BEACON_INTERVAL_S": "2",
                }

    def start(self) -> None:
        for broker in self.brokers:
            broker.start()
        for sidecar in self.sidecars:
            sidecar.start()
        self.settle()

    def settle(self) -> None:
        """Until everybody knows everybody, and is subscribed as the others want."""
        wait_until(self._is_settled, "the federation settles")

    def _is_settled(self) -> bool:
        for sidecar in self.sidecars:
            assert sidecar.process is not None
            assert sidecar.process.poll() is None, sidecar.log_text()[-4000:]
        found = [sidecar.status() for sidecar in self.sidecars]
        if not all(one and one["running"] for one in found):
            return False
        if self.everybody_takes and not all(one["edge"]["export_filters"] for one in found):
            return False
        digests = {one["digest"] for one in found}
        return len(digests) == 1 and all(
            one["edge"]["is_settled"] and one["members"] == len(found) for one in found
        )

    def stop(self) -> None:
        for sidecar in self.sidecars:
            sidecar.kill()
        for broker in self.brokers:
            broker.kill()
        for sidecar in self.sidecars:
            assert "Traceback" not in sidecar.log_text(), sidecar.log_text()[-6000:]
