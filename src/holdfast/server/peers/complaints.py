"""Log lines about what happens again and again, as long as it does."""

import logging
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("holdfast")

INTERVAL_S: Final = 60.0
COMPLAINTS_MAX: Final = 256
"""The oldest is forgotten, and may be said again."""


class Complaints:
    def __init__(self, clock: Callable[[], float], subject: str = "peer") -> None:
        """`subject`: the first word of each line."""
        self._clock = clock
        self._subject = subject
        self._said: dict[str, tuple[str, float]] = {}

    def say(self, key: str, what: str, text: str, level: int = logging.WARNING) -> None:
        """Log `text`, unless the last that was said about `key` was the same `what` and that is
        less than INTERVAL_S ago."""
        now = self._clock()
        what_before, at = self._said.pop(key, ("", 0.0))
        if what_before == what and now - at < INTERVAL_S:
            self._said[key] = (what, at)
            return
        if len(self._said) >= COMPLAINTS_MAX:
            del self._said[next(iter(self._said))]
        self._said[key] = (what, now)
        logger.log(level, "%s %s", self._subject, text)

    def forget(self, key: str) -> None:
        """All is well with `key`: what comes next is news."""
        self._said.pop(key, None)
