"""Runs a scenario on both brokers in alternating rounds and judges the figure it is about."""

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import brokers
from bench.measurement import Measurement
from bench.scenarios import Figure, Scenario

GENERATOR_TIMEOUT_S = 120.0
REPEATS_MAX = 2


class GeneratorFailed(Exception):
    """The generator process ended without a measurement; the text says why."""


@dataclass(frozen=True)
class Settings:
    directory: Path
    """Where configurations, logs and Holdfast's data go."""
    rounds: int
    warm_up_s: float
    measure_s: float
    python: str
    reference: str | None
    """The broker compared with; None measures the candidate alone."""
    candidate: str
    nodelay: bool = False
    """Whether Mosquitto sets TCP_NODELAY in every scenario."""

    def is_noise_only(self) -> bool:
        """A broker compared with itself: there is no target to meet."""
        return self.reference == self.candidate


@dataclass
class Outcome:
    """All rounds of one scenario."""

    scenario: Scenario
    has_target: bool = True
    reference: list[Measurement] = field(default_factory=list)
    candidate: list[Measurement] = field(default_factory=list)
    error: str = ""

    def figures(self, measurements: list[Measurement]) -> list[float]:
        match self.scenario.figure:
            case Figure.CPU:
                return [each.cpu_us for each in measurements]
            case Figure.RATE:
                return [each.rate for each in measurements]
            case Figure.LATENCY:
                return [each.other.get("delivery_p99_ms", float("inf")) for each in measurements]
            case Figure.MEMORY:
                return [each.other["connection_bytes"] for each in measurements]

    def ratios(self) -> list[float]:
        """Candidate over reference, round by round."""
        pairs = zip(self.figures(self.candidate), self.figures(self.reference), strict=False)
        return [candidate / reference for candidate, reference in pairs if reference]

    def judged(self) -> float | None:
        """The figure that is held against the target: a median over the rounds."""
        if self.scenario.figure in (Figure.CPU, Figure.RATE):
            figures = self.ratios()
        else:
            figures = self.figures(self.candidate)
        return statistics.median(figures) if figures else None

    def missing(self) -> int:
        return sum(each.missing for each in self.reference + self.candidate)

    def disturbed(self) -> int:
        """Rounds, of both brokers, in which other processes took much CPU in every attempt."""
        return sum(each.is_disturbed() for each in self.reference + self.candidate)

    def is_met(self) -> bool | None:
        """None if there is nothing to compare."""
        judged = self.judged()
        if self.error or self.missing():
            return False
        if judged is None or not self.has_target:
            return None
        if self.scenario.figure is Figure.RATE:
            return judged >= self.scenario.target
        return judged <= self.scenario.target

    def as_json(self) -> dict[str, object]:
        return {
            "scenario": asdict(self.scenario),
            "judged": self.judged(),
            "met": self.is_met(),
            "ratios": self.ratios(),
            "missing": self.missing(),
            "disturbed": self.disturbed(),
            "error": self.error,
            "reference": [asdict(each) for each in self.reference],
            "candidate": [asdict(each) for each in self.candidate],
        }


def generate(scenario: Scenario, broker: brokers.Broker, settings: Settings) -> Measurement:
    """One run in a fresh generator process."""
    command = [sys.executable, "-m", "bench.generator", scenario.name, str(broker.port)]
    command += [str(broker.pid), str(settings.warm_up_s), str(settings.measure_s)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GENERATOR_TIMEOUT_S,
            cwd=Path(__file__).parent.parent,
            check=False,
        )
    except subprocess.TimeoutExpired as stuck:
        raise GeneratorFailed(f"no result after {stuck.timeout:.0f} s") from None
    broker.check_running()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GeneratorFailed(f"{last} (broker: {broker.name})")
    return Measurement(**json.loads(done.stdout))


def generate_undisturbed(
    scenario: Scenario, broker: brokers.Broker, settings: Settings
) -> Measurement:
    """Repeats a run in which other processes took much CPU; returns the least disturbed one."""
    best = generate(scenario, broker, settings)
    for _ in range(REPEATS_MAX):
        if not best.is_disturbed() or best.missing:
            break
        best = min(best, generate(scenario, broker, settings), key=lambda each: each.others_busy)
    return best


def compare(scenario: Scenario, settings: Settings) -> Outcome:
    """Both brokers run for the whole scenario; the one without load waits."""
    outcome = Outcome(scenario, has_target=not settings.is_noise_only())
    running: list[tuple[brokers.Broker, list[Measurement]]] = []
    sides = [(settings.reference, outcome.reference), (settings.candidate, outcome.candidate)]
    try:
        for name, measurements in sides:
            if name is not None:
                broker = brokers.start(
                    name,
                    scenario,
                    settings.directory,
                    settings.python,
                    is_reference=measurements is outcome.reference,
                    nodelay=settings.nodelay,
                )
                running.append((broker, measurements))
        # A second crowd would be put into the memory that the first one left behind.
        rounds = 1 if scenario.figure is Figure.MEMORY else settings.rounds
        for number in range(rounds):
            order = running if number % 2 == 0 else running[::-1]
            for broker, measurements in order:
                measurements.append(generate_undisturbed(scenario, broker, settings))
    except (brokers.BrokerFailed, GeneratorFailed) as failure:
        outcome.error = str(failure)
    finally:
        for broker, _ in running:
            broker.stop()
    return outcome
