"""The topology manager as a process under test, and its command line."""

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.brokers import SOURCE, Broker

WAIT_S = 60.0


class ManagerProcess(Broker):
    """Probes often, so that the tests are short, with the timeout of a loaded machine."""

    def __init__(self, directory: Path, **environment: str) -> None:
        super().__init__(directory)
        is_secure = "HOLDFAST_TOPOLOGY__CERTIFICATE" in environment
        self.url = f"{'https' if is_secure else 'http'}://127.0.0.1:{self.port}"
        self.tls: ssl.SSLContext | None = None
        """For `ask`."""
        self.environment = {
            "HOLDFAST_TOPOLOGY__PROBE_INTERVAL_S": "0.2",
            "HOLDFAST_TOPOLOGY__PROBE_TIMEOUT_S": "15",
            "HOLDFAST_TOPOLOGY__DB_URL": f"sqlite:///{directory}/topology.db",
            **environment,
        }

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "holdfast.cli.main", "federation", "manager", "serve",
            "--port", str(self.port),
        ]  # fmt: skip

    def ready(self) -> bool:
        if self.url.startswith("https"):
            return Broker.ready(self)
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The data of the envelope. Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self.tls) as answer:
            return json.load(answer)["data"]

    def join(self, broker: Broker, **more: object) -> Any:
        return self.ask("POST", "/join", {"ip": f"tcp://127.0.0.1:{broker.port}", **more})

    def states(self) -> dict[int, str]:
        return {node["id"]: node["state"] for node in self.ask("GET", "/nodes")}

    def links(self) -> list[tuple[int, int]]:
        return [(link["a"], link["b"]) for link in self.ask("GET", "/topology")["links"]]


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def command(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "federation", "manager", *arguments],
        env=dict(os.environ, PYTHONPATH=str(SOURCE)) | (environment or {}),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
