"""Members and links that die while a publisher at one member sends to subscribers at others.

The members are brokers with [federation] and the links of the layout. Publisher and subscribers are
processes of our client library, QoS 1; the subscribers' sessions are durable, so what was
acknowledged must arrive at both, also at one whose broker was killed and started again. What is
measured is the longest time without a delivery at the far subscriber.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from bench.failover_run import ClientProcess
from bench.failover_sending import TOPIC
from bench.federation_link import LinkProxy
from bench.federation_members import START_TIMEOUT_S, BuiltIn, MembersFailed, wait_until
from bench.ledger import Findings, examine, longest_silence, median_and_worst
from bench.trace import Event
from holdfast_lab.targets.graph import Layout

SETTLED: Final = 50
"""Deliveries in a row before a fault, and after it before the hurt one is revived."""
PHASE_S: Final = 2.0
"""A fault comes at a random moment of so long a time: HELLOs have a rhythm."""
DELIVERY_TIMEOUT_S: Final = 60.0
INTERVAL_S: Final = 0.01
DRAIN_S: Final = "60"


class Fault(StrEnum):
    LINK = "link closed"
    RELAY = "relay kill -9"
    FROZEN = "relay SIGSTOP"
    """A member that says nothing and closes nothing, as a host that is cut off."""
    NEIGHBOUR = "neighbour kill -9"
    """The first member on the way from the publisher; one of the subscribers is there."""


TARGETS_S: Final[dict[str, float | None]] = {
    Fault.LINK: 0.5,
    Fault.RELAY: 3.0,
    Fault.FROZEN: 3.0,
    Fault.NEIGHBOUR: 3.0,
}
COLUMNS: Final = "{:<20} {:>6} {:>9} {:>9} {:>10}  {}"


@dataclass(frozen=True)
class Round:
    fault: str
    silence_s: float | None
    """None: nothing was delivered any more."""


@dataclass(frozen=True)
class Campaign:
    rounds: list[Round]
    findings: dict[int, Findings]
    """By subscriber."""

    def silences_s(self, fault: str) -> list[float | None]:
        return [each.silence_s for each in self.rounds if each.fault == fault]

    def is_met(self, fault: str, target_s: float | None) -> bool:
        return target_s is None or median_and_worst(self.silences_s(fault))[1] <= target_s

    def violations(self) -> list[str]:
        return [
            f"subscriber at {member}: {line}"
            for member, found in self.findings.items()
            for line in found.violations(exactly_once=True)
        ]

    def as_json(self) -> dict[str, object]:
        return {
            "rounds": [asdict(each) for each in self.rounds],
            "findings": {member: asdict(each) for member, each in self.findings.items()},
            "violations": self.violations(),
        }


class Traffic:
    """`with Traffic(...)`: durable subscribers and a publisher, each at its member's broker.
    Raises ClientFailed."""

    def __init__(self, directory: Path, publisher: str, subscribers: dict[int, str]) -> None:
        """Addresses of brokers."""
        self._directory = directory
        self._publisher = publisher
        self._subscribers = subscribers
        self._processes: list[ClientProcess] = []
        self.subscribers: dict[int, ClientProcess] = {}

    def __enter__(self) -> "Traffic":
        try:
            for member, address in self._subscribers.items():
                self.subscribers[member] = self._client("subscribe", f"at-{member}", address)
            for subscriber in self.subscribers.values():
                _await_subscribed(subscriber)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_running():
                process.kill()

    def publish(self) -> None:
        """From now on. What is published before its interest is known is owed to nobody: so call
        this when the publisher's member knows it."""
        options = ["--interval-s", str(INTERVAL_S), "--window", "64"]
        self.publisher = self._client("publish", "publisher", self._publisher, *options)

    def _client(self, role: str, name: str, address: str, *options: str) -> ClientProcess:
        place = self._directory / name
        place.mkdir()
        process = ClientProcess(role, [address], place, "--drain-s", DRAIN_S, *options)
        self._processes.append(process)
        return process

    def delivers(self, member: int, count: int = SETTLED) -> bool:
        """Whether so many more arrive there in time. Raises ClientFailed when its client ended."""
        subscriber = self.subscribers[member]
        if subscriber.wait_for(Event.DELIVERED, count, DELIVERY_TIMEOUT_S):
            return True
        for process in (subscriber, self.publisher):
            if not process.is_running():
                raise process.failure("ended")
        return False

    def silence_s(self, member: int, from_s: float, to_s: float) -> float | None:
        subscriber = self.subscribers[member]
        subscriber.trace.read()
        delivered_s = [
            entry.at_s for entry in subscriber.trace.entries if entry.event is Event.DELIVERED
        ]
        found = longest_silence(delivered_s, from_s, to_s)
        return None if found is None else found.duration_s

    def finish(self) -> dict[int, Findings]:
        """Lets the publisher confirm and the subscribers receive the rest. Raises ClientFailed."""
        self.publisher.end()
        published = self.publisher.trace.entries
        newest = max((e.sequence for e in published if e.event is Event.CONFIRMED), default=0)
        for subscriber in self.subscribers.values():
            subscriber.end(str(newest))
        return {
            member: examine(published, subscriber.trace.entries)
            for member, subscriber in self.subscribers.items()
        }


def _await_subscribed(subscriber: ClientProcess) -> None:
    """Raises ClientFailed when it ends, MembersFailed when it takes too long."""

    def is_subscribed() -> bool:
        if not subscriber.is_running():
            raise subscriber.failure("ended")
        subscriber.trace.read()
        return any(entry.event is Event.SUBSCRIBED for entry in subscriber.trace.entries)

    wait_until(is_subscribed, "a subscriber is subscribed", START_TIMEOUT_S)


