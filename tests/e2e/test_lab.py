"""`holdfast lab`: experiments against real brokers, what it keeps, and what it says."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.client import ClientError
from holdfast.testing import Broker
from holdfast_lab.experiments import traffic
from holdfast_lab.experiments.traffic import WINDOW, Observed, Traffic
from holdfast_lab.log import ExperimentLog
from holdfast_lab.results import document, pages, store
from holdfast_lab.targets import wide_network
from holdfast_lab.targets.others import (
    AedesBroker,
    AmqttBroker,
    EjabberdCluster,
    NatsCluster,
    NatsSyncCluster,
    OtherBroker,
    RabbitMqCluster,
)
from holdfast_lab.targets.target import Fault, Remote, TargetError, wait_until

PROGRAM = [sys.executable, "-m", "holdfast.cli.main", "lab"]


def lab(directory: Path, *words: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [*PROGRAM, *words], cwd=directory, capture_output=True, text=True, timeout=timeout_s,
        check=False, env=environment,
    )  # fmt: skip


def test_a_broker_that_runs_is_measured_and_reported(tmp_path: Path) -> None:
    with Broker() as broker:
        target = f"127.0.0.1:{broker.port}"
        done = lab(tmp_path, "run", "publish-queue", "availability", "--quick", "--target", target)
    assert done.returncode == 0, done.stderr
    made = store.load(tmp_path / "lab")
    queue, availability = made.results
    assert queue.figures["QoS 2, median (s)"]
    assert not queue.problems
    assert not queue.broken
    assert availability.problems == ["faults cannot be injected into a broker that runs elsewhere"]
    assert made.machine["cores"]
    assert made.command.startswith("holdfast lab run publish-queue")
    # What is there is not measured again.
    again = lab(tmp_path, "run", "publish-queue", "--quick", "--resume", "--target", target)
    assert again.returncode == 0
    assert len(store.load(tmp_path / "lab").results) == 2
    assert lab(tmp_path, "run", "publish-queue").returncode == 2

    done = lab(tmp_path, "report", "--no-spark")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "lab" / "report.html").read_text()
    assert "Publish queue" in page
    assert "queue on disk" in page
    assert f"--target {target}" in (tmp_path / "lab" / "report.md").read_text()
    done = lab(tmp_path, "compare", "lab", "lab")
    assert done.returncode == 0
    assert "1.00" in done.stdout


def test_a_target_that_is_not_there_is_a_result(tmp_path: Path) -> None:
    done = lab(tmp_path, "run", "latency", "--quick", "--target", "127.0.0.1:1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (result,) = store.load(tmp_path / "lab").results
    assert result.problems
    assert not result.figures


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("run", "nothing"), "no experiment 'nothing': choose from all, availability"),
        (("report", "elsewhere"), "elsewhere has no run of the lab"),
        (("compare", "a", "b"), "a has no run of the lab"),
    ],
)
def test_wrong_use_is_one_line(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    done = lab(tmp_path, *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"[" * 100_000, b'{"version": 1}'])
def test_a_damaged_run_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / store.FILE).write_bytes(data)
    with pytest.raises(store.ResultError, match=r"run\.json"):
        store.load(tmp_path)


def test_an_older_and_a_newer_run_are_named(tmp_path: Path) -> None:
    for version, text in ((0, "too old"), (2, "of a newer version")):
        (tmp_path / store.FILE).write_text(json.dumps({"version": version}))
        with pytest.raises(store.ResultError, match=text):
            store.load(tmp_path)


def test_a_hostile_name_stays_text() -> None:
    result = store.Result(
        "load", "<b>", "<script>alert(1)</script>", "v", {}, {"<i>": 1.0}, problems=["</script>"]
    )
    made = store.LabRun(store.VERSION, "2026", "</title><script>", {}, [result])
    page = pages.html(made, {})
    assert "<script>alert" not in page
    assert "<i>" not in page


def test_the_document_is_that_of_its_results(tmp_path: Path) -> None:
    """And it names what a run lacks."""
    docs = Path(__file__).parents[2] / "docs"
    for name in ("experiments.md", "brokers.md"):
        assert document.is_kept(docs / name), "holdfast lab report DIR --document FILE"
    result = store.Result(
        "packet-loss", "pair", "A pair", "v 1", {"QoS": "1"}, {"lost": 0.0, "other": 1.0},
        problems=["no figure"], broken=["7 were lost"], events="x.jsonl",
    )  # fmt: skip
    page = tmp_path / "page.md"
    document.keep(store.LabRun(store.VERSION, "2026", "holdfast lab run", {}, [result]), page)
    assert document.is_kept(page)
    text = page.read_text()
    assert "| lost | 20 | 0 |" in text
    assert "- A pair: broken promise: 7 were lost" in text
    assert "holdfast lab run packet-loss --target pair" in text


def test_the_silence_that_touches_a_fault_is_the_downtime() -> None:
    observed = Observed()
    observed.confirmed = {1: 1.0, 2: 1.1, 3: 1.9, 4: 2.0, 5: 5.0, 6: 5.1}
    assert observed.silence_s(1.2, 2.0) == pytest.approx(3.0)
    assert observed.silence_s(1.2, 1.95) == pytest.approx(0.8)
    assert observed.silence_s(6.0, 7.0) is None


def test_a_broker_that_never_confirms_again_ends_the_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its publisher waits with a full window."""
    monkeypatch.setattr(traffic, "DRAIN_S", 0.2)

    async def play() -> Observed:
        with Broker() as broker, ExperimentLog("run", tmp_path / "run.jsonl") as log:
            servers = [f"127.0.0.1:{broker.port}"]
            async with Traffic(servers, "t", log, interval_s=0.001) as sent:
                assert await sent.confirmations(5, 10.0)
                broker.kill()
                assert not await sent.confirmations(WINDOW + 1, 1.0)
                return await sent.finish()

    observed = asyncio.run(asyncio.wait_for(play(), 20))
    assert observed.not_delivered()


