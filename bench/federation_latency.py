"""The published run on a LAN: how long messages take to two subscribers, by variant.

A: the publisher waits for its broker's acknowledgement before the next message (closed loop). B: a
fixed rate. The variants take turns, each round with new processes; figures are medians of rounds.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import process
from bench.federation_load import Latency, Load, latency_of
from bench.federation_members import VARIANTS, Bridges, BuiltIn, BuiltInMemory, Members, Sidecars
from bench.federation_observing import Observed, observe
from bench.measurement import OTHERS_BUSY_MAX
from holdfast_lab.targets.graph import LAN, Layout

CLOSED, PACED = "A", "B"
RATE: Final = 100.0
WARM_UP: Final = 50
PUBLISHED_MEAN_MS: Final = {0: 445.796, 5: 1062.230}
"""Of the paper's Table 1, by subscriber."""
FAR_BELOW: Final = 0.1
"""Of the published figures, at most."""
REFERENCE: Final = Bridges.name
JUDGED: Final = (BuiltIn.name, BuiltInMemory.name, Sidecars.name)
COPIES_TOLERANCE: Final = 0.05
"""A confirmation that is late has a message sent again."""
COLUMNS: Final = "{:<15} {:<4} {:>3}  {:<30} {:>5} {:>5} {:>6} {:>7} {:>8} {:>8}"


@dataclass(frozen=True)
class Plan:
    layout: Layout
    variants: Sequence[str]
    qualities: Sequence[int]
    """Of service, QoS."""
    messages: int
    rounds: int
    directory: Path


@dataclass(frozen=True)
class Run:
    """One load on one variant."""

    variant: str
    load: str
    qos: int
    sent: int
    latencies: dict[int, Latency | None]
    """By subscriber."""
    lost: int
    """Of all subscribers, as the two that follow."""
    duplicates: int
    reordered: int
    took_s: float
    cpu_s: float
    """Of all members."""
    others_busy: float
    """Cores kept busy by anything but the members and this process."""
    rss_bytes: int
    copies: float | None
    """Of each message; None: nothing counts them in this run."""
    control_per_s: float | None

    def violations(self) -> list[str]:
        """What a federation that promises QoS 1 and 2 must not do, in words."""
        if not self.qos:
            return []
        wrong = {"lost": self.lost, "out of order": self.reordered}
        if self.qos == 2:
            wrong["delivered twice"] = self.duplicates
        return [
            f"{self.variant}, {self.load}, QoS {self.qos}: {count:,} {what}"
            for what, count in wrong.items()
            if count
        ]


@dataclass(frozen=True)
class Verdict:
    what: str
    figure: str
    target: str
    is_met: bool

    def text(self) -> str:
        result = "pass" if self.is_met else "MISS"
        return f"{self.what:<52} {self.figure:>12}  target {self.target:<18} {result}"


@dataclass
class Found:
    plan: Plan
    runs: list[Run]
    observed: dict[str, Observed]

    def of(self, variant: str, load: str, qos: int) -> list[Run]:
        return [
            run for run in self.runs if (run.variant, run.load, run.qos) == (variant, load, qos)
        ]

    def mean_ms(self, variant: str, load: str, qos: int, subscriber: int) -> float | None:
        """Median of the rounds' means; None: nothing arrived in some round, or none was run."""
        latencies = [run.latencies[subscriber] for run in self.of(variant, load, qos)]
        found = [each.mean_ms for each in latencies if each is not None]
        return statistics.median(found) if found and len(found) == len(latencies) else None

    def violations(self) -> list[str]:
        return [line for run in self.runs if run.variant in JUDGED for line in run.violations()]

    def verdicts(self) -> list[Verdict]:
        return [
            each
            for variant in self.plan.variants
            if variant in JUDGED
            for each in [*self._latency_verdicts(variant), *self._copies_verdicts(variant)]
        ]

    def _latency_verdicts(self, variant: str) -> list[Verdict]:
        found = []
        for qos in self.plan.qualities:
            for subscriber in self.plan.layout.subscribers:
                mean_ms = self.mean_ms(variant, CLOSED, qos, subscriber)
                figure = "-" if mean_ms is None else f"{mean_ms:.2f} ms"
                what = f"{variant}, A, QoS {qos}, mean at {subscriber}"
                limits: list[tuple[str, float]] = []
                bridges_ms = self.mean_ms(REFERENCE, CLOSED, qos, subscriber)
                if bridges_ms is not None:
                    limits.append((f"<= {bridges_ms:.2f} ms, {REFERENCE}", bridges_ms))
                if self.plan.layout == LAN:
                    limit_ms = FAR_BELOW * PUBLISHED_MEAN_MS[subscriber]
                    limits.append((f"<= {limit_ms:.1f} ms, published / 10", limit_ms))
                found += [
                    Verdict(what, figure, text, mean_ms is not None and mean_ms <= limit_ms)
                    for text, limit_ms in limits
                ]
        return found

    def _copies_verdicts(self, variant: str) -> list[Verdict]:
        least = self.plan.layout.copies_least()
        copies = [
            run.copies for run in self.runs if run.variant == variant and run.copies is not None
        ]
        if not copies:
            return []
        median = statistics.median(copies)
        target = f"= {least:.1f}"
        is_met = abs(median - least) <= COPIES_TOLERANCE
        return [Verdict(f"{variant}, copies of a message", f"{median:.2f}", target, is_met)]

    def as_json(self) -> dict[str, object]:
        return {
            "runs": [asdict(run) for run in self.runs],
            "observed": {name: asdict(each) for name, each in self.observed.items()},
            "verdicts": [asdict(each) for each in self.verdicts()],
            "violations": self.violations(),
        }


