"""A publisher and a durable subscriber, as processes, with brokers that are hurt meanwhile."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.ledger import (
    Findings,
    StoredFindings,
    confirmed_at_s,
    examine,
    examine_log,
    longest_silence,
)
from bench.pair import Fault, Pair, wait_until
from bench.trace import Event, TraceReader
from holdfast_lab.targets.holdfast import HoldfastNode

SETTLED_MESSAGES: Final = 50
"""Confirmed in a row before a fault, and after it before the former holder is revived."""
PHASE_S: Final = 0.25
"""A fault comes at a random moment of so long a time: the lease has a rhythm."""
CONFIRM_TIMEOUT_S: Final = 15.0
SUBSCRIBE_TIMEOUT_S: Final = 20.0
END_TIMEOUT_S: Final = 90.0
"""For a client process to wait for the rest and to end; above its own --drain-s."""
ROOT: Final = Path(__file__).parent.parent


class ClientFailed(Exception):
    """A client process ended by itself or saw nothing of the broker; the text says why."""


@dataclass(frozen=True)
class Plan:
    """How the publisher sends."""

    library: str
    """One of `failover_clients.LIBRARIES`."""
    interval_s: float = 0.002
    window: int = 8
    count: int = 0
    """0: until it is told to end."""
    drain_s: float = 30.0
    paho_delay_s: float = 0.05


class ClientProcess:
    def __init__(self, role: str, servers: list[str], directory: Path, *options: str) -> None:
        self.role = role
        path = directory / f"{role}.trace"
        self.trace = TraceReader(path)
        command = [sys.executable, "-m", "bench.failover_clients", role, "--trace", str(path)]
        command += ["--client-id", f"bench-{role}", *options]
        for server in servers:
            command += ["--server", server]
        self._errors = directory / f"{role}.errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stderr=errors
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, event: Event, count: int, timeout_s: float) -> bool:
        """Whether it saw so many such events from now on, before it ended and in time."""
        self.trace.read()
        seen = 0

        def enough() -> bool:
            nonlocal seen
            running = self.is_running()
            seen += sum(entry.event is event for entry in self.trace.read())
            return seen >= count or not running

        return wait_until(enough, timeout_s) and seen >= count

    def end(self, line: str = "") -> None:
        """Tells it to finish what is under way and waits until it has. Raises ClientFailed."""
        assert self._process.stdin is not None
        try:
            self._process.communicate(f"{line}\n".encode(), END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self.failure("does not end") from None
        self.trace.read()
        if self._process.returncode:
            raise self.failure(f"ended with code {self._process.returncode}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def failure(self, what: str) -> ClientFailed:
        words = self._errors.read_text(errors="replace").strip().splitlines()
        return ClientFailed(f"{self.role}: {what}: {words[-1] if words else 'no message'}")


class Traffic:
    """`with Traffic(...) as traffic`: a subscriber that is subscribed, and a publisher."""

    def __init__(self, plan: Plan, servers: list[str], directory: Path) -> None:
        self.plan = plan
        self._servers = servers
        self._directory = directory
        self.subscriber = ClientProcess("subscribe", servers, directory, "--library", plan.library)
        self.publisher: ClientProcess | None = None

    def __enter__(self) -> "Traffic":
        try:
            if not self.subscriber.wait_for(Event.SUBSCRIBED, 1, SUBSCRIBE_TIMEOUT_S):
                raise self.subscriber.failure("not subscribed")
            plan = self.plan
            self.publisher = ClientProcess(
                "publish",
                self._servers,
                self._directory,
                *["--library", plan.library, "--interval-s", str(plan.interval_s)],
                *["--window", str(plan.window), "--count", str(plan.count)],
                *["--drain-s", str(plan.drain_s), "--paho-delay-s", str(plan.paho_delay_s)],
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.publisher, self.subscriber):
            if process is not None and process.is_running():
                process.kill()

    def confirmed(self, count: int, timeout_s: float = CONFIRM_TIMEOUT_S) -> bool:
        """Waits for so many more confirmations. Raises ClientFailed if the publisher has ended."""
        assert self.publisher is not None
        if self.publisher.wait_for(Event.CONFIRMED, count, timeout_s):
            return True
        if not self.publisher.is_running():
            raise self.publisher.failure("ended")
        return False

    def failure(self, what: str) -> ClientFailed:
        assert self.publisher is not None
        return self.publisher.failure(what)

    def confirmed_s(self) -> list[float]:
        assert self.publisher is not None
        self.publisher.trace.read()
        return confirmed_at_s(self.publisher.trace.entries)

    def finish(self) -> Findings:
        """Lets the publisher confirm and the subscriber receive the rest. Raises ClientFailed."""
        assert self.publisher is not None
        self.publisher.end()
        published = self.publisher.trace.entries
        newest = max((e.sequence for e in published if e.event is Event.CONFIRMED), default=0)
        self.subscriber.end(str(newest))
        return examine(published, self.subscriber.trace.entries)

    def compare_with(self, records: Sequence[int]) -> StoredFindings:
        """After `finish`. `records`: the sequences in the log, in its order."""
        assert self.publisher is not None
        return examine_log(records, self.publisher.trace.entries, self.subscriber.trace.entries)


@dataclass(frozen=True)
class Round:
    fault: Fault
    downtime_s: float | None
    """The longest time without a confirmation from the fault to the end of the round; None when
    nothing was confirmed any more."""
    ready_s: float | None
    """From the last confirmation before the takeover until the other node said that it serves; the
    rest is the client's."""


def play(pair: Pair, traffic: Traffic, fault: Fault, rng: random.Random) -> Round:
    """One fault of a complete pair, until the pair is complete again."""
    if not traffic.confirmed(SETTLED_MESSAGES):
        raise traffic.failure("nothing is confirmed although nobody was hurt")
    time.sleep(rng.uniform(0, PHASE_S))
    holder = pair.holder()
    from_s = time.monotonic()
    pair.hurt(holder, fault)
    ready_at_s = _wait_for_heir(pair.other(holder))
    confirmed = ready_at_s is not None and traffic.confirmed(SETTLED_MESSAGES)
    settled_s = time.monotonic()
    pair.revive(holder, fault)
    confirmed_s = traffic.confirmed_s()
    takeover = longest_silence(confirmed_s, from_s, settled_s)
    longest = longest_silence(confirmed_s, from_s, time.monotonic())
    if not confirmed or takeover is None or longest is None or ready_at_s is None:
        return Round(fault, None, None)
    return Round(fault, longest.duration_s, ready_at_s - takeover.from_s)


def _wait_for_heir(heir: HoldfastNode) -> float | None:
    """When it said that it holds, as time.monotonic(); None when it did not."""
    if wait_until(lambda: heir.role() == "holder", CONFIRM_TIMEOUT_S):
        return time.monotonic()
    return None


def schedule(counts: dict[Fault, int], rng: random.Random) -> list[Fault]:
    """So many of each, mixed."""
    faults = [fault for fault, count in counts.items() for _ in range(count)]
    rng.shuffle(faults)
    return faults
