"""Identifies processes of this machine, and kills a holder that hangs."""

import os
import signal
from pathlib import Path

from holdfast.node.lease.directory import HolderInfo


def boot_identity() -> str:
    """Returns a name for the time since the machine was started, "" if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def machine_identity() -> str:
    """Returns a name shared by processes that see one another's pids: same boot and namespace."""
    boot = boot_identity()
    try:
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """Returns the clock ticks from boot to a process's start. Raises `OSError` without one."""
    # The name in the second field may contain blanks and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


def kill_if_same(info: HolderInfo) -> bool:
    """Kills the process of `info` if it still runs on this machine; returns whether it did.

    SIGKILL closes its connections, so its clients notice at once.
    """
    if not info.pid or not info.machine or info.machine != machine_identity():
        return False
    try:
        descriptor = os.pidfd_open(info.pid)
    except OSError:
        return False
    try:
        # From here on the descriptor names this process even if its pid is reused.
        if process_start(info.pid) != info.process_start:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
