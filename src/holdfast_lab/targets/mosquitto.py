"""Debian's Mosquitto as a target, with its messages on disk at most every half hour."""

import shutil
import signal
from pathlib import Path
from typing import Final

from holdfast_lab.targets.target import (
    Fault,
    Program,
    Target,
    first_line,
    free_port,
    listens,
    program_path,
    wait_until,
)

CONFIGURATION: Final = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {directory}/
max_inflight_messages {inflight_max}
max_queued_messages 0
connection_messages false
set_tcp_nodelay true
log_dest stderr
log_type error
user root
{extra}"""


class Mosquitto(Target):
    """One Mosquitto. Nothing takes over; it is started again after a fault."""

    name = "mosquitto"
    title = "Mosquitto"
    promise = "in memory; stored every half hour and at an orderly stop"
    faults = (Fault.PLANNED, Fault.KILL, Fault.PAUSE)

    def __init__(self, directory: Path, *, inflight_max: int = 1000) -> None:
        self.directory = directory
        self.extra = ""
        """More lines of the configuration."""
        self._inflight_max = inflight_max
        self._port = free_port()
        self._program: Program | None = None

    @property
    def servers(self) -> list[str]:
        """Returns the addresses for clients."""
        return [f"127.0.0.1:{self._port}"]

    def start(self) -> None:
        """Starts it and waits until it serves. Raises `TargetError`."""
        path = program_path("mosquitto")
        configuration = self.directory / "mosquitto.conf"
        configuration.write_text(
            CONFIGURATION.format(
                port=self._port, directory=self.directory, inflight_max=self._inflight_max,
                extra=self.extra,
            )
        )  # fmt: skip
        self._program = Program("mosquitto", [path, "-c", str(configuration)], self.directory)
        self._program.start()
        self._wait()

    def stop(self) -> None:
        """Stops it and removes its files."""
        if self._program is not None:
            self._program.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def version(self) -> str:
        """Returns the program and its version."""
        return first_line([program_path("mosquitto"), "-h"])

    def pids(self) -> list[int]:
        """Returns the processes that are measured."""
        program = self._program
        return [program.pid] if program is not None and program.is_running() else []

    def inject(self, fault: Fault, topic: str) -> str:
        """Injects a fault into the node that serves the topic. Returns its name."""
        assert self._program is not None
        if fault is Fault.PAUSE:
            self._program.signal(signal.SIGSTOP)
        else:
            self._program.signal(signal.SIGTERM if fault is Fault.PLANNED else signal.SIGKILL)
            self._program.wait(10.0)
        return "mosquitto"

    def heal(self) -> None:
        """Makes it complete again."""
        assert self._program is not None
        self._program.signal(signal.SIGCONT)
        if not self._program.is_running():
            self._program.start()
        self._wait()

    def _wait(self) -> None:
        assert self._program is not None
        wait_until(lambda: listens(self._port), [self._program], "the broker listens")
