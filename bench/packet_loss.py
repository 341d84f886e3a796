"""Packet loss as the paper on broker pairs measured it: 50 messages, one a second, the broker is
killed after the 24th; how many does the subscriber never get?

The paper's publisher sent into the void while no broker was there. Confirmed publishing sends
again: with a pair nothing is lost, with a single broker what comes after its end.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import brokers
from bench.failover_run import Plan, Traffic
from bench.ledger import Findings, longest_silence
from bench.pair import Fault, Pair, wait_until

MESSAGES: Final = 50
KILL_AFTER: Final = 24
INTERVAL_S: Final = 1.0
QUICK_INTERVAL_S: Final = 0.1
DRAIN_S: Final = 10.0
"""How long the publisher waits, after the last message, for a broker that does not come back."""
PAIR: Final = "Holdfast pair"
PAPER: Final = (
    ("ActiveMQ pair, as published", 20),
    ("Mosquitto alone, as published", 26),
)
"""The second one from its text: deliveries end at second 24 of 50."""


@dataclass(frozen=True)
class Loss:
    publisher: str
    broker: str
    findings: Findings
    longest_silence_s: float | None
    """Between two confirmations; the interval of sending included."""

    def is_broken_promise(self) -> bool:
        """A message that was confirmed is missing, or with a pair any at all."""
        missing = self.findings.undelivered if self.broker == PAIR else self.findings.lost
        return missing > 0


def run(libraries: Iterable[str], quick: bool, parent: Path, python: str) -> list[Loss]:
    """Prints each line as soon as it is known. Raises ClientFailed, BrokerFailed."""
    interval_s = QUICK_INTERVAL_S if quick else INTERVAL_S
    print(
        f"\npacket loss: {MESSAGES} messages, one every {interval_s:g} s, "
        f"kill -9 after number {KILL_AFTER}\n"
        f"{'publisher':<12} {'brokers':<32} {'confirmed':>10} {'delivered':>10} {'lost':>6}"
    )
    found = []
    for library in libraries:
        found.append(_with_pair(library, interval_s, parent, python))
        _print(found[-1])
    if brokers.mosquitto_path():
        found.append(_with_mosquitto(interval_s, parent))
        _print(found[-1])
    for name, lost in PAPER:
        print(f"{'':<12} {name:<32} {'':>10} {MESSAGES - lost:>10} {lost:>6}")
    return found


def _print(loss: Loss) -> None:
    findings = loss.findings
    print(
        f"{loss.publisher:<12} {loss.broker:<32} {findings.confirmed:>10} "
        f"{findings.delivered:>10} {findings.undelivered:>6}",
        flush=True,
    )


def _plan(library: str, interval_s: float, drain_s: float) -> Plan:
    return Plan(library, interval_s=interval_s, window=MESSAGES, count=MESSAGES, drain_s=drain_s)


def _reach_the_kill(traffic: Traffic, interval_s: float) -> None:
    if not traffic.confirmed(KILL_AFTER, KILL_AFTER * interval_s + DRAIN_S):
        raise traffic.failure(f"message {KILL_AFTER} was never confirmed")


def _with_pair(library: str, interval_s: float, parent: Path, python: str) -> Loss:
    with (
        Pair(parent, python=python) as pair,
        Traffic(_plan(library, interval_s, 30.0), pair.servers, pair.directory) as traffic,
    ):
        _reach_the_kill(traffic, interval_s)
        pair.hurt(pair.holder(), Fault.KILL)
        findings = _finish(traffic, interval_s)
        return Loss(library, PAIR, findings, _silence_s(traffic))


def _with_mosquitto(interval_s: float, parent: Path) -> Loss:
    """It stays dead, as in the paper: who restarts it decides how much more is lost."""
    broker = brokers.start_mosquitto(parent, nodelay=True)
    try:
        plan = _plan("paho", interval_s, DRAIN_S)
        with Traffic(plan, [f"127.0.0.1:{broker.port}"], broker.directory) as traffic:
            _reach_the_kill(traffic, interval_s)
            broker.signal(signal.SIGKILL)
            findings = _finish(traffic, interval_s)
            return Loss("paho", "Mosquitto alone", findings, _silence_s(traffic))
    finally:
        broker.stop()


def _finish(traffic: Traffic, interval_s: float) -> Findings:
    """Waits until all messages were sent: told to end earlier, the publisher would stop."""
    assert traffic.publisher is not None
    publisher = traffic.publisher

    def all_sent() -> bool:
        publisher.trace.read()
        sent = sum(entry.event.name == "SENT" for entry in publisher.trace.entries)
        return sent == MESSAGES or not publisher.is_running()

    wait_until(all_sent, MESSAGES * interval_s + DRAIN_S)
    return traffic.finish()


def _silence_s(traffic: Traffic) -> float | None:
    silence = longest_silence(traffic.confirmed_s(), 0.0, float("inf"))
    return silence.duration_s if silence is not None else None
