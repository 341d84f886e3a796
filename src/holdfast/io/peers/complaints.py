"""Log lines about repeated problems, limited in rate."""

import logging
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("holdfast")

INTERVAL_S: Final = 60.0
COMPLAINTS_MAX: Final = 256
"""The most problems in memory. The oldest is forgotten, and may then be logged again."""


class Complaints:
    """Logs a problem once per INTERVAL_S and key, unless it changes."""

    def __init__(self, clock: Callable[[], float], subject: str = "peer") -> None:
        """`subject`: the beginning of the event in each line."""
        self._clock = clock
        self._subject = subject
        self._said: dict[str, tuple[str, float]] = {}

    def say(self, key: str, what: str, text: str, level: int = logging.WARNING) -> None:
        """Logs `text`, unless the same `what` was logged for `key` less than INTERVAL_S ago."""
        now = self._clock()
        what_before, at = self._said.pop(key, ("", 0.0))
        if what_before == what and now - at < INTERVAL_S:
            self._said[key] = (what, at)
            return
        if len(self._said) >= COMPLAINTS_MAX:
            del self._said[next(iter(self._said))]
        self._said[key] = (what, now)
        logger.log(level, f"{self._subject}_problem text=%r", text)

    def forget(self, key: str) -> None:
        """Forgets a solved problem, so that the next one is logged at once."""
        self._said.pop(key, None)
