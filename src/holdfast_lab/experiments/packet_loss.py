"""Counts lost messages of 50, one a second, when the broker stops after the 24th.

A broker that nothing takes over from stays down, as in the study: its operator is not there.
"""

import asyncio
from typing import Final

from holdfast.client import ClientError
from holdfast_lab.experiments.paper import ACTIVEMQ_LOST
from holdfast_lab.experiments.traffic import Traffic
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.log import ExperimentLog
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.target import Fault, Target, TargetError

MESSAGES: Final = 50
STOP_AFTER: Final = 24
INTERVAL_S: Final = 1.0
QUICK_INTERVAL_S: Final = 0.1
DEAD_S: Final = 1.0
"""The wait for the rest if nothing takes over: a broker that stays down delivers nothing."""


async def run(target: Target, trial: Trial) -> Result:
    """Sends the messages and counts those that arrive."""
    interval_s = QUICK_INTERVAL_S if trial.is_quick else INTERVAL_S
    result = Result(
        "packet-loss", target.name, target.title, target.version(),
        {"interval": f"{interval_s:g} s", "stop after": str(STOP_AFTER), "QoS": "1"}, {},
    )  # fmt: skip
    if Fault.PLANNED not in target.faults:
        result.problems.append("a broker that runs elsewhere cannot be stopped")
        return result
    path = trial.directory / f"{trial.run}.jsonl"
    result.events = path.name
    parameters = {"name": "packet loss", "clients": "2", "qos": "1"}
    with ExperimentLog(trial.run, path, parameters=parameters) as log:
        try:
            async with Traffic(
                target.servers,
                f"lab/{trial.run}",
                log,
                level=target.mqtt,
                user=target.user,
                interval_s=interval_s,
                count=MESSAGES,
            ) as traffic:
                if not await traffic.confirmations(STOP_AFTER, STOP_AFTER * interval_s + 30):
                    result.problems.append("nothing was confirmed although nothing was wrong")
                    return result
                log.write("fault_injected", fault=1, kind=str(Fault.PLANNED))
                trial.progress(STOP_AFTER / MESSAGES, "the broker stops")
                await asyncio.to_thread(target.inject, Fault.PLANNED, traffic.topic)
                while len(traffic.observed.published) < MESSAGES:
                    await asyncio.sleep(interval_s / 4)
                    share = len(traffic.observed.published) / MESSAGES
                    trial.progress(share, "messages after the stop")
                observed = await traffic.finish(None if target.survives_faults else DEAD_S)
        except (ClientError, TargetError, OSError) as error:
            result.problems.append(str(error))
            return result
    missing = set(observed.not_delivered())
    result.figures["published"] = len(observed.published)
    result.figures["lost"] = len(missing)
    result.figures["confirmed and lost"] = len(observed.lost())
    if observed.lost():
        result.broken.append(f"{len(observed.lost())} confirmed messages were lost")
    numbers = [float(number) for number in range(1, MESSAGES + 1)]
    ours: list[float | None] = [0.0 if number in missing else 1.0 for number in numbers]
    paper: list[float | None] = [0.0 if number in ACTIVEMQ_LOST else 1.0 for number in numbers]
    result.charts.append(
        Chart(
            "Messages that arrived",
            "message",
            "messages so far",
            "The study's Figure 6 beside ours: a flat stretch is loss.",
            [
                Series("ActiveMQ pair (the study)", numbers, _sum(paper)),
                Series(result.title, numbers, _sum(ours)),
            ],
        )
    )
    return result


def _sum(values: list[float | None]) -> list[float | None]:
    total = 0.0
    sums: list[float | None] = []
    for value in values:
        total += value or 0.0
        sums.append(total)
    return sums
