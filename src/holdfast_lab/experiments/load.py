"""Measures CPU, memory and network of a broker with 0 to 10,000 clients, over time.

Each client subscribes to a topic of its own. Ten publishers share a fixed rate of messages over
these topics, so that a broker's cost of idle clients and of messages can be told apart.
"""

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Final

from holdfast.cli.bench.load import LoadError, LoadPlan
from holdfast.io.event_loop.descriptors import raise_limit
from holdfast_lab.experiments.generator import milliseconds, play
from holdfast_lab.experiments.paper import LOAD_CLIENTS
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.target import Target

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICKS: Final = os.sysconf("SC_CLK_TCK")
CPU_CLOCK: Final = 2
INTERVAL_S: Final = 0.25


def cpu_s(pids: list[int]) -> float:
    """The CPU seconds of the processes, from the kernel's clock of each one in nanoseconds. A
    process that has ended counts nothing."""
    total = 0
    for pid in pids:
        try:
            total += time.clock_gettime_ns((~pid << 3) | CPU_CLOCK)
        except OSError:
            continue
    return total / 1e9


def rss_bytes(pids: list[int]) -> int:
    """The resident bytes of the processes."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except OSError:
            continue
    return total


def loopback_bytes() -> int:
    """The bytes that went over the loopback interface so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, values = line.strip().partition(":")
        if name == "lo":
            return int(values.split()[0])
    return 0


class Usage:
    """Samples of processes, taken until it is stopped."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.times_s: list[float] = []
        self.cpu_percent: list[float | None] = []
        """The share of one core, in each interval."""
        self.rss_mib: list[float | None] = []
        self.network_mib_s: list[float | None] = []
        """Over the loopback interface, all processes of the machine together."""
        self._task = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        start = before_s = time.monotonic()
        cpu_before, bytes_before = cpu_s(self._pids), loopback_bytes()
        while True:
            await asyncio.sleep(INTERVAL_S)
            now_s, cpu_now, bytes_now = time.monotonic(), cpu_s(self._pids), loopback_bytes()
            elapsed_s = now_s - before_s
            self.times_s.append(now_s - start)
            self.cpu_percent.append(100 * (cpu_now - cpu_before) / elapsed_s)
            self.rss_mib.append(rss_bytes(self._pids) / (1 << 20))
            self.network_mib_s.append((bytes_now - bytes_before) / elapsed_s / (1 << 20))
            before_s, cpu_before, bytes_before = now_s, cpu_now, bytes_now

    async def stop(self) -> None:
        """Takes no more samples."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


RATE: Final = 500.0
PUBLISHERS: Final = 10
DURATION_S: Final = 20
QUICK_S: Final = 3
WARM_UP_S: Final = 1.0
QUICK_WARM_UP_S: Final = 0.5
SIZE_BYTES: Final = 64
QUICK_CLIENTS_MAX: Final = 1000


async def run(target: Target, trial: Trial) -> Result:
    """Measures each number of clients."""
    duration_s = trial.choose(QUICK_S, DURATION_S)
    warm_up_s = trial.choose(QUICK_WARM_UP_S, WARM_UP_S)
    result = Result(
        "load", target.name, target.title, target.version(),
        {"messages a second": f"{RATE:g}", "QoS": "1", "duration": f"{duration_s} s",
         "publishers": str(PUBLISHERS)}, {},
    )  # fmt: skip
    raise_limit()
    pids = target.pids()
    if not pids:
        result.problems.append("CPU and memory are not measured: give the target a pid")
    lines: dict[str, list[Series]] = {"cpu": [], "rss": [], "network": []}
    numbers = [each for each in LOAD_CLIENTS if not trial.is_quick or each <= QUICK_CLIENTS_MAX]
    for number, clients in enumerate(numbers):
        trial.progress(number / len(numbers), f"{clients:,} clients")
        plan = LoadPlan(
            PUBLISHERS, clients, 1, RATE, SIZE_BYTES, duration_s, warm_up_s, False,
            f"lab/{trial.run}/{clients}",
        )  # fmt: skip
        usage = Usage(pids)
        try:
            outcomes, causes = await play(target, plan)
        except (LoadError, OSError) as error:
            result.problems.append(f"{clients:,} clients: {error}")
            break
        finally:
            await usage.stop()
        name = f"{result.title}: {clients:,} clients"
        if pids:
            # The connections and the end are not the load.
            middle = usage.cpu_percent[len(usage.cpu_percent) // 3 :]
            measured = [each for each in middle if each is not None]
            if measured:
                percent = statistics.median(measured)
                result.figures[f"{clients:,} clients, CPU (%)"] = percent
                result.figures[f"{clients:,} clients, CPU a message (µs)"] = percent * 1e4 / RATE
            peak = [each for each in usage.rss_mib if each is not None]
            if peak:
                result.figures[f"{clients:,} clients, memory (MiB)"] = max(peak)
            lines["cpu"].append(Series(name, usage.times_s, usage.cpu_percent))
            lines["rss"].append(Series(name, usage.times_s, usage.rss_mib))
        lines["network"].append(Series(name, usage.times_s, usage.network_mib_s))
        if causes:
            result.problems.append(f"{clients:,} clients, no latency: {'; '.join(causes)}")
        else:
            result.figures[f"{clients:,} clients, confirmation p99 (ms)"] = milliseconds(
                outcomes.acknowledgement, 0.99
            )
    texts = (
        ("cpu", "CPU over time", "% of a core"),
        ("rss", "Memory over time", "MiB"),
        ("network", "Network over time", "MiB/s over the loopback interface"),
    )
    result.charts = [
        Chart(title, "seconds", unit, "One line for each number of clients.", lines[key])
        for key, title, unit in texts
        if lines[key]
    ]
    return result
