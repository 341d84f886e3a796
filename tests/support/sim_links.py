"""The links between simulated members: delays, losses, cuts and partitions, by a seed."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tests.sim.schedule import VirtualTime

Name = TypeVar("Name", int, bytes)


@dataclass
class Weather:
    """Of all links; `delay_s`: the least and the most."""

    delay_s: tuple[float, float] = (0.001, 0.005)
    loss: float = 0.0
    reorders: bool = False
    sync_s: tuple[float, float] = (0.0005, 0.005)


class LinkedTime(VirtualTime, Generic[Name]):
    def __init__(self, seed: int, weather: Weather) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.weather = weather
        self.cut: set[tuple[Name, Name]] = set()
        # Of members that cannot hear each other: the side each is on.
        self.sides: dict[Name, int] = {}
        self._arrival_at: dict[tuple[Name, Name], float] = defaultdict(float)

    def delay(self) -> float:
        return self.rng.uniform(*self.weather.delay_s)

    def hears(self, a: Name, b: Name) -> bool:
        return pair(a, b) not in self.cut and self.sides.get(a, 0) == self.sides.get(b, 0)

    def carry(self, sender: Name, receiver: Name, arrive: Callable[[], Any]) -> None:
        """Call it when what is sent now arrives, if it is not lost."""
        if self.rng.random() < self.weather.loss:
            return
        at = self.now + self.delay()
        if not self.weather.reorders:
            at = max(at, self._arrival_at[sender, receiver])
            self._arrival_at[sender, receiver] = at
        self.at(at, arrive)

    def heal(self) -> None:
        self.sides = {}
        self.cut = set()


def pair(a: Name, b: Name) -> tuple[Name, Name]:
    return (a, b) if a < b else (b, a)
