"""Starts the brokers to be measured, each as a process of its own on a free loopback port."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import trustme

from bench import features
from bench.scenarios import Figure, Scenario

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 12
SYSTEM_PATHS = "/usr/sbin:/usr/local/sbin:/sbin"
"""Debian puts mosquitto where an ordinary user's PATH does not look."""

MOSQUITTO_CONF = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
max_inflight_messages 1000
max_queued_messages 0
connection_messages false
set_tcp_nodelay {nodelay}
log_dest stderr
log_type error
log_type warning
"""
MOSQUITTO_SETTINGS = (
    "persistence off, no queue limit, 1,000 messages in flight a client, logging errors only, "
    "TCP_NODELAY for latency only"
)


class BrokerFailed(Exception):
    """A broker could not be started or ended by itself; the text holds the end of its log."""


@dataclass
class Broker:
    name: str
    port: int
    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_tail(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def check_running(self) -> None:
        if self.process.poll() is not None:
            raise BrokerFailed(
                f"{self.name} ended with code {self.process.returncode}:\n{self.log_tail()}"
            )

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_running()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            time.sleep(0.02)
        raise BrokerFailed(
            f"{self.name} does not listen after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}"
        )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def mosquitto_path() -> str | None:
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATHS}")


def _start(name: str, port: int, directory: Path, command: list[str]) -> Broker:
    # A package of hooks for the measurement is in the directory.
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(directory))))
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
    broker = Broker(name, port, process, directory)
    try:
        broker.wait_until_listening()
    except BaseException:
        broker.stop()
        raise
    return broker


def certificate(directory: Path) -> tuple[Path, Path]:
    """A new certificate for 127.0.0.1 with its key: elliptic curve P-256, the same for both."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    paths = directory / "server.pem", directory / "server.key"
    issued.cert_chain_pems[0].write_to_path(str(paths[0]))
    issued.private_key_pem.write_to_path(str(paths[1]))
    return paths


def start_mosquitto(parent: Path, nodelay: bool, transport: str = "tcp") -> Broker:
    path = mosquitto_path()
    if path is None:
        raise BrokerFailed("mosquitto is not installed (on Debian: apt install mosquitto)")
    directory = Path(tempfile.mkdtemp(prefix="mosquitto-", dir=parent))
    port = free_port()
    text = MOSQUITTO_CONF.format(port=port, nodelay=str(nodelay).lower())
    if transport == "websocket":
        # It ends if all of its listeners are for WebSocket.
        text += f"protocol websockets\nlistener {free_port()} 127.0.0.1\n"
    elif transport == "tls":
        files = certificate(directory)
        # It drops its rights before it reads the files.
        text += f"certfile {files[0]}\nkeyfile {files[1]}\nuser root\n"
    (directory / "mosquitto.conf").write_text(text)
    return _start("mosquitto", port, directory, [path, "-c", str(directory / "mosquitto.conf")])


def start_holdfast(
    parent: Path,
    durability: str,
    python: str = sys.executable,
    transport: str = "tcp",
    feature: str = "",
    admin_port: int = 0,
) -> Broker:
    """`admin_port`: 0: none."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir=parent))
    port = free_port()
    command = [python, "-m", "holdfast.cli.main", "serve", "--durability", durability]
    command += ["-p", str(port), "--bind", "127.0.0.1"]
    command += ["--admin", f"127.0.0.1:{admin_port}" if admin_port else "off"]
    command += ["--data", str(directory / "data")]
    text = features.settings(feature, directory) if feature else ""
    if transport == "websocket":
        text += '[[listeners]]\ntransport = "websocket"\n'
    elif transport == "tls":
        files = certificate(directory)
        text += f'[[listeners]]\ncertificate = "{files[0]}"\nkey = "{files[1]}"\n'
    if text:
        (directory / "holdfast.toml").write_text(text)
        command += ["-c", str(directory / "holdfast.toml")]
    return _start("holdfast", port, directory, command)


def start(
    name: str, scenario: Scenario, parent: Path, python: str, *, is_reference: bool = False
) -> Broker:
    """Start the broker of one side. The reference of a feature is Holdfast without it."""
    if scenario.feature:
        feature = "" if is_reference else scenario.feature
        return start_holdfast(parent, scenario.durability, python, scenario.transport, feature)
    if name == "mosquitto":
        # Without TCP_NODELAY it spends less CPU, with it answers sooner: each where it helps it.
        nodelay = scenario.figure is Figure.LATENCY
        return start_mosquitto(parent, nodelay, scenario.transport)
    return start_holdfast(parent, scenario.durability, python, scenario.transport)


def version(name: str, python: str) -> str:
    """The first line the broker says about itself; of Holdfast it names the form, too."""
    if name == "mosquitto":
        command = [mosquitto_path() or "mosquitto", "-h"]
    else:
        command = [python, "-m", "holdfast.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines else f"{name} says nothing about its version"
