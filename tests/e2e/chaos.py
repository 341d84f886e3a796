"""Publishers and durable subscribers under load while connections and brokers die."""

import random
import selectors
import time
from collections.abc import Callable

from tests.e2e.chaos_clients import Publisher, Subscriber
from tests.e2e.chaos_parties import RECONNECT_S, Former, Party, on_loopback
from tests.e2e.ledger import Interest, Ledger
from tests.support.waiting import patience


class Crowd:
    """The parties and the loop that serves them."""

    def __init__(self, parties: list[Party]) -> None:
        self.parties = parties
        self.formers: list[Former] = []
        """Connections that their clients have left without closing them, still open."""
        self._selector = selectors.DefaultSelector()

    @property
    def publishers(self) -> list[Publisher]:
        return [party for party in self.parties if isinstance(party, Publisher)]

    @property
    def subscribers(self) -> list[Subscriber]:
        return [party for party in self.parties if isinstance(party, Subscriber)]

    def pump(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Serve everybody for that long or until the condition holds. Returns the condition."""
        end = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now >= end:
                return until()
            self._reconnect(now)
            self._serve()
        return True

    def drain(self, seconds: float, collect: Callable[[], None] = lambda: None) -> None:
        """No more is produced; until all is answered, then until all is delivered, at most so
        long each: what is missing then is for the ledger to say. `collect` tells the ledger what
        others saw."""
        for publisher in self.publishers:
            publisher.producing = False
        ledger = self.parties[0].ledger
        for _ in patience(seconds):
            if self.pump(0.2, lambda: not any(one.inflight for one in self.publishers)):
                break
        for _ in patience(seconds):
            collect()
            # `missing` walks the whole history: ask it now and then only.
            if next(ledger.missing(), None) is None:
                break
            self.pump(0.2)
        # What was sent twice is on its way behind what was missing.
        self.pump(0.3)
        collect()

    def close(self) -> None:
        for party in self.parties:
            if party.socket is not None:
                self._drop(party)
        for former in list(self.formers):
            self._forget(former)
        self._selector.close()

    def cut(self, party: Party) -> None:
        if party.socket is not None:
            self._selector.unregister(party.socket)
            party.cut()

    def supplant(self, party: Party) -> None:
        """The party connects to its next server and leaves its present connection open."""
        if party.socket is not None:
            self._selector.unregister(party.socket)
            former = party.release()
            self.formers.append(former)
            self._selector.register(former.socket, selectors.EVENT_READ, former)

    def _forget(self, former: Former) -> None:
        self._selector.unregister(former.socket)
        self.formers.remove(former)
        former.socket.close()

    def _drop(self, party: Party) -> None:
        assert party.socket is not None
        self._selector.unregister(party.socket)
        party.lost()

    def _reconnect(self, now: float) -> None:
        for party in self.parties:
            if party.socket is None and not party.away and now >= party.retry_at:
                party.retry_at = now + RECONNECT_S
                if party.open():
                    assert party.socket is not None
                    self._selector.register(party.socket, selectors.EVENT_READ, party)

    def _serve(self) -> None:
        for entry, _ in self._selector.select(0.005):
            try:
                entry.data.read()
            except OSError:
                if isinstance(entry.data, Former):
                    self._forget(entry.data)
                else:
                    self._drop(entry.data)
        now = time.monotonic()
        for party in self.parties:
            try:
                party.tick(now)
                if party.has_output:
                    party.flush()
            except OSError:
                if party.socket is not None:
                    self._drop(party)


def crowd(port: int, ledger: Ledger) -> Crowd:
    """Four publishers (QoS 1 and 2; three share a topic) and five subscribers, of MQTT 3.1.1 and
    of MQTT 5.0."""

    servers = on_loopback(port)

    def publisher(name: str, version: int, topics: list[str], qos: int) -> Publisher:
        return Publisher(name, servers, version, ledger, topics, qos)

    def subscriber(name: str, version: int, *filters: tuple[str, int]) -> Subscriber:
        interests = [Interest(filter_, qos) for filter_, qos in filters]
        return Subscriber(name, servers, version, ledger, interests)

    return Crowd(
        [
            publisher("p1", 4, ["load/one/a", "load/one/b", "shared/1"], 1),
            publisher("p2", 5, ["load/two/a", "load/two/b"], 2),
            publisher("p3", 5, ["load/three/a", "shared/1"], 1),
            publisher("p4", 4, ["load/four/a", "shared/1"], 2),
            subscriber("exact-1", 5, ("load/one/a", 1), ("shared/1", 1)),
            subscriber("exact-2", 4, ("load/two/a", 2)),
            subscriber("plus-2", 5, ("load/+/a", 2), ("shared/+", 2)),
            subscriber("all-1", 4, ("load/#", 1), ("shared/#", 1)),
            subscriber("all-2", 5, ("#", 2)),
        ]
    )


def shake(
    group: Crowd,
    rounds: int,
    rng: random.Random,
    hurt: Callable[[], None],
    round_s: tuple[float, float] = (0.3, 0.9),
    drain_s: float = 60.0,
) -> None:
    """`rounds` times: load, somebody loses the connection, one subscriber stays away, then
    `hurt()`. Afterwards no more messages are produced and everything is delivered, or `drain_s`
    passes: what is missing then is for the ledger to say.
    """
    assert group.pump(10, lambda: all(one.subscribed for one in group.subscribers)), "no SUBACK"
    for publisher in group.publishers:
        publisher.producing = True
        publisher.fill()
    for _ in range(rounds):
        absent = rng.choice(group.subscribers)
        group.pump(rng.uniform(*round_s) / 2)
        absent.away = True
        group.cut(absent)
        group.cut(rng.choice(group.parties))
        group.pump(rng.uniform(*round_s) / 2)
        hurt()
        absent.away = False
    group.drain(drain_s)
