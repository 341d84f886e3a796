"""The table of a comparison, one line as soon as its scenario is done."""

import statistics

from bench.comparison import Outcome
from bench.measurement import Measurement
from bench.scenarios import Figure

COLUMNS = "{:<22} {:<25} {:<25} {:<21} {:<9} {}"


def heading(reference: str | None, candidate: str) -> str:
    titles = COLUMNS.format(
        "scenario", reference or "-", candidate, "judged (spread)", "target", "result"
    )
    return f"{titles}\n{'-' * 111}"


def line(outcome: Outcome) -> str:
    return COLUMNS.format(
        outcome.scenario.name,
        _side(outcome, outcome.reference),
        _side(outcome, outcome.candidate),
        _judged(outcome),
        _target(outcome),
        _result(outcome),
    ).rstrip()


def _side(outcome: Outcome, measurements: list[Measurement]) -> str:
    if not measurements:
        return "-"
    figure = statistics.median(outcome.figures(measurements))
    rate = statistics.median(each.rate for each in measurements)
    busy = statistics.median(each.broker_busy for each in measurements)
    match outcome.scenario.figure:
        case Figure.CPU:
            return f"{figure:6.2f} µs {rate:>9,.0f}/s {busy:4.0%}"
        case Figure.RATE:
            return f"{figure:>9,.0f}/s {busy:4.0%}"
        case Figure.LATENCY:
            p50 = statistics.median(each.other["delivery_p50_ms"] for each in measurements)
            return f"p50 {p50:.2f} p99 {figure:.2f} ms"
        case Figure.MEMORY:
            took_s = statistics.median(each.duration_s for each in measurements)
            return f"{figure:,.0f} B each, in {took_s:.1f} s"


def _judged(outcome: Outcome) -> str:
    judged = outcome.judged()
    if judged is None:
        return "-"
    match outcome.scenario.figure:
        case Figure.CPU | Figure.RATE:
            ratios = outcome.ratios()
            return f"{judged:.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        case Figure.LATENCY:
            figures = outcome.figures(outcome.candidate)
            return f"{judged:.2f} ms ({min(figures):.2f}..{max(figures):.2f})"
        case Figure.MEMORY:
            return f"{judged:,.0f} B"


def _target(outcome: Outcome) -> str:
    match outcome.scenario.figure:
        case Figure.CPU:
            return f"<= {outcome.scenario.target:.2f}"
        case Figure.RATE:
            return f">= {outcome.scenario.target:.2f}"
        case Figure.LATENCY:
            return f"< {outcome.scenario.target:.0f} ms"
        case Figure.MEMORY:
            return f"<= {outcome.scenario.target:,.0f}"


def _result(outcome: Outcome) -> str:
    if outcome.error:
        return f"FAILED: {outcome.error.splitlines()[-1]}"
    if outcome.missing():
        return f"FAILED: {outcome.missing():,} messages did not arrive"
    result = {True: "pass", False: "MISS", None: "not judged"}[outcome.is_met()]
    if outcome.disturbed():
        result += f", {outcome.disturbed()} rounds disturbed"
    return result


def explanation() -> str:
    return (
        "µs: CPU of the broker process (user and system, all threads) for each delivered\n"
        "message; /s: delivered messages a second; %: cores the broker kept busy (well below\n"
        "100 % at full speed, the generator set the pace). Judged: the median over the rounds of\n"
        "candidate over reference, with the lowest and the highest; latency and memory are the\n"
        "candidate's own. Every message of every run is checked to have arrived. Disturbed: other\n"
        "processes used the machine during every attempt at a round."
    )
