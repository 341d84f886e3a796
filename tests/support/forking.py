"""Starts commands of Holdfast as forks of a process that has imported the server before.

A broker takes 0.45 s of CPU to start, nearly all of it for imports, and the tests start more than a
thousand. A fork runs the same `main` with its own arguments, environment, directory and standard
files. Other commands (strace before it, another source) start as usual.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Final

import holdfast
from holdfast.cli.main import main
from holdfast.cli.serve import LOADED

SOURCE: Final = Path(holdfast.__file__).parents[1]
PROGRAM: Final = [sys.executable, "-m", "holdfast.cli.main"]
REQUEST_BYTES_MAX: Final = 200_000


class Forked(subprocess.Popen[bytes]):
    """A process whose parent is the fork server, which sends its id and exit code over a pipe."""

    def __init__(self, command: list[str], pid: int, results: int) -> None:
        self._child_created = False  # for the base: there is nothing that it could wait for
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._results = results
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        return self._await_exit(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._await_exit(timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _await_exit(self, timeout_s: float | None) -> int | None:
        if self.returncode is not None or not select.select([self._results], [], [], timeout_s)[0]:
            return self.returncode
        with self._reading:
            if self.returncode is None:
                self.returncode = _read_number(self._results)
                os.close(self._results)
        return self.returncode


class ForkServer:
    """A process that has imported the server, as its creator sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # It ends when this process does, because then the socket has an end.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()

    def fork(self, command: list[str], output: IO[bytes], environment: dict[str, str]) -> Forked:
        request = json.dumps([command, os.getcwd(), environment]).encode()
        assert len(request) <= REQUEST_BYTES_MAX
        results, theirs = os.pipe()
        socket.send_fds(self._requests, [request], [output.fileno(), theirs])
        os.close(theirs)
        return Forked(command, _read_number(results), results)


_servers: Final[dict[frozenset[tuple[str, str]], ForkServer]] = {}


def launch(
    command: list[str], output: IO[bytes], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command with `output` as its standard output and error, by a fork where possible."""
    if command[: len(PROGRAM)] != PROGRAM or environment.get("PYTHONPATH") != str(SOURCE):
        return subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
        )
    variables = _variables_of_python(environment)
    if variables not in _servers:
        _servers[variables] = ForkServer(environment)
    return _servers[variables].fork(command, output, environment)


def _variables_of_python(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    """The variables that the interpreter or an imported module reads."""
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith("PYTHON") or name == "HOLDFAST_INTERPRETED"
    )


def _read_number(pipe: int) -> int:
    data = os.read(pipe, 4)
    if len(data) < 4:
        raise RuntimeError("the fork server has ended")
    return int.from_bytes(data, "big", signed=True)


def _write_number(pipe: int, number: int) -> None:
    os.write(pipe, number.to_bytes(4, "big", signed=True))


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Returns the command in each child, and None at the end."""
    children: dict[int, tuple[int, int]] = {}  # by the descriptor of a child: its id, its pipe
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid, results = children.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                try:
                    _write_number(results, code)
                except BrokenPipeError:
                    pass  # a test that does not wait for its process
                os.close(results)
                continue
            request, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 2)
            if not request:
                return None
            output, results = files
            pid = os.fork()
            if pid == 0:
                for each, (_, pipe) in children.items():
                    os.close(each)
                    os.close(pipe)
                os.close(results)
                os.close(requests.detach())
                command, directory, environment = json.loads(request)
                _become(command, directory, environment, output)
                return list(command)
            os.close(output)
            _write_number(results, pid)
            exited = os.pidfd_open(pid)
            children[exited] = (pid, results)
            poll.register(exited, select.POLLIN)


def _become(command: list[str], directory: str, environment: dict[str, str], output: int) -> None:
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = command
    sys.argv = command[2:]


def run() -> int:
    for each in LOADED:
        import_module(each)
    with suppress(ImportError):
        import_module("uvloop")

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _serve(socket.socket(fileno=int(sys.argv[1]))) is None:
        return 0
    return main()


if __name__ == "__main__":
    sys.exit(run())
