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
from holdfast.storage.partition import partition_of
from holdfast_lab.log import ExperimentLog
from tests.e2e.chaos_clients import Publisher
from tests.e2e.chaos_faults import Fault, Scene, wait_whole
from tests.e2e.chaos_site import Site
from tests.e2e.chaos_workload import Workload
from tests.e2e.ledger import Ledger, Violation
from tests.e2e.ledger_checks import check, legal_duplicates
from tests.e2e.ledger_story import tell_all

SETTLE_S: Final = (0.5, 1.5)
WHOLE_S: Final = 60.0
DRAIN_S: Final = 60.0
AFTERWARDS_S: Final = 10.0
"""For a connection through which nothing went: its sender tries again ever more seldom."""
ANSWERED_S: Final = 0.2
"""A probe that publishes every 10 ms and heard nothing for so long is not connected, or stalled."""
COLUMNS: Final = "{:<24} {:>6} {:>8} {:>8} {:>8}  {}"


@dataclass(frozen=True)
class Round:
    kind: str
    victims: tuple[str, ...]
    stall_s: float | None
    """The longest time without an acknowledgement, to probes at nodes that were not hurt (at all
    nodes when all were), on partitions that a victim led; None when it led none of theirs."""
    whole_s: float
    """From the fault until all nodes were in sync again."""


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

    def stalls(self, kind: str) -> list[float]:
        return sorted(
            each.stall_s for each in self.rounds if each.kind == kind and each.stall_s is not None
        )

    def report(self) -> str:
        lines = [COLUMNS.format("fault", "rounds", "p50 s", "p99 s", "worst s", "whole again s")]
        for kind in dict.fromkeys(each.kind for each in self.rounds):
            stalls, rounds = self.stalls(kind), [one for one in self.rounds if one.kind == kind]
            whole = statistics.median(each.whole_s for each in rounds)
            figures = (
                [statistics.median(stalls), stalls[int(len(stalls) * 0.99)], stalls[-1]]
                if stalls
                else []
            )
            texts = [f"{figure:.3f}" for figure in figures] or ["-"] * 3
            lines.append(COLUMNS.format(kind, len(rounds), *texts, f"{whole:.1f}"))
        refusals = {f"{reason:#x}": count for reason, count in sorted(self.refusals.items())}
        lines.append(
            f"seed {self.seed}: {self.sent:,} sent, {self.acknowledged:,} acknowledged,"
            f" {self.delivered:,} deliveries, {self.wills} wills; more than once:"
            f" {dict(self.duplicates)}; refused: {refusals}"
        )
        kinds = Counter(violation.kind for violation in self.violations)
        lines.append(f"broken promises: {dict(kinds) or 'none'}")
        return "\n".join([*lines, *self.stories])


def topics_of(workload: Workload) -> list[str]:
    return [topic for probe in workload.probes.values() for topic in probe.topics]


def play(
    site: Site,
    faults: Sequence[tuple[str, Fault]],
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
            for kind, fault in _repeated(faults, time.monotonic() + duration_s):
                scene = Scene(site, rng, topics_of(workload), pause_max_s)
                outcome.rounds.append(_play_one(workload, scene, kind, fault, roles))
            workload.end(DRAIN_S)
        except BaseException as error:
            _judge(outcome, workload)
            # What is on its way, and what libraries sent, is known only after the end.
            unknown = {"lost", "missed after SUBACK", "invented"}
            outcome.violations = [each for each in outcome.violations if each.kind not in unknown]
            outcome.stories = tell_all(workload.ledger, outcome.violations)
            error.add_note(outcome.report())
            raise
        finally:
            workload.close()
    _judge(outcome, workload)
    return outcome


def _repeated(faults: Sequence[tuple[str, Fault]], until: float) -> Iterator[tuple[str, Fault]]:
    yield from faults
    while True:
        for each in faults:
            if time.monotonic() >= until:
                return
            yield each


def _parameters(
    site: Site, faults: Sequence[tuple[str, Fault]], outcome: Outcome
) -> dict[str, str]:
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
        "fault_plan": ", ".join(dict.fromkeys(kind for kind, _ in faults)),
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


def _play_one(workload: Workload, scene: Scene, kind: str, fault: Fault, roles: "Roles") -> Round:
    crowd, rng = workload.crowd, scene.rng
    crowd.pump(rng.uniform(*SETTLE_S))
    absent = workload.stir()
    crowd.pump(rng.uniform(0, 0.3))
    # The probe at the node that was hit last may not be back yet, which is not this fault's doing.
    crowd.pump(AFTERWARDS_S, lambda: all(map(is_answered, workload.probes.values())))
    leaders = scene.site.leaders()
    at = time.monotonic()
    for pause_s in fault(scene):
        crowd.pump(pause_s, roles.look)
    for party in absent:
        party.away = False
    for pause_s in wait_whole(scene, WHOLE_S):
        crowd.pump(pause_s, roles.look)
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
    return Round(kind, tuple(sorted(scene.victims)), stall_s, whole_at - at)


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
