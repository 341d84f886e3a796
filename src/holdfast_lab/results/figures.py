"""Main figures of each experiment, those of its study, and how a figure is written."""

import statistics
from typing import Final

from holdfast_lab.experiments.paper import (
    ACTIVEMQ_DOWNTIMES_S,
    ACTIVEMQ_LATENCY_S,
    ACTIVEMQ_LOST,
    FEDERATION_MEANS_MS,
    FEDERATION_NEIGHBOURS,
    QUEUE_FASTER,
)

STUDIES: Final[dict[str, dict[str, str]]] = {
    "availability": {
        "downtime, planned stop, mean (s)": f"{statistics.fmean(ACTIVEMQ_DOWNTIMES_S):.1f}",
    },
    "packet-loss": {"lost": str(len(ACTIVEMQ_LOST))},
    "latency": {
        f"100 clients, {side}, p99 (ms)": f"{mean_s * 1000:,.0f} (mean)"
        for side, mean_s in zip(("publisher", "subscriber"), ACTIVEMQ_LATENCY_S, strict=True)
    },
    "publish-queue": {"queue on disk, times as fast as QoS 2": f"about {QUEUE_FASTER:g}"},
    "federation": {
        f"latency at member {member}, mean (ms)": f"{mean_ms:,.0f}"
        for member, mean_ms in FEDERATION_MEANS_MS.items()
    },
    "repair": {
        "8 has new neighbours after, kill -9, median (s)":
            f"{FEDERATION_NEIGHBOURS[0]} and {FEDERATION_NEIGHBOURS[1]}, no time",
    },
}  # fmt: skip
"""The figures that each study gives, by the name of ours."""
MAIN: Final[dict[str, tuple[str, ...]]] = {
    "availability": (
        "downtime, planned stop, mean (s)",
        "downtime, kill -9, mean (s)",
        "downtime, SIGSTOP, mean (s)",
        "confirmed and lost",
        "delivered again",
        "delivered out of order",
    ),
    "packet-loss": ("lost", "confirmed and lost"),
    "latency": (
        "20 clients, publisher, p99 (ms)",
        "20 clients, subscriber, p99 (ms)",
        "100 clients, publisher, p99 (ms)",
        "100 clients, subscriber, p99 (ms)",
    ),
    "publish-queue": (
        "QoS 2, median (s)",
        "queue on disk, times as fast as QoS 2",
        "queue on disk, window 64, times as fast as QoS 2",
    ),
    "replication": ("confirmed", "replicas with another order"),
    "load": (
        "1,000 clients, CPU (%)",
        "1,000 clients, CPU a message (µs)",
        "1,000 clients, memory (MiB)",
    ),
    "federation": (
        "latency at member 0, mean (ms)",
        "latency at member 5, mean (ms)",
        "silence, relay kill -9, mean (s)",
        "confirmed and lost",
    ),
    "repair": (
        "8 has new neighbours after, kill -9, median (s)",
        "silence at 8, kill -9, median (s)",
        "confirmed and lost",
    ),
}
"""The figures of each experiment that the summary has."""


def study_of(experiment: str, name: str) -> str:
    """The study's figure beside ours; a dash if it gives none."""
    return STUDIES.get(experiment, {}).get(name, "–")


def title_of(experiment: str) -> str:
    """The name of an experiment as a title."""
    return experiment.replace("-", " ").capitalize()


def figure(value: float | None) -> str:
    """A figure with as many digits as it deserves; a dash for one that is missing."""
    if value is None:
        return "–"
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
