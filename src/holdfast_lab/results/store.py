"""Stores the results of a run of the lab in one directory.

`run.json` has the machine, the versions, the command and one result for each experiment and target.
It is written after each of them, so that a run that is interrupted keeps what it has, and
`--resume` continues it. Beside it are the events of the experiments, as JSON lines that the
pipeline reads.
"""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

VERSION: Final = 1
FILE: Final = "run.json"


class ResultError(Exception):
    """A run that cannot be read. The text says why."""


class Series(Struct):
    """One line of a chart."""

    name: str
    xs: Sequence[float | str | None]
    ys: Sequence[float | str | None]
    texts: Sequence[str] = ()
    """The text of each point."""


class Chart(Struct):
    """A chart of an experiment. The lines of all targets are drawn into one."""

    title: str
    x_title: str
    y_title: str
    caption: str
    series: list[Series]
    kind: str = "line"
    """line; bar; points, with a text each; heat, one series for each row of counts; or graph, whose
    lines are the links and whose points the nodes."""


class Result(Struct):
    """The result of one experiment against one target."""

    experiment: str
    target: str
    title: str
    version: str
    parameters: dict[str, str]
    figures: dict[str, float | None]
    """Figures by name with its unit, such as "downtime, mean (s)"."""
    charts: list[Chart] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why a figure is missing or must not be trusted, each in one sentence."""
    broken: list[str] = field(default_factory=list)
    """The broken promises of the broker, each in one sentence."""
    events: str = ""
    """The file of its events, if there is one."""
    duration_s: float = 0.0
    promise: str = ""
    """The meaning of an acknowledgement there, if it is known."""


class LabRun(Struct):
    """One run of the lab."""

    version: int
    started: str
    command: str
    machine: dict[str, str]
    results: list[Result] = field(default_factory=list)

    def has(self, experiment: str, target: str) -> bool:
        """Whether there is a result of this experiment and target."""
        return any((each.experiment, each.target) == (experiment, target) for each in self.results)


def new_run(command: str) -> LabRun:
    """A run that begins now on this machine."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return LabRun(VERSION, started, command, machine())


def machine() -> dict[str, str]:
    """The facts about this machine on which figures depend."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def fdatasync_ms(directory: Path, samples: int = 50) -> float:
    """The median milliseconds of an append of 4 KiB with fdatasync in the directory."""
    path = directory / "fdatasync-probe"
    times: list[float] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for _ in range(samples):
            start = time.perf_counter()
            os.write(descriptor, bytes(4096))
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - start)
    finally:
        os.close(descriptor)
        path.unlink()
    return sorted(times)[samples // 2] * 1e3


def save(run: LabRun, directory: Path) -> None:
    """Writes the run's file in place of an earlier one."""
    path = directory / FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    temporary.replace(path)


def load(directory: Path) -> LabRun:
    """The run in a directory. Raises `ResultError`."""
    path = directory / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{directory} has no run of the lab: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ResultError(f"{path} is no run of the lab: {error}") from None
    if version != VERSION:
        age = "too old" if version < VERSION else "of a newer version"
        raise ResultError(f"{path} is {age}: version {version}, this program reads {VERSION}")
    try:
        return msgspec.json.decode(data, type=LabRun)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ResultError(f"{path} is damaged: {error}") from None


class _Versioned(Struct):
    version: int
