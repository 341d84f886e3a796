"""Ctrl-C as a terminal sends it: SIGINT to the command and to all of its processes that share its
group. A command then ends without a traceback, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.testing import Broker
from tests.e2e.brokers import SOURCE
from tests.e2e.cluster_processes import until
from tests.e2e.wire import Wire
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
DEMO = (sys.executable, str(ROOT / "examples" / "demo.py"))
START_S = 120.0
"""The most seconds until a command has started, and until it has ended."""
STOPPED = 130
"""The exit code of a command whose work Ctrl-C has cut off. One that goes on until Ctrl-C ends with
0."""

pytestmark = pytest.mark.timeout(3 * START_S)


class Interrupted:
    """A command in a process group of its own, which one SIGINT has ended."""

    def __init__(
        self, directory: Path, command: tuple[str, ...], is_ready: Callable[[str], bool]
    ) -> None:
        printed = directory / "printed"
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert process.stdin is not None
        processes = [psutil.Process(process.pid)]
        try:

            def is_done() -> bool:
                assert process.poll() is None, printed.read_text()
                return is_ready(printed.read_text())

            until(is_done, f"{command} has started", START_S)
            processes += processes[0].children(recursive=True)
            before = len(printed.read_text())
            os.killpg(process.pid, signal.SIGINT)
            self.code = process.wait(START_S)
            self.children = len(processes) - 1
            _, self.left = psutil.wait_procs(processes[1:], timeout=START_S)
            self.printed = printed.read_text()[before:]
        finally:
            process.stdin.close()
            for each in processes:
                if each.is_running():
                    each.kill()
            process.wait()
        assert not self.left
        assert "Traceback" not in self.printed, self.printed
        assert "Exception ignored" not in self.printed, self.printed


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with a retained message."""
    data = tmp_path_factory.mktemp("broker") / "data"
    with Broker(data=data, admin=True) as broker, Wire(broker.port) as client:
        client.connect("sensor")
        client.publish("a/b", b"retained", qos=1, retain=True)
        yield broker


def printed(text: str) -> Callable[[str], bool]:
    return lambda output: text in output


@pytest.mark.parametrize(
    ("processes", "text", "children"),
    [(1, " ready ", 0), (2, "processes_ready", 2)],
)
def test_a_broker(tmp_path: Path, processes: int, text: str, children: int) -> None:
    options = ("-p", str(free_port()), "--admin", "off", "--processes", str(processes))
    command = (*HOLDFAST, "serve", "--data", str(tmp_path / "data"), *options)
    ended = Interrupted(tmp_path, command, printed(text))
    assert ended.code == 0
    assert ended.children == children


def test_a_cluster(tmp_path: Path) -> None:
    options = ("--nodes", "3", "--data", str(tmp_path / "cluster"))
    ended = Interrupted(tmp_path, (*HOLDFAST, "cluster", "local", *options), printed("Ctrl-C"))
    assert (ended.code, ended.children) == (0, 3)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("sub -p PORT -t # -v", 0),
        ("log tail --follow DATA", STOPPED),
    ],
)
def test_what_shows_a_broker(broker: Broker, tmp_path: Path, command: str, code: int) -> None:
    words = {
        "PORT": str(broker.port),
        "ADMIN": f"127.0.0.1:{broker.admin_port}",
        "DATA": str(broker.data),
    }
    arguments = [words.get(each, each) for each in command.split()]
    ended = Interrupted(tmp_path, (*HOLDFAST, *arguments), bool)
    assert (ended.code, ended.printed) == (code, "")


def test_a_load(broker: Broker, tmp_path: Path) -> None:
    options = ("--topic", "load", "-d", "600", "-n", "3", "-s", "3")
    with Wire(broker.port) as client:
        client.connect("reader")
        client.subscribe(("load/#", 0))
        ended = Interrupted(
            tmp_path,
            (*HOLDFAST, "bench", f"127.0.0.1:{broker.port}", *options),
            lambda _: bool(client.message().payload),
        )
    assert (ended.code, ended.printed) == (STOPPED, "")


def test_a_publisher_of_lines(broker: Broker, tmp_path: Path) -> None:
    command = (*HOLDFAST, "pub", "-p", str(broker.port), "-i", "lines", "-t", "lines", "-l")
    ended = Interrupted(tmp_path, command, lambda _: is_connected(broker, "lines"))
    assert (ended.code, ended.printed) == (STOPPED, "")


def is_connected(broker: Broker, client_id: str) -> bool:
    command = (*HOLDFAST, "clients", "list", "--admin", f"127.0.0.1:{broker.admin_port}")
    return client_id in subprocess.run(command, capture_output=True, text=True).stdout


def test_the_manager_of_a_federation(tmp_path: Path) -> None:
    command = (*HOLDFAST, "federation", "manager", "serve", "--port", str(free_port()))
    assert Interrupted(tmp_path, command, printed(" ready ")).code == 0


def test_a_member_beside_a_broker(broker: Broker, tmp_path: Path) -> None:
    command: tuple[str, ...] = (
        *HOLDFAST,
        "federation",
        "sidecar",
        "--name",
        "site",
        "--data-dir",
        str(tmp_path),
    )
    command += ("--listen", f"127.0.0.1:{free_port()}", "--admin", f"127.0.0.1:{free_port()}")
    command += ("--broker", f"mqtt://127.0.0.1:{broker.port}")
    assert Interrupted(tmp_path, command, printed("federation_edge_up")).code == 0


@pytest.mark.parametrize(
    "reached", ["start", "telemetry", pytest.param("Spark's start", marks=pytest.mark.long)]
)
def test_the_demo(tmp_path: Path, reached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes are in sessions of their own, which a terminal's SIGINT does not reach."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    is_ready = {
        # Its first process has been started, and has written to the log.
        "start": lambda _: any(path.stat().st_size for path in tmp_path.glob("*/cluster.log")),
        "telemetry": printed("the subscriber goes away"),
        "Spark's start": printed("Spark makes tables"),
    }
    ended = Interrupted(tmp_path, (*DEMO, "--seconds", "5"), is_ready[reached])
    assert (ended.code, ended.children >= 1) == (STOPPED, True)
    *others, line = ended.printed.splitlines()
    # Java prints warnings when it starts.
    assert not others or reached == "Spark's start"
    assert line.endswith("  stopped by Ctrl-C")
    assert list(tmp_path.iterdir()) == [tmp_path / "printed"]
