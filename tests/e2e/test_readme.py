"""Runs the commands and programs of README.md and of the guides below docs/.

Ports and directories are replaced; everything else is run as the page has it.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.cluster.local import is_free
from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.e2e.pair import wait_until
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30.0


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(title: str, name: str = "README.md") -> str:
    return page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


README = page("README.md")
OPERATING = page("docs/operating.md")
PAIR = section("Try it", "docs/shared-storage.md")
NODE_BY_NODE = section("Three nodes on one machine", "docs/cluster.md")
FEDERATION = section("Try it", "docs/federation.md")
OWN_TABLES = section("Tables of your own", "docs/pipeline.md")
PUBLISH_QUEUE = page("docs/publish-queue.md")


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def holdfast_lines(text: str) -> list[str]:
    return [
        line.split("  #")[0].strip()
        for block in blocks("sh", text)
        for line in block.replace("\\\n", "").splitlines()
        if line.startswith("holdfast ")
    ]


def command_of(line: str, port: int, admin: int, directory: Path) -> list[str]:
    words = shlex.split(line.removesuffix("&"))[1:]
    words = [word.replace("./data", str(directory / "data")) for word in words]
    words = [word.replace("18083", str(admin)) for word in words]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    words = [str(port) if word == "1883" else word for word in words]
    if words[0] in ("pub", "sub", "serve") and "-p" not in words and "-c" not in words:
        words += ["-p", str(port)]
    if words[0] in ("serve", "groups") and "--admin" not in words:
        words += ["--admin", f"127.0.0.1:{admin}"]
    words = [word.replace("DIR", str(directory / "data")) for word in words]
    return [sys.executable, "-m", "holdfast.cli.main", *words]


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def wait_for(process: subprocess.Popen[str], port: int, directory: Path) -> None:
    probe = [sys.executable, "-m", "holdfast.cli.main", "pub", "-p", str(port), "-t", "x", "-n"]
    deadline = time.monotonic() + TIMEOUT_S
    while run(probe, directory).returncode != 0:
        assert process.poll() is None
        assert time.monotonic() < deadline


def test_the_five_minutes(tmp_path: Path) -> None:
    lines = holdfast_lines(section("Five minutes"))
    port, admin = free_port(), free_port()
    serve, sub, pub = (command_of(line, port, admin, tmp_path) for line in lines)
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    broker = subprocess.Popen(serve, cwd=tmp_path, env=environment, text=True)
    try:
        wait_for(broker, port, tmp_path)
        subscriber = subprocess.Popen(
            sub, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE
        )
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while subscriber.poll() is None:
                # The subscriber may not be there yet: the first message may pass it by.
                assert run(pub, tmp_path).returncode == 0
                assert time.monotonic() < deadline
            assert subscriber.stdout is not None
            assert subscriber.stdout.read() == "greetings/world hello\n"
        finally:
            subscriber.kill()
            subscriber.communicate()
    finally:
        broker.kill()
        broker.wait()


@pytest.mark.parametrize("text", [section("The past"), page("docs/replay.md")])
def test_the_past(text: str, tmp_path: Path) -> None:
    """Each line begins in the past, and is run once something was published there."""
    lines = [
        line
        for block in blocks("sh", text)
        for line in block.replace("1764000000", "1700000000").splitlines()
    ]
    broker = Holdfast(tmp_path)
    broker.start()
    try:
        for topic in ("greetings/world", "plant/line1"):
            publish = command_of("holdfast pub -q 1 -m hello -t " + topic, broker.port, 0, tmp_path)
            assert run(publish, tmp_path).returncode == 0
        for line in lines:
            if line.startswith("holdfast "):
                command = command_of(line, broker.port, broker.admin_port, tmp_path)
            elif shutil.which("mosquitto_sub") is None:
                continue
            else:
                command = [*shlex.split(line), "-p", str(broker.port)]
            done = run(command, tmp_path)
            assert done.returncode == 0, f"{line}: {done.stderr}"
            if " -t" in line and "_pub" not in line and not line.endswith(" -E"):
                assert "hello" in done.stdout, line
    finally:
        broker.stop()


def test_the_commands_that_end_by_themselves(tmp_path: Path) -> None:
    lines = [
        line for line in holdfast_lines(OPERATING) if "--check-config" in line or " passwd " in line
    ]
    assert len(lines) == 2
    for line in lines:
        done = run(command_of(line, free_port(), free_port(), tmp_path), tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_every_line_is_run_by_a_test() -> None:
    """The first line of operating.md starts a broker with options that other tests use."""
    known = (
        "serve --data ./data",
        "sub -t",
        "pub -t",
        "--check-config",
        "passwd -b -c",
        " pipeline ",
    )
    of_cluster = section("A cluster")
    for line in holdfast_lines(README) + holdfast_lines(OPERATING):
        assert line in of_cluster or any(each in line for each in known), line


def test_the_pair(tmp_path: Path) -> None:
    lines = holdfast_lines(PAIR)
    assert len(lines) == 5
    ports = {text: str(free_port()) for text in ("18083", "18084", "1883", "1884")}

    def command(line: str) -> list[str]:
        for text, port in ports.items():
            line = re.sub(rf"\b{text}\b", port, line)
        return [sys.executable, "-m", "holdfast.cli.main", *shlex.split(line.removesuffix("&"))[1:]]

    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    nodes = []
    try:
        for line in lines[:2]:
            nodes.append(subprocess.Popen(command(line), cwd=tmp_path, env=environment, text=True))
            wait_until(
                lambda: (
                    "standbys" in run(command(f"{lines[3]} --json"), tmp_path).stdout
                    and len(nodes) == nodes_of(run(command(f"{lines[3]} --json"), tmp_path).stdout)
                ),
                "the node runs",
            )
        for line in lines[2:]:
            done = run(command(line), tmp_path)
            assert done.returncode == 0, f"{line}: {done.stderr}"
        assert "a handed over to b" in done.stdout
    finally:
        for node in nodes:
            node.kill()
            node.wait()


class Shell:
    """Runs blocks of the README in a shell that knows `holdfast`; `close` ends what they left."""

    def __init__(self, directory: Path, ports: dict[str, int]) -> None:
        self._directory = directory
        self._ports = ports
        self._processes: list[subprocess.Popen[bytes]] = []
        binaries = directory / "bin"
        binaries.mkdir()
        command = binaries / "holdfast"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast.cli.main "$@"\n')
        command.chmod(0o755)
        self._environment = {
            "PYTHONPATH": str(SOURCE),
            "PATH": f"{binaries}:/usr/bin:/bin",
            "HOLDFAST_CLUSTER__PARTITIONS": "8",
        }

    def start(self, block: str, output: Path) -> subprocess.Popen[bytes]:
        for text, port in self._ports.items():
            block = re.sub(rf"\b{text}\b", str(port), block)
        # Those that take the admin port for granted.
        admin = f"--admin 127.0.0.1:{self._ports.get('18083', 0)}"
        block = re.sub(
            r"^holdfast cluster (init|status|drain|remove)", rf"\g<0> {admin}", block, flags=re.M
        )
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["/bin/bash", "-e", "-c", block],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, block: str) -> tuple[int, str]:
        """Waits for its end, but not for that of what it has started in the background."""
        output = self._directory / f"output-{len(self._processes)}"
        code = self.start(block, output).wait(TIMEOUT_S)
        return code, output.read_text()

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[[dict[str, int]], Shell]]:
    shells: list[Shell] = []

    def start(ports: dict[str, int]) -> Shell:
        shells.append(Shell(tmp_path, ports))
        return shells[-1]

    yield start
    for each in shells:
        each.close()


def free_base() -> int:
    """Of `holdfast cluster local --nodes 3`."""
    while True:
        base = free_port()
        ports = [base + offset + node for offset in (0, 100, 200) for node in range(3)]
        if all(is_free(port) for port in ports):
            return base


def test_the_cluster_for_trying(shell: Callable[[dict[str, int]], Shell], tmp_path: Path) -> None:
    base = free_base()
    terminal = shell({"2883": base, "2884": base + 1, "2885": base + 2, "2983": base + 100})
    local, trial = blocks("sh", section("A cluster"))
    table = tmp_path / "nodes"
    cluster = terminal.start(local, table)
    wait_until(lambda: cluster.poll() is not None or "ready after" in table.read_text(), "ready")
    words = [line.split() for line in table.read_text().splitlines()]
    ids = {row[0]: int(row[-1]) for row in words if row[1:2] and row[1].isdecimal()}
    assert set(ids) == {"n1", "n2", "n3"}
    watched = tmp_path / "watched"
    # It ends; what it has started in the background watches on.
    assert terminal.start(trial, watched).wait(TIMEOUT_S) == 0, watched.read_text()
    assert "greetings/cluster hello\n" in watched.read_text()
    wait_until(lambda: "healthy: 3 nodes" in watched.read_text(), "watched")
    os.kill(ids["n2"], signal.SIGKILL)
    wait_until(lambda: "degraded: n2 is down" in watched.read_text(), "n2 is found dead")
    assert "n2 (pid" in table.read_text()


def test_the_cluster_node_by_node(shell: Callable[[dict[str, int]], Shell]) -> None:
    texts = (f"{first + node}" for first in (1883, 18083, 21883) for node in range(3))
    terminal = shell({text: free_port() for text in texts})
    serve, make, remove = blocks("sh", NODE_BY_NODE)

    def succeeds(block: str) -> bool:
        return terminal.run(block)[0] == 0

    assert succeeds(serve)
    init, status = make.splitlines()
    wait_until(lambda: succeeds(init), "the nodes answer")
    wait_until(lambda: succeeds(status), "the cluster is healthy")
    code, text = terminal.run(remove)
    assert code == 0, text
    assert text.endswith("n2 removed\n")
    code, text = terminal.run(status)
    assert code == 1
    assert "\nn1 " in text
    assert "\nn2 " not in text


def test_the_federation(shell: Callable[[dict[str, int]], Shell], tmp_path: Path) -> None:
    texts = (f"{first + node}" for first in (1883, 7883, 18083) for node in range(3))
    terminal = shell({text: free_port() for text in texts})
    serve, talk = blocks("sh", FEDERATION)
    assert terminal.run(serve)[0] == 0
    subscribe, mesh, *rest = talk.splitlines()
    received = tmp_path / "received"

    riga = mesh.replace("18083", "18085")
    wait_until(lambda: terminal.run(riga)[0] == terminal.run(mesh)[0] == 0, "the sites answer")
    terminal.start(subscribe.removesuffix(" &"), received)
    wait_until(lambda: "no member is" not in terminal.run(mesh)[1], "Oslo knows that Riga wants it")
    code, text = terminal.run("\n".join(rest))
    assert code == 0, text
    assert "knows 3 members" in text
    wait_until(lambda: "greetings/federation hello\n" in received.read_text(), "it arrives")


def nodes_of(text: str) -> int:
    status = json.loads(text)
    return len(status["standbys"]) + (status["holder"] is not None)


def test_the_python_lines(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    broker = start_holdfast()
    program = next(block for block in blocks("python", README) if "asyncio.run" in block)
    done = run([sys.executable, "-c", program.replace("1883", str(broker.port))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "greetings/world" in done.stdout


def test_the_publish_queue_lines(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    """The first of the two servers is not there: the client finds the other."""
    broker = start_holdfast()
    program = next(block for block in blocks("python", PUBLISH_QUEUE) if "asyncio.run" in block)
    program = program.replace("1883", str(free_port())).replace("1884", str(broker.port))
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "put=1000, delivered=1000" in done.stdout
    assert (tmp_path / "outbox.db").exists()


@pytest.mark.spark
def test_the_spark_lines(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    broker = start_holdfast()
    greet(broker.port)
    program = next(block for block in blocks("python", README) if "spark_session" in block)
    program = program.replace("127.0.0.1:1883", f"127.0.0.1:{broker.port}")
    program = program.replace("127.0.0.1:18083", f"127.0.0.1:{broker.admin_port}")
    done = subprocess.run(
        [sys.executable, "-c", program.replace("./data", str(broker.data))],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "greetings/world" in done.stdout
    log = run(
        [sys.executable, "-m", "holdfast.cli.main", "log", "dump", str(broker.data)], tmp_path
    )
    assert log.stdout.count("copies/greetings/world") == 1


def greet(port: int) -> None:
    pub = ["pub", "-p", str(port), "-t", "greetings/world", "-q", "1", "-m", "hello"]
    done = run([sys.executable, "-m", "holdfast.cli.main", *pub], Path.cwd())
    assert done.returncode == 0, done.stderr


HOME = {
    "tele/plug/STATE": '{"Time":"2026-11-30T11:00:<n>","POWER":"ON","Wifi":{"RSSI":82}}',
    "tele/plug/SENSOR": '{"Time":"2026-11-30T11:00:<n>","ENERGY":{"Total":5.<n>,"Power":12}}',
    "tele/plug/LWT": "Online",
    "zigbee2mqtt/bridge/state": '{"state":"online"}',
    "zigbee2mqtt/desk": '{"temperature":21.<n>,"linkquality":80}',
    "zigbee2mqtt/hall": '{"temperature":19.<n>,"linkquality":70}',
}


def test_a_home_becomes_tables(tmp_path: Path) -> None:
    """The first commands of the page, with a lake that needs no Spark."""
    pytest.importorskip("pyspark")
    import pandas

    from holdfast.client.blocking import Client
    from holdfast_lake.lake.lake import Lake
    from tests.support.spark_free_lake import no_spark

    head = page("docs/pipeline.md").split("\n## ")[0]
    serve, infer, pipeline = holdfast_lines(head)
    (read,) = [line for line in head.splitlines() if line.startswith("python -c ")]
    port, admin = free_port(), free_port()
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    words = command_of(serve, port, admin, tmp_path)
    broker = subprocess.Popen(words, cwd=tmp_path, env=environment)
    try:
        wait_for(broker, port, tmp_path)
        with Client("127.0.0.1", port) as client:
            for number in range(10, 50):
                for topic, payload in HOME.items():
                    client.publish(topic, payload.replace("<n>", str(number)), qos=0)
            client.publish("end", b"", qos=1)
        done = run(command_of(infer, port, admin, tmp_path), tmp_path)
        assert "my_tables.py" in done.stdout, done.stderr
        # The command would start Spark, with these arguments.
        words = command_of(pipeline, port, admin, tmp_path)
        source, lake, tables = (words[words.index(f"--{name}") + 1] for name in
                                ("from", "lake", "tables"))  # fmt: skip
        made = Lake(tmp_path / lake, tables=[tmp_path / tables], spark=no_spark())
        assert made.run(["records", "readings"], source=source).errors == {}
        assert made.status(ask_servers=False).hints == []
    finally:
        broker.kill()
        broker.wait()
    shown = run([sys.executable, *shlex.split(read)[1:]], tmp_path)
    assert re.search(r"\[\d+ rows x \d+ columns\]", shown.stdout), shown.stderr
    found = pandas.read_parquet(tmp_path / lake / "readings")
    units = {tuple(row) for row in found[["device", "metric", "unit"]].fillna("").values}
    assert {("plug", "ENERGY.Power", "W"), ("desk", "temperature", "°C"),
            ("hall", "temperature", "°C"), ("plug", "$online", "")} <= units  # fmt: skip


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_pipeline_lines(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    broker = start_holdfast()
    greet(broker.port)
    program, *_ = blocks("python", OWN_TABLES)
    (tmp_path / "my_tables.py").write_text(program)
    lines = holdfast_lines(section("Spark")) + holdfast_lines(OWN_TABLES)
    assert len(lines) == 4
    outputs = []
    for line in lines:
        words = shlex.split(line.replace("18083", str(broker.admin_port)))[1:]
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        outputs.append(done.stdout)
    assert "device_minutes" in outputs[1]
    assert "<html" in (tmp_path / "report.html").read_text().lower()
    assert list((tmp_path / "lake" / "busy_hours").rglob("*.parquet"))
