"""Virtual time: what is to happen, in order of its time."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Final
from zlib import crc32

Work = Callable[[], None]

TRACED: Final = 400
"""Events remembered for the report of a failure."""


class Violation(Exception):
    """Something that must hold does not."""


class Schedule:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=TRACED)
        self.on_trace: Callable[[str], None] | None = None
        # Of everything traced: two runs of a seed have the same.
        self.digest = 0
        self._queue: list[tuple[float, int, Work]] = []
        self._count = 0

    def chance(self, name: str) -> random.Random:
        """A stream of randomness of its own."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, when: float, work: Work) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, work))

    def after(self, delay_s: float, work: Work) -> None:
        self.at(self.now + delay_s, work)

    def run(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            when, _, work = heapq.heappop(queue)
            self.now = when
            self.steps += 1
            work()
        self.now = until

    def note(self, who: str, text: str) -> None:
        line = f"{self.now:10.4f} {who:<10} {text}"
        self.digest = crc32(line.encode(), self.digest)
        self.trace.append(line)
        if self.on_trace is not None:
            self.on_trace(line)
