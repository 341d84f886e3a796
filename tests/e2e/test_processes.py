"""`holdfast serve --processes`: a supervisor and its nodes as real processes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.cluster.local import is_free
from tests.e2e.brokers import Holdfast
from tests.e2e.chaos import crowd, shake
from tests.e2e.ledger import Ledger
from tests.e2e.ledger_checks import check
from tests.e2e.wire import DISCONNECT, Closed, Wire
from tests.support.api_client import Api
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, until

STARTED = re.compile(r"process_started process=(\d+) pid=(\d+)")
CLIENT = re.compile(r"connected client='([^']+)'.* process=(\d+)")
SENT_AWAY = ("refused", "disconnected")
SEED = int(os.environ.get("HOLDFAST_CHAOS_SEED", str(time.time_ns() % 1_000_000)))


class Processes(Holdfast):
    """A broker of several processes, `count` at the next start."""

    def __init__(
        self, directory: Path, count: int, settings: dict[str, dict[str, Any]] | None = None
    ) -> None:
        super().__init__(directory, settings)
        self.count = count
        while not all(is_free(self.admin_port + each) for each in range(4)):
            self.admin_port = free_port()
        # The next ones, which the other processes have.
        for _ in range(3):
            free_port()
        self._begun = 0
        self.environment = {"HOLDFAST_LOGGING__LEVEL": "debug"}

    def command(self) -> list[str]:
        return [*super().command(), "--processes", str(self.count)]

    def launch(self) -> None:
        self._begun = len(self.log_text())
        super().launch()

    def this_log(self) -> str:
        """The log since the last start."""
        return self.log_text()[self._begun :]

    def ready(self) -> bool:
        log = self.this_log()
        return ("supervisor_started" not in log or "processes_ready" in log) and super().ready()

    def pids(self) -> dict[int, int]:
        """The present process ids, by the numbers of the processes."""
        return {int(index): int(pid) for index, pid in STARTED.findall(self.this_log())}

    def starts(self, index: int) -> int:
        return self.this_log().count(f"process_started process={index} ")

    def serves(self, index: int) -> int:
        """How often a process has begun to serve since the start."""
        form = rf"^\S+ INFO ready listeners=.* process={index}$"
        return len(re.findall(form, self.this_log(), re.MULTILINE))

    def process_of(self, client: str) -> int:
        found = dict(CLIENT.findall(self.this_log()))
        return int(found[client])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path, 2)
    made.start()
    yield made
    if made.process is not None:
        pids = made.pids().values()
        assert made.stop() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in made.log_text()


def client_at(broker: Processes, index: int, name: str, **options: Any) -> Wire:
    """A client that is connected to one of the processes: the system chooses, so it tries."""
    for _ in range(200):
        wire = Wire(broker.port, timeout_s=WAIT_S)
        wire.connect(name, **options)
        until(lambda: f"client='{name}'" in broker.this_log(), "a line of the log")
        if broker.process_of(name) == index:
            return wire
        wire.disconnect()
    raise AssertionError(f"no connection of 200 reached process {index}")


def kill_process(broker: Processes, index: int) -> float:
    """kill -9, and the seconds until it serves again."""
    served = broker.serves(index)
    began = time.monotonic()
    os.kill(broker.pids()[index], signal.SIGKILL)
    until(lambda: broker.serves(index) > served, f"process {index} serves again")
    return time.monotonic() - began


def test_clients_of_all_processes_meet(broker: Processes) -> None:
    receivers = [client_at(broker, index, f"receiver-{index}") for index in (0, 1)]
    for each in receivers:
        each.subscribe(("t/#", 2))
    for index in (0, 1):
        sender = client_at(broker, index, f"sender-{index}")
        for number in range(20):
            assert sender.publish(f"t/{number}", b"%d" % number, number % 3) in (0, None)
        for each in receivers:
            found = sorted(int(each.message().payload) for _ in range(20))
            assert found == list(range(20))
        sender.disconnect()
    for each in receivers:
        each.ping()
    # A client id has one connection, whichever process has it.
    other = client_at(broker, 1, "receiver-0", expiry_s=100, clean=True)
    receivers[0].wait_closed(WAIT_S)
    other.subscribe(("u", 1))
    other.abort()
    sender = client_at(broker, 0, "sender-2")
    assert sender.publish("u", b"kept", 1) == 0
    back = client_at(broker, 0, "receiver-0", expiry_s=100, clean=False)
    assert back.message().payload == b"kept"
    for each in (*receivers, back):
        each.socket.close()


def test_kill_9_of_each_process_under_load(broker: Processes) -> None:
    ledger = Ledger()
    group = crowd(broker.port, ledger)
    turns = iter([0, 1, 0, 1])
    seconds: list[float] = []
    try:
        shake(
            group, 4, random.Random(SEED), lambda: seconds.append(kill_process(broker, next(turns)))
        )
    finally:
        group.close()
    assert len(ledger.acknowledged) > 200
    # A client is told to come again if a start takes seconds, as on a busy machine.
    found = [each for each in check(ledger) if each.kind not in SENT_AWAY]
    assert not found, f"seed {SEED}: {found[:5]}"
    assert broker.starts(0) == broker.starts(1) == 3
    print(f"processes that were killed served again after {seconds} s")


def test_one_admin_port_for_all(broker: Processes) -> None:
    """Its readiness and metrics are those of all processes, also while one is down."""
    clients = [client_at(broker, index, f"client-{index}") for index in (0, 1)]
    metrics = broker.admin("/metrics")[1]
    for index, node in enumerate(("n1", "n1-1")):
        assert f'holdfast_connections{{node="{node}",process="{index}"}} 1.0' in metrics
        assert f'holdfast_local_process_up{{process="{index}"}} 1.0' in metrics
        assert f'process_resident_memory_bytes{{process="{index}"}}' in metrics
    listed = json.loads(broker.admin("/api/v1/clients?limit=10")[1])
    found = {each["client"]: each["node"] for each in listed["sessions"]}
    assert found == {"client-0": "n1", "client-1": "n1-1"}
    os.kill(broker.pids()[1], signal.SIGSTOP)
    until(lambda: "process_down" in broker.admin("/readyz")[1], "readiness names process 1")
    assert broker.admin("/readyz")[0] == 503
    assert 'holdfast_local_process_up{process="1"} 0.0' in broker.admin("/metrics")[1]
    os.kill(broker.pids()[1], signal.SIGCONT)
    until(lambda: broker.admin("/readyz")[0] == 200, "ready again")
    kill_process(broker, 1)
    until(lambda: broker.admin("/readyz")[0] == 200, "ready again")
    form = 'holdfast_local_process_restarts_total{process="1"} 1.0'
    until(lambda: form in broker.admin("/metrics")[1], "the restart is counted")
    for each in clients:
        each.socket.close()


def test_a_process_that_ends_again_and_again_waits_longer(broker: Processes) -> None:
    for _ in range(3):
        kill_process(broker, 1)
        # A fork of the supervisor: no interpreter is started.
        assert sorted(broker.children()) == sorted(broker.pids().values())
    found = re.findall(r"process_ended process=1 .*was killed by SIGKILL.*", broker.this_log())
    waits = [float(re.findall(r"again_in_s=([0-9.]+)", each)[0]) for each in found]
    assert waits == [0.0, 0.5, 1.0]
    assert all("last_words=" in each and "ready listeners=" in each for each in found)


def test_more_and_fewer_processes(tmp_path: Path) -> None:
    """1, 2, 3 and 1 processes: sessions, retained and queued messages stay, and so does order."""
    broker = Processes(tmp_path, 1)
    sent = 0
    expected: list[bytes] = []
    with_session = {"expiry_s": 1000, "clean": False}
    for count in (1, 2, 3, 1, 1):
        broker.count = count
        broker.launch()
        broker.await_ready()
        receiver = Wire(broker.port, timeout_s=WAIT_S)
        receiver.connect("receiver", **with_session)
        if not sent:
            receiver.subscribe(("t/#", 1))
        for payload in expected:
            assert receiver.message().payload == payload
        receiver.ping()
        receiver.disconnect()
        expected = []
        sender = Wire(broker.port, timeout_s=WAIT_S)
        sender.connect(f"sender-{sent}")
        for _ in range(30):
            payload = b"%d" % sent
            assert sender.publish("t/0", payload, 1) == 0
            expected.append(payload)
            sent += 1
        if sent > 30:
            sender.subscribe(("r", 1))
            assert sender.message().payload == b"%d" % (sent - 30)
        assert sender.publish("r", b"%d" % sent, 1, retain=True) < 0x80
        sender.disconnect()
        if count == 1 and sent > 100:
            until(
                lambda: (
                    not any(each.name.isdecimal() for each in (broker.data / "processes").iterdir())
                ),
                "the directories of the other processes are empty and removed",
            )
        assert broker.stop() == 0
    # Without surplus processes it is a broker of one process again.
    assert "supervisor_started" not in broker.this_log()
    assert "Traceback" not in broker.log_text()


def test_a_backup_has_all_processes(broker: Processes, tmp_path: Path) -> None:
    receiver = client_at(broker, 1, "receiver", expiry_s=1000, clean=False)
    receiver.subscribe(("t/#", 1))
    receiver.disconnect()
    sender = client_at(broker, 0, "sender")
    for number in range(40):
        assert sender.publish(f"t/{number}", b"%d" % number, 1, retain=True) == 0
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    for arguments in (["backup", broker.data, backup], ["restore", backup, restored]):
        command = [sys.executable, "-m", "holdfast.cli.main", *map(str, arguments)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S)
        assert run.returncode == 0, run.stderr
    assert f"--processes 2 --data {restored}" in run.stdout
    assert broker.stop() == 0
    # The other process ends as well, so it is no server for the client.
    (goodbye,) = sender.wait_closed()
    assert (goodbye.kind, goodbye.reason) == (DISCONNECT, 0x8B)
    broker.data = restored
    broker.start()
    back = client_at(broker, 0, "receiver", expiry_s=1000, clean=False)
    assert sorted(int(back.message().payload) for _ in range(40)) == list(range(40))
    back.subscribe(("t/#", 0))
    found = sorted(int(back.message().payload) for _ in range(40))
    assert found == list(range(40))
    back.socket.close()


def test_a_second_broker_is_refused(broker: Processes, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Processes(tmp_path / "other", 2)
    other.data = broker.data
    with pytest.raises(RuntimeError, match="is served by other processes"):
        other.start()
    # Its port is taken, too, although the processes of one broker share theirs.
    third = Processes(tmp_path / "other", 2)
    third.port = broker.port
    with pytest.raises(RuntimeError, match="Address already in use"):
        third.start()
    client_at(broker, 1, "still-there").disconnect()


def test_signals(broker: Processes) -> None:
    assert broker.process is not None
    client = client_at(broker, 1, "client")
    # systemd sends it to all processes of a service. Only the supervisor's counts.
    os.kill(broker.pids()[1], signal.SIGTERM)
    client.ping()
    broker.process.send_signal(signal.SIGHUP)
    until(lambda: broker.this_log().count(" reloaded settings=") == 2, "both have read it again")
    client.ping()
    Api(broker.admin_port).post("reload", {})
    assert broker.this_log().count(" reloaded settings=") == 4
    # The processes end with the supervisor, and the next one waits for their end.
    pids = broker.pids()
    os.kill(broker.process.pid, signal.SIGKILL)
    broker.process.wait()
    broker.process = None
    broker.start()
    assert set(broker.pids().values()).isdisjoint(pids.values())
    with pytest.raises((Closed, ConnectionError)):
        client.ping()


def test_a_start_that_fails_ends_all(tmp_path: Path) -> None:
    broker = Processes(tmp_path, 2, {"security": {"acl_file": str(tmp_path / "missing")}})
    with pytest.raises(RuntimeError, match="missing"):
        broker.start()
    assert "process_not_started" in broker.log_text()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"node": {"standby": True}}, "node.standby"),
        ({"federation": {"name": "f", "secret_file": "s"}}, "federation"),
        ({"cluster": {"peer_bind": "127.0.0.1"}}, "cluster.peer_bind"),
    ],
)
def test_settings_that_do_not_go_with_it(
    tmp_path: Path, settings: dict[str, dict[str, Any]], text: str
) -> None:
    broker = Processes(tmp_path, 2, settings)
    run = subprocess.run(broker.command(), capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 2
    assert "server.processes = 2: cannot go with" in run.stderr
    assert text in run.stderr