def play(members: Members, load_name: str, qos: int, messages: int) -> Run:
    """Raises MembersFailed."""
    with Load(members, qos) as load:
        load.await_flow()
        load.warm_up(WARM_UP)
        before = members.traffic()
        start_s, cpu_s = time.monotonic(), members.cpu_s()
        own_s, busy_s = time.process_time(), process.machine_busy_s()
        if load_name == CLOSED:
            load.closed_loop(messages)
        else:
            load.paced(messages, RATE)
        load.drain(messages)
        took_s, cpu_s = time.monotonic() - start_s, members.cpu_s() - cpu_s
        own_s, busy_s = time.process_time() - own_s, process.machine_busy_s() - busy_s
        after = members.traffic()
        sinks = load.sinks
        copies = control_per_s = None
        if before is not None and after is not None:
            copies = (after.copies - before.copies) / messages
            control_per_s = (after.control - before.control) / (after.at_s - before.at_s)
        return Run(
            members.name,
            load_name,
            qos,
            messages,
            {each: latency_of([*sink.times_ms.values()]) for each, sink in sinks.items()},
            sum(messages - len(sink.times_ms) for sink in sinks.values()),
            sum(sink.duplicates for sink in sinks.values()),
            sum(sink.reordered for sink in sinks.values()),
            took_s,
            cpu_s,
            max(0.0, (busy_s - cpu_s - own_s) / took_s),
            members.rss_bytes(),
            copies,
            control_per_s,
        )


def compare(plan: Plan) -> Found:
    """Prints as it goes. Raises MembersFailed, ConnectionLost."""
    found = Found(plan, [], {})
    for number in range(plan.rounds):
        order = plan.variants if number % 2 == 0 else plan.variants[::-1]
        for variant in order:
            print(f"round {number + 1} of {plan.rounds}: {variant}", flush=True)
            with VARIANTS[variant](plan.layout, plan.directory) as members:
                for qos in plan.qualities:
                    for load_name in (CLOSED, PACED):
                        found.runs.append(play(members, load_name, qos, plan.messages))
                if members.observed and variant not in found.observed:
                    found.observed[variant] = observe(members)
    return found


def print_found(found: Found) -> None:
    print(
        "\n"
        + COLUMNS.format(
            "variant", "load", "QoS", "at: mean p50 p99 max ms", "lost", "twice", "copies",
            "ctrl/s", "CPU ms", "RSS MB",
        )
    )  # fmt: skip
    for load_name in (CLOSED, PACED):
        for qos in found.plan.qualities:
            for variant in found.plan.variants:
                _print_runs(found, found.of(variant, load_name, qos))
    print(
        "\nMedians of the rounds; lost and twice are sums. A: closed loop, B: 100 a second. copies:"
        "\nbetween members, of each message. ctrl/s: frames or announcements of all members; of"
        "\nloads of a few seconds by chance. CPU ms: of all members for each message published."
        "\n*: counted apart from this load. !: other processes took more than a quarter of a core."
    )
    for verdict in found.verdicts():
        print(verdict.text())
    for line in found.violations():
        print(f"BROKEN PROMISE: {line}")


def _print_runs(found: Found, runs: list[Run]) -> None:
    if not runs:
        return
    first, observed = runs[0], found.observed.get(runs[0].variant)
    disturbed = statistics.median(run.others_busy for run in runs) > OTHERS_BUSY_MAX
    head = [first.variant + ("!" if disturbed else ""), first.load, str(first.qos)]
    tail = [
        f"{sum(run.lost for run in runs)}",
        f"{sum(run.duplicates for run in runs)}",
        _figure([run.copies for run in runs], None if observed is None else observed.copies),
        _figure(
            [run.control_per_s for run in runs],
            None if observed is None else observed.control_per_s,
        ),
        f"{statistics.median(run.cpu_s / run.sent for run in runs) * 1e3:.2f}",
        f"{statistics.median(run.rss_bytes for run in runs) / 1e6:.0f}",
    ]
    for subscriber in found.plan.layout.subscribers:
        latencies = [run.latencies[subscriber] for run in runs]
        print(COLUMNS.format(*head, f"{subscriber}: {_latency_text(latencies)}", *tail).rstrip())
        head, tail = [""] * len(head), [""] * len(tail)


def _latency_text(latencies: list[Latency | None]) -> str:
    found = [each for each in latencies if each is not None]
    if not found:
        return "-"
    medians = [
        statistics.median(getattr(each, name) for each in found)
        for name in ("mean_ms", "p50_ms", "p99_ms", "max_ms")
    ]
    return " ".join(f"{each:6.2f}" if each < 1000 else f"{each:6.0f}" for each in medians)


def _figure(counted: list[float | None], observed: float | None) -> str:
    found = [each for each in counted if each is not None]
    if found:
        return f"{statistics.median(found):.2f}"
    return "-" if observed is None else f"{observed:.1f}*"
