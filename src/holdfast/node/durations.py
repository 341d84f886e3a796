"""Histograms of durations: publish to acknowledgement, to delivery, fdatasync, replication.

They are samples. Each turn of the event loop, each write group or each probe yields at most one
observation, because an observation for every message would be seen in the cost of a message.
"""

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""The upper bounds of the buckets, in seconds. A last bucket has everything above."""


class Durations:
    """The number of observed durations in each bucket, and their sum. One thread may observe."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a duration. A negative one, by a clock that was set back, counts as 0."""
        if seconds < 0.0:
            seconds = 0.0
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns the buckets as Prometheus has them: (bound, number of durations up to it)."""
        total = 0
        buckets = []
        for bound, count in zip((*BOUNDS_S, None), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else f"{bound:g}", float(total)))
        return buckets


class SampledDurations:
    """The durations of messages at one node."""

    def __init__(self) -> None:
        self.acknowledged = Durations()
        """From the arrival of a publish to its acknowledgement."""
        self.delivered = Durations()
        """From the time of a message in the log to its delivery to a client that has room."""
        self.replicated = Durations()
        """From a leader's batch to its commit."""
        self.takes_delivery = False
        """Whether the next delivery is observed. Set once a turn."""

    def deliver(self, age_us: int) -> None:
        """Observes a delivery, the only one of the turn."""
        self.takes_delivery = False
        self.delivered.observe(age_us / 1e6)
