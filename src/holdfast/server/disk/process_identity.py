"""Processes of this machine: naming one for good, and ending a holder that hangs."""

import os
import signal
from pathlib import Path

from holdfast.cluster.lease.directory import HolderInfo


def machine_identity() -> str:
    """Equal for processes that see one another's process ids: same boot, same pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """Clock ticks from boot to the start of a process. Raises OSError if there is none."""
    # The name in the second field may contain anything, blanks and parentheses too.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


def kill_if_same(info: HolderInfo) -> bool:
    """SIGKILL the process of `info`, if it runs on this machine and is that very process. So its
    clients learn at once that it is gone. Whether it was killed."""
    if not info.pid or not info.machine or info.machine != machine_identity():
        return False
    try:
        descriptor = os.pidfd_open(info.pid)
    except OSError:
        return False
    try:
        # From here on the descriptor means one process, whatever becomes of the number.
        if process_start(info.pid) != info.process_start:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