def test_two_publishers_of_a_topic_are_told_apart(tmp_path: Path) -> None:
    async def play() -> tuple[Observed, Observed]:
        with (
            Broker() as broker,
            ExperimentLog("run", tmp_path / "run.jsonl") as log,
            ExperimentLog("run-2", tmp_path / "run-2.jsonl") as other_log,
        ):
            servers = [f"127.0.0.1:{broker.port}"]
            async with (
                Traffic(servers, "t", log, interval_s=0.005, count=20) as one,
                Traffic(servers, "t", other_log, interval_s=0.005, count=30) as other,
            ):
                return await one.finish(), await other.finish()

    one, other = asyncio.run(asyncio.wait_for(play(), 60))
    assert (len(one.delivered()), len(other.delivered())) == (20, 30)
    assert not one.repeated
    assert not one.reordered


@pytest.mark.parametrize("reply", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64)])
def test_a_server_that_speaks_no_mqtt_ends_the_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: bytes | None
) -> None:
    """It is silent, closes, or replies with something else."""
    monkeypatch.setattr(traffic, "SERVE_S", 1.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        if reply is None:
            await reader.read()
        else:
            writer.write(reply)
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with ExperimentLog("run", tmp_path / "run.jsonl") as log:
                async with Traffic([f"127.0.0.1:{port}"], "t", log, interval_s=0.01):
                    raise AssertionError("it serves")

    with pytest.raises(ClientError):
        asyncio.run(asyncio.wait_for(play(), 15))


@pytest.mark.parametrize(
    "text", ["h:1,pid=x", "h:1,mqtt=4", "h:x", ":1", "h:1,pid", "h:1,other=2", "h:1,"]
)
def test_a_wrong_address_is_named(text: str) -> None:
    with pytest.raises(TargetError, match="write HOST:PORT"):
        Remote(text)
    assert Remote("h:1,mqtt=3.1.1").mqtt == 4


@pytest.mark.skipif(bool(wide_network.missing()), reason=wide_network.missing())
def test_packets_between_continents_take_their_time() -> None:
    """And none comes while one side is cut off."""
    with wide_network.WideNetwork("ab", lambda one, other: 0.02) as network:
        here, there = network.hosts["a"], network.hosts["b"]
        with here.entered():
            listener = socket.create_server((here.address, 4000))
        with there.entered():
            client = socket.socket()
        with listener, client:
            start_s = time.monotonic()
            client.connect((here.address, 4000))
            served, _ = listener.accept()
            with served:
                assert time.monotonic() - start_s >= 0.04
                network.isolate("b")
                client.sendall(b"late")
                served.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    served.recv(4)
                network.heal()
                served.settimeout(10.0)
                assert served.recv(4) == b"late"


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_experiment_is_made(tmp_path: Path) -> None:
    done = lab(tmp_path, "run", "all", "--quick", timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    made = store.load(tmp_path / "lab")
    assert all(each.figures for each in made.results)
    lost = {each.target: each.figures["lost"] for each in made.results
            if each.experiment == "packet-loss"}  # fmt: skip
    # Mosquitto may take the 25th message before it handles the signal.
    assert lost.pop("mosquitto") in (25, 26)
    assert lost == {"pair": 0, "cluster": 0}
    done = lab(tmp_path, "report", timeout_s=600)
    assert done.returncode == 0, done.stderr
    assert "promises were broken" not in done.stdout


OTHERS = [NatsCluster, NatsSyncCluster, RabbitMqCluster, EjabberdCluster, AedesBroker, AmqttBroker]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, id=each.name, marks=[] if each is NatsCluster else pytest.mark.long)
        for each in OTHERS
    ],
)
def test_another_broker_serves_is_hurt_and_serves_again(
    tmp_path: Path, kind: type[OtherBroker]
) -> None:
    """Those that are installed here; NATS always is."""
    target = kind(tmp_path)
    try:
        target.start()
    except TargetError as error:
        target.stop()
        if kind is not NatsCluster and "is not installed" in str(error):
            pytest.skip(str(error))
        raise
    try:
        pids = target.pids()
        assert len(target.servers) == len(pids) == (3 if kind.survives_faults else 1)
        # The servers make their stream for the first client, and may refuse it until then.
        wait_until(lambda: publishes(target, 0), target.nodes, "it serves")
        hurt = target.inject(Fault.KILL, "lab/topic")
        number = [node.name for node in target.nodes].index(hurt)
        assert target.nodes[number].wait(20)
        if kind.survives_faults:
            other = (number + 1) % 3
            wait_until(lambda: publishes(target, other), target.nodes, "another node serves")
        target.heal()
        wait_until(lambda: publishes(target, number), target.nodes, "it serves again")
        pids += target.pids()
    finally:
        target.stop()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def publishes(target: OtherBroker, number: int) -> bool:
    """Whether a node acknowledges a publish by a client from elsewhere."""
    words = ["-q", "1", "-t", "lab/topic", "-m", "x", "-V", "5" if target.mqtt == 5 else "mqttv311"]
    if target.user:
        words += ["-u", target.user, "-P", target.user]
    host, _, port = target.servers[number].partition(":")
    done = subprocess.run(
        ["mosquitto_pub", "-h", host, "-p", port, *words], timeout=60, capture_output=True,
        check=False,
    )  # fmt: skip
    return not done.returncode


def test_many_targets_are_the_rows_of_a_table() -> None:
    results = [
        store.Result("packet-loss", f"t{number}", f"T {number}", "v", {}, {"lost": float(number)},
                     promise="on disk" if number else "")
        for number in range(7)
    ]  # fmt: skip
    few = document.document(store.LabRun(store.VERSION, "2026", "c", {}, results[:2]), "lab")
    assert "| figure | the study | T 0 | T 1 |\n|---|---|---|---|\n| lost | 20 | 0 | 1 |" in few
    assert "| acknowledged means | – | – | on disk |" in few
    many = document.document(store.LabRun(store.VERSION, "2026", "c", {}, results), "lab")
    assert "| figure | lost | acknowledged means |\n|---|---|---|\n| the study | 20 | – |" in many
    assert "| T 6 | 6 | on disk |" in many
