"""Samples CPU and memory of a target's processes."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

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
