"""Measures the published federation on a LAN: twelve members, a publisher, two subscribers.

The publisher is at member 11, and the subscribers are one and three links away. First 1,000
messages are sent without a fault: the study's Table 1. Then the last relay before the far
subscriber is killed, again and again: a mesh with redundancy finds another way, a tree does not.
"""

import asyncio
import statistics
import time
from typing import Final

from holdfast.client import ClientError
from holdfast_lab.experiments.paper import FEDERATION_MEANS_MS
from holdfast_lab.experiments.traffic import Observed, Traffic
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.log import ExperimentLog
from holdfast_lab.results.distributions import distribution_of, quantile
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.federation import FederatedTarget
from holdfast_lab.targets.graph import LAN
from holdfast_lab.targets.target import Fault, Target, TargetError

MESSAGES: Final = 1000
QUICK_MESSAGES: Final = 300
INTERVAL_S: Final = 0.01
PAYLOAD_BYTES: Final = 64
WINDOW: Final = 1000
"""More than the messages under way, so that the publisher follows the clock."""
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 1
SETTLED: Final = 50
SERVICE_S: Final = 30.0
STUDY: Final = "Mosquitto with federators (the study)"
REPAIR_S: Final = 2.0
"""Downtime of a relay that nothing takes over from."""


async def run(target: Target, trial: Trial) -> Result:
    """Measures the latency without a fault, then the silence after kills of the relay."""
    count = trial.choose(QUICK_MESSAGES, MESSAGES)
    rounds = trial.choose(QUICK_ROUNDS, ROUNDS)
    result = Result(
        "federation", target.name, target.title, target.version(),
        {"messages": str(count), "payload": f"{PAYLOAD_BYTES} B", "QoS": "1",
         "interval": f"{INTERVAL_S * 1000:g} ms", "kills of the relay": str(rounds)}, {},
    )  # fmt: skip
    if not isinstance(target, FederatedTarget) or target.layout != LAN:
        result.problems.append("only the federations of twelve members have the study's links")
        return result
    path = trial.directory / f"{trial.run}.jsonl"
    result.events = path.name
    parameters = {"name": "federation", "clients": "3", "qos": "1", "software": result.version[:99]}
    subscribers = {f"at-{each}": [target.server(each)] for each in target.layout.subscribers}
    silences: list[float] = []
    with ExperimentLog(trial.run, path, parameters=parameters) as log:
        try:
            async with Traffic(
                target.servers, target.topic, log, level=target.mqtt, interval_s=INTERVAL_S,
                window=WINDOW, subscribers=subscribers, size_bytes=PAYLOAD_BYTES,
            ) as traffic:  # fmt: skip
                trial.progress(0.2, f"{count} messages")
                await _undisturbed(target, traffic, result, count)
                for number in range(1, rounds + 1):
                    trial.progress(0.3 + 0.7 * number / rounds, f"kill {number} of {rounds}")
                    is_last = number == rounds
                    silences.append(await _kill(target, traffic, log, number, is_last))
                observed = await traffic.finish()
            _judge(result, observed, target)
        except (ClientError, TargetError, OSError) as error:
            result.problems.append(str(error))
    if silences:
        result.figures["silence, relay kill -9, mean (s)"] = statistics.fmean(silences)
        result.figures["silence, relay kill -9, worst (s)"] = max(silences)
    return result


async def _undisturbed(
    target: FederatedTarget, traffic: Traffic, result: Result, count: int
) -> None:
    """The study's Table 1. Raises `TargetError` if the messages do not arrive."""
    far = f"at-{target.layout.subscribers[-1]}"
    before = target.copies()
    if not await traffic.deliveries(far, count, count * INTERVAL_S + SERVICE_S):
        raise TargetError(f"not all of {count} messages arrived although nothing was wrong")
    after = target.copies()
    if before is not None and after is not None:
        copies = (after - before) / len(traffic.observed.arrivals[far].delivered)
        result.figures["copies between members for each message"] = copies
    means: list[float | None] = []
    spread: list[Series] = []
    for member in target.layout.subscribers:
        latencies = traffic.observed.latencies_ms(f"at-{member}")[:count]
        means.append(statistics.fmean(latencies))
        result.figures[f"latency at member {member}, mean (ms)"] = means[-1]
        result.figures[f"latency at member {member}, p99 (ms)"] = quantile(latencies, 0.99)
        spread.append(distribution_of(f"{result.title}: at {member}", latencies))
    names = [
        f"member {member}, {target.layout.hops(member)} links"
        for member in target.layout.subscribers
    ]
    result.charts += [
        Chart(
            "Latency of federated publications", "", "milliseconds, mean",
            "The study's Table 1 beside ours; the axis is logarithmic.",
            [Series(STUDY, names, [*FEDERATION_MEANS_MS.values()]),
             Series(result.title, names, means)], "bar",
        ),
        Chart(
            "Distribution of latency in a federation", "milliseconds", "% of messages",
            "A point says which share of the messages took at most so long.", spread,
        ),
    ]  # fmt: skip


async def _kill(
    target: Target, traffic: Traffic, log: ExperimentLog, number: int, is_last: bool
) -> float:
    """Kills the relay once. Returns the silence of the far subscriber in seconds. A relay that
    another member replaces need not be there at the end."""
    far = list(traffic.observed.arrivals)[-1]
    if not await traffic.deliveries(far, SETTLED, SERVICE_S):
        raise TargetError("no delivery although nothing is wrong")
    from_s = time.monotonic()
    log.write("fault_injected", fault=number, kind=f"relay {Fault.KILL}")
    await asyncio.to_thread(target.inject, Fault.KILL, traffic.topic)
    if not target.survives_faults:
        await asyncio.sleep(REPAIR_S)
        await asyncio.to_thread(target.heal)
    served = await traffic.deliveries(far, SETTLED, SERVICE_S)
    if not (target.survives_faults and is_last):
        if target.survives_faults:
            await asyncio.to_thread(target.heal)
        log.write("fault_healed", fault=number)
    silence_s = traffic.observed.gap_s(far, from_s, time.monotonic())
    if not served or silence_s is None:
        raise TargetError(f"no delivery within {SERVICE_S:g} s after a kill")
    return silence_s


def _judge(result: Result, observed: Observed, target: Target) -> None:
    result.figures["confirmed"] = len(observed.confirmed)
    result.figures["confirmed and lost"] = len(observed.lost())
    result.figures["delivered again"] = observed.repeated
    result.figures["delivered out of order"] = observed.reordered
    if observed.lost():
        result.broken.append(f"{len(observed.lost())} confirmed messages were lost")
    if observed.reordered:
        result.broken.append(f"{observed.reordered} messages arrived out of order")
