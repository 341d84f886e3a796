"""When to ping, and when the server counts as gone."""


class KeepAlive:
    """A ping is due when nothing was sent for the interval (the server would close the
    connection) or nothing received (it may be gone)."""

    def __init__(self, ping_timeout_s: float) -> None:
        self.interval_s = 0.0
        """0: no pings."""
        self._ping_timeout_s = ping_timeout_s
        self._sent = 0.0
        self._received = 0.0
        self._pinged: float | None = None
        self._held = False

    def start(self, now: float) -> None:
        self.interval_s = 0.0
        self._sent = self._received = now
        self._pinged = None
        self._held = False

    def sent(self, now: float) -> None:
        self._sent = now

    def received(self, now: float) -> None:
        self._received = now

    def pinged(self, now: float) -> None:
        self._pinged = now

    def answered(self) -> None:
        self._pinged = None

    def hold(self, held: bool, now: float) -> None:
        """While we do not read ourselves, silence says nothing about the server."""
        self._held = held
        self._received = now
        if self._pinged is not None:
            self._pinged = now

    def is_waiting(self) -> bool:
        """A ping is out and unanswered."""
        return self._pinged is not None and not self._held

    def timer(self) -> float | None:
        """When the next ping is due, or the one that is out counts as unanswered."""
        if self.interval_s == 0:
            return None
        if self._held:
            return self._sent + self.interval_s
        if self._pinged is not None:
            return self._pinged + min(self._ping_timeout_s, self.interval_s)
        return min(self._sent, self._received) + self.interval_s
