"""What a cluster has to do while it is broken: every kind of client, through every node."""

import random
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Final

from tests.e2e.chaos import Crowd
from tests.e2e.chaos_clients import Publisher, Subscriber
from tests.e2e.chaos_library import END_S, LibraryClient
from tests.e2e.chaos_parties import UNDER_FAULTS, Party, Server
from tests.e2e.chaos_visitors import Mortal, Reader
from tests.e2e.ledger import Interest, Ledger
from tests.support.waiting import patience

PATIENCE_S: Final = 1.5
PROBE_INTERVAL_S: Final = 0.01
PROBE_TOPICS: Final = 8
ROAMER_INTERVAL_S: Final = 0.02
RETAINED: Final = ["state/a", "state/b", "state/c"]
NEWCOMERS_MAX: Final = 8
RETAINED_S: Final = 10.0
OURS: Final = "ours"


class Workload:
    """Probes publish to their own node only, however long that takes: what they wait for is the
    broker's doing, not the client's. All others go to the next node when theirs is silent."""

    def __init__(
        self,
        servers: Sequence[Server],
        ledger: Ledger,
        rng: random.Random,
        directory: Path,
        prefix: Sequence[str] = (),
    ) -> None:
        """`directory` and `prefix`: for the clients in processes of their own."""
        self.servers = list(servers)
        self.ledger = ledger
        self._rng = rng
        self._newcomers = 0
        self.probes = {server.node: self._probe(server) for server in servers}
        self.mortals = [
            Mortal(
                f"mortal-{number}",
                self._from(number),
                ledger,
                rng,
                patience_s=PATIENCE_S,
                tolerated=UNDER_FAULTS,
            )
            for number in range(2)
        ]
        parties: list[Party] = [
            *self.probes.values(),
            self._publisher("roam-1", 4, ["load/one/a", "load/one/b", "shared/1"], 1),
            self._publisher("roam-2", 5, ["load/two/a", "shared/1"], 2),
            self._publisher("roam-3", 4, ["load/three/a"], 2),
            self._publisher("keeper", 5, RETAINED, 1, retain=True),
            self._subscriber("all-2", 5, [("#", 2)]),
            self._subscriber("load-1", 4, [("load/#", 1), ("shared/#", 1)]),
            self._subscriber("exact-2", 5, [("load/two/a", 2), ("state/a", 1)]),
            *(
                self._subscriber(f"at-{server.node}", 5, [(f"probe/{server.node}/#", 1)], start)
                for start, server in enumerate(servers, 1)
            ),
            *(
                # At QoS 1: progress of a group is logged a moment later, so a crash may give to
                # another member once more what one had just been given.
                self._subscriber(f"team-{number}", 5, [("load/#", 1)], number, "team")
                for number in range(3)
            ),
            *self.mortals,
        ]
        self.crowd = Crowd(parties)
        self.libraries = self._libraries(directory, prefix)

    def _libraries(self, directory: Path, prefix: Sequence[str]) -> list[LibraryClient]:
        def library(role: str, name: str, start: int, topics: list[str], qos: int) -> LibraryClient:
            addresses = [f"{server.host}:{server.port}" for server in self._from(start)]
            return LibraryClient(role, name, addresses, topics, qos, directory, prefix)

        paho_readers = [
            library("paho-read", f"paho-r{qos}", qos, ["paho/#"], qos) for qos in (1, 2)
        ]
        self.readers = [
            library("holdfast-subscribe", OURS, 1, ["load/+/a", "lib/#"], 2),
            *paho_readers,
        ]
        paho_publishers = [
            library("paho-publish", f"paho-p{number}", number, [f"paho/{number}"], qos)
            for number, qos in enumerate((1, 2, 2))
        ]
        self.independent = [one.events for one in (*paho_readers, *paho_publishers)]
        """The files for `paho_ledger.judge`."""
        return [
            *self.readers,
            library("holdfast-publish", "ours-p1", 0, ["lib/ours/1", "lib/shared"], 1),
            library("holdfast-publish", "ours-p2", 2, ["lib/ours/2", "lib/shared"], 2),
            *paho_publishers,
        ]

    def collect(self) -> None:
        """Tells the ledger what the clients in processes of their own saw."""
        for one in self.libraries:
            one.tell(self.ledger)

    def close(self) -> None:
        self.crowd.close()
        for one in self.libraries:
            one.kill()

    def _from(self, start: int) -> list[Server]:
        start %= len(self.servers)
        return self.servers[start:] + self.servers[:start]

    def _probe(self, server: Server) -> Publisher:
        topics = [f"probe/{server.node}/{number}" for number in range(PROBE_TOPICS)]
        return Publisher(
            f"probe-{server.node}",
            [server],
            5,
            self.ledger,
            topics,
            1,
            window=4 * PROBE_TOPICS,
            interval_s=PROBE_INTERVAL_S,
            tolerated=UNDER_FAULTS,
        )

    def _publisher(
        self, name: str, version: int, topics: list[str], qos: int, retain: bool = False
    ) -> Publisher:
        return Publisher(
            name,
            self._from(self._rng.randrange(len(self.servers))),
            version,
            self.ledger,
            topics,
            qos,
            interval_s=ROAMER_INTERVAL_S,
            retain=retain,
            patience_s=PATIENCE_S,
            tolerated=UNDER_FAULTS,
        )

    def _subscriber(
        self,
        name: str,
        version: int,
        filters: list[tuple[str, int]],
        start: int = 0,
        group: str = "",
    ) -> Subscriber:
        return Subscriber(
            name,
            self._from(start),
            version,
            self.ledger,
            [Interest(filter_, qos) for filter_, qos in filters],
            group=group,
            patience_s=PATIENCE_S,
            tolerated=UNDER_FAULTS,
        )

    def begin(self, timeout_s: float = 20.0) -> None:
        """Returns when all are subscribed and publish. Raises AssertionError."""

        def silent() -> list[str]:
            self.collect()
            subscriptions = self.ledger.subscriptions.items()
            names = [name for name, one in subscriptions if one.since_s == inf]
            expected = {one.name for one in self.readers}
            return [*names, *expected.difference(self.ledger.subscriptions)]

        for _ in patience(timeout_s, "not all have a SUBACK"):
            if self.crowd.pump(0.2, lambda: not silent()):
                break
        for publisher in self.crowd.publishers:
            publisher.producing = True
        for mortal in self.mortals:
            mortal.living = True

    def stir(self) -> list[Party]:
        """Somebody comes, somebody moves, somebody is cut off; some stay away: those returned."""
        if self._newcomers < NEWCOMERS_MAX:
            self._newcomers += 1
            start = self._rng.randrange(len(self.servers))
            filters = [("load/one/a", 2), ("shared/#", 1)]
            newcomer = self._subscriber(f"newcomer-{self._newcomers}", 5, filters, start)
            self.crowd.parties.append(newcomer)
        subscribers = self.crowd.subscribers
        self.crowd.supplant(self._rng.choice(subscribers))
        roamers = [one for one in self.crowd.publishers if one.name not in self.probes]
        self.crowd.cut(self._rng.choice(roamers))
        absent = self._rng.choice(subscribers)
        absent.away = True
        self.crowd.cut(absent)
        return [absent]

    def end(self, drain_s: float) -> None:
        """No more is produced, everything is delivered, or `drain_s` passes; then what is retained
        is looked at through every node, and connections that should be gone are told."""
        for mortal in self.mortals:
            mortal.living = False
        self.crowd.pump(drain_s, lambda: all(one.socket is None for one in self.mortals))
        publishers = [one for one in self.libraries if one not in self.readers]
        for one in publishers:
            one.stop_soon()
        self.crowd.pump(END_S, lambda: all(one.has_ended() for one in publishers))
        self.crowd.drain(drain_s, self.collect)
        for one in self.readers:
            one.stop_soon()
        self.crowd.pump(END_S, lambda: all(one.has_ended() for one in self.readers))
        self.collect()
        for one in self.libraries:
            if one.failure():
                self.ledger.accuse("client failed", one.name, one.failure())
        readers = [
            Reader(f"reader-{server.node}", server, self.ledger, "state/#")
            for server in self.servers
        ]
        self.crowd.parties += readers
        self.crowd.pump(
            RETAINED_S, lambda: all(len(reader.found) == len(RETAINED) for reader in readers)
        )
        for reader in readers:
            reader.tell(RETAINED)
        self.crowd.pump(RETAINED_S, lambda: not self.crowd.formers)
        for former in self.crowd.formers:
            self.ledger.accuse("two owners", former.name, "its former connection is still open")
