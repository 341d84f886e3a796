"""Rounds of faults under load, the measurements, and the verdict of the ledger."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Final

import holdfast
from holdfast.log.partition import partition_of
from holdfast_lab.log import ExperimentLog
from tests.e2e.chaos_clients import Publisher
from tests.e2e.chaos_faults import Planned, Scene, wait_whole
from tests.e2e.chaos_site import Site
from tests.e2e.chaos_workload import Workload
from tests.e2e.ledger import Ledger, Violation
from tests.e2e.ledger_checks import check, legal_duplicates
from tests.e2e.ledger_story import tell_all
from tests.e2e.paho_ledger import LOST, OUT_OF_ORDER, TWICE, Verdict, judge

SETTLE_S: Final = (0.5, 1.5)
WHOLE_S: Final = 60.0
DRAIN_S: Final = 60.0
AFTERWARDS_S: Final = 10.0
"""For a connection through which nothing went: its sender tries again ever more seldom."""
ANSWERED_S: Final = 0.2
"""A probe that publishes every 10 ms and heard nothing for so long is not connected, or stalled."""
SHOWN_MAX: Final = 10
HEADINGS: Final = (
    *("fault", "rounds", "acked", "lost", "twice", "order"),
    *("stall s", "p99 s", "worst s", "whole again s"),
)
COLUMNS: Final = "{:<28} {:>6} {:>8}" + " {:>6}" * 3 + " {:>8} {:>8} {:>8}  {}"
"""Acknowledged, lost, twice and out of order are those of the independent ledger."""


@dataclass(frozen=True)
class Round:
    kind: str
    victims: tuple[str, ...]
    stall_s: float | None
    """The longest time without an acknowledgement, to probes at nodes that were not hurt (at all
    nodes when all were), on partitions that a victim led; None when it led none of theirs."""
    whole_s: float
    """From the fault until all nodes were in sync again."""
    from_s: float = 0.0
    """When it began."""
    seed: str = ""
    """With the kind, for another run of the same round."""
    notes: tuple[str, ...] = ()
    """The draws and the deeds of the round."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.seed}: {'; '.join(self.notes) or ', '.join(self.victims)}"


@dataclass
class Outcome:
    seed: int
    rounds: list[Round] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    stories: list[str] = field(default_factory=list)
    duplicates: Counter[str] = field(default_factory=Counter)
    refusals: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    acknowledged: int = 0
    delivered: int = 0
    wills: int = 0
    run: str = ""
    """The name of the run in its events."""
    events: Path = Path()
    """The file with them."""
    independent: Verdict = field(default_factory=Verdict)

    def independent_counts(self, kind: str) -> list[int]:
        """Acknowledged, lost, twice and out of order, in the rounds of a kind: from the fault until
        the next one."""
        times = [*(each.from_s for each in self.rounds), inf]
        total: Counter[str] = Counter()
        for each, (from_s, to_s) in zip(self.rounds, pairwise(times), strict=True):
            if each.kind == kind:
                total.update(self.independent.counts(from_s, to_s))
                total["acknowledged"] += self.independent.acknowledged(from_s, to_s)
        return [total[name] for name in ("acknowledged", LOST, TWICE, OUT_OF_ORDER)]

    def stalls(self, kind: str) -> list[float]:
        return sorted(
            each.stall_s for each in self.rounds if each.kind == kind and each.stall_s is not None
        )

    def report(self) -> str:
        lines = [COLUMNS.format(*HEADINGS)]
        for kind in dict.fromkeys(each.kind for each in self.rounds):
            stalls, rounds = self.stalls(kind), [one for one in self.rounds if one.kind == kind]
            whole = statistics.median(each.whole_s for each in rounds)
            figures = (
                [statistics.median(stalls), stalls[int(len(stalls) * 0.99)], stalls[-1]]
                if stalls
                else []
            )
            texts = [f"{figure:.3f}" for figure in figures] or ["-"] * 3
            counts = self.independent_counts(kind)
            lines.append(COLUMNS.format(kind, len(rounds), *counts, *texts, f"{whole:.1f}"))
        refusals = {f"{reason:#x}": count for reason, count in sorted(self.refusals.items())}
        lines.append(
            f"seed {self.seed}: {self.sent:,} sent, {self.acknowledged:,} acknowledged,"
            f" {self.delivered:,} deliveries, {self.wills} wills; more than once:"
            f" {dict(self.duplicates)}; refused: {refusals}"
        )
        kinds = Counter(violation.kind for violation in self.violations)
        lines.append(f"broken promises: {dict(kinds) or 'none'}")
        independent = self.independent.findings
        lines.append(
            f"independent ledger: {len(self.independent.acknowledged_s):,} acknowledged,"
            f" {self.independent.repeated} repeated at QoS 1, {len(independent)} broken promises"
        )
        lines += map(str, independent[:SHOWN_MAX])
        return "\n".join([*lines, *map(str, self.rounds), *self.stories])


