"""What every publisher of the failover benchmarks has in common: messages, pace, and its end."""

import sys
import threading
import time
from typing import Final

TOPIC: Final = "bench/failover"
PAYLOAD_BYTES: Final = 26


def payload_of(sequence: int) -> bytes:
    return b"%08d" % sequence + b"." * (PAYLOAD_BYTES - 8)


def sequence_of(payload: bytes) -> int:
    """Raises ValueError for what `payload_of` did not make."""
    sequence = int(payload[:8])
    if payload != payload_of(sequence):
        raise ValueError(f"not a message of this benchmark: {payload!r}")
    return sequence


class Line:
    """Standard input, read by a thread: whether a line or the end has arrived, and the line."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.text = sys.stdin.readline().strip()
        self.arrived.set()


class Pace:
    """When the next message is due: every `interval_s`, and after a delay from then on, so that
    what an outage held back does not follow in a burst."""

    def __init__(self, interval_s: float, count: int, line: Line) -> None:
        self._interval_s = interval_s
        self._count = count or sys.maxsize
        self._line = line
        self._due_s = time.monotonic()
        self.sequence = 0

    def is_over(self) -> bool:
        return self.sequence >= self._count or self._line.arrived.is_set()

    def wait_s(self) -> float:
        """Until the next one is due; call `next` then."""
        return self._due_s - time.monotonic()

    def next(self) -> int:
        self.sequence += 1
        self._due_s = max(self._due_s + self._interval_s, time.monotonic())
        return self.sequence
