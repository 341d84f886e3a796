"""Child processes that run `holdfast`, and end with the process that started them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

STOP_S: Final = 30.0
"""The time in seconds that children have to stop in order."""
CHILD_POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """One `holdfast` process."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        output: IO[bytes] | int,
        environ: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        source: int = subprocess.DEVNULL,
    ) -> None:
        """Starts `holdfast` with `arguments`. `output`: the file of what it writes. `descriptors`:
        those that it inherits. `source`: its standard input.

        It must be called from the main thread: for the kernel, the thread that starts a child is
        its parent, and its end kills the child. Raises `OSError` if the start fails.
        """
        self.name = name
        self.command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
        parent = os.getpid()
        # Loaded here, because between fork and exec only system calls are safe.
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None

        def die_with_parent() -> None:
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)  # The parent died before the request.

        self._process = subprocess.Popen(
            self.command,
            stdin=source,
            stdout=output,
            stderr=output,
            env=environ,
            pass_fds=descriptors,
            preexec_fn=die_with_parent,
            # Ctrl-C reaches the starting process alone, which then stops its children.
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self.code is None

    def end_text(self) -> str:
        """Describes how the process ended."""
        code = self._process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    @property
    def code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def tell_to_stop(self) -> None:
        # SIGCONT, because a process stopped by SIGSTOP would not receive SIGTERM.
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def stop_all(
    children: Sequence[Child], is_hurried: Callable[[], bool], timeout_s: float = STOP_S
) -> list[Child]:
    """Stops all children at the same time and returns those that had to be killed.

    A child is killed after `timeout_s`, or earlier when `is_hurried` returns True.
    """
    for child in children:
        child.tell_to_stop()
    deadline = time.monotonic() + timeout_s
    while (left := [child for child in children if child.is_alive()]) and not is_hurried():
        if time.monotonic() > deadline:
            break
        time.sleep(CHILD_POLL_S)
    for child in children:
        child.kill()
    return left
