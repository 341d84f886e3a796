"""Measures a client's downtime when the broker is stopped, killed or paused.

Downtime is the longest time without a confirmation from the fault to the end of its round. It ends
with the first confirmation afterwards, so it contains the client's search for another server.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.client import ClientError
from holdfast_lab.experiments.paper import ACTIVEMQ_DOWNTIMES_S
from holdfast_lab.experiments.traffic import PUBLISHER, Observed, Traffic, longest_gap
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.log import ExperimentLog
from holdfast_lab.results.distributions import heat_of
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.target import Change, Fault, Target, TargetError

BROKER: Final = "broker"
BEFORE_S: Final = 0.1
AFTER_S: Final = 0.3
"""The timeline begins and ends by so much before the fault and after the last silence."""


@dataclass
class PlayedFault:
    """A fault that was injected, with times of the monotonic clock in seconds."""

    kind: str
    from_s: float
    until_s: float
    changes: list[Change]
    """Events of the broker, with times since 1970."""


def timeline_of(title: str, fault: PlayedFault, observed: Observed) -> Chart:
    """One fault, from just before it until all clients are served again.

    The rows are the broker and the clients. The silence of a client is a bar.
    """
    silences = {PUBLISHER: longest_gap(observed.confirmed.values(), fault.from_s, fault.until_s)}
    for name, found in observed.arrivals.items():
        silences[name] = longest_gap(found.delivered.values(), fault.from_s, fault.until_s)
    ends = [gap[1] for gap in silences.values() if gap is not None]
    begin_s, end_s = fault.from_s - BEFORE_S, max(ends, default=fault.until_s) + AFTER_S
    # The wall clock of the broker's own report, on the monotonic clock of the clients.
    offset_s = time.monotonic() - time.time()
    events: dict[str, list[tuple[float, str, str]]] = {
        "fault": [(fault.from_s, BROKER, fault.kind)]
    }
    for change in fault.changes:
        events.setdefault(change.what, []).append((change.at_s + offset_s, BROKER, change.text))
    for at_s, client, is_connected in observed.links:
        what = "connected" if is_connected else "disconnected"
        events.setdefault(what, []).append((at_s, client, f"{client} {what}"))
    bars = Series("silence", [], [])
    for client, gap in silences.items():
        if gap is None:
            continue
        bars.xs = [*bars.xs, gap[0] - fault.from_s, gap[1] - fault.from_s, None]
        bars.ys = [*bars.ys, client, client, None]
        what = "confirmation" if client == PUBLISHER else "delivery"
        text = f"{client}: first {what} after a silence of {gap[1] - gap[0]:.3f} s"
        events.setdefault("service", []).append((gap[1], client, text))
    series = [bars]
    for what, found_events in events.items():
        shown = [each for each in sorted(found_events) if begin_s <= each[0] <= end_s]
        series.append(
            Series(
                what,
                [round(each[0] - fault.from_s, 4) for each in shown],
                [each[1] for each in shown],
                [f"{each[0] - fault.from_s:.3f} s: {each[2]}" for each in shown],
            )
        )
    return Chart(
        title, "seconds after the fault", "",
        "Bars are the time without a confirmation or delivery; service is the first one after it.",
        [each for each in series if len(each.xs)], "points",
    )  # fmt: skip


def seconds_of(title: str, observed: Observed) -> Chart:
    """The messages of each second: published, confirmed, delivered to all and lost."""
    start_s = min(observed.published.values(), default=0.0)
    length = int(max(observed.published.values(), default=0.0) - start_s) + 1
    first = next(iter(observed.arrivals.values()))
    lost = [observed.published[each] for each in observed.not_delivered()]

    def line(name: str, times_s: Iterable[float]) -> Series:
        """Counts the times in each second."""
        counts = Counter(int(each - start_s) for each in times_s)
        return Series(name, list(range(length)), [counts[second] for second in range(length)])

    return Chart(
        title, "second of the run", "messages a second",
        "A message that never arrived is lost in the second in which it was published.",
        [
            line("published", observed.published.values()),
            line("confirmed", observed.confirmed.values()),
            line("delivered", first.delivered.values()),
            line("lost", lost),
        ],
    )  # fmt: skip


def latency_of(title: str, observed: Observed) -> Chart:
    """The latency of confirmations over time, as a heat map."""
    start_s = min(observed.due.values(), default=0.0)
    found = {
        observed.due[number] - start_s: (at_s - observed.due[number]) * 1000
        for number, at_s in observed.confirmed.items()
    }
    return heat_of(
        title, "From when a message was due until its confirmation. Failovers stand out as towers.",
        found,
    )  # fmt: skip


INTERVAL_S: Final = 0.005
SETTLED: Final = 50
"""The confirmations in a row before a fault and after it."""
SERVICE_S: Final = 30.0
"""The longest wait for service after a fault."""
PAUSE_S: Final = 2.0
"""Pause of a broker that nothing takes over from."""
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 1


async def run(target: Target, trial: Trial) -> Result:
    """Injects each fault of the target several times into one stream of messages."""
    rounds = trial.choose(QUICK_ROUNDS, ROUNDS)
    plan = [fault for _ in range(rounds) for fault in target.faults]
    result = Result(
        "availability",
        target.name,
        target.title,
        target.version(),
        {"interval": f"{INTERVAL_S * 1000:g} ms", "rounds": str(rounds), "QoS": "1"},
        {},
    )
    if not plan:
        result.problems.append("faults cannot be injected into a broker that runs elsewhere")
        return result
    path = trial.directory / f"{trial.run}.jsonl"
    result.events = path.name
    downtimes: dict[Fault, list[float]] = {fault: [] for fault in target.faults}
    played: list[PlayedFault] = []
    parameters = {
        "name": "availability", "clients": "2", "qos": "1", "rate_per_s": str(1 / INTERVAL_S),
        "software": result.version[:100], "fault_plan": ", ".join(plan),
    }  # fmt: skip
    with ExperimentLog(trial.run, path, parameters=parameters) as log:
        try:
            async with Traffic(
                target.servers, f"lab/{trial.run}", log, level=target.mqtt, user=target.user,
                interval_s=INTERVAL_S,
            ) as traffic:  # fmt: skip
                for number, fault in enumerate(plan, 1):
                    trial.progress((number - 1) / len(plan), f"{fault} {number} of {len(plan)}")
                    silence_s = await _round(target, traffic, log, number, fault, played)
                    if silence_s is None:
                        result.problems.append(
                            f"{fault}: no confirmation within {SERVICE_S:g} s; the run ended"
                        )
                        break
                    downtimes[fault].append(silence_s)
                observed = await traffic.finish()
            _judge(result, observed)
            _draw(result, observed, played)
        except (ClientError, TargetError, OSError) as error:
            result.problems.append(str(error))
    _add_figures(result, downtimes)
    return result


async def _round(
    target: Target,
    traffic: Traffic,
    log: ExperimentLog,
    number: int,
    fault: Fault,
    played: list[PlayedFault],
) -> float | None:
    """One fault until the target is complete again, which is added to `played`.

    Returns the downtime in seconds, or None if the service did not come back.
    """
    if not await traffic.confirmations(SETTLED, SERVICE_S):
        return None
    from_s, wall_s = time.monotonic(), time.time()
    log.write("fault_injected", fault=number, kind=str(fault))
    await asyncio.to_thread(target.inject, fault, traffic.topic)
    if not target.survives_faults:
        await asyncio.sleep(PAUSE_S if fault is Fault.PAUSE else 0.0)
        await asyncio.to_thread(target.heal)
    served = await traffic.confirmations(SETTLED, SERVICE_S)
    if target.survives_faults:
        await asyncio.to_thread(target.heal)
    log.write("fault_healed", fault=number)
    if not served:
        return None
    # What comes in the half second after the other node is back belongs to the fault.
    await asyncio.sleep(0.5)
    changes = await asyncio.to_thread(target.changes, wall_s)
    until_s = time.monotonic()
    played.append(PlayedFault(str(fault), from_s, until_s, changes))
    for change in changes:
        if change.what == "elected":
            log.write("role_changed", node=change.text.split(":")[0], role="leader")
    return traffic.observed.silence_s(from_s, time.monotonic())


def _draw(result: Result, observed: Observed, played: list[PlayedFault]) -> None:
    """Draws the first fault of each kind, and the whole run."""
    kinds = {each.kind: each for each in reversed(played)}
    for kind, fault in kinds.items():
        result.charts.append(timeline_of(f"Failover, {kind}: {result.title}", fault, observed))
        for what in ("detected", "elected"):
            times = [each.at_s for each in fault.changes if each.what == what]
            if times:
                delay_s = min(times) + time.monotonic() - time.time() - fault.from_s
                result.figures[f"{what} after {kind}, first round (s)"] = delay_s
    result.charts.append(seconds_of(f"Messages by second: {result.title}", observed))
    result.charts.append(latency_of(f"Latency over time: {result.title}", observed))


def _judge(result: Result, observed: Observed) -> None:
    result.figures["published"] = len(observed.published)
    result.figures["confirmed"] = len(observed.confirmed)
    result.figures["confirmed and lost"] = len(observed.lost())
    result.figures["delivered again"] = observed.repeated
    result.figures["delivered out of order"] = observed.reordered
    if observed.lost():
        result.broken.append(f"{len(observed.lost())} confirmed messages were lost")
    if observed.reordered:
        result.broken.append(f"{observed.reordered} messages arrived out of order")


def _add_figures(result: Result, downtimes: dict[Fault, list[float]]) -> None:
    for fault, values in downtimes.items():
        if values:
            result.figures[f"downtime, {fault}, mean (s)"] = statistics.fmean(values)
            result.figures[f"downtime, {fault}, worst (s)"] = max(values)
    measured = {fault: values for fault, values in downtimes.items() if values}
    if measured:
        result.charts.insert(
            0,
            Chart(
                "Downtime",
                "",
                "seconds, mean",
                "The longest silence that a client saw. The study's Table 1 is beside ours, and the"
                " axis is logarithmic.",
                [
                    Series(
                        "ActiveMQ pair (the study)",
                        [str(Fault.PLANNED)],
                        [statistics.fmean(ACTIVEMQ_DOWNTIMES_S)],
                    ),
                    Series(
                        result.title,
                        [str(fault) for fault in measured],
                        [statistics.fmean(values) for values in measured.values()],
                    ),
                ],
                "bar",
            ),
        )
