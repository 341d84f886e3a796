"""Child processes that end with the process that started them: a start of `holdfast`, or a fork."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Final

STOP_S: Final = 30.0
"""The time in seconds that children have to stop in order."""
CHILD_POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1


def _death_with_parent() -> Callable[[], None]:
    """Makes the function by which a child asks to be killed when this process ends.

    It must be called from the main thread: for the kernel, the thread that starts a child is its
    parent, and its end kills the child.
    """
    parent = os.getpid()
    # Loaded here, because between fork and exec only system calls are safe.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)  # The parent died before the request.

    return die_with_parent


def end_text(code: int) -> str:
    """Describes how a process ended. `code`: its exit code, or minus the number of the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class ForkedChild:
    """A copy of this process, which must have one thread. In the copy, `pid` is 0."""

    def __init__(self, output: int) -> None:
        """Forks. The child writes to `output`, and has an empty input and no handlers of signals.
        Raises `OSError` in the parent alone."""
        self.code: int | None = None
        """The exit code, or minus the number of a signal; None while it ran when last looked at."""
        die_with_parent = _death_with_parent()
        empty = os.open(os.devnull, os.O_RDONLY)
        # A signal at once waits until the child has its own handler: its parent's swallows it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                die_with_parent()
                signal.set_wakeup_fd(-1)
                for number in signal.valid_signals():
                    if callable(signal.getsignal(number)):
                        signal.signal(number, signal.SIG_DFL)
                for standard, file in enumerate((empty, output, output)):
                    os.dup2(file, standard)
                os.setpgid(0, 0)  # As `process_group` of `Child`.
        finally:
            os.close(empty)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def is_alive(self) -> bool:
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def send(self, number: int) -> None:
        # Until it was waited for, no other process has its id.
        if self.is_alive():
            os.kill(self.pid, number)


class Child:
    """One `holdfast` process."""

    def __init__(self, name: str, arguments: Sequence[str], output: IO[bytes] | int) -> None:
        """Starts `holdfast` with `arguments`, from the main thread. `output`: the file of what it
        writes. Raises `OSError` if the start fails."""
        self.name = name
        self.command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=_death_with_parent(),
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
        return end_text(self._process.returncode)

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
