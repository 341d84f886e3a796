"""Runs several nodes on one machine: starts a process for each, and one again that has ended.

It serves nothing. It reads the configuration once, forks the processes with their places, passes on
signals and log lines, and reports their common state to the service manager. It is the service
manager of its processes: they report to it as they would to systemd.

- It has loaded the broker, so that a start or a restart does not take the time of a start of
  Python, and the processes share the memory of what was loaded.
- A process that ends is started again at once, one that ends again within QUICK_S after a wait that
  doubles. The log line has its last words.
- A process that reports no sign of life for as long as systemd's watchdog allows is killed.
- All processes end when the supervisor ends, also after kill -9. A lock that they inherit keeps the
  next supervisor from starting before the last of them has ended.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Final

from msgspec.structs import replace

from holdfast.config.schema import Config
from holdfast.io.sockets.bound_sockets import identity, remove_unix, reserve_tcp, reserve_unix
from holdfast.log.files.data_directory import present_processes
from holdfast.log.files.layout import PROCESSES
from holdfast.process.children import ForkedChild, end_text
from holdfast.process.place import (
    EXIT_AGAIN,
    EXIT_REMOVED,
    IGNORED,
    RELOAD,
    SECRET,
    STOP,
    ProcessPlace,
    count_of,
)
from holdfast.process.service_manager import reloading, send, watchdog_s
from holdfast.security.files import replace_file

logger = logging.getLogger("holdfast")

QUICK_S: Final = 60.0
"""A process that ends this soon after its start, after another one, ends again and again."""
DELAY_S_MIN: Final = 0.5
DELAY_S_MAX: Final = 30.0
"""The shortest and the longest wait before such a process is started again."""
LOCK_WAIT_S: Final = 5.0
"""The most seconds for the processes of a supervisor that was killed to end."""
PAUSE_S: Final = 0.02
PATH_BYTES_MAX: Final = 80
"""The longest path of the sockets' directory: the system allows 107 bytes for a socket, and its
temporary name is longer than its own."""
TAIL_BYTES: Final = 4096
WORDS_MAX: Final = 500
"""The most characters of the last words of a process."""
DATAGRAM_BYTES: Final = 4096
READ_BYTES: Final = 65_536


class SupervisorError(Exception):
    """The processes cannot be started. The text says why and what to do."""


class _Process:
    """One place, with its process if it runs."""

    def __init__(self, place: ProcessPlace) -> None:
        self.place = place
        self.child: ForkedChild | None = None
        self.is_ready = False
        self.was_ready = False
        self.started_at = 0.0
        self.start_at: float | None = 0.0
        """The time of the next start; None: none is due."""
        self.delay_s = 0.0
        self.beat_at = 0.0
        """The time of its last sign of life."""
        self.address = place.notices
        Path(self.address).unlink(missing_ok=True)
        self.notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.notices.setblocking(False)
        self.notices.bind(self.address)
        self.output = -1
        """The reading end of its standard error; -1: none."""
        self.tail = b""
        self.rest = b""
        """The begin of a line of which the end has not come yet."""

    def last_words(self) -> str:
        """The end of what the process has written."""
        lines = self.tail.decode(errors="replace").split("\n")
        return " | ".join(line.strip() for line in lines[-4:] if line.strip())[-WORDS_MAX:]


class Supervisor:
    """The processes of one data directory."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._data = Path(config.node.data).absolute()
        self._count = count_of(config)
        self._manager = os.environ.get("NOTIFY_SOCKET", "")
        self._watchdog_s = watchdog_s(os.environ)
        self._beat_due = 0.0
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = (-1, -1)
        self._lock = -1
        self._sockets = ""
        self._unix: dict[str, socket.socket] = {}
        """The sockets of listeners by path, on which all processes accept."""
        self._files: dict[str, tuple[int, int]] = {}
        self._reserved: list[list[socket.socket]] = []
        """The sockets that keep a port that the system has chosen, for each listener on port 0."""
        self._signals: list[int] = []
        self._reloading: set[int] = set()
        self._is_stopping = self._is_announced = False
        self._is_journal = os.environ.get("JOURNAL_STREAM") == _stream(2)
        self._pid = os.getpid()
        self._code = 0

    def run(self) -> int | ProcessPlace:
        """Runs until a signal, and returns the exit code. In each process that it has forked, it
        returns the place. Raises `SupervisorError`, `OSError`."""
        # Nobody's end is awaited in a new directory, and a start that fails does not make it.
        is_new = not (self._data / PROCESSES).exists()
        try:
            for step in (self._bind, self._take_directory)[:: 1 if is_new else -1]:
                step()
            place = self._run()
        finally:
            if not self._is_fork():
                for path, own in self._files.items():
                    remove_unix(Path(path), own)
        if place is not None:
            return place
        logger.info("supervisor_stopped")
        return self._code

    def _is_fork(self) -> bool:
        """Whether this is one of the processes."""
        return os.getpid() != self._pid

    def _run(self) -> ProcessPlace | None:
        self._wake = wake_in, wake_out = os.pipe()
        for end in self._wake:
            os.set_blocking(end, False)
        self._selector.register(wake_in, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        for number in (*IGNORED, signal.SIGCHLD, STOP, RELOAD):
            signal.signal(number, self._note_signal)
        logger.info("supervisor_started processes=%d data=%s", self._count, self._data)
        indexes = {*range(self._count), *present_processes(self._data)}
        for index in sorted(indexes):
            self._add(index)
        while self._processes:
            place = self._start_due()
            if place is not None:
                return place
            self._turn(wake_in)
        return None

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # The directory

    def _bind(self) -> None:
        """Binds what the processes share: the paths of Unix sockets, and ports that the system
        chooses. No other program may have the other ports: each process would bind the port of
        another broker with several processes without an error."""
        for each in self._config.listeners if self._count > 1 else ():
            if each.socket:
                path = Path(each.socket)
                self._unix[each.socket] = reserve_unix(path, int(each.socket_mode, 8))
                self._files[each.socket] = identity(path)
            else:
                bound = reserve_tcp(each.bind, each.port, is_shared=not each.port)
                if each.port:
                    for one in bound:
                        one.close()
                else:
                    self._reserved.append(bound)

    def _take_directory(self) -> None:
        """Creates what the processes need to find each other, and locks it."""
        folder = self._data / PROCESSES
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._is_locked():
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            if _is_alive(holder) or time.monotonic() > deadline:
                by = f" (pid {holder})" if holder else ""
                raise SupervisorError(
                    f"{self._data} is served by other processes{by}: stop them, or give another"
                    " data directory"
                )
            time.sleep(PAUSE_S)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        secret = folder / SECRET
        if not secret.exists():
            replace_file(secret, [secrets.token_hex(32).encode() + b"\n"])
        self._sockets = _sockets_directory(folder)

    def _is_locked(self) -> bool:
        try:
            # A lock of the open file, not of the process: it ends with the last child that has it.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # Processes

    def _add(self, index: int) -> None:
        unix = {path: one.fileno() for path, one in self._unix.items()}
        ports = tuple(int(each[0].getsockname()[1]) for each in self._reserved)
        place = ProcessPlace(index, self._count, self._sockets, unix=unix, ports=ports)
        process = _Process(place)
        self._processes[index] = process
        self._selector.register(process.notices, selectors.EVENT_READ, process)

    def _start_due(self) -> ProcessPlace | None:
        """Starts the processes whose time has come. Returns the place in a new process."""
        now = time.monotonic()
        for process in self._processes.values():
            if process.start_at is not None and now >= process.start_at:
                try:
                    self._start(process)
                except OSError as error:
                    if self._is_fork():
                        raise
                    process.start_at = now + DELAY_S_MAX
                    index = process.place.index
                    logger.error("process_not_started process=%d how=%r", index, str(error))
                if self._is_fork():
                    return process.place
        return None

    def _start(self, process: _Process) -> None:
        output, writing = os.pipe()
        try:
            child = ForkedChild(writing)
        except OSError:
            os.close(output)
            raise
        finally:
            os.close(writing)
        if child.pid == 0:
            os.close(output)
            self._become_child(process)
            return
        os.set_blocking(output, False)
        process.child, process.output = child, output
        process.tail = process.rest = b""
        process.is_ready = False
        process.start_at = None
        process.started_at = process.beat_at = time.monotonic()
        self._selector.register(output, selectors.EVENT_READ, process)
        logger.info("process_started process=%d pid=%d", process.place.index, child.pid)

    def _become_child(self, own: _Process) -> None:
        """Closes what belongs to the supervisor, but the lock and the sockets of all processes."""
        # Without `unregister`: parent and child have one list of what is registered.
        self._selector.close()
        for each in self._wake:
            os.close(each)
        for process in self._processes.values():
            process.notices.close()
            if process.output >= 0:
                os.close(process.output)
        for one in (one for bound in self._reserved for one in bound):
            one.close()
        for one in self._unix.values():
            one.detach()
        os.environ.pop("WATCHDOG_PID", None)
        os.environ["NOTIFY_SOCKET"] = own.address
        if self._is_journal:
            # Lines for journald begin with their priority.
            os.environ["JOURNAL_STREAM"] = _stream(2)

    def _ended(self, process: _Process) -> None:
        """Decides what follows from the end of a process."""
        child, index = process.child, process.place.index
        assert child is not None
        code, now = child.code, time.monotonic()
        assert code is not None
        how = end_text(code)
        self._read(process)
        self._close_output(process)
        process.child = None
        self._reloading.discard(index)
        if self._is_stopping:
            self._forget(process)
            return
        if code == EXIT_REMOVED and index:
            logger.info("process_empty process=%d text='its directory is removed'", index)
            shutil.rmtree(self._data / PROCESSES / str(index))
            if index >= self._count:
                self._forget(process)
                return
            code = 0
        elif code > 0 and code != EXIT_AGAIN and not process.was_ready:
            logger.critical("process_not_started process=%d how=%r", index, how)
            self._code = code
            self._forget(process)
            self._stop()
            return
        lived_s = now - process.started_at
        if lived_s >= QUICK_S:
            process.delay_s = 0.0
        elif process.place.restarts:
            process.delay_s = min(max(DELAY_S_MIN, 2 * process.delay_s), DELAY_S_MAX)
        process.start_at = now + process.delay_s
        process.place = replace(process.place, restarts=process.place.restarts + 1)
        logger.error(
            "process_ended process=%d pid=%d how=%r lived_s=%.1f again_in_s=%s last_words=%r",
            index, child.pid, how, lived_s, process.delay_s, process.last_words(),
        )  # fmt: skip

    def _forget(self, process: _Process) -> None:
        self._selector.unregister(process.notices)
        process.notices.close()
        Path(process.address).unlink(missing_ok=True)
        del self._processes[process.place.index]

    # One turn

    def _turn(self, wake: int) -> None:
        due = [each.start_at for each in self._processes.values() if each.start_at is not None]
        if self._watchdog_s:
            due.append(self._beat_due)
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in self._selector.select(timeout_s):
            if key.fd == wake:
                os.read(wake, READ_BYTES)
            elif key.fd == key.data.output:
                self._read(key.data)
            else:
                self._take_notices(key.data)
        signals, self._signals = self._signals, []
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop()
            elif number == signal.SIGHUP:
                self._reload()
            elif number != signal.SIGCHLD:
                logger.info("signal_ignored signal=%s", signal.Signals(number).name)
        for process in list(self._processes.values()):
            if process.child is not None and not process.child.is_alive():
                self._take_notices(process)
                self._ended(process)
        if self._watchdog_s and time.monotonic() >= self._beat_due:
            self._beat(time.monotonic())

    def _stop(self) -> None:
        """Stops all processes; at once at the second request."""
        self._is_stopping = True
        send(self._manager, "STOPPING=1")
        for process in list(self._processes.values()):
            if process.child is not None:
                process.child.send(STOP)
                # One that was stopped by SIGSTOP would not receive it.
                process.child.send(signal.SIGCONT)
            else:
                self._forget(process)

    def _reload(self) -> None:
        send(self._manager, *reloading())
        for index, process in self._processes.items():
            if process.child is not None and process.is_ready:
                self._reloading.add(index)
                process.child.send(RELOAD)
        self._announce()

    def _take_notices(self, process: _Process) -> None:
        while True:
            try:
                text = process.notices.recv(DATAGRAM_BYTES).decode(errors="replace")
            except BlockingIOError:
                return
            fields = dict(line.partition("=")[::2] for line in text.split("\n"))
            process.beat_at = time.monotonic()
            if "READY" in fields:
                # The lines that it wrote before come before those about it.
                self._read(process)
                process.is_ready = process.was_ready = True
                self._reloading.discard(process.place.index)
                self._announce(fields.get("STATUS", ""))
            elif "EXTEND_TIMEOUT_USEC" in fields:
                send(self._manager, f"EXTEND_TIMEOUT_USEC={fields['EXTEND_TIMEOUT_USEC']}")

    def _announce(self, status: str = "") -> None:
        """Reports that all processes are ready, or have read the configuration again."""
        serving = [self._processes.get(index) for index in range(self._count)]
        if self._reloading or not all(each is not None and each.is_ready for each in serving):
            return
        if not self._is_announced:
            self._is_announced = True
            logger.info("processes_ready processes=%d", self._count)
        send(self._manager, "READY=1", f"STATUS={status}, {self._count} processes")

    def _beat(self, now: float) -> None:
        """Reports a sign of life, and kills a process that has none."""
        self._beat_due = now + self._watchdog_s / 2
        for index, process in self._processes.items():
            if process.is_ready and process.child and now - process.beat_at > self._watchdog_s:
                logger.error("process_hangs process=%d silent_s=%s", index, self._watchdog_s)
                process.is_ready = False
                process.child.send(signal.SIGKILL)
        send(self._manager, "WATCHDOG=1")

    # The log

    def _read(self, process: _Process) -> None:
        """Passes on what a process has written, in complete lines."""
        while process.output >= 0:
            try:
                data = os.read(process.output, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_output(process)
                return
            process.tail = (process.tail + data)[-TAIL_BYTES:]
            lines, end, process.rest = (process.rest + data).rpartition(b"\n")
            if len(process.rest) > READ_BYTES:
                end, process.rest = process.rest, b""
            _write(lines + end)

    def _close_output(self, process: _Process) -> None:
        if process.output >= 0:
            self._selector.unregister(process.output)
            os.close(process.output)
            process.output = -1
            if process.rest:
                _write(process.rest + b"\n")


def _stream(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{found.st_dev}:{found.st_ino}"


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


def _is_alive(pid: str) -> bool:
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _sockets_directory(folder: Path) -> str:
    """The directory of the sockets: in the data directory, or, if the system does not allow such a
    long path, in the directory for what programs need while they run."""
    near = folder / "sockets"
    if len(os.fsencode(near)) <= PATH_BYTES_MAX:
        near.mkdir(mode=0o700, exist_ok=True)
        return str(near)
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
    made = Path(base) / f"holdfast-{name}"
    made.mkdir(mode=0o700, exist_ok=True)
    found = made.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SupervisorError(f"{made} is open to other users: remove it")
    return str(made)
