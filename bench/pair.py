"""The lab's pair of nodes on one data directory, as the benchmarks of failover use it."""

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

from holdfast_lab.targets import target
from holdfast_lab.targets.holdfast import SIGNALS, HoldfastNode, PairTarget

THAW_TIMEOUT_S: Final = 10.0
"""How long a paused holder may need, once it runs again, to find that its lease is over."""
POLL_S: Final = 0.01


class Fault(StrEnum):
    """What happens to the holder."""

    HANDOVER = "handover"
    """`holdfast cluster handover`: a planned stop."""
    TERMINATE = "SIGTERM"
    KILL = "kill -9"
    STOP = "SIGSTOP"


IN_LAB: Final = {
    Fault.HANDOVER: target.Fault.PLANNED,
    Fault.KILL: target.Fault.KILL,
    Fault.STOP: target.Fault.PAUSE,
}


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition, and return whether it came in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


class Pair(PairTarget):
    """`with Pair(parent) as pair`: one node holds the lease, and the other one follows.

    `data` is a directory that is there already and stays. Raises `TargetError`.
    """

    def __init__(
        self, parent: Path, *, python: str = sys.executable, data: Path | None = None
    ) -> None:
        directory = Path(tempfile.mkdtemp(prefix="pair-", dir=parent))
        super().__init__(directory, program=[python, "-m", "holdfast.cli.main"], data=data)

    def __enter__(self) -> "Pair":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def holder(self) -> HoldfastNode:
        """Wait until there is a holder, and return it."""
        return self._serving("")

    def other(self, node: HoldfastNode) -> HoldfastNode:
        """Return the other node of the pair."""
        return self.nodes[1 - self.nodes.index(node)]

    def hurt(self, holder: HoldfastNode, fault: Fault) -> None:
        """Give the order for a fault. It may have no effect yet when this returns."""
        if fault in IN_LAB:
            self._end(holder, IN_LAB[fault])
        else:
            holder.signal(SIGNALS[target.Fault.PLANNED])

    def revive(self, node: HoldfastNode, fault: Fault) -> None:
        """Make the former holder a standby. It is started again if it has ended."""
        if fault is Fault.STOP:
            node.signal(signal.SIGCONT)
        wait_until(lambda: not node.is_running() or node.role() == "standby", THAW_TIMEOUT_S)
        if not node.is_running():
            node.start()
        self._wait_complete()
