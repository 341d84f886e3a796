"""Measures publishers' and subscribers' latency with 20 to 100 clients at a fixed rate.

A message's latency counts from the time at which it was due, so a broker that stalls cannot hide
it. The publisher's side is the time to its confirmation, the subscriber's side that to its arrival.
"""

from typing import Final

from holdfast.cli.bench.load import LoadError, LoadPlan
from holdfast_lab.experiments.generator import distribution, milliseconds, play
from holdfast_lab.experiments.paper import ACTIVEMQ_LATENCY_S, CLIENTS
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.target import Target

RATE_PER_CLIENT: Final = 10.0
DURATION_S: Final = 20
QUICK_S: Final = 3
WARM_UP_S: Final = 1.0
QUICK_WARM_UP_S: Final = 0.5
SIZE_BYTES: Final = 64


async def run(target: Target, trial: Trial) -> Result:
    """Measures each number of clients."""
    duration_s = trial.choose(QUICK_S, DURATION_S)
    warm_up_s = trial.choose(QUICK_WARM_UP_S, WARM_UP_S)
    result = Result(
        "latency", target.name, target.title, target.version(),
        {"messages a second of each client": f"{RATE_PER_CLIENT:g}", "QoS": "1",
         "duration": f"{duration_s} s", "payload": f"{SIZE_BYTES} B"}, {},
    )  # fmt: skip
    sides: dict[str, tuple[list[float], list[float | None]]] = {}
    spread: list[Series] = []
    for number, clients in enumerate(CLIENTS):
        trial.progress(number / len(CLIENTS), f"{clients} clients")
        plan = LoadPlan(
            clients, clients, 1, RATE_PER_CLIENT * clients, SIZE_BYTES, duration_s, warm_up_s,
            False, f"lab/{trial.run}/{clients}",
        )  # fmt: skip
        try:
            outcomes, causes = await play(target, plan)
        except (LoadError, OSError) as error:
            result.problems.append(f"{clients} clients: {error}")
            break
        if causes:
            result.problems.append(f"{clients} clients, no figure: {'; '.join(causes)}")
            continue
        for side, latencies in (
            ("publisher", outcomes.acknowledgement),
            ("subscriber", outcomes.delivery),
        ):
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                value = milliseconds(latencies, share)
                result.figures[f"{clients} clients, {side}, {name} (ms)"] = value
                xs, ys = sides.setdefault(f"{side}, {name}", ([], []))
                xs.append(float(clients))
                ys.append(value)
        if clients == CLIENTS[-1]:
            spread = [
                distribution(f"{result.title}: confirmation", outcomes.acknowledgement),
                distribution(f"{result.title}: delivery", outcomes.delivery),
            ]
        missing = outcomes.sent - outcomes.refused - outcomes.delivered
        if missing > 0:
            result.broken.append(f"{clients} clients: {missing} messages did not arrive")
    publisher_s, subscriber_s = ACTIVEMQ_LATENCY_S
    result.charts = [
        Chart(
            "Latency by clients", "clients", "milliseconds",
            f"The study's Figures 4 and 5. Its means were {publisher_s:g} s for publishers and"
            f" {subscriber_s:g} s for subscribers, on a Raspberry Pi 3.",
            [Series(f"{result.title}: {name}", xs, ys) for name, (xs, ys) in sides.items()],
        ),
        Chart(
            f"Distribution of latency with {CLIENTS[-1]} clients", "milliseconds",
            "% of messages", "A point says which share of the messages took at most so long.",
            spread,
        ),
    ]  # fmt: skip
    return result
