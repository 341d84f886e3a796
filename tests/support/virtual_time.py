"""Time that passes as soon as nothing is left to do in it."""

import heapq
import itertools
from collections.abc import Callable
from typing import Final

STEP_S: Final = 0.01
"""How exact `run_until` is."""


class Wrong(AssertionError):
    """A promise was broken."""


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Callable[[], object]) -> None:
        """What is due at the same time happens in the order of these calls."""
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), event))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Seconds that passed. Raises Wrong when it does not come true in time."""
        begin = self.now
        while not condition():
            if self.now - begin >= limit_s:
                raise Wrong(f"not within {limit_s} s")
            self.run(STEP_S)
        return self.now - begin
