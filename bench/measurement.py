"""What one run of one scenario on one broker gave."""

import time
from dataclasses import dataclass, field

from bench.process import cpu_s, machine_busy_s, rss_bytes

OTHERS_BUSY_MAX = 0.25
"""Cores; above it another process was at work and the figures are worth little."""


@dataclass
class Measurement:
    """Passed from the generator process to the comparison as JSON."""

    messages: int = 0
    """Delivered in the measured interval, counted at the subscribers."""
    duration_s: float = 0.0
    broker_cpu_s: float = 0.0
    """The CPU time of all processes of the broker."""
    generator_cpu_s: float = 0.0
    others_busy: float = 0.0
    """Cores kept busy by anything but the broker and the generator."""
    broker_rss_bytes: int = 0
    missing: int = 0
    """Published at any time of the run and not delivered by its end."""
    other: dict[str, float] = field(default_factory=dict)
    """Figures of single scenarios, with their unit at the end of the name."""

    @property
    def cpu_us(self) -> float:
        """Broker CPU a delivered message."""
        return self.broker_cpu_s / self.messages * 1e6 if self.messages else 0.0

    @property
    def rate(self) -> float:
        """Delivered messages a second."""
        return self.messages / self.duration_s if self.duration_s else 0.0

    @property
    def broker_busy(self) -> float:
        """Cores the broker kept busy; well below 1 at full speed, the generator set the pace."""
        return self.broker_cpu_s / self.duration_s if self.duration_s else 0.0

    def is_disturbed(self) -> bool:
        return self.others_busy > OTHERS_BUSY_MAX


class Sample:
    """Counters at one moment; the difference of two is a Measurement."""

    def __init__(self, broker_pid: int, delivered: int) -> None:
        self.broker_pid = broker_pid
        self.delivered = delivered
        self.broker_cpu_s = cpu_s(broker_pid)
        self.generator_cpu_s = time.process_time()
        self.machine_busy_s = machine_busy_s()
        self.at = time.monotonic()

    def until(self, later: "Sample") -> Measurement:
        duration_s = later.at - self.at
        broker_cpu_s = later.broker_cpu_s - self.broker_cpu_s
        generator_cpu_s = later.generator_cpu_s - self.generator_cpu_s
        others_s = later.machine_busy_s - self.machine_busy_s - broker_cpu_s - generator_cpu_s
        return Measurement(
            messages=later.delivered - self.delivered,
            duration_s=duration_s,
            broker_cpu_s=broker_cpu_s,
            generator_cpu_s=generator_cpu_s,
            others_busy=max(0.0, others_s / duration_s),
            broker_rss_bytes=rss_bytes(self.broker_pid),
        )


def percentile(ordered: list[float], share: float) -> float:
    """Of a sorted, non-empty list; `share` from 0 to 1, nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
