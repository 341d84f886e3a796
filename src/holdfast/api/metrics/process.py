"""Metrics of the process itself: build, CPU, memory, descriptors. Linux only, from /proc."""

import os
import platform
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from holdfast import __version__
from holdfast.api.metrics.catalog import METRICS, counter, gauge
from holdfast.api.process import ServedProcess
from holdfast.log import record

_PROC: Final = Path("/proc/self")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def process_values() -> dict[str, float]:
    """Returns the process's metrics by name. Empty without /proc."""
    try:
        # The name of the program, in brackets, may contain blanks.
        fields = (_PROC / "stat").read_text().rpartition(")")[2].split()
        booted = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
        # Since Linux 6.2 the size of this folder is the number of descriptors. Listing 100,000 of
        # them takes 50 ms.
        descriptors = (_PROC / "fd").stat().st_size or len(os.listdir(_PROC / "fd"))
    except (OSError, StopIteration):
        return {}
    return {
        "process_cpu_seconds": (int(fields[11]) + int(fields[12])) / _TICKS,
        "process_virtual_memory_bytes": float(fields[20]),
        "process_resident_memory_bytes": float(fields[21]) * _PAGE_BYTES,
        "process_start_time_seconds": booted + float(fields[19]) / _TICKS,
        "process_open_fds": descriptors,
        "process_max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "process_threads": int(fields[17]),
    }


def _form() -> str:
    """Returns whether the hot modules are compiled."""
    return "interpreted" if (record.__file__ or "").endswith(".py") else "compiled"


class ProcessCollector(Collector):
    """Collects the build and the process."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        broker = self._server.broker
        loop = type(broker.loop).__module__.partition(".")[0] if broker is not None else ""
        build = gauge("build_info")
        labels = [
            self._server.config.node.id,
            __version__,
            platform.python_version(),
            _form(),
            loop,
        ]
        build.add_metric(labels, 1)
        yield build
        restarts = counter("local_process_restarts")
        restarts.add_metric([], self._server.restarts)
        yield restarts
        for name, value in process_values().items():
            made = counter if METRICS[name].kind == "counter" else gauge
            family = made(name)
            family.add_metric([], value)
            yield family
