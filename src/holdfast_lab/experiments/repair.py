"""Cuts a member of the published federation in the cloud off both its neighbours.

Members 0 and 7 are the only neighbours of member 8, and fail at once. The study's Figures 11 and 12
show the links before and after. Meanwhile a client of member 3 publishes to clients of members 5
and 8, so the silence at 8 and the losses between living members are measured too.
"""

import asyncio
import math
import statistics
import time
from typing import Final

from holdfast.client import ClientError
from holdfast_lab.experiments.paper import FEDERATION_NEIGHBOURS
from holdfast_lab.experiments.traffic import Traffic
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.log import ExperimentLog
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.cloud import CONTINENTS, LONELY, CloudTarget
from holdfast_lab.targets.target import Fault, Target, TargetError

INTERVAL_S: Final = 0.02
WINDOW: Final = 1000
ROUNDS: Final = 3
SETTLED: Final = 25
SERVICE_S: Final = 60.0
RELINK_S: Final = 120.0
FAR: Final = f"at-{LONELY}"


async def run(target: Target, trial: Trial) -> Result:
    """Fails the manager, then both neighbours of member 8, by a kill and by silence."""
    rounds = trial.choose(1, ROUNDS)
    result = Result(
        "repair", target.name, target.title, target.version(),
        {"rounds": str(rounds), "QoS": "1", "interval": f"{INTERVAL_S * 1000:g} ms",
         "delays": "1 to 120 ms one way, by continent"}, {},
    )  # fmt: skip
    if not isinstance(target, CloudTarget):
        result.problems.append("only a federation with a topology manager heals its links")
        return result
    faults = [Fault.KILL] if trial.is_quick else [Fault.MANAGER, Fault.KILL, Fault.CUT]
    plan = [fault for _ in range(rounds) for fault in faults]
    path = trial.directory / f"{trial.run}.jsonl"
    result.events = path.name
    parameters = {"name": "repair", "clients": "3", "qos": "1", "software": result.version[:99]}
    subscribers = {f"at-{each}": [target.server(each)] for each in target.layout.subscribers}
    silences: dict[Fault, list[float]] = {}
    relinked: dict[Fault, list[float]] = {}
    with ExperimentLog(trial.run, path, parameters=parameters) as log:
        try:
            async with Traffic(
                target.servers, target.topic, log, level=target.mqtt, interval_s=INTERVAL_S,
                window=WINDOW, subscribers=subscribers,
            ) as traffic:  # fmt: skip
                for number, fault in enumerate(plan, 1):
                    trial.progress((number - 1) / len(plan), f"{fault} {number} of {len(plan)}")
                    round_ = Round(target, traffic, log, number, fault)
                    silences.setdefault(fault, []).append(await round_.play(result))
                    if number < len(plan):
                        await round_.heal()
                    if round_.relinked_s is not None:
                        relinked.setdefault(fault, []).append(round_.relinked_s)
                observed = await traffic.finish()
            result.figures["confirmed"] = len(observed.confirmed)
            result.figures["confirmed and lost"] = len(observed.lost())
            result.figures["delivered out of order"] = observed.reordered
            if observed.lost():
                result.broken.append(f"{len(observed.lost())} confirmed messages were lost")
        except (ClientError, TargetError, OSError) as error:
            result.problems.append(str(error))
    for text, found in (("silence at 8", silences), ("8 has new neighbours after", relinked)):
        for fault, values in found.items():
            result.figures[f"{text}, {fault}, median (s)"] = statistics.median(values)
            result.figures[f"{text}, {fault}, worst (s)"] = max(values)
    return result


class Round:
    """One fault and its healing."""

    def __init__(
        self, target: CloudTarget, traffic: Traffic, log: ExperimentLog, number: int, fault: Fault
    ) -> None:
        self._target = target
        self._traffic = traffic
        self._log = log
        self._number = number
        self._fault = fault
        self.relinked_s: float | None = None
        """The time from the fault until member 8 had new neighbours; None if it kept its own."""

    async def play(self, result: Result) -> float:
        """Returns the silence at member 8 in seconds. Raises `TargetError` if it does not end."""
        target, traffic = self._target, self._traffic
        await self._serves()
        before = await asyncio.to_thread(target.links)
        from_s = time.monotonic()
        self._log.write("fault_injected", fault=self._number, kind=str(self._fault))
        await asyncio.to_thread(target.inject, self._fault, traffic.topic)
        if self._fault is not Fault.MANAGER:
            near = await asyncio.to_thread(target.await_relinked, RELINK_S)
            self.relinked_s = time.monotonic() - from_s
            if not any(chart.kind == "graph" for chart in result.charts):
                after = await asyncio.to_thread(target.links)
                result.charts += _graphs(result.title, before, after, near)
        await self._serves()
        silence_s = traffic.observed.gap_s(FAR, from_s, time.monotonic())
        if silence_s is None:
            raise TargetError("nothing was delivered at 8 any more")
        return silence_s

    async def heal(self) -> None:
        """Starts again what failed. The members that failed need not be there at the end."""
        await asyncio.to_thread(self._target.heal)
        self._log.write("fault_healed", fault=self._number)

    async def _serves(self) -> None:
        """Raises `TargetError` unless both subscribers receive."""
        for name in self._traffic.observed.arrivals:
            if not await self._traffic.deliveries(name, SETTLED, SERVICE_S):
                raise TargetError(f"no delivery {name} within {SERVICE_S:g} s")


def _graphs(
    title: str, before: list[tuple[int, int]], after: list[tuple[int, int]], near: list[int]
) -> list[Chart]:
    study = " and ".join(map(str, FEDERATION_NEIGHBOURS))
    ours = " and ".join(map(str, near))
    return [
        _graph(
            f"Links before 0 and 7 fail: {title}", before,
            "The study's Figure 11. Member 8 has the neighbours 0 and 7.",
        ),
        _graph(
            f"Links after 0 and 7 failed: {title}", after,
            f"The study's Figure 12. Member 8 got {ours}; in the study it got {study}.",
        ),
    ]  # fmt: skip


def _graph(title: str, links: list[tuple[int, int]], caption: str) -> Chart:
    """The members on a circle, and their links. Those of member 8 are a line of their own."""
    count = len(CONTINENTS)
    places = [
        (math.sin(2 * math.pi * each / count), math.cos(2 * math.pi * each / count))
        for each in range(count)
    ]
    lines = {"link": Series("link", [], []), "link of 8": Series("link of 8", [], [])}
    for one, other in links:
        line = lines["link of 8" if LONELY in (one, other) else "link"]
        line.xs = [*line.xs, places[one][0], places[other][0], None]
        line.ys = [*line.ys, places[one][1], places[other][1], None]
    present = sorted({each for link in links for each in link})
    nodes = Series(
        "member", [places[each][0] for each in present], [places[each][1] for each in present],
        [f"{each}, {CONTINENTS[each]}" for each in present],
    )  # fmt: skip
    return Chart(title, "", "", caption, [*lines.values(), nodes], "graph")
