"""Every kind of listener, hooks, a reload and the service manager with two processes: one broker
for all of it."""

import json
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.security.psk import has_psk
from tests.e2e.brokers import broker_toml
from tests.e2e.listeners_broker import PUB, mosquitto_pub
from tests.e2e.test_processes import Processes
from tests.e2e.test_proxies import header_of
from tests.e2e.test_systemd import Manager
from tests.e2e.wire import connect
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, until

TRIES_MAX = 200
HOOKS = """
import os
from holdfast.hooks import Hooks

class Doors(Hooks):
    def on_connect(self, client):
        with open(os.environ["DOORS"], "a") as file:
            file.write(f"{os.getpid()} {client.client_id}\\n")
"""
KEY = "0a0b0c0d0e0f10111213141516171819"


class Doors(Processes):
    """A broker with two processes and several listeners."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 2, {"hooks": {"enabled": ["doors"]}})
        self.path = str(directory / "mqtt.sock")
        self.proxied, self.tls, self.psk = free_port(), free_port(), free_port()
        self.authority = Authority(directory)
        files = self.authority.issue()
        self.listeners: list[dict[str, Any]] = [
            {"port": self.port},
            {"port": 0},
            {"socket": self.path},
            {"port": self.proxied, "proxies": ["127.0.0.1"]},
            {"port": self.tls, "certificate": files.certificate, "key": files.key},
        ]
        if has_psk():
            keys = directory / "psk"
            keys.write_text(f"dev-1:{KEY}\n")
            keys.chmod(0o600)
            self.listeners.append({"port": self.psk, "psk_file": str(keys)})

    def command(self) -> list[str]:
        self.write()
        configuration = str(self.directory / "holdfast.toml")
        return [sys.executable, "-m", "holdfast.cli.main", "serve", "-c", configuration]

    def write(self) -> None:
        tables = {
            **self.settings,
            "server": {"processes": self.count},
            "node": {"data": str(self.data)},
            "admin": {"port": self.admin_port},
        }
        text = broker_toml(tables)
        for table in self.listeners:
            text += "[[listeners]]\n"
            text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        (self.directory / "holdfast.toml").write_text(text)

    def reload(self) -> list[str]:
        """The lines of both processes about it."""
        form = re.compile(r"^\S+ INFO reloaded settings=.*$", re.MULTILINE)
        before = len(form.findall(self.this_log()))
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        until(lambda: len(form.findall(self.this_log())) == before + 2, "both have read it again")
        return form.findall(self.this_log())[before:]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Doors, Manager]]:
    directory = tmp_path_factory.mktemp("doors")
    site = directory / "site"
    metadata = site / "doors-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: doors\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[holdfast.hooks]\ndoors = the_doors:Doors\n")
    (site / "the_doors.py").write_text(HOOKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_TEST_PATH", str(site))
        patch.setenv("DOORS", str(directory / "events"))
        manager = Manager(str(directory / "manager"), patch, 1.5)
        broker = Doors(directory)
        broker.start()
    yield broker, manager
    drain(manager)
    assert broker.stop() == 0
    assert "STOPPING=1" in manager.until("STOPPING=1")
    manager.socket.close()
    assert "Traceback" not in broker.log_text()
    assert not Path(broker.path).exists()


def reach_both(broker: Doors, name: str, dial: Callable[[], socket.socket]) -> str:
    """Connects until both processes have had such a client. Returns the lines of the log."""
    reached: set[int] = set()
    for number in range(TRIES_MAX):
        client = f"{name}-{number}"
        with closing(dial()) as one:
            one.settimeout(WAIT_S)
            one.sendall(connect(client, 4))
            assert one.recv(4) == b"\x20\x02\x00\x00"
            until(lambda client=client: f"client='{client}'" in broker.this_log(), "its line")  # type: ignore[misc]
            reached.add(broker.process_of(client))
        if len(reached) == 2:
            return "\n".join(each for each in broker.this_log().splitlines() if name in each)
    raise AssertionError(f"{TRIES_MAX} clients were at process {reached} alone")


def drain(manager: Manager) -> None:
    """Takes what its socket has: the system keeps ten messages, and drops the others."""
    timeout_s = manager.socket.gettimeout()
    manager.socket.setblocking(False)
    with suppress(BlockingIOError):
        while manager.socket.recv(4096):
            pass
    manager.socket.settimeout(timeout_s)


def dial_port(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def test_a_unix_socket(doors: tuple[Doors, Manager]) -> None:
    broker, _ = doors

    def dial() -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        one.connect(broker.path)
        return one

    reach_both(broker, "unix", dial)


def test_a_port_that_the_system_chooses(doors: tuple[Doors, Manager]) -> None:
    broker, _ = doors
    ready = re.findall(r"ready listeners=\[([^]]*)\]", broker.this_log())
    assert len(ready) >= 2
    chosen = {each.split(", ")[1].strip("'").rpartition(":")[2] for each in ready}
    assert len(chosen) == 1
    reach_both(broker, "chosen", lambda: dial_port(int(min(chosen))))


def test_the_address_in_a_header_of_a_proxy(doors: tuple[Doors, Manager]) -> None:
    broker, _ = doors

    def dial() -> socket.socket:
        one = dial_port(broker.proxied)
        one.sendall(header_of("10.3.0.1", 777))
        return one

    lines = reach_both(broker, "proxied", dial)
    assert lines.count("10.3.0.1:777") >= 2


@pytest.mark.skipif(PUB is None or not has_psk(), reason="needs mosquitto-clients, Python 3.13")
def test_pre_shared_keys(doors: tuple[Doors, Manager]) -> None:
    broker, _ = doors
    reached: set[int] = set()
    for number in range(TRIES_MAX):
        client = f"psk-{number}"
        secret = ["--psk-identity", "dev-1", "--psk", KEY, "-i", client]
        assert mosquitto_pub("-p", str(broker.psk), *secret).returncode == 0
        reached.add(broker.process_of(client))
        if len(reached) == 2:
            return
    raise AssertionError(f"all were at process {reached}")


def test_hooks_run_in_the_process_of_the_client(doors: tuple[Doors, Manager]) -> None:
    broker, _ = doors
    reach_both(broker, "hooked", lambda: dial_port(broker.port))
    events = broker.directory / "events"

    def pids() -> set[int]:
        lines = events.read_text().splitlines() if events.exists() else []
        return {int(each.split()[0]) for each in lines if " hooked-" in each}

    until(lambda: pids() == set(broker.pids().values()), "both processes have run them")


def test_a_reload_reaches_both_and_tells_what_needs_a_restart(
    doors: tuple[Doors, Manager],
) -> None:
    broker, manager = doors
    context = ssl.create_default_context(cafile=broker.authority.ca)
    shown: set[bytes] = set()

    def dial() -> socket.socket:
        one = context.wrap_socket(dial_port(broker.tls), server_hostname="127.0.0.1")
        certificate = one.getpeercert(binary_form=True)
        assert certificate is not None
        shown.add(certificate)
        return one

    reach_both(broker, "first", dial)
    former = set(shown)
    assert len(former) == 1
    broker.authority.issue()
    broker.count = 3
    broker.write()
    drain(manager)
    lines = broker.reload()
    assert all("needs_restart=['server.processes']" in each for each in lines)
    manager.until("RELOADING=1")
    manager.until("READY=1")
    shown.clear()
    reach_both(broker, "second", dial)
    assert len(shown) == 1
    assert shown.isdisjoint(former)


def test_a_process_that_hangs_is_replaced(doors: tuple[Doors, Manager]) -> None:
    """Readiness and signs of life are those of all processes."""
    broker, manager = doors
    manager.until("WATCHDOG=1")
    pid, starts = broker.pids()[1], broker.starts(1)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "process_hangs process=1" in broker.this_log(), "the supervisor has noticed")
    until(lambda: broker.starts(1) > starts, "another one is started")
    until(lambda: broker.admin("/readyz")[0] == 200, "ready again")
