"""What `holdfast cluster local` is made of: the directory it keeps, and child processes."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.cli.cluster.http import AdminPort
from holdfast.cli.cluster.local import (
    LayoutError,
    LocalNode,
    LoggedChild,
    is_free,
    plan,
    secret_file,
)
from holdfast.cli.main import main
from holdfast.client.admin_connection import NoAnswer
from holdfast.process.children import stop_all
from tests.e2e.brokers import SOURCE
from tests.support.ports import free_port

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def source_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the children."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


def test_a_plan_is_kept(tmp_path: Path) -> None:
    nodes = plan(tmp_path, None, None)
    assert [node.node for node in nodes] == ["n1", "n2", "n3"]
    ports = [port for node in nodes for port in node.ports()]
    assert len(set(ports)) == 9
    assert all(is_free(port) for port in ports)
    assert plan(tmp_path, None, None) == nodes
    assert plan(tmp_path, 3, None) == nodes
    more = plan(tmp_path, 5, None)
    assert more[:3] == nodes
    assert [node.node for node in more[3:]] == ["n4", "n5"]
    assert plan(tmp_path, None, None) == more
    with pytest.raises(LayoutError, match="cluster of 5 nodes: give --nodes 5"):
        plan(tmp_path, 3, None)
    with pytest.raises(LayoutError, match="leave out --base-port"):
        plan(tmp_path, None, 4000)
    wider = plan(tmp_path, None, None, 2)
    assert wider[:5] == more
    assert [(each.node, each.role) for each in wider[5:]] == [("g1", "gateway"), ("g2", "gateway")]
    assert plan(tmp_path, None, None) == wider
    with pytest.raises(LayoutError, match="cluster of 2 gateways: give --gateways 2"):
        plan(tmp_path, None, None, 1)


def test_ports_from_a_base(tmp_path: Path) -> None:
    """The same command again resumes the cluster, also if the ports were taken the first time."""
    nodes = [LocalNode("n1", 4000, 4100, 4200), LocalNode("n2", 4001, 4101, 4201)]
    assert plan(tmp_path, 2, 4000) == nodes
    assert plan(tmp_path, 2, 4000) == nodes
    with pytest.raises(LayoutError, match="leave out --base-port"):
        plan(tmp_path, 2, 4001)


@pytest.mark.parametrize("text", ["", "{", "{}", '[{"node": "n1"}]', '[{"node": 1, "port": 1}]'])
def test_a_plan_that_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(LayoutError, match="mend it, or take another directory"):
        plan(tmp_path, None, None)
    assert (tmp_path / "cluster.json").read_text() == text


def test_the_secret_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    text = path.read_text()
    assert len(text.strip()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_file(tmp_path).read_text() == text
    other = tmp_path / "other"
    other.mkdir()
    assert secret_file(other).read_text() != text


def start(directory: Path, name: str) -> LoggedChild:
    """A broker that serves."""
    admin = AdminPort(f"127.0.0.1:{free_port()}")
    arguments = [
        *["serve", "--bind", "127.0.0.1", "-p", str(free_port()), "--admin", admin.address],
        *["--data", str(directory / name)],
    ]
    child = LoggedChild(name, arguments, directory / f"{name}.log")
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if admin.is_ready():
                return child
        except NoAnswer:
            pass
        if not child.is_alive() or time.monotonic() > deadline:
            child.kill()
            raise AssertionError(child.log_end())
        time.sleep(0.02)


def test_a_child_stops_in_order_even_when_paused(tmp_path: Path) -> None:
    child = start(tmp_path, "n1")
    try:
        os.kill(child.pid, signal.SIGSTOP)
        assert stop_all([child], lambda: False) == []
        assert child.end_text() == "ended with exit code 0"
        assert "stopped" in child.log_end()
    finally:
        child.kill()


def test_who_does_not_stop_is_killed(tmp_path: Path) -> None:
    child = start(tmp_path, "n1")
    try:
        assert stop_all([child], lambda: True) == [child]
        assert child.end_text() == "was killed by SIGKILL"
    finally:
        child.kill()


def is_running(pid: int) -> bool:
    """Not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Not even one that is paused."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.unit.cli.test_cluster_local import start\n"
        "for child in [start(Path(sys.argv[1]), name) for name in ('a', 'b')]:\n"
        "    print(child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=dict(os.environ, PYTHONPATH=f"{SOURCE}:{Path(__file__).parents[3]}"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        with parent.stdout:
            children = [int(parent.stdout.readline()) for _ in range(2)]
        os.kill(children[1], signal.SIGSTOP)
        assert all(is_running(pid) for pid in children)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + WAIT_S
    while left := [pid for pid in children if is_running(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail("they live on")
        time.sleep(0.02)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    nodes = plan(tmp_path, None, None)
    with socket.create_server(("127.0.0.1", nodes[1].admin)):
        result = subprocess.run(
            [*[sys.executable, "-m", "holdfast.cli.main"], "cluster", "local", "--data", tmp_path],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (result.returncode, result.stdout) == (1, "")
    assert f"port {nodes[1].admin} of n2 is taken: does it run already?" in result.stderr
    assert not (tmp_path / "n1.log").exists()


@pytest.mark.parametrize(
    "options",
    [["--nodes", "0"], ["--nodes", "33"], ["--nodes", "x"], ["--base-port", "65400"]],
)
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "local", *options])
    assert ended.value.code == 2
    assert f"{options[1]!r}: a number from 1 to " in capsys.readouterr().err
