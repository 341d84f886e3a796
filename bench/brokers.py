"""Starts the brokers to be measured, each as a process of its own on a free loopback port."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import trustme

from bench import features
from bench.scenarios import Figure, Scenario
from holdfast_lab.targets.target import (
    Program,
    TargetError,
    first_line,
    free_port,
    program_path,
    wait_until,
)

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


def mosquitto_settings(nodelay: bool) -> str:
    """The settings of Mosquitto in words."""
    return (
        "persistence off, no queue limit, 1,000 messages in flight a client, logging errors only, "
        f"TCP_NODELAY {'always' if nodelay else 'for latency only'}"
    )


BrokerFailed = TargetError
"""A broker that could not be started or ended early; the text has the end of its log."""


class Broker(Program):
    """A broker under measurement, with its directory."""

    def __init__(self, name: str, port: int, directory: Path, command: list[str]) -> None:
        super().__init__(name, command, directory, port)
        self.directory = directory
        # A package of hooks for the measurement is in the directory.
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(directory))))
        self.environment = {**os.environ, "PYTHONPATH": path}

    def check_running(self) -> None:
        """Raise `TargetError` if it has ended."""
        if not self.is_running():
            raise BrokerFailed(
                f"{self.name} ended with code {self.exit_code()}:\n{self.log_tail()}"
            )

    def stop(self) -> None:
        """Stop it and remove its files."""
        super().stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def mosquitto_path() -> str | None:
    """The path of Mosquitto, or None if it is not installed."""
    try:
        return program_path("mosquitto")
    except TargetError:
        return None


def _start(name: str, port: int, directory: Path, command: list[str]) -> Broker:
    broker = Broker(name, port, directory, command)
    try:
        broker.start()
        wait_until(broker.is_listening, [broker], f"{name} listens")
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
    name: str,
    scenario: Scenario,
    parent: Path,
    python: str,
    *,
    is_reference: bool = False,
    nodelay: bool = False,
) -> Broker:
    """Start the broker of one side. The reference of a feature is Holdfast without it. `nodelay`:
    Mosquitto sets TCP_NODELAY in every scenario."""
    if scenario.feature:
        feature = "" if is_reference else scenario.feature
        return start_holdfast(parent, scenario.durability, python, scenario.transport, feature)
    if name == "mosquitto":
        # Without TCP_NODELAY it spends less CPU, with it answers sooner: each where it helps it.
        sets_nodelay = nodelay or scenario.figure is Figure.LATENCY
        return start_mosquitto(parent, sets_nodelay, scenario.transport)
    return start_holdfast(parent, scenario.durability, python, scenario.transport)


def version(name: str, python: str) -> str:
    """The first line the broker says about itself; of Holdfast it names the form, too."""
    if name == "mosquitto":
        return first_line([mosquitto_path() or "mosquitto", "-h"])
    return first_line([python, "-m", "holdfast.cli.main", "--version"])