class FaultyLan(BuiltIn):
    """Its links that may have to be closed go through proxies."""

    name = "faulty"

    def __init__(self, layout: Layout, parent: Path) -> None:
        super().__init__(layout, parent)
        self.proxies = {
            (one, other): LinkProxy(self.members[other].federation_port)
            for one, other in layout.edges
        }

    def _start(self) -> None:
        for proxy in self.proxies.values():
            proxy.start()
        for number, member in enumerate(self.members):
            ports = [proxy.port for (one, _), proxy in self.proxies.items() if one == number]
            member.settings["federation"]["peers"] = [f"127.0.0.1:{port}" for port in ports]
        super()._start()

    def _stop(self) -> None:
        super()._stop()
        for proxy in self.proxies.values():
            proxy.stop()

    def await_agreed(self) -> None:
        """Raises MembersFailed."""
        wait_until(self._is_agreed, "everybody is linked again", START_TIMEOUT_S)

    def await_interest(self) -> None:
        """Until the publisher's member sends to all subscribers. Raises AssertionError."""
        member = self.members[self.layout.publisher]
        member.await_interest(TOPIC, len(self.layout.subscribers))
        member.await_sending(TOPIC)

    def proxy(self, one: int, other: int) -> LinkProxy:
        return self.proxies.get((one, other)) or self.proxies[other, one]

    def way(self, traffic: Traffic, member: int) -> list[int]:
        """Which members messages to `member` pass now, from the publisher on."""
        before = self._copies()
        if not traffic.delivers(member):
            raise MembersFailed(f"nothing is delivered at {member} although nobody was hurt")
        after = self._copies()
        sending = {each for each in after if after[each] > before[each]}
        edges = [edge for edge in self.layout.edges if sending & set(edge)]
        useful = [(one, other) for one, other in edges if {one, other} <= sending | {member}]
        found = replace(self.layout, edges=tuple(useful)).parents()
        way = [member]
        while way[-1] in found:
            way.append(found[way[-1]])
        return way[::-1]

    def _copies(self) -> dict[int, int]:
        return {
            number: self.status(number)["counters"]["data_copies"]
            for number in range(self.layout.members)
        }


def play(members: FaultyLan, traffic: Traffic, fault: Fault, rng: random.Random) -> Round:
    """One fault, until all is well again. Raises MembersFailed, ClientFailed."""
    far = members.layout.subscribers[-1]
    way = members.way(traffic, far)
    if len(way) < 3:
        raise MembersFailed(f"the way to {far} is {way}: there is no relay to be hurt")
    time.sleep(rng.uniform(0, PHASE_S))
    from_s = time.monotonic()
    hurt, heal = _fault(members, fault, way)
    hurt()
    delivered = traffic.delivers(far)
    heal()
    members.await_agreed()
    delivered = delivered and traffic.delivers(far)
    silence_s = traffic.silence_s(far, from_s, time.monotonic())
    return Round(fault, silence_s if delivered else None)


def _fault(
    members: FaultyLan, fault: Fault, way: list[int]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """How it is done and undone. The relay is the last one on the way."""
    if fault is Fault.LINK:
        proxy = members.proxy(way[-2], way[-1])
        return proxy.close_link, proxy.reopen
    member = members.members[way[1] if fault is Fault.NEIGHBOUR else way[-2]]
    if fault is Fault.FROZEN:
        assert member.process is not None
        process = member.process
        return (
            lambda: process.send_signal(signal.SIGSTOP),
            lambda: process.send_signal(signal.SIGCONT),
        )
    return member.kill, member.start


def run(layout: Layout, directory: Path, counts: dict[Fault, int], seed: int) -> Campaign:
    """Raises MembersFailed, ClientFailed."""
    rng = random.Random(seed)
    faults = [fault for fault, count in counts.items() for _ in range(count)]
    rng.shuffle(faults)
    with FaultyLan(layout, directory) as members:
        addresses = {member: f"127.0.0.1:{members.port(member)}" for member in layout.subscribers}
        publisher = f"127.0.0.1:{members.port(layout.publisher)}"
        place = members.directory / "clients"
        place.mkdir()
        with Traffic(place, publisher, addresses) as traffic:
            members.await_interest()
            traffic.publish()
            for member in layout.subscribers:
                if not traffic.delivers(member):
                    raise MembersFailed(f"nothing is delivered at {member}")
            rounds = [play(members, traffic, fault, rng) for fault in faults]
            return Campaign(rounds, traffic.finish())


def print_campaign(campaign: Campaign, targets_s: dict[str, float | None]) -> None:
    """`targets_s` of all faults; None: there is none."""
    print(COLUMNS.format("fault", "rounds", "median s", "worst s", "target s", ""))
    for fault, target_s in targets_s.items():
        silences_s = campaign.silences_s(fault)
        if not silences_s:
            continue
        median_s, worst_s = median_and_worst(silences_s)
        target = "-" if target_s is None else f"<= {target_s:g}"
        result = "" if target_s is None else "pass" if campaign.is_met(fault, target_s) else "MISS"
        print(
            COLUMNS.format(
                fault, len(silences_s), f"{median_s:.3f}", f"{worst_s:.3f}", target, result
            ).rstrip()
        )
    for member, found in campaign.findings.items():
        print(
            f"at {member}: {found.sent:,} sent, {found.confirmed:,} confirmed, {found.lost:,} lost,"
            f" {found.reordered:,} reordered, {found.redelivered:,} delivered again with DUP,"
            f" {found.duplicates:,} without"
        )
    for line in campaign.violations():
        print(f"BROKEN PROMISE: {line}")