def topics_of(workload: Workload) -> list[str]:
    return [topic for probe in workload.probes.values() for topic in probe.topics]


def play(
    site: Site,
    faults: Sequence[Planned],
    seed: int,
    directory: Path,
    *,
    pause_max_s: float = 8.0,
    duration_s: float = 0.0,
) -> Outcome:
    """Each fault in turn, under load, and again until the duration is over; returns when everything
    is healed and delivered, or is not going to be. `directory` is for the clients' own files.
    Raises AssertionError when the site does not become whole again."""
    rng = random.Random(seed)
    outcome = Outcome(seed, run=f"chaos-{len(site.nodes)}-{seed}-{time.time_ns() // 1000}")
    outcome.events = directory / "events.jsonl"
    parameters = _parameters(site, faults, outcome)
    with ExperimentLog(outcome.run, outcome.events, parameters=parameters) as log:
        ledger, roles = Ledger(log), Roles(site, log)
        workload = Workload(site.servers(), ledger, rng, directory, site.clients_prefix)
        try:
            workload.begin()
            for planned in _repeated(faults, time.monotonic() + duration_s):
                drawn = random.Random(planned.seed)
                scene = Scene(site, drawn, topics_of(workload), pause_max_s)
                outcome.rounds.append(_play_one(workload, scene, planned, roles, rng))
            workload.end(DRAIN_S)
        except BaseException as error:
            _judge(outcome, workload)
            # What is on its way, and what libraries sent, is known only after the end.
            unknown = {"lost", "missed after SUBACK", "invented"}
            outcome.violations = [each for each in outcome.violations if each.kind not in unknown]
            found = outcome.independent.findings
            outcome.independent.findings = [each for each in found if each.kind not in unknown]
            outcome.stories = tell_all(workload.ledger, outcome.violations)
            error.add_note(outcome.report())
            raise
        finally:
            workload.close()
    _judge(outcome, workload)
    return outcome


def _repeated(faults: Sequence[Planned], until: float) -> Iterator[Planned]:
    yield from faults
    while True:
        for each in faults:
            if time.monotonic() >= until:
                return
            yield each


def _parameters(site: Site, faults: Sequence[Planned], outcome: Outcome) -> dict[str, str]:
    """What the events say about the run."""
    deadline = time.monotonic() + WHOLE_S
    while not site.leaders() and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        "name": f"chaos, {len(site.nodes)} nodes",
        "software": f"holdfast {holdfast.__version__}",
        "nodes": str(len(site.nodes)),
        "partitions": str(len(site.leaders())),
        "qos": "mixed",
        "payload_bytes": "64",
        "fault_plan": ", ".join(dict.fromkeys(each.kind for each in faults)),
        "seed": str(outcome.seed),
    }


def _judge(outcome: Outcome, workload: Workload) -> None:
    ledger = workload.ledger
    outcome.violations = check(ledger)
    outcome.stories = tell_all(ledger, outcome.violations)
    outcome.duplicates = legal_duplicates(ledger)
    outcome.sent, outcome.acknowledged = len(ledger.sent), len(ledger.acknowledged)
    outcome.delivered = sum(len(one.history) for one in ledger.subscriptions.values())
    outcome.wills = sum(mortal.deaths for mortal in workload.mortals)
    for party in workload.crowd.parties:
        outcome.refusals += party.refusals
    outcome.independent = judge(workload.independent)


