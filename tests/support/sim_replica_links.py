"""Links between simulated nodes as TCP makes them: in order, nothing lost inside a connection; its
two sides see its end at different times, and frames under way are lost then."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol


class End(Protocol):
    """A node, for its links."""

    name: str
    is_alive: bool

    def do(self, step: Callable[[], None]) -> None:
        """In its loop, which may stand still; a process that ends before drops it."""

    def connected(self, other: str) -> None: ...
    def disconnected(self, other: str) -> None: ...
    def received(self, other: str, kind: int, payload: bytes) -> None: ...


After = Callable[[float, Callable[[], None]], None]
"""Run something so many seconds from now."""

DELAYS_S = (0.0005, 0.002, 0.02)
NEVER = float("inf")


class Link:
    """Between two nodes, one connection after the other."""

    def __init__(self, ends: tuple[End, End], random: Random, after: After) -> None:
        self._ends = ends
        self._random = random
        self._after = after
        self._clock = 0.0
        self.number = 0
        self.is_up = False
        # Per side: the connection it believes in; 0: none.
        self.views = [0, 0]
        # Per receiving side: frames stand still; those that do; when the last one arrives, and
        # when the connection stops carrying any.
        self.blocked = [False, False]
        self._standing: list[list[Callable[[], None]]] = [[], []]
        self._last = [0.0, 0.0]
        self._cut = [NEVER, NEVER]
        self.delay_s = random.choice(DELAYS_S)

    def connect(self, now: float) -> None:
        if self.is_up or any(self.blocked) or not all(end.is_alive for end in self._ends):
            return
        self.number += 1
        self.is_up = True
        self._standing = [[], []]
        self._cut = [NEVER, NEVER]
        for side in (0, 1):
            self._last[side] = now
            self._carry(side, now, partial(self._ends[side].do, self._opener(side, self.number)))

    def tear(self, now: float) -> None:
        if not self.is_up:
            return
        self.is_up = False
        for side in (0, 1):
            self._cut[side] = now + self._random.choice((0, 0, 0.005, 0.05))
            closer = self._closer(side, self.number)
            self._after(self._random.choice((0.0, 0.01, 0.3)) + self._cut[side] - now, closer)

    def block(self, side: int) -> None:
        """What goes to this side stands still."""
        self.blocked[side] = True

    def unblock(self, now: float) -> None:
        self.blocked = [False, False]
        for side in (0, 1):
            standing, self._standing[side] = self._standing[side], []
            for deliver in standing:
                deliver()

    def send(self, sender: str, kind: int, payload: bytes, now: float) -> None:
        side = 1 if self._ends[0].name == sender else 0
        number = self.views[1 - side]
        if number != self.number or number == 0 or now > self._cut[side]:
            return
        end = self._ends[side]

        def receive() -> None:
            if self.views[side] == number:
                end.received(sender, kind, payload)

        self._carry(side, now, lambda: end.do(receive))

    def _carry(self, side: int, now: float, deliver: Callable[[], None]) -> None:
        number = self.number
        at = max(self._last[side], now + self.delay_s * self._random.uniform(0.5, 2.0))
        self._last[side] = at

        def arrive() -> None:
            if self.number != number or at > self._cut[side]:
                return
            if self.blocked[side] or self._standing[side]:
                self._standing[side].append(deliver)
            else:
                deliver()

        self._after(at - now, arrive)

    def _opener(self, side: int, number: int) -> Callable[[], None]:
        def open_side() -> None:
            if self.views[side]:
                self._ends[side].disconnected(self._ends[1 - side].name)
            self.views[side] = number
            self._ends[side].connected(self._ends[1 - side].name)

        return open_side

    def _closer(self, side: int, number: int) -> Callable[[], None]:
        def close_side() -> None:
            if self.views[side] == number:
                self.views[side] = 0
                self._ends[side].disconnected(self._ends[1 - side].name)

        return partial(self._ends[side].do, close_side)

    def forget(self, name: str) -> None:
        """This node's process is gone: it knows nothing of the connection."""
        self.views[0 if self._ends[0].name == name else 1] = 0
