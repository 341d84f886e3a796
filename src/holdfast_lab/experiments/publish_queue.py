"""Times 1,000 messages of 26 bytes, one at a time: QoS 1, QoS 2 and the publish queue.

The variants take turns in each of five rounds, so that a disturbance of the machine hits all.
"""

import statistics
import time
from typing import Final

from holdfast.client import Client, ClientError, Options
from holdfast.client.options import LEVEL_5
from holdfast.client.pubqueue.queue import PublishQueue
from holdfast.client.pubqueue.sqlite import SqliteStore
from holdfast.client.pubqueue.store import MemoryStore
from holdfast_lab.experiments.paper import QUEUE_FASTER
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.results.store import Chart, Result, Series
from holdfast_lab.targets.target import Target

MESSAGES: Final = 1000
QUICK_MESSAGES: Final = 300
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 2
WARM_UP: Final = 50
PAYLOAD: Final = b"0123abcdefghijklmnopqrstuv"
SESSION_EXPIRY_S: Final = 600
VARIANTS: Final[dict[str, tuple[int, int, str]]] = {
    "QoS 1": (1, 1, ""),
    "QoS 2": (2, 1, ""),
    "queue in memory": (1, 1, "memory"),
    "queue on disk": (1, 1, "disk"),
    "queue on disk, window 64": (1, 64, "disk"),
}
"""QoS, window, and where the queue is."""


async def run(target: Target, trial: Trial) -> Result:
    """Measures every variant in every round."""
    rounds, count = trial.choose(QUICK_ROUNDS, ROUNDS), trial.choose(QUICK_MESSAGES, MESSAGES)
    result = Result(
        "publish-queue", target.name, target.title, target.version(),
        {"messages": str(count), "payload": f"{len(PAYLOAD)} B", "rounds": str(rounds)}, {},
    )  # fmt: skip
    times_s: dict[str, list[float]] = {name: [] for name in VARIANTS}
    total = rounds * len(VARIANTS)
    for number in range(rounds):
        for place, name in enumerate(VARIANTS):
            trial.progress((number * len(VARIANTS) + place) / total, f"{name}, round {number + 1}")
            try:
                times_s[name].append(await _measure(target, trial, name, count))
            except (ClientError, OSError, ValueError) as error:
                problem = f"{name}: {error}"
                if problem not in result.problems:
                    result.problems.append(problem)
    medians = {name: statistics.median(found) for name, found in times_s.items() if found}
    for name, median_s in medians.items():
        result.figures[f"{name}, median (s)"] = median_s
    if "QoS 2" in medians:
        for name in medians.keys() - {"QoS 2"}:
            result.figures[f"{name}, times as fast as QoS 2"] = medians["QoS 2"] / medians[name]
    result.charts.append(
        Chart(
            f"Time of {count} messages",
            "",
            "seconds, median",
            f"The study's Figure 5: its queue was about {QUEUE_FASTER:g} times as fast as QoS 2.",
            [Series(result.title, list(medians), [*medians.values()])],
            "bar",
        )
    )
    return result


async def _measure(target: Target, trial: Trial, name: str, count: int) -> float:
    """The seconds from handing over the first message to the confirmation of the last one."""
    qos, window, store = VARIANTS[name]
    topic = f"lab/{trial.run}"
    options = Options(
        client_id=f"{trial.run}-{name.replace(' ', '-').replace(',', '')}",
        inflight_max=window,
        level=target.mqtt,
        session_expiry_s=SESSION_EXPIRY_S if target.mqtt == LEVEL_5 else 0,
    )
    async with Client(servers=target.servers, options=options) as client:
        if not store:
            for each in (WARM_UP, count):
                start_s = time.perf_counter()
                for _ in range(each):
                    await client.submit(topic, PAYLOAD, qos=qos)
                await client.flush()
            return time.perf_counter() - start_s
        path = trial.directory / f"{trial.run}.queue"
        kept = SqliteStore(path) if store == "disk" else MemoryStore()
        try:
            async with PublishQueue(client, store=kept, window=window) as queue:
                for each in (WARM_UP, count):
                    start_s = time.perf_counter()
                    for _ in range(each):
                        await queue.put(topic, PAYLOAD)
                    await queue.flush()
                return time.perf_counter() - start_s
        finally:
            for file in trial.directory.glob(f"{trial.run}.queue*"):
                file.unlink()
