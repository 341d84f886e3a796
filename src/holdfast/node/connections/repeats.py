"""Limits log lines about a repeated event to one a minute."""

from typing import Final
from zlib import crc32

PAUSE_S: Final = 60.0
"""The shortest time in seconds between two lines about the same event."""
KEYS_MAX: Final = 1000
"""The most events that are remembered. Beyond that the one noted first is forgotten."""
KEY_MAX: Final = 200
"""The most characters of a key that are remembered: a topic may have 65,535."""


class Repeat:
    """An event: the time of its last line, and how often it has happened since."""

    def __init__(self, noted_at: float) -> None:
        self.noted_at = noted_at
        self.count = 0


class Repeats:
    """The times at which repeated events were last noted, by a key that describes the event.

    A line for each occurrence would cost more than the refused packet itself, and a client may send
    such packets as fast as the network carries them.
    """

    def __init__(self) -> None:
        # In the order of `noted_at`.
        self._noted: dict[str, Repeat] = {}

    def count(self, key: str, now: float) -> int:
        """Counts an event. Returns the number since the last line if a line is due, else 0."""
        if len(key) > KEY_MAX:
            # Two events with one beginning share their lines with a chance of 2 to the -32.
            key = f"{key[:KEY_MAX]}#{crc32(key.encode()):08x}"
        repeat = self._noted.get(key)
        if repeat is None:
            if len(self._noted) >= KEYS_MAX:
                del self._noted[next(iter(self._noted))]
            self._noted[key] = Repeat(now)
            return 1
        repeat.count += 1
        if now < repeat.noted_at + PAUSE_S:
            return 0
        del self._noted[key]
        self._noted[key] = Repeat(now)
        return repeat.count
