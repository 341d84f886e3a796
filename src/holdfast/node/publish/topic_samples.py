"""A sample of the publishes that arrive, by topic and client, while an operator looks.

Every `stride`-th publish on average is taken, and counts for `stride`. The distance to the next one
varies, because publishers often take turns. Counter-example: ten publishers in a circle and every
tenth publish is always that of the same one.
"""

from typing import Final

SAMPLES_MAX: Final = 4000
"""The most samples between two calls of `take`. Further publishes are counted and not sampled."""
SAMPLES_WANTED: Final = 1000
"""The number of samples between two calls of `take` at which the stride aims."""


class TopicSamples:
    """The topics and publishers of some publishes, with the size of their payloads."""

    def __init__(self) -> None:
        self._samples: list[tuple[bytes, str, int]] = []
        self._stride = 1
        self._left = 1
        self._random = 1
        self._seen = 0

    def add(self, topic: bytes, client_id: str, size_bytes: int) -> None:
        """Notes a publish."""
        self._seen += 1
        self._left -= 1
        if self._left > 0 or len(self._samples) >= SAMPLES_MAX:
            return
        self._samples.append((topic, client_id, size_bytes))
        # The constants of ANSI C's generator. The core has no other source of random numbers.
        self._random = (self._random * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        self._left = 1 + (self._random >> 8) % (2 * self._stride - 1)

    def take(self) -> tuple[list[tuple[bytes, str, int]], float]:
        """Returns the samples since the last call, and the number of publishes that each stands
        for."""
        samples, seen = self._samples, self._seen
        self._samples, self._seen = [], 0
        self._stride = max(1, seen // SAMPLES_WANTED)
        return samples, seen / len(samples) if samples else 0.0