def _play_one(
    workload: Workload, scene: Scene, planned: Planned, roles: "Roles", rng: random.Random
) -> Round:
    """`rng` is for the load; what the fault draws has a seed of its own."""
    crowd, kind = workload.crowd, planned.kind
    crowd.pump(rng.uniform(*SETTLE_S))
    absent = workload.stir()
    crowd.pump(rng.uniform(0, 0.3))
    # The probe at the node that was hit last may not be back yet, which is not this fault's doing.
    crowd.pump(AFTERWARDS_S, lambda: all(map(is_answered, workload.probes.values())))
    leaders = scene.site.leaders()
    at = time.monotonic()
    try:
        for pause_s in planned.fault(scene):
            crowd.pump(pause_s, roles.look)
        for party in absent:
            party.away = False
        for pause_s in wait_whole(scene, WHOLE_S):
            crowd.pump(pause_s, roles.look)
    except BaseException as error:
        # The ledger excuses what the fault explains, also when nothing ends it.
        workload.ledger.fault(kind, at, time.monotonic(), scene.victims)
        error.add_note(f"round {kind}@{planned.seed}: {'; '.join(scene.notes)}")
        raise
    whole_at = time.monotonic()
    workload.ledger.fault(kind, at, whole_at, scene.victims)
    affected = {
        topic
        for topic in scene.busy
        if leaders and leaders[partition_of(topic.encode(), len(leaders))] in scene.victims
    }
    judged = [name for name in workload.probes if name not in scene.victims]
    watched = [Watched(workload.probes[name], affected, at) for name in judged or workload.probes]
    crowd.pump(AFTERWARDS_S, lambda: all(one.newest_s() > whole_at for one in watched))
    stall_s = max((one.stall_s() for one in watched if one.topics), default=None)
    victims, notes = tuple(sorted(scene.victims)), tuple(scene.notes)
    return Round(kind, victims, stall_s, whole_at - at, at, planned.seed, notes)


def is_answered(probe: Publisher) -> bool:
    """Now, as far as one can tell."""
    return bool(probe.answers) and probe.answers[-1][0] > time.monotonic() - ANSWERED_S


class Roles:
    """Writes down which node leads which partition, as of the site's newest look at them."""

    def __init__(self, site: Site, log: ExperimentLog) -> None:
        self._site = site
        self._log = log
        self._known: dict[int, str] = site.leaders()

    def look(self) -> bool:
        """False: a crowd may ask for it all the time, and goes on."""
        leaders = self._site.leaders()
        if leaders != self._known:
            for partition, node in leaders.items():
                before = self._known.get(partition, "")
                if node != before:
                    role = "leader" if node else "none"
                    self._log.write(
                        "role_changed", node=node or before, partition=partition, role=role
                    )
            self._known = leaders
        return False


class Watched:
    """One probe's acknowledgements on the partitions that were affected, from the last one before
    a fault on."""

    def __init__(self, probe: Publisher, affected: set[str], at: float) -> None:
        self._probe = probe
        self.topics = affected.intersection(probe.topics)
        self._at = at
        self._first = len(probe.answers)
        while self._first and not self._is_before(probe.answers[self._first - 1]):
            self._first -= 1
        self._first = max(0, self._first - 1)

    def _is_before(self, answer: tuple[float, str]) -> bool:
        return answer[0] <= self._at and answer[1] in self.topics

    def newest_s(self) -> float:
        for when, topic in reversed(self._probe.answers):
            if topic in self.topics:
                return when
        return 0.0 if self.topics else inf

    def stall_s(self) -> float:
        """The longest silence that ended after the fault; the last may not have ended yet."""
        answers = self._probe.answers[self._first :]
        times = [when for when, topic in answers if topic in self.topics]
        silences = pairwise([*times, time.monotonic()])
        return max(after - before for before, after in silences if after > self._at)
