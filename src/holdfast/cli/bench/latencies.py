"""Counts latencies by size, in bounded memory."""

from typing import Final

_BITS: Final = 8
"""The exact bits of a latency: two that differ by less than 1 % may share a bucket."""


class Latencies:
    """A histogram of durations in microseconds.

    Durations below 256 µs are exact. Longer ones are rounded down by less than 1 %. An hour of any
    load needs fewer than 4,000 buckets.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0
        self._buckets: dict[int, int] = {}

    def add(self, duration_us: int) -> None:
        """Counts one duration; one below zero counts as zero."""
        duration_us = max(duration_us, 0)
        shift = max(duration_us.bit_length() - _BITS, 0)
        bucket = duration_us >> shift << shift
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.max_us = max(self.max_us, duration_us)

    def quantile_us(self, share: float) -> int | None:
        """The duration that `share` (0 to 1) of all do not exceed; None without any."""
        if not self.count:
            return None
        wanted = share * self.count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return bucket
        return self.max_us
