"""Clients of the chaos tests that come and go: with wills, as newcomers, and to look."""

import random
import time
from collections.abc import Sequence
from typing import Final

from tests.e2e import wire
from tests.e2e.chaos_parties import Party, Server, key_of
from tests.e2e.ledger import Key, Ledger

LIFE_S: Final = (0.3, 2.0)
REST_S: Final = 0.2
KEEP_ALIVE_S: Final = 3
"""Above the patience, by which pings are sent."""


class Mortal(Party):
    """Lives for a moment, then says goodbye or is cut off, and starts again. Its will at QoS 2 is
    due when the connection ends in any other way than by a goodbye; it stays away until the will
    has been delivered, for a client that returns at once may be in time to stop it."""

    def __init__(
        self,
        name: str,
        servers: Sequence[Server],
        ledger: Ledger,
        rng: random.Random,
        *,
        patience_s: float,
        tolerated: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(
            name,
            servers,
            5,
            ledger,
            # A reset may be lost on the way: then this tells the server.
            keep_alive_s=KEEP_ALIVE_S,
            patience_s=patience_s,
            tolerated=tolerated,
        )
        self.living = False
        """Whether it is to start again and again."""
        self.away = True
        self.deaths = 0
        self.goodbyes = 0
        self._rng = rng
        self._attempts = 0
        self._dies_at = 0.0
        self._leaving = False
        self._due: Key | None = None

    @property
    def _key(self) -> Key:
        return self.name, f"wills/{self.name}", self._attempts

    def will(self) -> wire.Will:
        self._attempts += 1
        name, topic, number = self._key
        self.ledger.send(self._key, 2, time.monotonic(), is_will=True)
        return wire.Will(topic, f"{name} {number} .".encode(), qos=2)

    def on_ready(self) -> None:
        self._leaving = False
        self._dies_at = time.monotonic() + self._rng.uniform(*LIFE_S)

    def on_frame(self, frame: wire.Frame) -> None:
        self.ledger.accuse("stray answer", self.name, f"kind {frame.kind}")

    def on_tick(self, now: float) -> None:
        """Raises ConnectionResetError when it cuts itself off."""
        if self._due is not None and self._due in self.ledger.delivered:
            self._due = None
        if self.socket is None:
            self.away = not self.living or self._due is not None
        elif self.ready and not self._leaving and (now > self._dies_at or not self.living):
            if self._rng.random() < 0.5:
                self.reset()
                raise ConnectionResetError
            self._leaving = True
            self.send(wire.disconnect())

    def on_end(self) -> None:
        if self._leaving:
            self.goodbyes += 1
            self.ledger.withdraw(self._key, time.monotonic())

    def lost(self) -> None:
        if self.ready and not self._leaving:
            self.deaths += 1
            self._due = self._key
            self.ledger.acknowledge(self._key, time.monotonic())
        self.retry_at = time.monotonic() + REST_S
        super().lost()


class Reader(Party):
    """Looks once at what is retained below a filter."""

    def __init__(self, name: str, server: Server, ledger: Ledger, filter_: str) -> None:
        super().__init__(name, [server], 5, ledger)
        self.filter = filter_
        self.found: dict[str, Key] = {}
        self.answered = False

    def on_ready(self) -> None:
        self.send(wire.subscribe(1, [(self.filter, 0)]))

    def on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.SUBACK:
            self.answered = True
        elif frame.kind == wire.PUBLISH:
            message = wire.read_publish(frame, self.version)
            self.found[message.topic] = key_of(message)

    def tell(self, topics: Sequence[str]) -> None:
        for topic in topics:
            self.ledger.find_retained(topic, self.name, self.found.get(topic))
