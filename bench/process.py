"""What a process and its descendants have used, from the kernel's accounts."""

import os
import resource
import time
from pathlib import Path

from holdfast_lab.results.store import fdatasync_ms

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED = 2


def descendants(pid: int) -> list[int]:
    """`pid` and every living process below it."""
    found = [pid]
    for parent in found:
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
            for task in tasks:
                text = Path(f"/proc/{parent}/task/{task}/children").read_text()
                found.extend(int(child) for child in text.split())
        except OSError:
            continue
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, of all threads of the process tree below `pid`.

    Read from the process CPU clock (what clock_getcpuclockid(3) names), which counts the same
    time as utime + stime in /proc/PID/stat but in nanoseconds instead of ticks of 10 ms.
    """
    total = 0.0
    for member in descendants(pid):
        try:
            total += process_cpu_s(member)
        except OSError:
            if member == pid:
                raise
    return total


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of one process. Raises `OSError` if there is none."""
    return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED) / 1e9


def rss_bytes(pid: int) -> int:
    """Resident bytes of the process tree below `pid`; pages shared by two processes count twice."""
    total = 0
    for member in descendants(pid):
        try:
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * PAGE_BYTES
        except OSError:
            if member == pid:
                raise
    return total


def machine_busy_s() -> float:
    """Seconds of all cores together that were not idle, in ticks of 10 ms; stolen time counts."""
    user, nice, system, _idle, _io_wait, irq, soft_irq, stolen = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split(None, 9)[1:9]
    )
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")


def raise_open_files_limit(wanted: int) -> int:
    """Raises this process's soft limit towards `wanted`; children inherit it. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown processor"


def filesystem_of(directory: Path) -> str:
    """The type of the file system that holds `directory`, from the longest matching mount."""
    best, kind = "", "unknown"
    target = str(directory.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, mount_type, *_ = line.split()
        inside = target == mount_point or target.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, mount_type
    return kind


def usable_cores() -> set[int]:
    return os.sched_getaffinity(0)


def describe_disk(directory: Path) -> str:
    """The file system of a directory, and what an fdatasync costs there."""
    return (
        f"data on {filesystem_of(directory)}, where an append with fdatasync takes"
        f" {fdatasync_ms(directory):.2f} ms"
    )
