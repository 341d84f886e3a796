"""`holdfast pub` and `holdfast sub` with several servers."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.e2e.brokers import SOURCE, Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.support.ports import free_port

RUN_S = 60
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
COMMAND = [sys.executable, "-m", "holdfast.cli.main"]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        timeout=RUN_S,
        env=ENVIRONMENT,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def pair(start_holdfast: StartHoldfast) -> tuple[Holdfast, Holdfast, list[str]]:
    first, second = start_holdfast(), start_holdfast()
    servers = [
        *["--server", f"127.0.0.1:{first.port}"],
        *["--server", f"mqtt://127.0.0.1:{second.port}"],
    ]
    return first, second, servers


@pytest.mark.parametrize("failure", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_both_go_over_to_the_other_server(
    pair: tuple[Holdfast, Holdfast, list[str]], failure: signal.Signals
) -> None:
    first, _, servers = pair
    subscriber = start("sub", *servers, "-t", "t", "-q", "1", "-d", "-V", "5")
    publisher = start("pub", *servers, "-t", "t", "-q", "1", "-l", "-V", "5")
    assert subscriber.stdout is not None
    assert publisher.stdin is not None
    assert first.process is not None
    lines = iter(subscriber.stdout)
    try:
        assert any(line.startswith(b"Subscribed") for line in lines)
        publisher.stdin.write(b"before\n")
        publisher.stdin.flush()
        assert any(line == b"before\n" for line in lines)
        first.signal_all(failure)
        # Written while nobody may be there: accepted, and acknowledged by the second server.
        publisher.stdin.write(b"meanwhile\n")
        publisher.stdin.flush()
        assert any(line.startswith(b"Subscribed") for line in lines)
        publisher.stdin.write(b"after\n")
        publisher.stdin.close()
        assert publisher.wait(RUN_S) == 0
        assert any(line == b"after\n" for line in lines)
        subscriber.terminate()
        assert subscriber.wait(RUN_S) == 0
    finally:
        if first.process.poll() is None:
            first.signal_all(signal.SIGCONT)
        stop(subscriber, publisher)


def stop(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_a_message_goes_to_the_server_that_is_there(
    pair: tuple[Holdfast, Holdfast, list[str]],
) -> None:
    first, second, servers = pair
    first.kill()
    finished = run("pub", *servers, "-t", "t", "-m", "x", "-r", "-q", "1")
    assert (finished.returncode, finished.stderr) == (0, b"")
    # -h and -p name the first one of the list.
    finished = run(
        *["sub", "-h", "127.0.0.1", "-p", str(first.port)],
        *["--server", f"127.0.0.1:{second.port}", "-t", "t", "-C", "1"],
    )
    assert (finished.returncode, finished.stdout) == (0, b"x\n")


def test_a_server_that_comes_late_is_waited_for(broker: Holdfast) -> None:
    """With a choice of servers; a single one is asked once."""
    broker.kill()
    servers = ["--server", f"127.0.0.1:{broker.port}", "--server", f"127.0.0.1:{free_port()}"]
    publisher = start("pub", *servers, "-t", "t", "-m", "x", "-q", "2", "-d")
    starter = threading.Thread(target=broker.start)
    try:
        starter.start()
        out, error = publisher.communicate(timeout=RUN_S)
        assert publisher.returncode == 0, error
        assert out.splitlines()[-2:] == [
            b"Client received PUBCOMP (m1, 0)",
            b"Client sending Disconnect(reason=0, properties={})",
        ]
    finally:
        starter.join(RUN_S)
        stop(publisher)


def test_what_is_wrong_is_said() -> None:
    port = free_port()
    finished = run("pub", "--server", f"127.0.0.1:{port}", "-t", "t", "-m", "x")
    assert finished.returncode == 1
    assert finished.stderr == b"Error: Connection refused\n"
    for wrong, complaint in (
        ("http://a", b"unknown scheme"),
        ("mqtt://a/topic", b"path is for ws"),
        ("mqtt://name:word@a", b"set them in the options"),
    ):
        finished = run("sub", "--server", wrong, "-t", "t")
        assert finished.returncode == 1
        assert finished.stderr.startswith(b"Error: argument --server: ")
        assert complaint in finished.stderr
