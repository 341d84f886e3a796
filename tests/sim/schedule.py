"""Virtual time: what is to happen, in order of its time."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from struct import pack
from typing import Final
from zlib import crc32

Work = Callable[[], None]

TRACED: Final = 400
"""Events remembered for the report of a failure."""


class Violation(Exception):
    """Something that must hold does not."""


class Wrong(AssertionError):
    """A promise was broken."""


class VirtualTime:
    """A clock that jumps to the next work that is due. Every simulator has one."""

    step_s = 0.01
    """How exact `run_until` is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.planned = 0
        """Works so far. Those due at the same time are done in the order of their planning."""
        self._queue: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, when: float, work: Callable[[], object]) -> None:
        self.planned += 1
        heapq.heappush(self._queue, (max(when, self.now), self.planned, work))

    def after(self, delay_s: float, work: Callable[[], object]) -> None:
        self.at(self.now + delay_s, work)

    def step(self, until: float) -> bool:
        """Do the next work that is due by then. False: there is none."""
        if not self._queue or self._queue[0][0] > until:
            return False
        self.now, _, work = heapq.heappop(self._queue)
        self.steps += 1
        work()
        return True

    def advance(self, until: float) -> None:
        while self.step(until):
            pass
        self.now = until

    def advance_or(self, is_done: Callable[[], bool], until: float, every: int = 32) -> None:
        """Stop before that when it is done, which is looked at after every so many works; the clock
        then shows the last work."""
        steps = 0
        while self.step(until):
            steps += 1
            if steps % every == 0 and is_done():
                return

    def run(self, seconds: float) -> None:
        self.advance(self.now + seconds)

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Seconds that passed. Raises Wrong when it does not come true in time."""
        begin = self.now
        while not condition():
            if self.now - begin >= limit_s:
                raise Wrong(f"not within {limit_s} s")
            self.run(self.step_s)
        return self.now - begin


class Schedule(VirtualTime):
    """The virtual time of a seed, with its randomness and its trace."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.trace: deque[str] = deque(maxlen=TRACED)
        self.on_trace: Callable[[str], None] | None = None
        # Of everything traced and planned: two runs of a seed have the same.
        self.digest = 0

    def at(self, when: float, work: Callable[[], object]) -> None:
        self.digest = crc32(pack("d", when), self.digest)
        super().at(when, work)

    def chance(self, name: str) -> random.Random:
        """A stream of randomness of its own."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, who: str, text: str) -> None:
        line = f"{self.now:10.4f} {who:<10} {text}"
        self.digest = crc32(line.encode(), self.digest)
        self.trace.append(line)
        if self.on_trace is not None:
            self.on_trace(line)
